"""Declare the metrics of a result: their units, vLLM's names for them, and what each is checked against.

The laws on signs and most other laws are derived from this table, and results under vLLM's names are
converted by it. A value that a result states only once and that is no measurement, such as a setting, cannot
be cross-checked; only its digest shows a later change.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, combinations
from typing import Any

import numpy as np

from benchmark.gate import recount as by
from benchmark.gate.law import Law, Tie, differs, exceeds, first, laws_of
from benchmark.gate.recount import figure, growth, per_s, product
from benchmark.gate.result import DONE, Fields, Figures, NotCheckable

LATENCIES = {"ttft_ms": "ttft", "tpot_ms": "tpot", "itl_ms": "itl", "e2e_ms": "e2el"}
PERCENTS = {"min": 0.0, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
PARTS: dict[str, float | None] = {"mean": None, "std": None, **PERCENTS}
BATCH_PERCENTS = (10, 25, 50, 75, 90, 99)
UNITS: dict[str, tuple[str, ...]] = {  # a unit -> the figures that have it
    "count": (
        *("requests", "completed", "failed", "rejected", "ended_by.stop", "ended_by.length"),
        *("prompt_tokens", "output_tokens", "total_num_tokens", "asked_output_tokens", "least_output_tokens"),
        *("most_output_tokens", "itl_gaps", "steps", "preemptions", "max_concurrent_requests"),
        *("slots", "page_size", "num_pages", "num_devices"),
    ),
    "bytes": ("weight_bytes_per_step", "kv_bytes_per_token", "page_bytes"),
    "ms": tuple(f"{name}.{part}" for name in LATENCIES for part in PARTS),
    "s": ("duration_s", "avg_latency", *(f"percentiles.{part}" for part in BATCH_PERCENTS)),
    "per s": (
        *("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "offered_per_s"),
        "request_goodput",
    ),
    "mean over time": ("mean_batch", "mean_running", "mean_in_system", "mean_in_flight"),
    "share": ("good_share", "prefix_hit_rate", "mean_page_use"),
}
THEIRS: dict[str, tuple[str, ...]] = {  # a figure -> the names that vllm gives it
    "requests": ("num_prompts", "num_requests"),
    "prompt_tokens": ("total_input_tokens",),
    "output_tokens": ("total_output_tokens",),
    "duration_s": ("duration", "elapsed_time"),
    "requests_per_s": ("request_throughput", "requests_per_second"),
    "output_tokens_per_s": ("output_throughput",),
    "total_tokens_per_s": ("total_token_throughput", "tokens_per_second"),
}
THEIR_PARTS = {
    f"{ours}.{part}": tuple(
        f"{word}_{theirs}_ms" for word in (("median", "p50") if part == "p50" else (part,))
    )
    for ours, theirs in LATENCIES.items()
    for part in PARTS
}
SLACK = 0.02  # relative tolerance of figures that are the same by definition, and were rounded
LITTLE = 0.05  # relative tolerance of an average over time, taken at the ends of steps
ROUNDING_MS = 0.002  # tolerance of latencies with three decimals
RATE = 6e-5  # tolerance of a share with four decimals


def exact(figures: Figures) -> float:
    """Return the relative tolerance of a figure beside the records; simulated ones come from a sketch."""
    return 5e-4 if figures.raw("SIMULATED") is None else SLACK


def rated(figures: Figures) -> float:
    """Return the relative tolerance of a rate beside its count: 1 %, and a duration has four decimals."""
    return 0.01 + 1e-4 / figures.positive("duration_s")


def _gap_rounding_ms(figures: Figures) -> float:
    return ROUNDING_MS * (1 + figures.number("completed") / by.num_gaps(figures))


STATEMENTS = {  # a law of ties -> its statement, and the field without which it does not apply
    "served <= offered": ("X <= the rate of arrivals, but for chance", ""),
    "all counted": ("every request is completed or failed", ""),
    "rate x duration": ("a rate times the duration is the count, within 1 %", ""),
    "median run": ("the reported run is no better than the median one", ""),
    "Little": ("N = X W, within 5 % and a step", ""),
    "Little, running": ("X x TPOT x gaps <= the mean number running, within 5 %", ""),
    "Little, records": ("N = the sum of W over the duration, within 5 % and a step", ""),
    "slots": (
        "X W of those that decode <= slots, and so is every mean number of them; the recipe has as many",
        "",
    ),
    "spans": ("mean batch x steps >= output tokens", ""),
    "percentiles": ("percentiles do not fall, and a mean is within min and max", ""),
    "TTFT <= E2E": ("in the mean and in every percentile", ""),
    "E2E = TTFT + gaps": ("summed over all requests, within 2 %", ""),
    "roofline": ("TPOT >= bytes of weights and keys and values / bandwidth", ""),
    "every request": ("one record for each request, none twice, and each is counted by its end", ""),
    "recount": ("latencies, duration and sums are those of the records", ""),
    "at once": ("never more requests at once than slots, but preempted", ""),
    "offered, records": ("the rate of arrivals is that of the records", ""),
    "goodput": ("good requests are those that meet the objectives", "request_goodput"),
    "counters": ("figures are what the engine's counters grew by in the run", "counters"),
    "memory": ("weights and pages fit into the device's memory, and tokens into their pages", "computed_on"),
    "cache": ("an engine at rest holds no page", "cache_after_all_runs"),
    "server": ("figures are what the server's own counters grew by; no client waits less", "metrics"),
    "batches": ("figures are those of the batches, each of which was answered in full", "latencies"),
    "claim": ("a number that is claimed in passing fits those beside it, within 5 %", "claim"),
}
TIES = (
    # Counts.
    Tie("all counted", "requests", "is", by.total("completed", "failed")),
    Tie("every request", "requests", "is", by.num_records()),
    Tie("every request", "requests", "is", by.num_ids()),
    Tie("every request", "completed", "is", by.num_ended(*DONE)),
    Tie("every request", "ended_by.stop", "is", by.num_ended("stop")),
    Tie("every request", "ended_by.length", "is", by.num_ended("length")),
    Tie("recount", "prompt_tokens", "is", by.of_answers("prompt_tokens", "sum", np.sum)),
    Tie("recount", "output_tokens", "is", by.of_answers("output_tokens", "sum", np.sum)),
    Tie("recount", "least_output_tokens", "is", by.of_answers("output_tokens", "least", np.min)),
    Tie("recount", "most_output_tokens", "is", by.of_answers("output_tokens", "most", np.max)),
    Tie("recount", "itl_gaps", "is", by.recorded_gaps()),
    Tie("at once", "slots", "at least", by.in_slots()),
    # Times and rates.
    Tie("recount", "duration_s", "at least", by.taken_s(are_all_needed=False), exact, 1e-4),
    Tie("recount", "duration_s", "at most", by.taken_s(are_all_needed=True), exact, 1e-4),
    Tie("rate x duration", "requests_per_s", "is", per_s("completed"), rated, 0.001),
    Tie("rate x duration", "output_tokens_per_s", "is", per_s("output_tokens"), rated, 0.001),
    Tie("rate x duration", "total_tokens_per_s", "is", per_s("prompt_tokens", "output_tokens"), rated, 0.001),
    Tie("rate x duration", "total_num_tokens", "is", product("total_tokens_per_s", "duration_s"), rated, 1.0),
    Tie("served <= offered", "requests_per_s", "at most", figure("offered_per_s"), 0.0, by.chance),
    Tie("offered, records", "offered_per_s", "is", by.arrivals_per_s(), 0.01, 0.001),
    Tie("median run", "output_tokens_per_s", "at most", by.median_run(), 0.01),
    Tie("goodput", "request_goodput", "at most", figure("requests_per_s"), 0.001),
    Tie("goodput", "request_goodput", "is", by.good_per_s(), 0.0, by.good_slack),
    # Latencies.
    *(
        Tie("recount", f"{name}.{part}", "is", by.latency_ms(name, part, percent), exact, 0.02)
        for name in LATENCIES
        for part, percent in PARTS.items()
    ),
    *(
        Tie("percentiles", f"{name}.{low}", "at most", figure(f"{name}.{high}"), 1e-3, ROUNDING_MS)
        for name in LATENCIES
        for low, high in (*combinations(PERCENTS, 2), ("min", "mean"), ("mean", "max"))
    ),
    *(
        Tie("TTFT <= E2E", f"ttft_ms.{part}", "at most", figure(f"e2e_ms.{part}"), 0.0, ROUNDING_MS)
        for part in ("mean", *PERCENTS)
    ),
    Tie("E2E = TTFT + gaps", "itl_ms.mean", "is", by.gap_ms(), SLACK, _gap_rounding_ms),
    Tie("roofline", "tpot_ms.mean", "at least", by.floor_ms(), SLACK, ROUNDING_MS),
    # How many are there, by Little's law N = X W, and how many there is room for.
    Tie("Little", "mean_in_system", "is", by.x_times_w(), LITTLE, by.unseen),
    Tie("Little, records", "mean_in_system", "is", by.mean_number(are_all_answered=True), LITTLE, by.unseen),
    Tie("Little, records", "mean_in_flight", "is", by.mean_number(are_all_answered=False), SLACK, 0.001),
    Tie("Little, running", "mean_running", "at least", by.decoding(), LITTLE),
    Tie("Little, running", "mean_running", "at most", figure("mean_in_system"), SLACK),
    Tie("slots", "slots", "at least", by.decoding(), SLACK),
    Tie("slots", "slots", "at least", figure("mean_running")),
    Tie("slots", "slots", "at least", figure("mean_batch")),
    Tie("slots", "slots", "is", figure("settings.scheduler.num_slots")),
    Tie("spans", "output_tokens", "at most", product("mean_batch", "steps", "max_tokens_per_step"), SLACK),
    # What an engine counted at its steps, and before and after them.
    Tie("counters", "steps", "is", growth("steps")),
    Tie("counters", "prompt_tokens", "is", growth("prompt_tokens")),
    Tie("counters", "output_tokens", "is", growth("sampled_tokens")),
    Tie("counters", "preemptions", "is", growth("preemptions")),
    Tie("counters", "prefix_hit_rate", "is", by.hit_share(), 0.0, RATE),
    Tie("memory", "page_bytes", "at least", product("page_size", "kv_bytes_per_token")),
    Tie("memory", "computed_on.memory_gib", "at least", by.memory_gib()),
    Tie("cache", "cache_after_all_runs.idle_pages", "is", by.idle_pages()),
    # What a server counted.
    Tie("server", "completed", "at most", by.server_growth("requests")),
    Tie("server", "prompt_tokens", "is", by.own_growth("prompt_tokens")),
    Tie("server", "output_tokens", "is", by.own_growth("output_tokens")),
    Tie("server", "ttft_ms.mean", "at least", by.own_mean_ms("ttft"), 0.01, 1.0),
    Tie("server", "e2e_ms.mean", "at least", by.own_mean_ms("e2e"), 0.01, 1.0),
    # Batches that were served one after the other.
    Tie("batches", "requests", "is", by.of_all_batches("batch_size")),
    Tie("batches", "completed", "is", by.of_all_batches("batch_size")),
    Tie("batches", "prompt_tokens", "is", product("completed", "input_len")),
    Tie("batches", "output_tokens", "is", product("completed", "output_len")),
    Tie("batches", "duration_s", "is", by.of_batches("sum", np.sum), 1e-3, 1e-4),
    Tie("batches", "avg_latency", "is", by.of_batches("mean", np.mean), 1e-3, 2e-6),
    Tie("batches", "tpot_ms.mean", "at most", by.batch_per_gap_ms(), 0.01),
    *(
        Tie(
            "batches",
            f"percentiles.{part}",
            "is",
            by.of_batches(f"percentile {part}", partial(np.percentile, q=part)),
            1e-3,
            2e-6,
        )
        for part in BATCH_PERCENTS
    ),
    # What an author says in passing.
    Tie("claim", "claim.is", "is", by.claimed(), LITTLE),
    Tie("claim", "claim.at_most", "at most", by.claimed(), LITTLE),
    Tie("claim", "claim.at_least", "at least", by.claimed(), LITTLE),
)


def signs(figures: Figures) -> str | None:
    """Check the signs of all figures, and that no share is above 1."""
    found = {name: value for name in chain(*UNITS.values()) if (value := figures.given(name)) is not None}
    if not found:
        raise NotCheckable("no figure is known by its name")
    below = [f"{name} is {value:g}, below 0" for name, value in found.items() if value < 0]
    shares = [name for name in UNITS["share"] if name in found]
    return first(below + [exceeds(name, found[name], "the whole", 1) for name in shares])


def both_names(figures: Figures) -> str | None:
    """Check that a figure under two names has one value; `under_ours` has added missing names."""
    wrongs = []
    for name, aliases in (THEIRS | THEIR_PARTS).items():
        for alias in aliases:
            mine, again = figures.given(name), figures.given(alias)
            if mine is not None and again is not None:
                wrongs.append(differs(name, mine, alias, again, 0.001 * abs(again)))
    if not wrongs:
        raise NotCheckable("no figure stands under two names")
    return first(wrongs)


def parts_of(fields: Fields, name: str) -> dict[str, Any]:
    """Return the parts of a latency that stand under vllm's names, such as `mean_ttft_ms`."""
    known = {part: [each for each in THEIR_PARTS[f"{name}.{part}"] if each in fields] for part in PARTS}
    return {part: fields[names[0]] for part, names in known.items() if names}


def under_ours(fields: Fields) -> Fields:
    """Return the result with the gate's name added to each figure that it has only under vllm's.

    Their ITL is the mean of gaps between pieces, which is of use only where the gaps are counted.
    """
    known = {name: [each for each in aliases if each in fields] for name, aliases in THEIRS.items()}
    found: dict[str, Any] = {name: fields[names[0]] for name, names in known.items() if names}
    if isinstance(fields.get("itls"), list):  # gaps of each request, in files with details
        found["itl_gaps"] = sum(len(each) for each in fields["itls"])
    for name in LATENCIES:
        if (name != "itl_ms" or "itl_gaps" in {*fields, *found}) and (stated := parts_of(fields, name)):
            found[name] = stated
    return {**found, **fields}


LAWS: tuple[Law, ...] = (
    Law("signs", "no figure is negative, and no share is above 1", signs),
    *laws_of(TIES, STATEMENTS),
    Law("both names", "a figure under two names has one value", both_names),
)
