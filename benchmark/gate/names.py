"""By which other names are figures known? Those of `vllm bench`, whose files the gate audits too."""

from __future__ import annotations

from typing import Any

from benchmark.gate.law import Fields, Figures, Law, NotCheckable, differs, first
from benchmark.gate.records import RECOUNT_SLACK_MS, done, latencies_of
from benchmark.gate.summary import SLACK

SAME = {  # the gate's name, and that of `vllm bench serve`
    "requests": "num_prompts",
    "duration_s": "duration",
    "prompt_tokens": "total_input_tokens",
    "output_tokens": "total_output_tokens",
    "requests_per_s": "request_throughput",
    "output_tokens_per_s": "output_throughput",
    "total_tokens_per_s": "total_token_throughput",
}
THROUGHPUT = {  # and that of `vllm bench throughput`
    "requests": "num_requests",
    "duration_s": "elapsed_time",
    "requests_per_s": "requests_per_second",
    "total_tokens_per_s": "tokens_per_second",
}
LATENCIES = {"ttft_ms": "ttft", "tpot_ms": "tpot", "itl_ms": "itl", "e2e_ms": "e2el"}
PARTS = {"mean": "mean", "p50": "median", "p90": "p90", "p95": "p95", "p99": "p99"}


def under_ours(fields: Fields) -> Fields:
    """The result with each figure that it has by their name only also by the gate's.

    Their ITL is the mean of gaps between pieces, which is of use only where they are counted.
    """
    if "tokens_per_second" in fields:
        return {**{ours: fields[theirs] for ours, theirs in THROUGHPUT.items() if theirs in fields}, **fields}
    if "request_throughput" not in fields:
        return fields
    found: dict[str, Any] = {ours: fields[theirs] for ours, theirs in SAME.items() if theirs in fields}
    if isinstance(fields.get("itls"), list):  # of each request, in files with details
        found["itl_gaps"] = sum(len(each) for each in fields["itls"])
    for ours, theirs in LATENCIES.items():
        if ours == "itl_ms" and "itl_gaps" not in {*fields, *found}:
            continue
        if stated := latency(fields, theirs):
            found[ours] = stated
    return {**found, **fields}


def latency(fields: Fields, theirs: str) -> dict[str, Any]:
    """The parts of a latency that a result has by their names, such as `mean_ttft_ms` for `ttft`."""
    names = {part: f"{name}_{theirs}_ms" for part, name in PARTS.items()}
    return {part: fields[name] for part, name in names.items() if name in fields}


def both_names(figures: Figures) -> str | None:
    """A figure under two names has one value; `under_ours` has added the name that was missing."""
    pairs = [*SAME.items(), *THROUGHPUT.items()]
    for ours, theirs in LATENCIES.items():
        pairs += [(f"{ours}.{part}", f"{name}_{theirs}_ms") for part, name in PARTS.items()]
        pairs.append((f"{ours}.p50", f"p50_{theirs}_ms"))
    wrongs = []
    for mine, other in pairs:
        stated, again = figures.given(mine), figures.given(other)
        if stated is not None and again is not None:
            wrongs.append(differs(mine, stated, other, again, 0.001 * abs(again)))
    return first(wrongs)


def all_tokens(figures: Figures) -> str | None:
    """Tokens of prompts and answers together."""
    stated, duration_s = figures.number("total_num_tokens"), figures.number("elapsed_time")
    expected = figures.number("tokens_per_second") * duration_s
    slack = 0.01 * stated + 0.001 * duration_s
    return differs("tokens_per_second x elapsed_time", expected, "total_num_tokens", stated, slack)


def spreads(figures: Figures) -> str | None:
    """The standard deviations are those of the records."""
    wrongs, stated = [], 0
    for ours, values_s in latencies_of(done(figures)).items():
        name = f"std_{LATENCIES[ours]}_ms"
        if (spread_ms := figures.given(name)) is not None and len(values_s):
            stated, found_ms = stated + 1, 1e3 * float(values_s.std())
            slack_ms = SLACK * found_ms + RECOUNT_SLACK_MS
            wrongs.append(differs(name, spread_ms, "the records'", found_ms, slack_ms))
    if not stated:
        raise NotCheckable("no standard deviation is given")
    return first(wrongs)


LAWS = (
    Law("both names", "a figure under two names has one value", both_names, "request_throughput"),
    Law("both names, all at once", "the same", both_names, "tokens_per_second"),
    Law("all tokens", "all tokens a second times the time is their number", all_tokens, "total_num_tokens"),
    Law("spreads", "standard deviations are those of the records", spreads, "request_throughput"),
)
