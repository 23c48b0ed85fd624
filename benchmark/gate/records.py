"""Define the laws that compare a result's figures with the requests' own records.

A record has `id`, `arrival_s`, `first_token_s`, `finish_s`, `prompt_tokens`, `max_tokens`, `output_tokens`,
`finish_reason` and perhaps `token_times_s`; where a client saw tokens in pieces, it has `piece_times_s` and,
if the client knows how many tokens are in each, `piece_tokens`. Answers that ended by "stop" or "length" are
completed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmark.gate.law import Fields, Figures, Law, NotCheckable, differs, exceeds, finite, first
from benchmark.gate.summary import LITTLE_SLACK, SLACK

DONE = ("stop", "length")
NEEDED = ("arrival_s", "first_token_s", "finish_s", "output_tokens")  # fields of each completed record
SHOWN = 3  # number of requests that a message names
PARTS = {"p50": 50, "p90": 90, "p95": 95, "p99": 99, "min": 0, "max": 100}
RECOUNT_SLACK_MS = 0.02  # tolerance of times given in microseconds
EXACT = 5e-4  # relative tolerance of figures computed from the records' own times
SAME_S = 5e-6  # tolerance between two entries of one time, in microseconds


def value(record: Fields, name: str) -> float:
    """Return a number of a record; raises NotCheckable if it is absent, ValueError if it is no number."""
    found = record.get(name)
    if found is None:
        raise NotCheckable(f"{name} of request {record.get('id')} is absent")
    return finite(f"{name} of request {record.get('id')}", found)


def done(figures: Figures) -> list[Fields]:
    """Return the records of completed requests; raises NotCheckable if there are none."""
    found = [each for each in figures.records() if each.get("finish_reason") in DONE]
    if not found:
        raise NotCheckable("no record is of a completed request")
    figures.used["completed records"] = len(found)
    return found


def column(records: list[Fields], name: str) -> NDArray[np.float64]:
    """Return one number of each record."""
    return np.array([value(record, name) for record in records])


def times_of(record: Fields) -> list[float] | None:
    """Return the times of a record's tokens, or of its pieces; None if they were not kept."""
    kept = record.get("token_times_s", record.get("piece_times_s"))
    if kept is None:
        return None
    name = f"a time of request {record.get('id')}"
    if not isinstance(kept, list):
        raise ValueError(f"{name}: {kept!r} is given where a list of times must be")
    return [finite(name, each) for each in kept]


def ends_of(records: list[Fields]) -> list[float]:
    """Return when requests ended, answered or not, for the records that say so."""
    names = [(each, "finish_s" if each.get("finish_reason") in DONE else "end_s") for each in records]
    return [value(each, name) for each, name in names if each.get(name) is not None]


def _named(wrongs: list[str]) -> str | None:
    shown = "; ".join(wrongs[:SHOWN])
    return f"{shown}; and {len(wrongs) - SHOWN} more" if len(wrongs) > SHOWN else shown or None


def whole(figures: Figures) -> str | None:
    """Require all times of completed records, without which they cannot be recounted."""
    completed = done(figures)
    wrongs = [
        f"{name} of request {record.get('id')} is absent"
        for record in completed
        for name in NEEDED
        if record.get(name) is None
    ]
    without = [record for record in completed if times_of(record) is None]
    if 0 < len(without) < len(completed):
        wrongs += [f"the times of request {record.get('id')}'s tokens are absent" for record in without]
    return _named(wrongs)


def clock(figures: Figures) -> str | None:
    """Check that arrival, first token and end are in order, and that tokens lie between first and end."""
    wrongs, measured_from_s = [], figures.given("measured_from_s")
    for record in done(figures):
        times_s = [value(record, name) for name in ("arrival_s", "first_token_s", "finish_s")]
        tokens_s = times_of(record) or []
        if times_s != sorted(times_s) or tokens_s != sorted(tokens_s):
            wrongs.append(f"request {record.get('id')} goes back in time: {times_s}")
        elif tokens_s and max(abs(tokens_s[0] - times_s[1]), abs(tokens_s[-1] - times_s[2])) > SAME_S:
            ends_s = f"{tokens_s[0]:g} and {tokens_s[-1]:g} s"
            wrongs.append(f"request {record.get('id')} has tokens between {ends_s}, but gives {times_s[1:]}")
        if record.get("end_s") is not None and value(record, "end_s") < times_s[2] - SAME_S:
            wrongs.append(f"request {record.get('id')} has tokens after its connection ended")
        if measured_from_s is not None and times_s[0] < measured_from_s:
            wrongs.append(
                f"request {record.get('id')} came at {times_s[0]:g} s, in the warm-up, and is counted"
            )
    return _named(wrongs)


