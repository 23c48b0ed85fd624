"""Define the laws of how a result was measured, and those of single requests and single steps.

Figures come from a monotonic clock. The clocks of the wall and of the processor were read beside it. The
device's name, its profile, the versions of libraries, the kind of device in the recipe and the operators that
ran must be of one machine, enough requests must have been served, and the client must have been on time.

No figure of a whole run shows what is wrong with one request or step. A record's times are in order, and its
tokens are those that were asked for. A reading has what was there at the end of a step, and what was counted
from the start of the run up to then.
"""

from __future__ import annotations

from datetime import datetime

import numpy as np

from benchmark.gate.law import Law, differs, exceeds, first
from benchmark.gate.recount import growth, plain, server_growth
from benchmark.gate.result import Fields, Figures, NotCheckable, finite, of_each, times_of, value_of
from devices.rates import load, named

LEAST_SAMPLES = 30
LEAST_BATCHES = 10
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


def samples(figures: Figures) -> str | None:
    """Require enough requests, and batches: a percentile of few says nothing."""
    if figures.raw("latencies") is not None and (count := len(figures.numbers("latencies"))) < LEAST_BATCHES:
        return f"{count} batches were served; {LEAST_BATCHES} are the least"
    if (completed := figures.number("completed")) < LEAST_SAMPLES:
        return f"{completed:g} requests were answered; {LEAST_SAMPLES} are the least"
    return None


def warm_up(figures: Figures) -> str | None:
    """Require one warm-up at least, which is no part of a rate."""
    if counted := figures.number("warm_up_counted"):
        return f"{counted:g} warm-up runs are counted in"
    if figures.given("warm_up_runs") == 0:
        return "no run went before the counted ones, so the first is its own warm-up"
    return None


def client_on_time(figures: Figures) -> str | None:
    """Check that the client was on time.

    A load generator that lags sends less than it says, and counts its own lateness as the server's.
    """
    most_ms = LATE_MS + 0.1 * (figures.given("ttft_ms.mean") or 0.0)
    is_timed = figures.given("offered_per_s") is not None  # closed loops send whenever they can
    names = ("client.lag_ms.p99", *(["client.late_ms.p99"] if is_timed else []))
    stated = {name: value for name in names if (value := figures.given(name)) is not None}
    if not stated:
        raise NotCheckable("client.lag_ms and client.late_ms are absent")
    bound = "a tenth of ttft_ms.mean and 10 ms"
    wrong = first([exceeds(name, value, bound, most_ms) for name, value in stated.items()])
    return wrong and f"{wrong}; {TOO_BUSY}"


def moment_s(figures: Figures, name: str) -> float:
    """Parse a date with its zone into seconds; raises ValueError for anything else."""
    stated = figures.raw(name)
    if stated is None:
        raise NotCheckable(f"{name} is absent")
    try:
        found = datetime.fromisoformat(str(stated))
    except ValueError as error:
        raise ValueError(f"{name} is {stated!r}; it must be a date and a time with its zone") from error
    if found.tzinfo is None:
        raise ValueError(f"{name} is {stated!r}; it must have a zone, such as +00:00")
    return found.timestamp()


def clocks(figures: Figures) -> str | None:
    """Check that the run took as long on the wall clock as on the monotonic one, and fits the processor's."""
    span_s = moment_s(figures, "clock.ended_at") - moment_s(figures, "clock.started_at")
    taken_s, cpu_s = figures.number("clock.monotonic_s"), figures.number("clock.cpu_s")
    cores_s = taken_s * figures.number("machine.cores")
    slack_s, span = DRIFT * taken_s + READ_S, "clock.ended_at - started_at, in s,"
    duration_s = figures.given("duration_s") or 0.0
    return first(
        [
            differs("clock.monotonic_s", taken_s, span, span_s, slack_s),
            exceeds("clock.cpu_s", cpu_s, "monotonic_s x cores", cores_s, TICK_S),
            exceeds("duration_s", duration_s, "clock.monotonic_s", taken_s, 1e-4),
        ]
    )


def kind_of(device: str) -> str:
    """Return the kind of device that has such a name."""
    return next((kind for kind, name in ACCELERATORS.items() if name.lower() in device.lower()), "cpu")


