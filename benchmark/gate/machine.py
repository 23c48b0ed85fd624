"""Define the laws of how a result was measured: enough requests, a client on time, clocks, and one machine.

Figures come from a monotonic clock. The clocks of the wall and of the processor were read beside it. The
device's name, its profile, the versions of libraries, the kind of device in the recipe and the operators that
ran must be of one machine.
"""

from __future__ import annotations

from datetime import datetime

from benchmark.gate.law import Law, differs, exceeds, first
from benchmark.gate.result import Figures, NotCheckable
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


LAWS = (
    Law("samples", f"at least {LEAST_SAMPLES} requests, and {LEAST_BATCHES} batches", samples),
    Law("warm-up", "no warm-up is counted in, and there was one", warm_up),
    Law("client on time", "it was late, p99, by at most 10 ms + TTFT / 10", client_on_time, "client"),
)
ANYWHERE = (  # laws of any benchmark's result
    Law("clocks", "the wall's clock and the processor's allow the run's duration", clocks, "clock"),
    Law("machine", "device, profile, versions, recipe and operators are of one", one_machine, "machine"),
)