def tokens(figures: Figures) -> str | None:
    """Check that answers have the tokens asked for, or stopped earlier, and that their numbers add up."""
    completed = done(figures)
    wrongs = []
    for record in completed:
        given, most = value(record, "output_tokens"), value(record, "max_tokens")
        exact = record["finish_reason"] == "length"
        times = record.get("token_times_s")
        if not 1 <= given <= most or (exact and given != most) or value(record, "prompt_tokens") < 1:
            asked = f"{most:g} asked for, ended by {record['finish_reason']}"
            wrongs.append(f"request {record.get('id')} has {given:g} tokens, {asked}")
        elif times is not None and len(times) != given:
            wrongs.append(f"request {record.get('id')} has {given:g} tokens at {len(times)} times")
        elif (pieces := record.get("piece_tokens")) is not None and (
            sum(pieces) != given or len(pieces) != len(record.get("piece_times_s") or [])
        ):
            wrongs.append(f"request {record.get('id')} has {given:g} tokens, and {sum(pieces):g} in pieces")
    for name in ("prompt_tokens", "output_tokens"):
        stated, count = figures.given(name), float(column(completed, name).sum())
        if stated is not None and (wrong := differs(name, stated, "their sum over the records", count, 0)):
            wrongs.append(wrong)
    return _named(wrongs)


def every_request(figures: Figures) -> str | None:
    """Require one record for each request, and none twice."""
    records = figures.records()
    ids = [str(record.get("id")) for record in records]
    wrong = None if len(set(ids)) == len(ids) else f"{len(ids) - len(set(ids))} ids stand more than once"
    stated, completed = figures.given("completed"), sum(each.get("finish_reason") in DONE for each in records)
    ended, reasons = figures.raw("ended_by"), 0.0
    if isinstance(ended, dict):
        reasons = sum(finite(f"ended_by.{name}", each) for name, each in ended.items())
    return first(
        [
            wrong,
            differs("requests", figures.number("requests"), "the number of records", len(ids), 0),
            None
            if not isinstance(ended, dict)
            else differs("ended_by, together,", reasons, "the records that ended", completed, 0),
            None
            if stated is None
            else differs("completed", stated, "their number in the records", completed, 0),
        ]
    )


def latencies_of(completed: list[Fields]) -> dict[str, NDArray[np.float64]]:
    """Return latencies in seconds, by name; gaps only if the times of all tokens, or pieces, are known."""
    arrival_s, begin_s, end_s = (column(completed, name) for name in NEEDED[:3])
    num_gaps = column(completed, "output_tokens") - 1
    longer = num_gaps > 0
    of_one = (end_s - begin_s)[longer] / num_gaps[longer]
    found = {"ttft_ms": begin_s - arrival_s, "e2e_ms": end_s - arrival_s, "tpot_ms": of_one}
    times = [times_of(record) for record in completed]
    if all(each is not None for each in times):
        found["itl_ms"] = np.concatenate([np.diff(each) for each in times if each] or [np.empty(0)])
    return found


def recount_slack(figures: Figures) -> float:
    """Return the relative tolerance of a latency beside the records; simulated ones come from a sketch."""
    return SLACK if figures.raw("SIMULATED") is not None else EXACT