def one_machine(figures: Figures) -> str | None:
    """Check that device, profile, versions, recipe and operators agree."""
    machine = figures.raw("machine")
    if not isinstance(machine, dict) or figures.raw("SIMULATED") is not None:
        raise NotCheckable("no machine is named, or it was simulated")
    device = str(machine.get("device") or "a CPU")
    kind, profile = kind_of(device), figures.raw("device_profile")
    if figures.raw("computed_on.virtual") or figures.raw("settings.device.virtual"):
        raise NotCheckable("the device was a virtual one")
    attention = str(figures.raw("computed_on.attention"))
    kinds = {name: figures.raw(name) for name in ("computed_on.kind", "settings.device.kind")}
    kinds["computed_on.attention"] = next((k for k in ("npu", "cuda", "cpu") if f".{k}." in attention), None)
    wrongs = [
        f"machine.device is {device!r}, of kind {kind}, but {name} is of {other}"
        for name, other in kinds.items()
        if other not in (None, kind)
    ]
    if kind == "npu" and "torch_npu" not in machine:
        wrongs.append(f"machine.device is {device!r}, but machine has no torch_npu, without which none runs")
    if kind == "cuda" and str(machine.get("torch", "")).endswith("+cpu"):
        wrongs.append(f"machine.device is {device!r}, but torch is {machine['torch']}, which has no CUDA")
    if profile is not None:
        load(str(profile))  # raises ValueError for a profile that does not exist
        if profile != (expected := named(str(machine.get("cpu")) if kind == "cpu" else device)):
            wrongs.append(f"device_profile is {profile!r}, but {device!r} has {expected!r}")
    if kind == "cpu" and (figures.given("num_devices") or 1) != 1:
        wrongs.append(f"num_devices is {figures.number('num_devices'):g}, but an engine runs on one CPU")
    return first(wrongs)


MEASURED_LAWS = (
    Law("samples", f"at least {LEAST_SAMPLES} requests, and {LEAST_BATCHES} batches", samples),
    Law("warm-up", "no warm-up is counted in, and there was one", warm_up),
    Law("client on time", "it was late, p99, by at most 10 ms + TTFT / 10", client_on_time, "client"),
)
MACHINE_LAWS = (  # laws of any benchmark's result
    Law("clocks", "the wall's clock and the processor's allow the run's duration", clocks, "clock"),
    Law("machine", "device, profile, versions, recipe and operators are of one", one_machine, "machine"),
)


NEEDED = ("arrival_s", "first_token_s", "finish_s", "output_tokens")  # fields of each completed record
SHOWN = 3  # number of requests that a message names
SAME_S = 5e-6  # tolerance between two entries of one time, in microseconds
LEAST_ITL_MS = 1.0  # the least ITL at which a client can tell a server's tokens apart
MOST_TOGETHER = 0.75  # share of all pieces that a client on a busy machine may read at one time


def _named(wrongs: list[str]) -> str | None:
    shown = "; ".join(wrongs[:SHOWN])
    return f"{shown}; and {len(wrongs) - SHOWN} more" if len(wrongs) > SHOWN else shown or None


def whole(figures: Figures) -> str | None:
    """Require all times of completed records, without which they cannot be recounted."""
    has_tokens = any(times_of(record) is not None for record in figures.completed)
    wrongs = [
        f"request {record.get('id')} has no {name}"
        for record in figures.completed
        for name in NEEDED
        if record.get(name) is None
    ]
    wrongs += [
        f"request {record.get('id')} has no times of its tokens"
        for record in figures.completed
        if has_tokens and times_of(record) is None
    ]
    return _named(wrongs)


def clock(figures: Figures) -> str | None:
    """Check that arrival, first token and end are in order, and that tokens lie between first and end."""
    wrongs = []
    for record in figures.completed:
        who, tokens_s = f"request {record.get('id')}", times_of(record) or []
        times_s = [value_of(record, name) for name in NEEDED[:3]]
        if times_s != sorted(times_s) or tokens_s != sorted(tokens_s):
            wrongs.append(f"{who} goes back in time: {times_s}")
        elif tokens_s and max(abs(tokens_s[0] - times_s[1]), abs(tokens_s[-1] - times_s[2])) > SAME_S:
            wrongs.append(
                f"{who} has tokens between {tokens_s[0]:g} and {tokens_s[-1]:g} s, not {times_s[1:]}"
            )
        if record.get("end_s") is not None and value_of(record, "end_s") < times_s[2] - SAME_S:
            wrongs.append(f"{who} has tokens after its connection ended")
    return _named(wrongs)


def tokens(figures: Figures) -> str | None:
    """Check that answers have the tokens asked for, or stopped earlier, and as many times."""
    wrongs = [wrong for record in figures.completed if (wrong := _tokens_of(record))]
    return _named(wrongs)


def _tokens_of(record: Fields) -> str | None:
    who, reason = f"request {record.get('id')}", record["finish_reason"]
    given, most = value_of(record, "output_tokens"), value_of(record, "max_tokens")
    is_short = reason == "length" and given != most
    if not 1 <= given <= most or is_short or value_of(record, "prompt_tokens") < 1:
        return f"{who} has {given:g} tokens, {most:g} asked for, ended by {reason}"
    times, pieces = record.get("token_times_s"), record.get("piece_tokens")
    if times is not None and len(times) != given:
        return f"{who} has {given:g} tokens at {len(times)} times"
    if pieces is not None and (sum(pieces) != given or len(pieces) != len(record.get("piece_times_s") or [])):
        return f"{who} has {given:g} tokens, and {sum(pieces):g} in pieces"
    return None


