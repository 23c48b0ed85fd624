"""List the server's metrics under names of its own.

Fifteen names, with their buckets, are those of the servers that this one follows. Where a unit is
milliseconds or microseconds, a second metric is in seconds, as Prometheus recommends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from serving.metrics.server_stats import (
    ABORTS,
    ENDS,
    HELD_BACK,
    LOOKUPS,
    REJECTS,
    RESPONSES,
    Histogram,
    ServerStats,
)

Value = float | Histogram | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's name, and how it is read; with `label`, it is read as a mapping from that label's values."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    read: Callable[[ServerStats], Value]
    label: str = ""
    scale: float = 1.0  # a factor for a histogram's bounds and sum


def all_of(names: tuple[str, ...], counts: Mapping[str, float]) -> dict[str, float]:
    """Return a count for each name, so that each series begins at 0, and for any other name counted."""
    return {**dict.fromkeys(names, 0), **counts}


def expert_imbalance(stats: ServerStats) -> dict[str, float]:
    """Return, by layer, the most chosen expert's count divided by the mean, where experts are counted."""
    layers = enumerate([] if stats.experts is None else stats.experts.counts)
    return {str(layer): max(each) * len(each) / sum(each) for layer, each in layers if sum(each)}


def pages_part(stats: ServerStats) -> float:
    """Return the fraction of the pages that requests use, or that of the windows' pages if it is larger."""
    gauges = stats.gauges
    all_pages = gauges.held_pages + gauges.idle_pages + gauges.free_pages
    of_windows = gauges.window_held_pages + gauges.window_idle_pages + gauges.window_free_pages
    return max(gauges.held_pages / max(1, all_pages), gauges.window_held_pages / max(1, of_windows))


