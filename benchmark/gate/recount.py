"""Recompute the metrics of a benchmark result from independent data in the same result.

A reading is one such value. It comes from other metrics, from the requests' records, from the counters of an
engine or a server before and after the run, or from the device's profile. It raises NotCheckable where these
data are absent, or count something other than the metric does. The first line of a reading's docstring is
quoted in the message when the gate refuses a metric. Some tolerances that depend on the result are computed
here too; which metric is compared with which reading is declared in `table`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from benchmark.gate.law import reading
from benchmark.gate.result import Array, Fields, Figures, NotCheckable, ends_of, of_each, times_of, value_of
from devices.rates import load

AT_ONCE_S = 0.001  # a spread of arrivals of which rounding to microseconds is no small part

# Other figures.


@reading
def figure(figures: Figures, name: str) -> float:
    """Return {0}."""
    return figures.number(name)


@reading
def product(figures: Figures, *names: str) -> float:
    """Return the product of {all}."""
    return math.prod(map(figures.number, names))


@reading
def per_s(figures: Figures, *names: str) -> float:
    """Return {all} over duration_s."""
    if not (duration_s := figures.number("duration_s")):
        raise NotCheckable("duration_s was rounded to 0")
    return sum(map(figures.number, names)) / duration_s


@reading
def total(figures: Figures, *names: str) -> float:
    """Return the sum of {all}."""
    return sum(map(figures.number, names))


@reading
def median_run(figures: Figures) -> float:
    """Return the median of the runs."""
    runs = figures.numbers("runs_output_tokens_per_s")
    return float(np.sort(runs)[len(runs) // 2])


@reading
def claimed(figures: Figures) -> float:
    """Return what its factors make."""
    made = math.prod(figures.numbers("claim.factors")) / math.prod(figures.numbers("claim.divisors"))
    return made + (figures.given("claim.plus") or 0.0)


# The seconds of batches that were served one after the other.


@reading
def of_batches(figures: Figures, says: str, of: Callable[[Array], float]) -> float:
    """Return the {0} of the batches."""
    return float(of(figures.numbers("latencies")))


@reading
def of_all_batches(figures: Figures, name: str) -> float:
    """Return {0} of all batches."""
    return len(figures.numbers("latencies")) * figures.number(name)


@reading
def batch_per_gap_ms(figures: Figures) -> float:
    """Return avg_latency / (output_len - 1), in ms."""
    if (gaps := figures.number("output_len") - 1) < 1:
        raise NotCheckable("answers of one token have no gap")
    return 1e3 * figures.number("avg_latency") / gaps


# Laws of nature.


@reading
def x_times_w(figures: Figures) -> float:
    """Return X W = requests_per_s x e2e_ms.mean."""
    return figures.number("requests_per_s") * figures.number("e2e_ms.mean") / 1e3


def unseen(figures: Figures) -> float:
    """Return one step for each request: one that comes during a step is seen at the step's end."""
    steps = figures.given("steps")
    return (figures.given("completed") or 0.0) / steps if steps else 0.0


def chance(figures: Figures) -> float:
    """Return three standard deviations of the rate at which random requests arrive."""
    count = figures.given("completed")
    return figures.number("offered_per_s") * (3 / math.sqrt(count) if count and count > 0 else 0.05)


def num_gaps(figures: Figures) -> float:
    """Return the number of gaps that the ITL averages: as given, or one before each token after the first."""
    stated = figures.given("itl_gaps")
    if stated is not None:
        return stated
    return max(0.0, figures.number("output_tokens") - figures.number("completed"))


@reading
def gap_ms(figures: Figures) -> float:
    """Return (E2E - TTFT) x completed / gaps."""
    if not (count := num_gaps(figures)):
        raise NotCheckable("no answer has a gap")
    spent_ms = figures.number("e2e_ms.mean") - figures.number("ttft_ms.mean")
    return spent_ms * figures.number("completed") / count


