"""Define the laws of a client: it sent when it says, and it states all that follows from its records."""

from __future__ import annotations

import re
from itertools import pairwise

from benchmark.gate.law import Fields, Figures, Law, NotCheckable, differs, exceeds, first
from benchmark.gate.records import DONE, column, done, value
from benchmark.gate.served import objectives_of

BACKENDS = ("openai", "openai-chat")
CLOSED = re.compile(r"closed, (\d+) clients")
LATENCIES = ("ttft", "tpot", "itl", "e2el")
PARTS = ("mean", "median", "std", "p50", "p90", "p99")  # parts of each latency; a run may ask for more
SENT_S = 5e-6  # tolerance of a sum of three times, each rounded to microseconds
CPU_SHARE = 1e-4  # tolerance of a share with four decimals
COUNTED = 1e-4  # relative tolerance of a rate with four decimals


def of_client(figures: Figures) -> None:
    """Raise NotCheckable unless this project's client wrote the result."""
    if figures.raw("benchmark") != "serve" or figures.raw("client") is None:
        raise NotCheckable("no client of this project wrote it")


def when_due(figures: Figures) -> str | None:
    """Check that a request is sent when due, plus its stated delays, and that all are due at the rate."""
    records = figures.records()
    timed = [record for record in records if record.get("due_s") is not None]
    if not timed:
        raise NotCheckable("due_s is absent: the clients waited for their answers")
    if len(timed) < len(records):
        return f"{len(records) - len(timed)} of {len(records)} records do not say when they were due"
    wrongs: list[str | None] = []
    for record in records:
        late_s = (value(record, "late_ms") + value(record, "held_ms")) / 1e3
        due_s, what = value(record, "due_s"), f"arrival_s of request {record.get('id')}"
        sent = "due_s + late_ms + held_ms, in s,"
        wrongs.append(differs(what, value(record, "arrival_s"), sent, due_s + late_s, SENT_S))
    due_s = column(records, "due_s")
    spread_s, offered = float(due_s.max() - due_s.min()), figures.given("offered_per_s")
    if offered is None and spread_s > SENT_S:
        wrongs.append(f"offered_per_s is null, but the requests were due over {spread_s:g} s")
    if offered is not None and spread_s > 0:
        per_s = (len(records) - 1) / spread_s
        slack = COUNTED + per_s * (COUNTED + 2e-6 / spread_s)
        wrongs.append(differs("offered_per_s", offered, "(requests - 1) / the spread of due_s", per_s, slack))
    return first([wrong for wrong in wrongs if wrong][:3])


def of_itself(figures: Figures) -> str | None:
    """Check what a client states of itself: its share of the processor, its lags, and its mode of sending."""
    of_client(figures)
    wrongs = [_words(figures), _rate(figures)]
    share, cpu_s = figures.given("client.cpu_share"), figures.given("clock.cpu_s")
    if share is not None and cpu_s is not None:
        expected = cpu_s / figures.positive("clock.monotonic_s")
        wrongs.append(
            differs("client.cpu_share", share, "clock.cpu_s / clock.monotonic_s", expected, CPU_SHARE)
        )
    lags = [(part, lag) for part in ("p50", "p99", "max") if (lag := figures.given(f"client.lag_ms.{part}"))]
    for (low, least), (high, most) in pairwise(lags):
        wrongs.append(exceeds(f"client.lag_ms.{low}", least, high, most, 0))
    if lags and (taken_s := figures.given("clock.monotonic_s")) is not None:
        wrongs.append(exceeds("client.lag_ms.max", lags[-1][1], "the run, in ms,", 1e3 * taken_s, 0))
    count = figures.given("client.tokens_counted_by_pieces")
    if count is not None:
        answered = figures.number("completed")
        wrongs.append(differs("client.tokens_counted_by_pieces", count, "a whole number", round(count), 0))
        wrongs.append(exceeds("client.tokens_counted_by_pieces", count, "completed", answered, 0))
    if (limit := figures.given("max_concurrency")) is not None:
        most = figures.number("max_concurrent_requests")
        wrongs.append(exceeds("max_concurrent_requests", most, "max_concurrency", limit, 0))
    return first(wrongs)