def recount(figures: Figures) -> str | None:
    """Recompute duration and latencies from the records."""
    latencies, wrongs = latencies_of(done(figures)), []
    if "itl_ms" in latencies and (stated := figures.given("itl_gaps")) is not None:
        wrongs.append(differs("itl_gaps", stated, "the records'", len(latencies["itl_ms"]), 0))
    if (stated := figures.given("duration_s")) is not None:
        records = figures.records()
        ends_s, came_s = ends_of(records), column(records, "arrival_s")
        taken_s, what = max(ends_s) - float(came_s.min()), "from first arrival to last end"
        slack = recount_slack(figures) * taken_s + 0.0001
        if len(ends_s) == len(records):
            wrongs.append(differs("duration_s", stated, what, taken_s, slack))
        else:  # the run may have gone on for requests whose end is not given
            wrongs.append(exceeds(what, taken_s, "duration_s", stated, slack))
    for name, found_s in latencies.items():
        for part in ("mean", *PARTS) if len(found_s) else ():
            stated = figures.given(f"{name}.{part}")
            found = 1e3 * float(found_s.mean() if part == "mean" else np.percentile(found_s, PARTS[part]))
            if stated is not None:
                slack = recount_slack(figures) * found + RECOUNT_SLACK_MS
                wrongs.append(differs(f"{name}.{part}", stated, "the records'", found, slack))
    return first(wrongs)


def at_once(figures: Figures) -> str | None:
    """Check that requests between their first and last token never outnumber the slots."""
    most, completed = figures.number("slots"), done(figures)
    most += figures.number("preemptions")  # a preemption takes a request out of its slot between two tokens
    begin_s, end_s = column(completed, "first_token_s"), column(completed, "finish_s")
    kept = end_s > begin_s
    times = np.concatenate([end_s[kept], begin_s[kept]])
    change = np.concatenate([np.full(kept.sum(), -1), np.full(kept.sum(), 1)])
    together = int(np.cumsum(change[np.lexsort((change, times))]).max(initial=0))  # ends come first
    return exceeds("the most requests at once", together, "slots + preemptions", most, 0)


def in_system(figures: Figures) -> str | None:
    """Check the mean number in the system by Little's law, from the records' own times."""
    completed = done(figures)
    if len(completed) != len(figures.records()):
        raise NotCheckable("some requests have no end, and were in the system too")
    waited_s = column(completed, "finish_s") - column(completed, "arrival_s")
    expected = float(waited_s.sum()) / figures.positive("duration_s")
    steps, held = figures.given("steps"), figures.number("mean_in_system")
    slack = LITTLE_SLACK * max(held, expected) + (len(completed) / steps if steps else 0.0)
    return differs("mean_in_system", held, "the sum of W / duration", expected, slack)


def offered(figures: Figures) -> str | None:
    """Check that the stated rate is that of the arrivals, except for a client's delays."""
    stated, came_s = figures.number("offered_per_s"), column(figures.records(), "arrival_s")
    if len(came_s) != figures.number("requests") or len(came_s) < 2:
        raise NotCheckable("the arrivals of all requests are not given")
    if figures.given("retried"):
        raise NotCheckable("refused requests were sent again, and their records give the last arrival")
    if stated <= 0:
        return f"offered_per_s is {stated:g}, and {len(came_s)} requests came"
    late_ms = sum(figures.given(f"client.{name}.max") or 0.0 for name in ("late_ms", "held_ms"))
    spread_s, gaps = float(came_s.max() - came_s.min()), len(came_s) - 1
    slack_s = SLACK / 2 * spread_s + late_ms / 1e3 + 0.001
    return differs("(requests - 1) / offered_per_s", gaps / stated, "the arrivals' spread", spread_s, slack_s)


LAWS = (
    Law("whole records", "completed ones have their times; of their tokens all, or none", whole),
    Law("clock", "arrival <= first token <= end, as tokens say, and none came in the warm-up", clock),
    Law("every request", "one record for each request, and none twice", every_request),
    Law("tokens by request", "each answer has the tokens that were asked for; they add up", tokens),
    Law("recount", "latencies and duration are those of the records, within 2 %", recount),
    Law("at once", "never more requests between first and last token than slots, but preempted", at_once),
    Law("offered, records", "the rate of arrivals is that of the records", offered),
    Law("Little, records", "N = the sum of W over the duration, within 5 % and a step", in_system),
)