@reading
def decoding(figures: Figures) -> float:
    """Return X x TPOT x gaps of those that decode.

    It is exact from the mean gap and the number of gaps; otherwise each of X requests has at least
    `least_output_tokens` tokens.
    """
    if figures.number("preemptions"):
        raise NotCheckable("preempted requests wait between their tokens, and are in no slot")
    gap, duration_s = figures.given("itl_ms.mean"), figures.given("duration_s")
    if gap is not None and duration_s and None not in map(figures.given, ("output_tokens", "completed")):
        return gap / 1e3 * num_gaps(figures) / duration_s
    gaps = figures.number("least_output_tokens") - 1
    return figures.number("requests_per_s") * figures.number("tpot_ms.mean") / 1e3 * gaps


@reading
def floor_ms(figures: Figures) -> float:
    """Return the milliseconds in which memory gives all weights and a request's keys and values.

    A request of one token has no TPOT, so its prompt is not among those read.
    """
    name = figures.raw("device_profile")
    if name is None:
        raise NotCheckable("device_profile is absent")
    profile = load(str(name))
    read = figures.positive("weight_bytes_per_step")
    prompt, completed = figures.given("prompt_tokens"), figures.given("completed")
    some_of_one = (figures.given("least_output_tokens") or 2) < 2
    if prompt and completed and not some_of_one and (per_token := figures.given("kv_bytes_per_token")):
        read += per_token * prompt / completed
    figures.used["memory_gb_per_s"] = profile.memory_gb_per_s
    return profile.read_ms(read, figures.positive("num_devices")) / figures.positive("max_tokens_per_step")


@reading
def memory_gib(figures: Figures) -> float:
    """Return the GiB of weights and pages."""
    pages = figures.number("page_bytes") * figures.number("num_pages")
    return (figures.number("weight_bytes_per_step") + pages) / 2**30


# The requests' records.


@reading
def num_records(figures: Figures) -> float:
    """Return the number of records."""
    return len(figures.records)


@reading
def num_ids(figures: Figures) -> float:
    """Return the number of requests that have a record."""
    return len({str(record.get("id")) for record in figures.records})


@reading
def num_ended(figures: Figures, *reasons: str) -> float:
    """Return the number of records that ended by {all}."""
    return sum(record.get("finish_reason") in reasons for record in figures.records)


@reading
def of_answers(figures: Figures, name: str, says: str, of: Callable[[Array], float]) -> float:
    """Return the records' {1}."""
    return float(of(of_each(figures.completed, name)))


@reading
def latency_ms(figures: Figures, name: str, part: str, percent: float | None) -> float:
    """Return the records'."""
    found_ms = figures.latencies_ms.get(name)
    if found_ms is None or not len(found_ms):
        raise NotCheckable(f"the records have no {name}")
    if percent is not None:
        return float(np.percentile(found_ms, percent))
    return float(found_ms.mean() if part == "mean" else found_ms.std())


@reading
def recorded_gaps(figures: Figures) -> float:
    """Return the number of gaps between the records' tokens."""
    if "itl_ms" not in figures.latencies_ms:
        raise NotCheckable("the times of some tokens are not given")
    return len(figures.latencies_ms["itl_ms"])


@reading
def taken_s(figures: Figures, are_all_needed: bool) -> float:
    """Return the time from the first arrival to the last end."""
    ends_s = ends_of(figures.records)
    if not ends_s or (are_all_needed and len(ends_s) != len(figures.records)):
        raise NotCheckable("some requests have no end, and the run may have gone on for them")
    return max(ends_s) - float(of_each(figures.records, "arrival_s").min())


@reading
def mean_number(figures: Figures, are_all_answered: bool) -> float:
    """Return the sum of W over duration_s."""
    records, ends_s = figures.records, ends_of(figures.records)
    if len(ends_s) != len(records) or (are_all_answered and len(figures.completed) != len(records)):
        raise NotCheckable("some requests have no end, and were in the system too")
    return (sum(ends_s) - float(of_each(records, "arrival_s").sum())) / figures.positive("duration_s")


@reading
def arrivals_per_s(figures: Figures) -> float:
    """Return (requests - 1) / the spread of when they were due.

    An engine in the same process has each request when it is due; a client's record says when that was.
    """
    is_due = all(each.get("due_s") is not None for each in figures.records)
    times_s = of_each(figures.records, "due_s" if is_due else "arrival_s")
    count = len(times_s)
    if count != figures.number("requests") or count < 2 or np.ptp(times_s) < AT_ONCE_S:
        raise NotCheckable("the arrivals of all requests are not given, or came at once")
    return (count - 1) / float(np.ptp(times_s))


