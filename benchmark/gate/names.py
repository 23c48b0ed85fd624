"""Map the names of `vllm bench`, whose files the gate audits too, to the gate's own."""

from __future__ import annotations

from typing import Any

from benchmark.gate.law import Fields, Figures, Law, NotCheckable, differs, first
from benchmark.gate.records import RECOUNT_SLACK_MS, done, latencies_of, recount_slack
from benchmark.gate.table import FIGURES, LATENCIES, PARTS


def under_ours(fields: Fields) -> Fields:
    """Return the result with the gate's name added to each figure that it has only under vllm's.

    Their ITL is the mean of gaps between pieces, which is of use only where the gaps are counted.
    """
    found: dict[str, Any] = {}
    for row in FIGURES:
        if "." not in row.name:
            known = [fields[alias] for alias in row.aliases if alias in fields]
            found |= {row.name: known[0]} if known else {}
    if isinstance(fields.get("itls"), list):  # gaps of each request, in files with details
        found["itl_gaps"] = sum(len(each) for each in fields["itls"])
    for ours, theirs in LATENCIES.items():
        if ours == "itl_ms" and "itl_gaps" not in {*fields, *found}:
            continue
        if stated := latency(fields, theirs):
            found[ours] = stated
    return {**found, **fields}


def latency(fields: Fields, theirs: str) -> dict[str, Any]:
    """Return the parts of a latency under their names, such as `mean_ttft_ms` for `ttft`."""
    names = {part: f"{name}_{theirs}_ms" for part, name in PARTS.items()}
    return {part: fields[name] for part, name in names.items() if name in fields}


def both_names(figures: Figures) -> str | None:
    """Check that a figure under two names has one value; `under_ours` has added missing names."""
    wrongs, stated = [], 0
    for row in FIGURES:
        for alias in row.aliases:
            mine, again = figures.given(row.name), figures.given(alias)
            if mine is not None and again is not None:
                stated += 1
                wrongs.append(differs(row.name, mine, alias, again, 0.001 * abs(again)))
    if not stated:
        raise NotCheckable("no figure stands under two names")
    return first(wrongs)


def all_tokens(figures: Figures) -> str | None:
    """Check that tokens a second times the time is the number of all tokens."""
    stated, duration_s = figures.number("total_num_tokens"), figures.number("elapsed_time")
    expected = figures.number("tokens_per_second") * duration_s
    slack = 0.01 * stated + 0.001 * duration_s
    return differs("tokens_per_second x elapsed_time", expected, "total_num_tokens", stated, slack)


def spreads(figures: Figures) -> str | None:
    """Check that standard deviations are those of the records."""
    wrongs, stated = [], 0
    for ours, values_s in latencies_of(done(figures)).items():
        name = f"std_{LATENCIES[ours]}_ms"
        if (spread_ms := figures.given(name)) is not None and len(values_s):
            stated, found_ms = stated + 1, 1e3 * float(values_s.std())
            slack_ms = recount_slack(figures) * found_ms + RECOUNT_SLACK_MS
            wrongs.append(differs(name, spread_ms, "the records'", found_ms, slack_ms))
    if not stated:
        raise NotCheckable("no standard deviation is given")
    return first(wrongs)


LAWS = (
    Law("both names", "a figure under two names has one value", both_names),
    Law("all tokens", "all tokens a second times the time is their number", all_tokens, "total_num_tokens"),
    Law("spreads", "standard deviations are those of the records", spreads, "request_throughput"),
)
