"""Declare the figures of a result: vLLM's names for them, and what each is checked against.

Results under vLLM's names are converted by these tables. A value that a result states only once and that is
no measurement, such as a setting, cannot be cross-checked; only its digest shows a later change.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from benchmark.gate import recount as by
from benchmark.gate.law import Law, Tie, Value
from benchmark.gate.result import DONE, Fields, Figures

LATENCIES = {"ttft_ms": "ttft", "tpot_ms": "tpot", "itl_ms": "itl", "e2e_ms": "e2el"}
PERCENTS = {"min": 0.0, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
PARTS: dict[str, float | None] = {"mean": None, "std": None, **PERCENTS}
THEIRS: dict[str, tuple[str, ...]] = {  # a figure -> the names that vllm gives it
    "requests": ("num_prompts",),
    "prompt_tokens": ("total_input_tokens",),
    "output_tokens": ("total_output_tokens",),
    "duration_s": ("duration",),
    "requests_per_s": ("request_throughput",),
    "output_tokens_per_s": ("output_throughput",),
    "total_tokens_per_s": ("total_token_throughput",),
}
THEIR_PARTS = {
    f"{ours}.{part}": tuple(
        f"{word}_{theirs}_ms" for word in (("median", "p50") if part == "p50" else (part,))
    )
    for ours, theirs in LATENCIES.items()
    for part in PARTS
}
SHARES = ("good_share", "prefix_hit_rate", "mean_page_use")
UNTIED = (  # figures that no tie below has on its left side, and that are not negative either
    *("rejected", "asked_output_tokens", "max_concurrent_requests", "page_size", "num_devices"),
    *("weight_bytes_per_step", "kv_bytes_per_token", "mean_batch", "failed", "mean_page_use"),
)
TAKEN_BYTES = "weight_bytes_per_step + page_bytes * num_pages"
SLACK = 0.02  # relative tolerance of figures that are the same by definition, and were rounded
LITTLE = 0.05  # relative tolerance of an average over time, taken at the ends of steps
ROUNDING_MS = 0.002  # tolerance of latencies with three decimals
RATE = 6e-5  # tolerance of a share with four decimals
RATED = "0.01 + 0.0001 / duration_s"  # relative tolerance of a rate, as a duration has four decimals
GOOD = "(0.01 * requests + 1) / duration_s"  # requests that may meet an objective by rounding
X_W = "requests_per_s * e2e_ms.mean / 1000"
DECODING = (  # how many decode: by all gaps, and if each answer has as few tokens as the least
    "itl_ms.mean / 1000 * itl_gaps / duration_s",
    "requests_per_s * tpot_ms.mean / 1000 * (least_output_tokens - 1)",
)


def exact(figures: Figures) -> float:
    """Return the relative tolerance of a figure beside the records; simulated ones come from a sketch."""
    return 5e-4 if figures.raw("SIMULATED") is None else SLACK


def grown(name: str, place: str = "counters") -> str:
    """Return the formula of how much a counter of the engine, or in `metrics` of a server, has grown."""
    return f"({place}.after.{name} - {place}.before.{name})"


# Computed are the tokens of prompts that were not hits, sampled tokens except an answer's last, and what
# preemption lost and did not find again.
COMPUTED = (
    f"prompt_tokens - {grown('hit_tokens')} + output_tokens - completed + counters.before.computed_tokens"
)
COMPUTED += f" + {grown('lost_tokens')} - {grown('refound_tokens')}"


def recounted(figure: str, of: Value, relative: Any = 0.0, absolute: Any = 0.0) -> Tie:
    """Return the tie of a figure to what the records come to."""
    return Tie(figure, "is", of, relative, absolute, "the records'")


TIED = (
    Law("served <= offered", "X <= the rate of arrivals, but for chance", [
        Tie("requests_per_s", "at most", "offered_per_s", 0.0, by.chance),
    ]),
    Law("all counted", "every request is completed or failed, and a server answered no fewer", [
        Tie("requests", "is", "completed + failed"),
        Tie("completed", "at most", grown("requests", "metrics")),
    ]),
    Law("rate x duration", "a rate times the duration is the count, within 1 %", [
        Tie("requests_per_s", "is", "completed / duration_s", RATED, 0.001),
        Tie("output_tokens_per_s", "is", "output_tokens / duration_s", RATED, 0.001),
        Tie("total_tokens_per_s", "is", "(prompt_tokens + output_tokens) / duration_s", RATED, 0.001),
    ]),
    Law("median run", "the reported run is no better than the median one", [
        Tie("output_tokens_per_s", "at most", by.median_run, 0.01, words="the median of the runs"),
    ]),
    Law("Little", "N = X W, within 5 % and a step, and those who run are among them", [
        Tie("mean_in_system", "is", X_W, LITTLE, by.unseen),
        Tie("mean_running", "at most", "mean_in_system", SLACK),
    ]),
    Law("Little, running", "X x TPOT x gaps <= the mean number running, within 5 %", [
        Tie("mean_running", "at least", each, LITTLE) for each in DECODING
    ], by.unpreempted),
    Law("slots", "X W of those that decode <= slots", [
        Tie("slots", "at least", each, SLACK) for each in DECODING
    ], by.unpreempted),
    Law("at once", "never more at once than slots, of which there are as many as in the recipe", [
        Tie("slots", "at least", by.most_in_slots, words="the most requests between first and last token"),
        Tie("slots", "at least", "mean_running"),
        Tie("slots", "at least", "mean_batch"),
        Tie("slots", "is", "settings.scheduler.num_slots"),
    ]),
    Law("spans", "mean batch x steps >= output tokens", [
        Tie("output_tokens", "at most", "mean_batch * steps * max_tokens_per_step", SLACK),
    ]),
    Law("percentiles", "percentiles do not fall, and a mean is within min and max", [
        Tie(f"{name}.{low}", "at most", f"{name}.{high}", 1e-3, ROUNDING_MS)
        for name in LATENCIES
        for low, high in (*combinations(PERCENTS, 2), ("min", "mean"), ("mean", "max"))
    ]),
    Law("TTFT <= E2E", "in the mean and in every percentile", [
        Tie(f"ttft_ms.{part}", "at most", f"e2e_ms.{part}", 0.0, ROUNDING_MS) for part in ("mean", *PERCENTS)
    ]),
    Law("E2E = TTFT + gaps", "summed over all requests, within 2 %", [
        Tie("itl_ms.mean", "is", "(e2e_ms.mean - ttft_ms.mean) * completed / itl_gaps",
            SLACK, f"{ROUNDING_MS} * (1 + completed / itl_gaps)"),
    ]),
    Law("roofline", "TPOT >= bytes of weights and keys and values / bandwidth", [
        Tie("tpot_ms.mean", "at least", by.floor_ms, SLACK, ROUNDING_MS, "memory's time for them"),
    ]),
    Law("recount", "counts, latencies, duration, sums and rates are those of the records", [
        recounted("requests", lambda figures: len(figures.records)),
        recounted("requests", lambda figures: len({str(each.get("id")) for each in figures.records})),
        recounted("completed", by.num_ended(*DONE)),
        recounted("ended_by.stop", by.num_ended("stop")),
        recounted("ended_by.length", by.num_ended("length")),
        recounted("prompt_tokens", by.over_completed("prompt_tokens", np.sum)),
        recounted("output_tokens", by.over_completed("output_tokens", np.sum)),
        recounted("least_output_tokens", by.over_completed("output_tokens", np.min)),
        recounted("most_output_tokens", by.over_completed("output_tokens", np.max)),
        recounted("itl_gaps", by.num_gaps),
        Tie("duration_s", "at least", by.least_s, exact, 1e-4, "the records' last end"),
        Tie("duration_s", "at most", by.most_s, exact, 1e-4, "the records' last end"),
        recounted("mean_in_flight", by.num_in_flight, SLACK, 0.001),
        recounted("offered_per_s", by.arrivals_per_s, 0.01, 0.001),
        *(
            recounted(f"{name}.{part}", by.latency_ms(name, part, percent), exact, 0.02)
            for name in LATENCIES
            for part, percent in PARTS.items()
        ),
    ]),
    Law("goodput", "good requests are those that meet the objectives", [
        Tie("request_goodput", "at most", "requests_per_s", 0.001),
        recounted("request_goodput", by.good_per_s, 0.0, GOOD),
        recounted("good_share", by.good_share, 0.0, "0.01 + 1 / requests"),
    ]),
    Law("counters", "figures are what the engine's counters grew by in the run", [
        Tie("steps", "is", grown("steps")),
        Tie("prompt_tokens", "is", grown("prompt_tokens")),
        Tie("output_tokens", "is", grown("sampled_tokens")),
        Tie("preemptions", "is", grown("preemptions")),
        Tie("prefix_hit_rate", "is", f"{grown('hit_tokens')} / {grown('prompt_tokens')}", 0.0, RATE),
    ], by.counted_apart),
    Law("computed tokens", "each token is computed once, and what was lost once more", [
        Tie("counters.after.computed_tokens", "at least", COMPUTED),
        Tie("counters.after.computed_tokens", "at most", COMPUTED, 0.0, by.computed_ahead),
    ], by.counted_apart),
    Law("memory", "weights and pages fit into the device's memory, and tokens into their pages", [
        Tie("page_bytes", "at least", "page_size * kv_bytes_per_token"),
        Tie("computed_on.memory_gib", "at least", f"({TAKEN_BYTES}) / {2**30}"),
    ]),
    Law("cache", "an engine at rest holds no page", [
        Tie("num_pages", "is", "cache_after_all_runs.free_pages + cache_after_all_runs.idle_pages"),
    ]),
    Law("server", "figures are what the server's own counters grew by; no client waits less", [
        Tie("prompt_tokens", "is", grown("prompt_tokens", "metrics")),
        Tie("output_tokens", "is", grown("output_tokens", "metrics")),
        *(
            Tie(f"{name}_ms.mean", "at least",
                f"1000 * {grown(f'{name}_s', 'metrics')} / {grown(f'{name}_count', 'metrics')}", 0.01, 1.0)
            for name in ("ttft", "e2e")
        ),
    ], by.answered_alone),
    Law("claim", "a number that is claimed in passing fits those beside it, within 5 %", [
        Tie("claim.is", "is", by.claimed, LITTLE, words="what its factors make"),
        Tie("claim.at_most", "at most", by.claimed, LITTLE, words="what its factors make"),
        Tie("claim.at_least", "at least", by.claimed, LITTLE, words="what its factors make"),
    ]),
)  # fmt: skip
NOT_NEGATIVE = sorted({*UNTIED, *(tie.figure for law in TIED for tie in law.checks if isinstance(tie, Tie))})
LAWS: tuple[Law, ...] = (
    Law("signs", "no figure is negative, and no share is above 1", [
        *(Tie(name, "at least", 0.0, words="the least") for name in NOT_NEGATIVE),
        *(Tie(name, "at most", 1.0, words="the whole") for name in SHARES),
    ]),
    *TIED,
    Law("both names", "a figure under two names has one value", [
        Tie(name, "is", alias, 0.001)
        for name, aliases in (THEIRS | THEIR_PARTS).items()
        for alias in aliases
    ]),
)  # fmt: skip


def under_theirs(figures: Fields) -> dict[str, Any]:
    """Return figures with vllm's names in place of the gate's, where it has them."""
    named = Figures(figures)
    found = {name: value for name, value in figures.items() if name not in (*THEIRS, *LATENCIES)}
    for name, aliases in (THEIRS | THEIR_PARTS).items():
        if (value := named.raw(name)) is not None:
            found |= dict.fromkeys(aliases, value)
    return found


def parts_of(fields: Fields, name: str) -> dict[str, Any]:
    """Return the parts of a latency that stand under vllm's names, such as `mean_ttft_ms`."""
    known = {part: [each for each in THEIR_PARTS[f"{name}.{part}"] if each in fields] for part in PARTS}
    return {part: fields[names[0]] for part, names in known.items() if names}


def under_ours(fields: Fields) -> Fields:
    """Return the result with the gate's name added to each figure that it has only under vllm's.

    Their ITL is the mean of gaps between pieces, which is of use only where the gaps are counted.
    """
    theirs = {name: [each for each in aliases if each in fields] for name, aliases in THEIRS.items()}
    found: dict[str, Any] = {name: fields[names[0]] for name, names in theirs.items() if names}
    if isinstance(fields.get("itls"), list):  # gaps of each request, in files with details
        found["itl_gaps"] = sum(len(each) for each in fields["itls"])
    for name in LATENCIES:
        if (name != "itl_ms" or "itl_gaps" in {*fields, *found}) and (stated := parts_of(fields, name)):
            found[name] = stated
    known = {**found, **fields}
    tokens, answers = known.get("output_tokens"), known.get("completed")
    if isinstance(tokens, int) and isinstance(answers, int):  # one before each token after the first
        known.setdefault("itl_gaps", max(0, tokens - answers))
    return known