@reading
def in_slots(figures: Figures) -> float:
    """Return the most requests between first and last token, less those preempted."""
    preempted = figures.number("preemptions")  # each takes a request out of its slot between two tokens
    begin_s, end_s = of_each(figures.completed, "first_token_s"), of_each(figures.completed, "finish_s")
    kept = end_s > begin_s
    times_s, change = np.concatenate([end_s[kept], begin_s[kept]]), np.repeat([-1, 1], kept.sum())
    together = np.cumsum(change[np.lexsort((change, times_s))])  # ends precede starts of the same moment
    return float(together.max(initial=0)) - preempted


@reading
def good_per_s(figures: Figures) -> float:
    """Return the rate of the records that meet the objectives."""
    stated = figures.raw("goodput")
    if not isinstance(stated, dict):
        raise NotCheckable("goodput is absent")
    known = ("ttft", "tpot", "itl", "e2el")
    if unknown := [name for name in stated if name not in known]:
        raise ValueError(f"goodput.{unknown[0]} is no objective; there are {', '.join(known)}")
    objectives = {name: figures.number(f"goodput.{name}") for name in stated}
    return sum(_meets(record, objectives) for record in figures.completed) / figures.positive("duration_s")


def _meets(record: Fields, objectives: dict[str, float]) -> bool:
    sent_s, first_s, last_s = (value_of(record, each) for each in ("arrival_s", "first_token_s", "finish_s"))
    tokens, pieces_s = value_of(record, "output_tokens"), times_of(record) or []
    if "itl" in objectives and tokens > 1 and not pieces_s:
        raise NotCheckable("piece_times_s is absent, and an objective bounds every gap")
    spent_s = {"ttft": first_s - sent_s, "e2el": last_s - sent_s}
    spent_s["tpot"] = (last_s - first_s) / max(1.0, tokens - 1)
    spent_s["itl"] = float(np.diff(pieces_s).max(initial=0.0))
    return all(1e3 * spent_s[name] <= most for name, most in objectives.items())


def good_slack(figures: Figures) -> float:
    """Return the rate of requests that may meet an objective by rounding: one, and 1 % of all."""
    return (0.01 * figures.number("requests") + 1) / figures.positive("duration_s")


# Counters.


def plain(figures: Figures) -> None:
    """Raise NotCheckable unless each request is one sequence, all of whose tokens came in an engine's steps.

    Otherwise the engine has counted more than the figures cover.
    """
    figures.number("mean_in_system")
    if any(record.get("token_times_s") is None for record in figures.records):
        raise NotCheckable("the times of some tokens are not given")


@reading
def growth(figures: Figures, name: str) -> float:
    """Return the growth of the counter {0}."""
    plain(figures)
    return figures.number(f"counters.after.{name}") - figures.number(f"counters.before.{name}")


@reading
def hit_share(figures: Figures) -> float:
    """Return the growth of hit_tokens / prompt_tokens."""
    return growth("hit_tokens")(figures) / max(1.0, growth("prompt_tokens")(figures))


@reading
def idle_pages(figures: Figures) -> float:
    """Return the pages that are not free."""
    return figures.number("num_pages") - figures.number("cache_after_all_runs.free_pages")


@reading
def server_growth(figures: Figures, name: str) -> float:
    """Return the growth of the server's {0}."""
    return figures.number(f"metrics.after.{name}") - figures.number(f"metrics.before.{name}")


@reading
def own_growth(figures: Figures, name: str) -> float:
    """Return the growth of the server's {0}."""
    if server_growth("requests")(figures) != figures.number("completed") or figures.number("failed"):
        raise NotCheckable("the server answered other requests, too")
    return server_growth(name)(figures)


@reading
def own_mean_ms(figures: Figures, name: str) -> float:
    """Return the server's own mean of {0} in ms."""
    if (count := own_growth(f"{name}_count")(figures)) <= 0:
        raise NotCheckable(f"the server's {name}_count did not grow")
    return 1e3 * own_growth(f"{name}_s")(figures) / count
