"""Recompute figures of a result from its records, its counters or its device's profile.

Each function raises NotCheckable where these are absent, or count something other than the figure does. Which
figure is compared with which function, or with a formula of other figures, is declared in `table`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmark.gate.law import Value
from benchmark.gate.result import Array, Fields, Figures, NotCheckable, ends_of, number_of, of_each, times_of
from devices.rates import load

AT_ONCE_S = 0.001  # a spread of arrivals of which rounding to microseconds is no small part


def median_run(figures: Figures) -> float:
    """Return the median rate of the counted runs, of an even number the better one."""
    return float(np.quantile(figures.numbers("runs_output_tokens_per_s"), 0.5, method="higher"))


def claimed(figures: Figures) -> float:
    """Return what the factors of a claim make."""
    made = math.prod(figures.numbers("claim.factors")) / math.prod(figures.numbers("claim.divisors"))
    return made + (figures.given("claim.plus") or 0.0)


def chance(figures: Figures) -> float:
    """Return three standard deviations of the rate at which random requests arrive."""
    count = figures.given("completed")
    return figures.number("offered_per_s") * (3 / math.sqrt(count) if count and count > 0 else 0.05)


def unseen(figures: Figures) -> float:
    """Return one step for each request: one that comes during a step is seen at the step's end."""
    steps = figures.given("steps")
    return (figures.given("completed") or 0.0) / steps if steps else 0.0


def unpreempted(figures: Figures) -> None:
    """Raise NotCheckable for preempted requests, which wait between their tokens, and are in no slot."""
    if figures.number("preemptions"):
        raise NotCheckable("preempted requests wait between their tokens")


def floor_ms(figures: Figures) -> float:
    """Return the milliseconds in which memory gives all weights and a request's keys and values.

    A request of one token has no TPOT, so its prompt is not among those read.
    """
    profile = load(str(figures.needed("device_profile")))
    read = figures.positive("weight_bytes_per_step")
    prompt, completed = figures.given("prompt_tokens"), figures.given("completed")
    some_of_one = (figures.given("least_output_tokens") or 2) < 2
    if prompt and completed and not some_of_one and (per_token := figures.given("kv_bytes_per_token")):
        read += per_token * prompt / completed
    step_ms = profile.read_ms(read, figures.positive("num_devices"))
    return step_ms / figures.positive("max_tokens_per_step")


# The requests' records.


def num_ended(*reasons: str) -> Value:
    """Return a function that counts the records that ended so."""
    return lambda figures: sum(record.get("finish_reason") in reasons for record in figures.records)


def over_completed(name: str, of: Callable[[Array], Any]) -> Value:
    """Return a function that finds what a number of the completed requests' records comes to."""
    return lambda figures: float(of(of_each(figures.completed, name)))


def latency_ms(name: str, part: str, percent: float | None) -> Value:
    """Return a function that finds the mean, the deviation or a percentile of a latency."""

    def found_ms(figures: Figures) -> float:
        values_ms = figures.latencies_ms.get(name)
        if values_ms is None or not len(values_ms):
            raise NotCheckable(f"the records have no {name}")
        if percent is not None:
            return float(np.percentile(values_ms, percent))
        return float(values_ms.mean() if part == "mean" else values_ms.std())

    return found_ms


def num_gaps(figures: Figures) -> float:
    """Return the number of gaps between tokens."""
    if "itl_ms" not in figures.latencies_ms:
        raise NotCheckable("the times of some tokens are not given")
    return len(figures.latencies_ms["itl_ms"])


def least_s(figures: Figures) -> float:
    """Return the time from the first arrival to the last end that is known."""
    if not (ends_s := ends_of(figures.records)):
        raise NotCheckable("no request has an end")
    return max(ends_s) - float(of_each(figures.records, "arrival_s").min())


def most_s(figures: Figures) -> float:
    """Return the time from the first arrival to the last end, where all are known."""
    _all_ends(figures)
    return least_s(figures)


def num_in_flight(figures: Figures) -> float:
    """Return the mean number of requests that had been sent and had not ended."""
    present_s = sum(_all_ends(figures)) - float(of_each(figures.records, "arrival_s").sum())
    return present_s / figures.positive("duration_s")


