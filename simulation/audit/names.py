"""By which other names are figures known? Those of `vllm bench serve`, whose files the gate audits too."""

from __future__ import annotations

from typing import Any

from simulation.audit.law import Fields, Figures, Law, differs, first

SAME = {  # the gate's name, and theirs
    "requests": "num_prompts",
    "duration_s": "duration",
    "prompt_tokens": "total_input_tokens",
    "output_tokens": "total_output_tokens",
    "requests_per_s": "request_throughput",
    "output_tokens_per_s": "output_throughput",
    "total_tokens_per_s": "total_token_throughput",
}
LATENCIES = {"ttft_ms": "ttft", "tpot_ms": "tpot", "itl_ms": "itl", "e2e_ms": "e2el"}
PARTS = {"mean": "mean", "p50": "median", "p90": "p90", "p95": "p95", "p99": "p99"}


def under_ours(fields: Fields) -> Fields:
    """The result with each figure that it has by their name only also by the gate's.

    Their ITL is the mean of gaps between pieces, which is of use only where they are counted.
    """
    if "request_throughput" not in fields:
        return fields
    found: dict[str, Any] = {ours: fields[theirs] for ours, theirs in SAME.items() if theirs in fields}
    if isinstance(fields.get("itls"), list):  # of each request, in files with details
        found["itl_gaps"] = sum(len(each) for each in fields["itls"])
    for ours, theirs in LATENCIES.items():
        if ours == "itl_ms" and "itl_gaps" not in {*fields, *found}:
            continue
        if told := latency(fields, theirs):
            found[ours] = told
    return {**found, **fields}


def latency(fields: Fields, theirs: str) -> dict[str, Any]:
    """The parts of a latency that a result has by their names, such as `mean_ttft_ms` for `ttft`."""
    names = {part: f"{name}_{theirs}_ms" for part, name in PARTS.items()}
    return {part: fields[name] for part, name in names.items() if name in fields}


def both_names(figures: Figures) -> str | None:
    """A figure that is told twice is told the same; `under_ours` has seen to those that are told once."""
    wrongs = []
    for ours, theirs in SAME.items():
        told, again = figures.given(ours), figures.given(theirs)
        if told is not None and again is not None:
            wrongs.append(differs(ours, told, theirs, again, 0.001 * again))
    for ours, theirs in LATENCIES.items():
        for part, name in PARTS.items():
            told, again = figures.given(f"{ours}.{part}"), figures.given(f"{name}_{theirs}_ms")
            if told is not None and again is not None:
                wrongs.append(differs(f"{ours}.{part}", told, f"{name}_{theirs}_ms", again, 0.001 * again))
    return first(wrongs)


LAWS = (Law("both names", "a figure told by two names is the same", both_names, "request_throughput"),)
