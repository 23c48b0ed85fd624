"""Define the laws of several runs on one engine, of which a result reports one."""

from __future__ import annotations

from benchmark.gate import elsewhere as other
from benchmark.gate.law import Figures, Law, NotCheckable, differs, exceeds, finite, first

RUNS = ("runs_output_tokens_per_s", "runs_output_tokens", "runs_duration_s")
SHARING = "settings.cache.prefix_sharing"


def lists(figures: Figures) -> list[list[float]]:
    """Return the rates, tokens and seconds of the counted runs."""
    found = []
    for name in RUNS:
        stated = figures.raw(name)
        if stated is None:
            raise NotCheckable(f"{name} is absent")
        if not isinstance(stated, list) or not stated:
            raise ValueError(f"{name} is {stated!r}; it must be a list of numbers")
        found.append([finite(name, each) for each in stated])
    if len({len(each) for each in found}) > 1:
        raise ValueError(f"{', '.join(RUNS)} must be of as many runs")
    return found


def reported(figures: Figures) -> str | None:
    """Check that each run's rate is its tokens over its seconds, and that the median run is reported."""
    rates, tokens, seconds = lists(figures)
    wrongs = []
    for number, (rate, count, taken_s) in enumerate(zip(rates, tokens, seconds), 1):
        slack = 1e-4 * rate * (1 + 1 / max(taken_s, 1e-4)) + 0.01
        expected = count / taken_s if taken_s > 0 else 0.0
        wrongs.append(differs(f"the rate of run {number}", rate, "its tokens / its seconds", expected, slack))
    middle = sorted(range(len(rates)), key=lambda number: rates[number])[len(rates) // 2]
    for name, values in (
        ("output_tokens_per_s", rates),
        ("output_tokens", tokens),
        ("duration_s", seconds),
    ):
        stated = figures.number(name)
        wrongs.append(differs(name, stated, "that of the median run", values[middle], 1e-9))
    return first(wrongs)


def counters(figures: Figures) -> str | None:
    """Check that counters only grow, up to the end of all runs, and that they count every run.

    The warm-ups and the earlier runs have counted the same prompts.
    """
    before, after = figures.raw("counters.before"), figures.raw("counters.after")
    finally_ = figures.raw("counters_after_all_runs")
    if not isinstance(before, dict) or not isinstance(after, dict) or not isinstance(finally_, dict):
        raise NotCheckable("counters are absent")
    num_runs = len(figures.raw("runs_output_tokens_per_s") or [0])
    wrongs: list[str | None] = []
    for name in after:
        first_, then, last = (
            finite(f"{name} of the counters", each.get(name)) for each in (before, after, finally_)
        )
        wrongs.append(exceeds(f"counters.before.{name}", first_, f"counters.after.{name}", then, 0))
        if num_runs == 1:
            wrongs.append(differs(f"counters.after.{name}", then, "counters_after_all_runs", last, 0))
        else:
            wrongs.append(exceeds(f"counters.after.{name}", then, "counters_after_all_runs", last, 0))
    try:
        other.plain(figures)
    except NotCheckable:
        return first(wrongs)
    warm_ups, tokens = figures.number("warm_up_runs"), figures.positive("prompt_tokens")
    whole = figures.number("counters_after_all_runs.prompt_tokens") / tokens
    wrongs.append(
        differs("warm_up_runs + counted runs", warm_ups + num_runs, "all prompts / a run's", whole, 0)
    )
    if not figures.number("counters_after_all_runs.preemptions"):
        wrongs.append(_looked_up(figures, (warm_ups + num_runs) * figures.number("requests")))
    return first(wrongs)


def _looked_up(figures: Figures, admitted: float) -> str | None:
    """Bound the prefix lookups by one for each admitted request, where prefixes are shared.

    A request that waited for a page computed by another is not counted.
    """
    lookups, shared = figures.raw("cache_after_all_runs.lookups"), figures.raw(SHARING)
    if not isinstance(lookups, dict) or shared is None:
        return None
    found = sum(finite(f"lookups of {name!r}", each) for name, each in lookups.items())
    most, what = (admitted, "the requests of all runs") if shared else (0.0, "none without shared prefixes")
    return exceeds("cache_after_all_runs.lookups, together,", found, what, most, 0)


LAWS = (
    Law("runs", "each rate is tokens / seconds, and the median run is reported", reported, "runs_duration_s"),
    Law("counters of all runs", "counters only grow, and count every run", counters, "counters"),
)