REQUESTS = (
    Metric("requests_total", "counter", "Prompts that went to the engine", lambda t: t.num_requests),
    Metric(
        "requests_queued",
        "gauge",
        "Samples that wait, also for a grammar or for another engine's pages",
        lambda t: t.gauges.waiting_requests,
    ),
    Metric("requests_running", "gauge", "Samples in a slot", lambda t: t.gauges.running_requests),
    Metric(
        "prompt_tokens_queued",
        "gauge",
        "Tokens to be computed before all samples here have begun to answer",
        lambda t: t.gauges.queued_tokens,
    ),
    Metric("samples_total", "counter", "Samples (n) that went to the engine", lambda t: t.num_samples),
    Metric("samples_open", "gauge", "Samples that have not ended", lambda t: t.num_open),
    Metric("sample_ends_total", "counter", "Ends", lambda t: all_of(ENDS, t.ends), "reason"),
    Metric("rejects_total", "counter", "Not taken", lambda t: all_of(REJECTS, t.rejects), "reason"),
    Metric("aborts_total", "counter", "Cut off", lambda t: all_of(ABORTS, t.aborts), "reason"),
    Metric(
        "http_responses_total",
        "counter",
        "By status; 499: client gone",
        lambda t: all_of(RESPONSES, t.responses),
        "code",
    ),
    Metric(
        "requests_waiting_for",
        "gauge",
        "Samples that wait, by what the first of them waits for",
        lambda t: all_of(HELD_BACK, {t.held_back: t.gauges.waiting_requests} if t.held_back else {}),
        "reason",
    ),
    Metric(
        "held_back_seconds_total",
        "counter",
        "For how long the first that waits has waited for what",
        lambda t: all_of(HELD_BACK, t.held_back_s),
        "reason",
    ),
)
TIMES = (
    Metric("request_latency_seconds", "histogram", "Arrival to end", lambda t: t.short_latency_s),
    Metric("time_to_first_token_seconds", "histogram", "Arrival to first token", lambda t: t.first_token_s),
    Metric("inter_token_latency_seconds", "histogram", "Token to token", lambda t: t.per_token_s),
    Metric("queue_seconds", "histogram", "Arrival to admission", lambda t: t.queue_s),
    Metric("prefill_seconds", "histogram", "Admission to first token", lambda t: t.prefill_s),
    Metric("decode_seconds", "histogram", "First token to end", lambda t: t.decode_s),
)
STEPS = (
    Metric("batch_size", "histogram", "Spans of a step, one for each sample in it", lambda t: t.spans),
    Metric("batch_tokens", "histogram", "Tokens of a step", lambda t: t.tokens),
    Metric("batch_utilization", "gauge", "Last step's part of its budget", lambda t: t.batch_utilization),
    Metric("iteration_latency_ms", "histogram", "A step", lambda t: t.step_ms),
    Metric("iteration_latency_seconds", "histogram", "A step", lambda t: t.step_ms, scale=1e-3),
    Metric("scheduler_overhead_us", "histogram", "A step, less the runner", lambda t: t.overhead_us),
    Metric(
        "scheduler_overhead_seconds",
        "histogram",
        "A step, less the runner",
        lambda t: t.overhead_us,
        scale=1e-6,
    ),
    Metric("steps_total", "counter", "Steps", lambda t: t.counters["steps"]),
    Metric("tokens_generated_total", "counter", "Tokens sent to clients", lambda t: t.answer_tokens),
    Metric("prefill_tokens_total", "counter", "Prompt tokens computed", lambda t: t.prefill_tokens),
    Metric("decode_tokens_total", "counter", "Answer tokens computed", lambda t: t.decode_tokens),
)
DRAFTS = (
    Metric(
        "speculative_accept_rate", "gauge", "Share of drafts that were right", lambda t: t.draft_accept_rate
    ),
    Metric(
        "speculative_speedup",
        "gauge",
        "Tokens of a step for a sample with drafts; 1 without",
        lambda t: t.draft_speedup,
    ),
)
GRAMMARS = (
    Metric(
        "grammar_compiles_total",
        "counter",
        "Grammars of structured output that could be followed, and others",
        lambda t: {"ok": t.grammars["compiled"], "refused": t.grammars["refused"]},
        "result",
    ),
    Metric(
        "grammar_compile_seconds_total",
        "counter",
        "In threads beside the engine",
        lambda t: t.grammars["compile_s"],
    ),
    Metric("grammar_masks_total", "counter", "Places of answers", lambda t: t.grammars["masks"]),
    Metric(
        "grammar_mask_seconds_total",
        "counter",
        "Of the host, while the device computes",
        lambda t: t.grammars["mask_s"],
    ),
    Metric(
        "grammar_late_masks_total",
        "counter",
        "Rows that got no token in a step, for their mask was not made in time",
        lambda t: t.counters["late_masks"],
    ),
    Metric(
        "grammar_errors_total",
        "counter",
        "Grammars that grew too complex within an answer",
        lambda t: t.grammars["failed"],
    ),
)
PAGES = (
    Metric("kv_pages_free", "gauge", "Pages that nobody holds", lambda t: t.gauges.free_pages),
    Metric("kv_pages_used", "gauge", "Pages of running samples", lambda t: t.gauges.held_pages),
    Metric("kv_pages_cached", "gauge", "Pages in the prefix cache alone", lambda t: t.gauges.idle_pages),
    Metric("kv_window_pages_free", "gauge", "Pages of windows, free", lambda t: t.gauges.window_free_pages),
    Metric(
        "kv_window_pages_used",
        "gauge",
        "Pages of windows, of running samples",
        lambda t: t.gauges.window_held_pages,
    ),
    Metric(
        "kv_window_pages_cached",
        "gauge",
        "Pages of windows, in the prefix cache alone",
        lambda t: t.gauges.window_idle_pages,
    ),
    Metric("states_free", "gauge", "Recurrent states that nobody holds", lambda t: t.gauges.state_free_pages),
    Metric("states_used", "gauge", "States of running samples", lambda t: t.gauges.state_held_pages),
    Metric(
        "states_cached",
        "gauge",
        "States that prompts go on from",
        lambda t: t.gauges.state_idle_pages,
    ),
    Metric("states_taken_total", "counter", "States kept for prompts", lambda t: t.gauges.state_taken_pages),
    Metric("states_hit_total", "counter", "Kept states found", lambda t: t.gauges.state_hit_pages),
    Metric("states_at_rest", "gauge", "Kept states on the host", lambda t: t.gauges.state_resting_pages),
    Metric("states_evicted_total", "counter", "Kept states evicted", lambda t: t.gauges.state_evicted_pages),
    Metric("kv_pages_shared", "gauge", "Used pages, of several samples", lambda t: t.shared_pages),
    Metric(
        "kv_fragmentation", "gauge", "Free pages below the highest held", lambda t: t.gauges.fragmentation
    ),
    Metric("kv_host_pages_free", "gauge", "Of the host's pool", lambda t: t.gauges.free_host_pages),
    Metric("kv_host_pages_swapped", "gauge", "Of preempted samples", lambda t: t.gauges.swapped_host_pages),
    Metric("kv_host_pages_resting", "gauge", "Evicted, to be found", lambda t: t.gauges.resting_host_pages),
    Metric(
        "kv_page_leak_total",
        "counter",
        "Pages whose holders a recount did not find; must stay 0",
        lambda t: t.counters["wrong_pages"],
    ),
    Metric("preemption_total", "counter", "Preemptions", lambda t: t.counters["preemptions"]),
    Metric("preempted_tokens_total", "counter", "To compute again", lambda t: t.counters["lost_tokens"]),
    Metric("swap_in_total", "counter", "Pages", lambda t: t.counters["swapped_in_pages"]),
    Metric("swap_out_total", "counter", "Pages", lambda t: t.counters["swapped_out_pages"]),
    Metric("swaps_refused_total", "counter", "Host pool full", lambda t: t.counters["refused_swaps"]),
    Metric("evicted_pages_total", "counter", "From the prefix cache", lambda t: t.counters["evicted_pages"]),
    Metric("promoted_pages_total", "counter", "Back from the host", lambda t: t.counters["promoted_pages"]),
    Metric("sent_pages_total", "counter", "To other engines", lambda t: t.counters["sent_pages"]),
    Metric("arrived_pages_total", "counter", "From other engines", lambda t: t.counters["arrived_pages"]),
    Metric("missed_pages_total", "counter", "Computed instead", lambda t: t.counters["missed_pages"]),
    Metric("copied_pages_total", "counter", "On write", lambda t: t.counters["copied_pages"]),
    Metric("compaction_pages_moved_total", "counter", "Pages", lambda t: t.counters["compacted_pages"]),
    Metric(
        "prefix_lookups_total",
        "counter",
        "Whole hits, and other lookups by why they ended",
        lambda t: all_of(LOOKUPS, t.lookups.totals),
        "result",
    ),
    Metric("prefix_hit_tokens_total", "counter", "Found cached", lambda t: t.counters["hit_tokens"]),
    Metric("prefix_queried_tokens_total", "counter", "Looked for", lambda t: t.counters["prompt_tokens"]),
)
TIER = (
    Metric(
        "kv_tier_up",
        "gauge",
        "1 while a tier of pages does what it is asked for",
        lambda t: t.last_beat is not None and t.last_beat.tier is not None and t.last_beat.tier.is_well,
    ),
    Metric(
        "kv_tier_pages_total",
        "counter",
        "Written there, known there already, dropped; found there, and refused as damaged or another model's",
        lambda t: {each: t.tier[each] for each in ("written", "known", "dropped", "found", "refused")},
        "result",
    ),
    Metric("kv_tier_pages_fetched_total", "counter", "In the host", lambda t: t.counters["fetched_pages"]),
    Metric(
        "kv_tier_lookups_total",
        "counter",
        "Which found something, found nothing, took too long, or were not begun",
        lambda t: {each: t.tier[each] for each in ("hits", "misses", "late", "skipped")},
        "result",
    ),
    Metric(
        "kv_tier_failures_total",
        "counter",
        "Calls to the store that failed",
        lambda t: {"read": t.tier["read_failures"], "write": t.tier["write_failures"]},
        "call",
    ),
)
ENGINE = (
    Metric("engine_up", "gauge", "1 while an engine can serve", lambda t: t.facts is not None),
    Metric(
        "engine_paused",
        "gauge",
        "1 while it begins no step, as an operator ordered",
        lambda t: t.orders is not None and t.orders.is_paused,
    ),
    Metric(
        "engine_asleep",
        "gauge",
        "1 while its pages are given back, as an operator ordered",
        lambda t: t.orders is not None and t.orders.is_asleep,
    ),
    Metric(
        "weight_updates_total",
        "counter",
        "Updates of the weights while it served",
        lambda t: 0 if t.orders is None else t.orders.num_updates,
    ),
    Metric(
        "weights_info",
        "gauge",
        "1, for the version of the weights",
        lambda t: {} if t.orders is None else {t.orders.weights.version: 1},
        "version",
    ),
    Metric("engine_slow", "gauge", "1 while it is overdue, as /health says", lambda t: t.is_slow()),
    Metric("engine_step_age_seconds", "gauge", "Since the last sign of life", lambda t: t.silent_s),
    Metric(
        "engine_step_age_limit_seconds",
        "gauge",
        "An engine without a sign of life for longer is ended",
        lambda t: t.silence_limit_s(),
    ),
    Metric(
        "engine_restarts_total", "counter", "Engines after the first", lambda t: max(0, t.num_engines - 1)
    ),
    Metric("engine_start_seconds", "gauge", "How long the last start took", lambda t: t.start_s),
    Metric(
        "engine_start_stage_seconds",
        "gauge",
        "How long each stage of the last start took",
        lambda t: t.start_stages_s,
        "stage",
    ),
    Metric(
        "slots",
        "gauge",
        "Samples that may run at once",
        lambda t: 0 if t.facts is None else t.facts.num_slots,
    ),
    Metric(
        "expert_imbalance",
        "gauge",
        "Tokens of a layer's most chosen expert, in means of all",
        expert_imbalance,
        "layer",
    ),
    Metric("log_lines_lost_total", "counter", "Could not be written", lambda t: t.num_lost_lines()),
)
OURS = (*REQUESTS, *TIMES, *STEPS, *DRAFTS, *GRAMMARS, *PAGES, *TIER, *ENGINE)
