"""List the metrics under the names that dashboards for vLLM use."""

from __future__ import annotations

from serving.metrics.prometheus_names import Metric, all_of, pages_part
from serving.metrics.server_stats import HELD_BACK, ServerStats


def _finished(stats: ServerStats) -> dict[str, float]:
    ends = stats.ends
    cut = ends["abort"] + ends["timeout"]
    return {"stop": ends["stop"], "length": ends["length"], "abort": cut, "error": ends["error"]}


def _waiting(stats: ServerStats) -> dict[str, float]:
    waits = all_of(HELD_BACK, {stats.held_back: stats.gauges.waiting_requests} if stats.held_back else {})
    deferred = waits.pop("policy")
    return {"capacity": sum(waits.values()), "deferred": deferred}


VLLM = (
    Metric("num_requests_running", "gauge", "Samples in a slot", lambda t: t.gauges.running_requests),
    Metric("num_requests_waiting", "gauge", "Samples that wait", lambda t: t.gauges.waiting_requests),
    Metric("num_requests_waiting_by_reason", "gauge", "Samples that wait", _waiting, "reason"),
    Metric("kv_cache_usage_perc", "gauge", "Pages in use; 1 is all", pages_part),
    Metric("gpu_cache_usage_perc", "gauge", "Pages in use; 1 is all (an older name)", pages_part),
    Metric(
        "prefix_cache_queries_total", "counter", "Tokens looked for", lambda t: t.counters["prompt_tokens"]
    ),
    Metric("prefix_cache_hits_total", "counter", "Tokens found cached", lambda t: t.counters["hit_tokens"]),
    Metric("num_preemptions_total", "counter", "Preemptions", lambda t: t.counters["preemptions"]),
    Metric("spec_decode_num_drafts_total", "counter", "Spans with drafts", lambda t: t.counters["drafts"]),
    Metric("spec_decode_num_draft_tokens_total", "counter", "Drafts", lambda t: t.counters["draft_tokens"]),
    Metric(
        "spec_decode_num_accepted_tokens_total",
        "counter",
        "Drafts that were right",
        lambda t: t.counters["accepted_tokens"],
    ),
    Metric(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Drafts that were right, by their place in their span",
        lambda t: t.accepted_at.totals,
        "position",
    ),
    Metric("prompt_tokens_total", "counter", "Tokens of accepted prompts", lambda t: t.prompt_tokens),
    Metric("generation_tokens_total", "counter", "Tokens sent to clients", lambda t: t.answer_tokens),
    Metric("request_success_total", "counter", "Samples that ended", _finished, "finished_reason"),
    Metric("corrupted_requests_total", "counter", "Samples that failed", lambda t: t.num_corrupted),
    Metric("iteration_tokens_total", "histogram", "Tokens of a step", lambda t: t.step_tokens),
    Metric("request_prompt_tokens", "histogram", "Tokens of a prompt", lambda t: t.prompt_lens),
    Metric("request_generation_tokens", "histogram", "Tokens of an answer", lambda t: t.answer_lens),
    Metric(
        "request_max_num_generation_tokens", "histogram", "Of the longest sample", lambda t: t.longest_lens
    ),
    Metric("request_params_n", "histogram", "n", lambda t: t.asked_samples),
    Metric("request_params_max_tokens", "histogram", "max_tokens", lambda t: t.asked_lens),
    Metric("time_to_first_token_seconds", "histogram", "Arrival to first token", lambda t: t.first_token_s),
    Metric("inter_token_latency_seconds", "histogram", "Token to token", lambda t: t.per_token_s),
    Metric("time_per_output_token_seconds", "histogram", "Token to token", lambda t: t.per_token_s),
    Metric(
        "request_time_per_output_token_seconds", "histogram", "A sample's mean", lambda t: t.mean_per_token_s
    ),
    Metric("e2e_request_latency_seconds", "histogram", "Arrival to end", lambda t: t.latency_s),
    Metric("request_queue_time_seconds", "histogram", "Arrival to admission", lambda t: t.queue_s),
    Metric("request_inference_time_seconds", "histogram", "Admission to end", lambda t: t.inference_s),
    Metric("request_prefill_time_seconds", "histogram", "Admission to first token", lambda t: t.prefill_s),
    Metric("request_decode_time_seconds", "histogram", "First token to end", lambda t: t.decode_s),
)


def cache_config(stats: ServerStats) -> dict[str, str]:
    """Return the labels of `vllm:cache_config_info`, from which a dashboard reads the size of the cache."""
    facts = stats.facts
    if facts is None:
        return {"block_size": "", "num_gpu_blocks": "", "num_cpu_blocks": ""}
    return {
        "block_size": str(facts.page_size),
        "num_gpu_blocks": str(facts.num_pages - 1),
        "num_cpu_blocks": str(max(0, facts.num_host_pages - 1)),
    }