def _all_ends(figures: Figures) -> list[float]:
    ends_s = ends_of(figures.records)
    if len(ends_s) != len(figures.records):
        raise NotCheckable("some requests have no end, and the run may have gone on for them")
    return ends_s


def arrivals_per_s(figures: Figures) -> float:
    """Return the rate of arrivals by the spread of when they were due.

    An engine in the same process has each request when it is due; a client's record says when that was.
    """
    is_due = all(each.get("due_s") is not None for each in figures.records)
    times_s = of_each(figures.records, "due_s" if is_due else "arrival_s")
    count = len(times_s)
    if count != figures.number("requests") or count < 2 or np.ptp(times_s) < AT_ONCE_S:
        raise NotCheckable("the arrivals of all requests are not given, or came at once")
    return (count - 1) / float(np.ptp(times_s))


def most_in_slots(figures: Figures) -> float:
    """Return the most requests at once between first and last token, less those preempted."""
    preempted = figures.number("preemptions")  # each takes a request out of its slot between two tokens
    begin_s, end_s = of_each(figures.completed, "first_token_s"), of_each(figures.completed, "finish_s")
    kept = end_s > begin_s
    times_s, change = np.concatenate([end_s[kept], begin_s[kept]]), np.repeat([-1, 1], kept.sum())
    together = np.cumsum(change[np.lexsort((change, times_s))])  # ends precede starts of the same moment
    return float(together.max(initial=0)) - preempted


def good_per_s(figures: Figures) -> float:
    """Return the rate of the records that meet the objectives."""
    return _num_good(figures) / figures.positive("duration_s")


def good_share(figures: Figures) -> float:
    """Return the share of the records that meet the objectives."""
    return _num_good(figures) / len(figures.records)


def _num_good(figures: Figures) -> int:
    stated = figures.raw("goodput")
    if not isinstance(stated, dict):
        raise NotCheckable("goodput is absent")
    known = ("ttft", "tpot", "itl", "e2el")
    if unknown := [name for name in stated if name not in known]:
        raise ValueError(f"goodput.{unknown[0]} is no objective; there are {', '.join(known)}")
    objectives = {name: figures.number(f"goodput.{name}") for name in stated}
    return sum(meets(record, objectives) for record in figures.completed)


def meets(record: Fields, objectives: Mapping[str, float]) -> bool:
    """Return whether a completed request's latencies are within their milliseconds, `itl` every gap.

    A request that was due waits from then on, also where the client's limit of concurrency held it.
    """
    begin = "arrival_s" if record.get("due_s") is None else "due_s"
    begin_s, first_s, last_s = (number_of(record, each) for each in (begin, "first_token_s", "finish_s"))
    tokens, pieces_s = number_of(record, "output_tokens"), times_of(record) or []
    if "itl" in objectives and tokens > 1 and not pieces_s:
        raise NotCheckable("piece_times_s is absent, and an objective bounds every gap")
    spent_s = {"ttft": first_s - begin_s, "e2el": last_s - begin_s}
    spent_s["tpot"] = (last_s - first_s) / max(1.0, tokens - 1)
    spent_s["itl"] = float(np.diff(pieces_s).max(initial=0.0))
    return all(1e3 * spent_s[name] <= most for name, most in objectives.items())


# Counters.


def counted_apart(figures: Figures) -> None:
    """Raise NotCheckable unless each request is one sequence, all of whose tokens came in an engine's steps.

    Otherwise the engine has counted more than the figures cover.
    """
    figures.number("mean_in_system")
    if any(record.get("token_times_s") is None for record in figures.records):
        raise NotCheckable("the times of some tokens are not given")


def answered_alone(figures: Figures) -> None:
    """Raise NotCheckable if the server's counters have grown by other requests, too."""
    grown = figures.number("metrics.after.requests") - figures.number("metrics.before.requests")
    if grown != figures.number("completed") or figures.number("failed"):
        raise NotCheckable("the server answered other requests, too")


def computed_ahead(figures: Figures) -> float:
    """Return the drafts, which are computed even if refused, and with overlap one token an answer.

    Where an answer stopped, the next step may have begun with it.
    """
    drafts = [figures.given(f"counters.{when}.draft_tokens") or 0.0 for when in ("before", "after")]
    begun = figures.number("completed") if figures.raw("settings.scheduler.overlap") else 0.0
    return begun + drafts[1] - drafts[0]