def one_a_step(figures: Figures) -> str | None:
    """Check that no two tokens of a request come at one time, where a step gives a request one token."""
    if figures.number("max_tokens_per_step") != 1:
        raise NotCheckable("a step may give a request several tokens")
    if not (timed := [each for each in figures.completed if each.get("token_times_s") is not None]):
        raise NotCheckable("token_times_s is absent")
    wrongs = [
        f"two tokens of request {record.get('id')} came at {times_s[1:][same][0]:g} s, in one step"
        for record in timed
        if (same := np.diff(times_s := np.array(times_of(record))) <= 0).any()
    ]
    return _named(wrongs)


def pieces_apart(figures: Figures) -> str | None:
    """Check that pieces which a server sent one after the other are not mostly read at one time."""
    grown_s, count = server_growth("itl_s")(figures), server_growth("itl_count")(figures)
    if 1e3 * grown_s < LEAST_ITL_MS * max(1.0, count):
        raise NotCheckable("the server itself sent its tokens at once")
    gaps_ms = figures.latencies_ms.get("itl_ms")
    if gaps_ms is None or not len(gaps_ms):
        raise NotCheckable("there are no gaps between pieces")
    share, what = float((gaps_ms <= 0).mean()), "the share of pieces that came with the one before"
    return exceeds(what, share, "the most by chance", MOST_TOGETHER)


def computed(figures: Figures) -> str | None:
    """Check that each token is computed once, and lost tokens once more.

    Computed are the tokens of prompts that were not hits, sampled tokens except an answer's last, and what
    preemption lost and did not find again.
    """
    plain(figures)
    counted, hits = (float(figures.column(name)[-1]) for name in ("tokens", "hit_tokens"))
    expected = figures.number("prompt_tokens") - hits
    expected += figures.number("output_tokens") - figures.number("completed")
    expected += growth("lost_tokens")(figures) - growth("refound_tokens")(figures)
    # A stopped answer may have had one more token computed where the next step had begun.
    ahead = figures.number("completed") if figures.raw("settings.scheduler.overlap") else 0.0
    all_tokens, what = "the tokens of all steps", "prompt_tokens - hits + output_tokens - completed + lost"
    return first(
        [
            differs(all_tokens, counted, "computed_tokens (counters)", growth("computed_tokens")(figures)),
            exceeds(what, expected, all_tokens, counted),
            exceeds(all_tokens, counted, what, expected, ahead),
        ]
    )


def at_steps(figures: Figures) -> str | None:
    """Check that tokens and requests' ends came at the ends of steps, as many as each reading counted."""
    plain(figures)
    at_s = figures.column("at_s")
    came_s = np.sort(np.concatenate([np.array(times_of(each) or []) for each in figures.completed]))
    ended_s = np.sort(of_each(figures.completed, "finish_s"))
    wrongs: list[str | None] = []
    for name, times_s in (("sampled", came_s), ("ended", ended_s)):
        by_then = np.searchsorted(times_s, at_s + SAME_S, side="right")
        if (off := np.flatnonzero(figures.column(name) != by_then)).size:
            at, counted = int(off[0]), figures.column(name)
            what, records = f"{name} at reading {at + 1}", "the records' number by then"
            wrongs.append(differs(what, float(counted[at]), records, float(by_then[at])))
    return first(wrongs)


def counters(figures: Figures) -> str | None:
    """Check that the counters of an engine or a server only grow: one that was started again counts anew."""
    place = "metrics" if figures.raw("benchmark") == "serve" else "counters"
    before, after = figures.raw(f"{place}.before"), figures.raw(f"{place}.after")
    if not isinstance(before, dict) or not isinstance(after, dict):
        raise NotCheckable("counters are absent")
    wrongs = [
        exceeds(f"{name} before", finite(name, before[name]), "after", finite(name, after[name]))
        for name in before.keys() & after.keys()
    ]
    return first(wrongs)


RECORDED_LAWS = (
    Law("whole records", "completed ones have their times; of their tokens all, or none", whole),
    Law("clock", "arrival <= first token <= end, as its tokens say", clock),
    Law("tokens by request", "each answer has the tokens that were asked for", tokens),
    Law("one token a step", "no two tokens of a request come at one time", one_a_step, "records"),
    Law("pieces apart", "pieces came one after the other, as the server sent them", pieces_apart, "metrics"),
    Law("computed tokens", "each token is computed once, and what was lost once more", computed, "metrics"),
    Law("steps of requests", "tokens and ends came at steps, as many as each counted", at_steps, "metrics"),
    Law("counters grow", "the counters of an engine or a server only grow", counters),
)
