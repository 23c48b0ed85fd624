"""By which other names are figures known? Those of `vllm bench`, whose files the gate audits too."""

from __future__ import annotations

from typing import Any

from benchmark.gate.law import Fields, Figures, Law, NotCheckable, differs, first
from benchmark.gate.records import RECOUNT_SLACK_MS, done, latencies_of, recount_slack
from benchmark.gate.table import FIGURES, LATENCIES, PARTS


def under_ours(fields: Fields) -> Fields:
    """The result with each figure that it has by their name only also by the gate's.

    Their ITL is the mean of gaps between pieces, which is of use only where they are counted.
    """
    found: dict[str, Any] = {}
    for row in FIGURES:
        if "." not in row.name:
            known = [fields[alias] for alias in row.aliases if alias in fields]
            found |= {row.name: known[0]} if known else {}
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
