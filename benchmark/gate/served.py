"""Define the laws of figures that a client measured at a server.

The client's own lateness is in `client`; the objectives, in milliseconds, are in `goodput`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmark.gate.law import Figures, Law, NotCheckable, differs, exceeds, finite, first
from benchmark.gate.records import column, done, ends_of, times_of, value
from benchmark.gate.summary import SLACK

OBJECTIVES = ("ttft", "tpot", "itl", "e2el")
LATE_MS = 10.0  # lateness allowed to an event loop on a busy machine, beside a tenth of the mean TTFT
TOO_BUSY = (
    "the client's machine was too busy to measure this server: run again with nothing else on it, "
    "from another machine than the server's, or at a lower rate"
)
GOOD_SLACK = 0.01  # share of all requests, or tokens, that may meet an objective by rounding


def on_time(figures: Figures) -> str | None:
    """Check that the client was on time.

    A load generator that lags sends less than it says, and counts its own lateness as the server's.
    """
    slack = LATE_MS + 0.1 * (figures.given("ttft_ms.mean") or 0.0)
    lag, late = figures.given("client.lag_ms.p99"), figures.given("client.late_ms.p99")
    if lag is None and late is None:
        raise NotCheckable("client.lag_ms and client.late_ms are absent")
    timed = figures.given("offered_per_s") is not None  # closed loops send whenever they can
    bound = "a tenth of ttft_ms.mean and 10 ms"
    wrong = first(
        [
            None if lag is None else exceeds("client.lag_ms.p99", lag, bound, slack, 0),
            None if late is None or not timed else exceeds("client.late_ms.p99", late, bound, slack, 0),
        ]
    )
    return wrong and f"{wrong}; {TOO_BUSY}"


def errors(figures: Figures) -> str | None:
    """Check that each failure has its error: a count for each text, or a text for each request."""
    stated, failed = figures.raw("errors"), figures.number("failed")
    if isinstance(stated, dict):
        count = sum(finite(f"errors of {name!r}", each) for name, each in stated.items())
    elif isinstance(stated, list):
        count = sum(bool(each) for each in stated)
    else:
        raise ValueError(f"errors is {stated!r}; it must be an object of counts, or a list of texts")
    rejected = figures.given("rejected") or 0.0
    return first(
        [
            differs("the errors", count, "failed", failed, 0),
            exceeds("rejected", rejected, "failed", failed, 0),
        ]
    )


def counters(figures: Figures) -> str | None:
    """Check that a server's counters hold whole numbers, except for seconds, and only grow."""
    before, after = (figures.raw(f"metrics.{when}") for when in ("before", "after"))
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        raise NotCheckable("metrics.before and metrics.after are absent")
    wrongs: list[str | None] = []
    for name in before.keys() & after.keys():
        was, came_to = f"metrics.before.{name}", f"metrics.after.{name}"
        counted = {was: finite(was, before[name]), came_to: finite(came_to, after[name])}
        if not name.endswith("_s"):
            wrongs += [
                differs(what, each, "a whole number", round(each), 0) for what, each in counted.items()
            ]
        wrongs.append(exceeds(was, counted[was], came_to, counted[came_to], 0))
    return first(wrongs)


def in_flight(figures: Figures) -> str | None:
    """Check the mean number in flight by Little's law over all requests sent, failed ones included."""
    records, stated = figures.records(), figures.number("mean_in_flight")
    ends_s = ends_of(records)
    if len(ends_s) != len(records):
        raise NotCheckable("some requests have no end")
    expected = (sum(ends_s) - float(column(records, "arrival_s").sum())) / figures.positive("duration_s")
    return differs("mean_in_flight", stated, "the sum of W / duration", expected, SLACK * expected + 0.001)