def _words(figures: Figures) -> str | None:
    """Check that the words for how requests were sent are among those that exist."""
    wrongs: list[str | None] = []
    if (backend := figures.raw("backend")) is not None and backend not in BACKENDS:
        wrongs.append(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    for name, start in (("endpoint", "/"), ("base_url", ("http://", "https://"))):
        stated = figures.raw(name)
        if stated is not None and not str(stated).startswith(start):
            wrongs.append(f"{name} is {stated!r}, which no request can be sent to")
    loop, most = str(figures.raw("loop")), figures.given("max_concurrent_requests")
    closed = CLOSED.fullmatch(loop)
    if loop != "open" and closed is None:
        wrongs.append(f"loop is {loop!r}; it must be 'open', or 'closed, N clients'")
    if closed is not None and most is not None:
        wrongs.append(exceeds("max_concurrent_requests", most, "the clients of loop", float(closed[1]), 0))
        if any(record.get("due_s") is not None for record in figures.records()):
            wrongs.append(f"loop is {loop!r}, but its records say when they were due")
    return first(wrongs)


def _rate(figures: Figures) -> str | None:
    """Check that the requests of a random process come at its rate, but for chance."""
    asked, offered = figures.raw("request_rate"), figures.given("offered_per_s")
    if asked is None:
        return None
    if asked == "inf":
        return None if offered is None else f"request_rate is inf, but offered_per_s is {offered:g}"
    if isinstance(asked, str):
        return f"request_rate is {asked!r}; it must be a number, 'inf' or null"
    # Five standard deviations of a Poisson process.
    most = 5 / max(1.0, figures.number("requests") - 1) ** 0.5
    rate = figures.positive("request_rate")
    if offered is None:
        return f"request_rate is {rate:g}, but offered_per_s is null"
    return differs("request_rate / offered_per_s", rate / offered, "1, but for chance", 1.0, most)


def pieces(figures: Figures) -> str | None:
    """Check pieces: a server states their tokens for every answer, or each piece has one token."""
    completed = done(figures)
    if not any(record.get("piece_tokens") is not None for record in completed):
        raise NotCheckable("no record says how many tokens a piece has")
    for record in completed:
        times = record.get("piece_times_s") or []
        if record.get("piece_tokens") is None and len(times) > 1:
            many, count = f"pieces of request {record.get('id')}", value(record, "output_tokens")
            if wrong := differs(many, len(times), "its tokens, one in each", count, 0):
                return wrong
        elif any(count < 1 for count in record.get("piece_tokens") or []):
            return f"request {record.get('id')} has a piece without a token"
    return None


def whole(figures: Figures) -> str | None:
    """Require every figure that follows from the records of a run."""
    of_client(figures)
    completed = done(figures)
    absent = [name for name in _due_from(figures, completed) if figures.stated.get(name) is None]
    return first([f"{name} follows from the records, and it is absent" for name in absent])


def _due_from(figures: Figures, completed: list[Fields]) -> list[str]:
    lens = column(completed, "output_tokens")
    gaps = sum(len(record.get("piece_times_s") or []) - 1 for record in completed)
    has = {"ttft": True, "tpot": bool((lens > 1).any()), "itl": gaps > 0, "e2el": True}
    names = [f"{part}_{name}_ms" for name in LATENCIES if has[name] for part in PARTS]
    names += ["itl_gaps", "least_output_tokens", "most_output_tokens"]
    if (objectives := objectives_of(figures)) is not None:
        names += ["request_goodput", "good_share"]
        answered = all(record.get("finish_reason") in DONE for record in figures.records())
        if "ttft" in objectives and {"tpot", "itl"} & {*objectives} and answered:
            names.append("fluidity")
    if any(record.get("cached_tokens") is not None for record in completed):
        names.append("prefix_hit_rate")
    return names


LAWS = (
    Law("sent when due", "arrival = due + late + held, and requests are due at the rate", when_due, "client"),
    Law("client of itself", "its share of the processor, its lags and its words agree", of_itself, "client"),
    Law("tokens of pieces", "every answer says how many tokens a piece has, or none", pieces, "client"),
    Law("whole client", "every figure that follows from the records is given", whole, "client"),
)
