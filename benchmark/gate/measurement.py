"""Define the laws of how a result was measured, and those of single requests.

Figures come from a monotonic clock. The clocks of the wall and of the processor were read beside it. The
device's name, its profile, the kind of device in the recipe and the operators that ran must be of one
machine, enough requests must have been served, and the client must have been on time.

No figure of a whole run shows what is wrong with one request. A record's times are in order, and its tokens
are those that were asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from benchmark.gate.law import Check, Law, Tie, exceeds, value_of
from benchmark.gate.result import Fields, Figures, NotCheckable, finite, number_of, times_of
from benchmark.gate.table import grown
from devices.rates import load, named

LEAST_SAMPLES = 30
LATE_MS = 10.0  # lateness allowed to an event loop on a busy machine, beside a tenth of the mean TTFT
TOO_BUSY = (
    "the client's machine was too busy to measure this server: run again with nothing else on it, "
    "from another machine than the server's, or at a lower rate"
)
# Relative drift of a duration between two clocks of one machine; NTP may slew a clock by 0.0005.
DRIFT = 0.002
READ_S = 0.001  # time between reading one clock and the other, unless something else ran in between
TICK_S = 0.02  # resolution of the processor's clock
ACCELERATORS = {"npu": "Ascend", "cuda": "NVIDIA"}  # names that devices of a kind report
NEEDED = ("arrival_s", "first_token_s", "finish_s", "output_tokens")  # fields of each completed record
SHOWN = 3  # number of requests that a message names
SAME_S = 5e-6  # tolerance between two entries of one time, in microseconds
LEAST_ITL_MS = 1.0  # the least ITL at which a client can tell a server's tokens apart
MOST_TOGETHER = 0.75  # share of all pieces that a client on a busy machine may read at one time


def samples(figures: Figures) -> str | None:
    """Require enough requests: a percentile of few says nothing."""
    completed = figures.number("completed")
    few = f"{completed:g} requests were answered; {LEAST_SAMPLES} are the least"
    return few if completed < LEAST_SAMPLES else None


def client_on_time(figures: Figures) -> str | None:
    """Check that the client was on time.

    A load generator that lags sends less than it says, and counts its own lateness as the server's.
    """
    most_ms = LATE_MS + 0.1 * (figures.given("ttft_ms.mean") or 0.0)
    records = figures.records if figures.raw("records") is not None else []
    is_due = any(each.get("due_s") is not None for each in records)  # closed loops send whenever they can
    is_timed = is_due or figures.given("offered_per_s") is not None  # a burst has times, and no rate
    names = ("client.lag_ms.p99", *(["client.late_ms.p99"] if is_timed else []))
    stated = {name: value for name in names if (value := figures.given(name)) is not None}
    if not stated:
        raise NotCheckable("client.lag_ms and client.late_ms are absent")
    bound = "a tenth of ttft_ms.mean and 10 ms"
    wrongs = [wrong for name, value in stated.items() if (wrong := exceeds(name, value, bound, most_ms))]
    return "; ".join([*wrongs, TOO_BUSY]) if wrongs else None


def moment_s(figures: Figures, name: str) -> float:
    """Return the seconds at which the clock of the wall stood when the run began, or ended."""
    stated = figures.needed(name)
    try:
        found = datetime.fromisoformat(str(stated))
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise ValueError(f"{name} is {stated!r}; it must be a date and a time with its zone, such as +00:00")
    return found.timestamp()


def one_machine(figures: Figures) -> str | None:
    """Check that device, profile, recipe and operators agree."""
    machine = figures.raw("machine")
    is_virtual = figures.raw("computed_on.virtual") or figures.raw("settings.device.virtual")
    if not isinstance(machine, dict) or is_virtual or figures.raw("SIMULATED") is not None:
        raise NotCheckable("no machine is named, or it was simulated, or its device was a virtual one")
    device, profile = str(machine.get("device") or "a CPU"), figures.raw("device_profile")
    kind = next((kind for kind, name in ACCELERATORS.items() if name.lower() in device.lower()), "cpu")
    attention = str(figures.raw("computed_on.attention"))
    kinds = {name: figures.raw(name) for name in ("computed_on.kind", "settings.device.kind")}
    kinds["computed_on.attention"] = next((k for k in ("npu", "cuda", "cpu") if f".{k}." in attention), None)
    wrongs = [
        f"machine.device is {device!r}, of kind {kind}, but {name} is of {other}"
        for name, other in kinds.items()
        if other not in (None, kind)
    ]
    if profile is not None:
        load(str(profile))  # raises ValueError for a profile that does not exist
        if profile != (expected := named(str(machine.get("cpu")) if kind == "cpu" else device)):
            wrongs.append(f"device_profile is {profile!r}, but {device!r} has {expected!r}")
    if kind == "cpu" and (figures.given("num_devices") or 1) != 1:
        wrongs.append(f"num_devices is {figures.number('num_devices'):g}, but an engine runs on one CPU")
    return "; ".join(wrongs) or None


def of_each_request(what_is_wrong: Callable[[Figures, Fields], str | None]) -> Check:
    """Make a check of all completed requests from that of one."""

    def check(figures: Figures) -> str | None:
        found = [(record.get("id"), what_is_wrong(figures, record)) for record in figures.completed]
        wrongs = [f"request {name} {wrong}" for name, wrong in found if wrong]
        more = [f"and {len(wrongs) - SHOWN} more"] if len(wrongs) > SHOWN else []
        return "; ".join([*wrongs[:SHOWN], *more]) or None

    return check


def whole(figures: Figures, record: Fields) -> str | None:
    """Require all times of a record, without which it cannot be recounted."""
    absent = [name for name in NEEDED if record.get(name) is None]
    return f"has no {', '.join(absent)}" if absent else None


def all_or_no_tokens(figures: Figures) -> str | None:
    """Require the times of tokens in all records, or in none."""
    silent = [record.get("id") for record in figures.completed if times_of(record) is None]
    if len(silent) in (0, len(figures.completed)):
        return None
    return f"request {silent[0]} and {len(silent) - 1} others have no times of their tokens"


def in_order(figures: Figures, record: Fields) -> str | None:
    """Check that arrival, first token and end are in order, and that tokens lie between first and end.

    Where a step gives a request one token, no two of them come at one time.
    """
    tokens_s, times_s = times_of(record) or [], [number_of(record, name) for name in NEEDED[:3]]
    if times_s != sorted(times_s) or tokens_s != sorted(tokens_s):
        return f"goes back in time: {times_s}"
    if tokens_s and max(abs(tokens_s[0] - times_s[1]), abs(tokens_s[-1] - times_s[2])) > SAME_S:
        return f"has tokens between {tokens_s[0]:g} and {tokens_s[-1]:g} s, not {times_s[1:]}"
    if record.get("end_s") is not None and number_of(record, "end_s") < times_s[2] - SAME_S:
        return "has tokens after its connection ended"
    is_one_a_step = figures.given("max_tokens_per_step") == 1 and record.get("token_times_s") is not None
    return "has two tokens of one step" if is_one_a_step and len({*tokens_s}) < len(tokens_s) else None


def tokens(figures: Figures, record: Fields) -> str | None:
    """Check that an answer has the tokens asked for, or stopped earlier, and as many times."""
    reason = record["finish_reason"]
    given, most = number_of(record, "output_tokens"), number_of(record, "max_tokens")
    is_short = reason == "length" and given != most
    if not 1 <= given <= most or is_short or number_of(record, "prompt_tokens") < 1:
        return f"has {given:g} tokens, {most:g} asked for, ended by {reason}"
    times, pieces = record.get("token_times_s"), record.get("piece_tokens")
    if times is not None and len(times) != given:
        return f"has {given:g} tokens at {len(times)} times"
    if pieces is not None and (sum(pieces) != given or len(pieces) != len(record.get("piece_times_s") or [])):
        return f"has {given:g} tokens, and {sum(pieces):g} in pieces"
    return None


def pieces_apart(figures: Figures) -> str | None:
    """Check that pieces which a server sent one after the other are not mostly read at one time."""
    grown_s, count = (value_of(grown(name, "metrics"), figures) for name in ("itl_s", "itl_count"))
    if 1e3 * grown_s < LEAST_ITL_MS * max(1.0, count):
        raise NotCheckable("the server itself sent its tokens at once")
    gaps_ms = figures.latencies_ms.get("itl_ms")
    if gaps_ms is None or not len(gaps_ms):
        raise NotCheckable("there are no gaps between pieces")
    share, what = float((gaps_ms <= 0).mean()), "the share of pieces that came with the one before"
    return exceeds(what, share, "the most by chance", MOST_TOGETHER)


def counters_grow(figures: Figures) -> str | None:
    """Check that the counters of an engine or a server only grow: one that was started again counts anew."""
    place = "metrics" if figures.raw("benchmark") == "serve" else "counters"
    before, after = figures.needed(f"{place}.before"), figures.needed(f"{place}.after")
    found = [
        exceeds(f"{name} before", finite(name, before[name]), "after", finite(name, after[name]))
        for name in before.keys() & after.keys()
    ]
    return "; ".join(filter(None, found)) or None


MEASURED_LAWS = (
    Law("samples", f"at least {LEAST_SAMPLES} requests", [samples]),
    Law("warm-up", "no warm-up is counted in, and there was one", [
        Tie("warm_up_counted", "at most", 0, words="the most that may be"),
        Tie("warm_up_runs", "at least", 1, words="the least that must be"),
    ]),
    Law("client on time", "it was late, p99, by at most 10 ms + TTFT / 10", [client_on_time]),
    Law("whole records", "completed ones have their times; of their tokens all, or none", [
        of_each_request(whole), all_or_no_tokens,
    ]),
    Law("clock", "arrival <= first token <= end, as its tokens say, of which a step gives one", [
        of_each_request(in_order),
    ]),
    Law("tokens by request", "each answer has the tokens that were asked for", [of_each_request(tokens)]),
    Law("pieces apart", "pieces came one after the other, as the server sent them", [pieces_apart]),
    Law("counters grow", "the counters of an engine or a server only grow", [counters_grow]),
)  # fmt: skip
MACHINE_LAWS = (  # laws of any benchmark's result
    Law("clocks", "the wall's clock and the processor's allow the run's duration", [
        Tie("clock.monotonic_s", "is",
            lambda figures: moment_s(figures, "clock.ended_at") - moment_s(figures, "clock.started_at"),
            DRIFT, READ_S, "clock.ended_at - started_at, in s,"),
        Tie("clock.cpu_s", "at most", "clock.monotonic_s * machine.cores", 0.0, TICK_S),
        Tie("duration_s", "at most", "clock.monotonic_s", 0.0, 1e-4),
    ]),
    Law("machine", "device, profile, recipe and operators are of one", [one_machine]),
)  # fmt: skip