def goodput(figures: Figures) -> str | None:
    """Check that good requests are among the answered, and are those whose records meet the objectives."""
    good, served = figures.number("request_goodput"), figures.number("requests_per_s")
    wrong = exceeds("request_goodput", good, "requests_per_s", served, 0.001 * served)
    if (share := figures.given("good_share")) is not None:
        stated, all_of_them = good * figures.number("duration_s"), figures.number("requests")
        slack, other = GOOD_SLACK * all_of_them, "request_goodput x duration"
        wrong = first([wrong, differs("good_share x requests", share * all_of_them, other, stated, slack)])
    objectives = objectives_of(figures)
    if objectives is None or figures.raw("records") is None:
        return wrong
    count = 0
    for record in done(figures):
        sent_s, last_s = value(record, "arrival_s"), value(record, "finish_s")
        begun_s, tokens = value(record, "first_token_s"), value(record, "output_tokens")
        spent_ms = {"ttft": begun_s - sent_s, "e2el": last_s - sent_s}
        spent_ms["tpot"] = (last_s - begun_s) / max(1.0, tokens - 1)
        pieces = times_of(record) or []
        if "itl" in objectives and tokens > 1 and not pieces:
            raise NotCheckable("piece_times_s is absent, and an objective bounds every gap")
        spent_ms["itl"] = float(np.diff(pieces).max()) if len(pieces) > 1 else 0.0
        count += all(1e3 * spent_ms[name] <= most for name, most in objectives.items())
    stated = good * figures.number("duration_s")
    slack = GOOD_SLACK * figures.number("requests") + 1
    other = "the records that meet the objectives"
    return first([wrong, differs("request_goodput x duration", stated, other, count, slack)])


def objectives_of(figures: Figures) -> dict[str, float] | None:
    """Return the objectives in milliseconds, by name; None where there are none."""
    stated = figures.raw("goodput")
    if not isinstance(stated, dict):
        return None
    if unknown := [name for name in stated if name not in OBJECTIVES]:
        raise ValueError(f"goodput.{unknown[0]} is no objective; there are {', '.join(OBJECTIVES)}")
    return {name: figures.number(f"goodput.{name}") for name in stated}


def fluidity(figures: Figures) -> str | None:
    """Check the share of all requested tokens that met their deadlines.

    A token's deadline is `ttft` of the objectives plus `tpot` (or `itl`) for each token before it. Failed
    requests met none.
    """
    stated = figures.number("fluidity")
    wrong = exceeds("fluidity", stated, "the whole", 1.0, 0)
    objectives = objectives_of(figures)
    if objectives is None or figures.raw("records") is None:
        return wrong
    between_ms = objectives.get("tpot", objectives.get("itl"))
    if "ttft" not in objectives or between_ms is None:
        return first([wrong, "fluidity is given, but its objectives are not"])
    good = total = 0.0
    for record in figures.records():
        if record.get("finish_reason") not in ("stop", "length"):
            total += value(record, "max_tokens")
            continue
        tokens, pieces_s = int(value(record, "output_tokens")), times_of(record) or []
        if not pieces_s:
            raise NotCheckable(f"piece_times_s of request {record.get('id')} is absent")
        in_piece = list(record.get("piece_tokens") or [1] * len(pieces_s))
        in_piece[-1] += tokens - sum(in_piece)  # tokens that no piece counts came last
        if len(in_piece) != len(pieces_s) or min(in_piece) < 0:
            raise NotCheckable(f"the pieces of request {record.get('id')} do not hold its tokens")
        spent_ms = 1e3 * (np.repeat(pieces_s, in_piece) - value(record, "arrival_s"))
        good += float((spent_ms <= objectives["ttft"] + between_ms * np.arange(tokens)).sum())
        total += tokens
    if not total:
        raise NotCheckable("no record asks for a token")
    return first([wrong, differs("fluidity", stated, "the records'", good / total, GOOD_SLACK)])


LAWS = (
    Law("errors", "each failure has its error", errors, "errors"),
    Law("server's counters", "a server counts whole things, and only upwards", counters, "metrics"),
    Law(
        "in flight", "N = the sum of W over the duration, of all that were sent", in_flight, "mean_in_flight"
    ),
    Law("client on time", "it was late, p99, by at most 10 ms + TTFT / 10", on_time, "client"),
    Law("goodput", "good requests are answered ones that meet the objectives", goodput, "request_goodput"),
    Law("fluidity", "the share of tokens in time is that of the records", fluidity, "fluidity"),
)
