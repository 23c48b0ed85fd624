"""Check durations against clocks that they were not computed from.

Figures come from a monotonic clock. The wall clock was read beside it, at the start, at the end and at each
reading; the processor's clock says how much was computed. A server has its own clocks.
"""

from __future__ import annotations

from datetime import datetime

import numpy as np

from benchmark.gate.law import Figures, Law, NotCheckable, differs, exceeds, first
from benchmark.gate.records import ends_of

# Relative drift of a duration between two clocks of one machine; NTP may slew a clock by 0.0005.
DRIFT = 0.002
READ_S = 0.001  # time between reading one clock and the other, unless something else ran in between
MOST_OFF = 0.05  # share of the readings that may be further apart; of few readings, none
# Time from the last end until a busy machine reads the clock: absolute, and relative to the run.
IDLE_S, IDLE = 0.25, 0.02
TICK_S = 0.02  # resolution of the processor's clock


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


def whole_run(figures: Figures) -> str | None:
    """Check that the run took as long on the wall clock as on the monotonic one.

    Its processor time, its duration and its date have to fit that span as well.
    """
    began_s, ended_s = moment_s(figures, "clock.started_at"), moment_s(figures, "clock.ended_at")
    taken_s = figures.number("clock.monotonic_s")
    cores = figures.number("machine.cores")
    slack_s = DRIFT * taken_s + READ_S
    span = "clock.ended_at - started_at, in s,"
    wrongs = [
        differs("clock.monotonic_s", taken_s, span, ended_s - began_s, slack_s),
        exceeds("clock.cpu_s", figures.number("clock.cpu_s"), "monotonic_s x cores", taken_s * cores, TICK_S),
    ]
    if (duration_s := figures.given("duration_s")) is not None:
        wrongs.append(exceeds("duration_s", duration_s, "clock.monotonic_s", taken_s, 1e-4))
    if figures.raw("date") is not None:
        late_s = moment_s(figures, "date") - ended_s
        wrongs.append(differs("date - clock.ended_at, in s,", late_s, "the end of the run", 0.0, 60.0))
    if duration_s is not None and (share := figures.given("client.cpu_share")) is not None:
        client_s, whole_s = share * duration_s, figures.number("clock.cpu_s")
        what = "client.cpu_share x duration_s"
        wrongs.append(exceeds(what, client_s, "clock.cpu_s", whole_s, DRIFT * whole_s + TICK_S))
    return first(wrongs)


def readings(figures: Figures) -> str | None:
    """Check that the wall clock advances from reading to reading as the run's does, within the run."""
    at_s, wall_s = figures.column("at_s"), figures.column("wall_s")
    if len(at_s) < 2:
        raise NotCheckable("one reading has no duration")
    offset_s = wall_s - at_s
    span_s = float(at_s[-1] - at_s[0])
    off = np.abs(offset_s - np.median(offset_s)) > READ_S + DRIFT * span_s
    wrong = None
    if off.mean() > MOST_OFF:
        at = int(np.flatnonzero(off)[-1])
        expected_s, slack_s = float(at_s[at] + np.median(offset_s)), READ_S + DRIFT * span_s
        what = f"wall_s of reading {at + 1}, from clock.started_at,"
        began_s = moment_s(figures, "clock.started_at")
        by_run_s = expected_s - began_s
        wrong = differs(what, float(wall_s[at]) - began_s, "its at_s on that clock", by_run_s, slack_s)
    began_s, ended_s = moment_s(figures, "clock.started_at"), moment_s(figures, "clock.ended_at")
    inside = wall_s[1:-1] if figures.raw("benchmark") == "serve" else wall_s
    wrongs = [wrong]
    if len(inside):
        early_s, late_s = began_s - float(inside.min()), float(inside.max()) - ended_s
        wrongs += [
            exceeds("the first reading before clock.started_at, in s,", early_s, "none", 0.0, READ_S),
            exceeds("the last reading after clock.ended_at, in s,", late_s, "none", 0.0, READ_S),
        ]
    return first(wrongs)


def processor(figures: Figures) -> str | None:
    """Bound the processor time between any two readings by the time of the cores."""
    at_s, cpu_s = figures.column("at_s"), figures.column("cpu_s")
    cores, total_s = figures.number("machine.cores"), figures.number("clock.cpu_s")
    taken_s, used_s = float(at_s[-1] - at_s[0]), float(cpu_s[-1] - cpu_s[0])
    around_s = figures.number("clock.monotonic_s") - taken_s
    return first(
        [
            exceeds("the processor's time in the readings", used_s, "time x cores", taken_s * cores, TICK_S),
            exceeds("the processor's time in the readings", used_s, "clock.cpu_s", total_s, TICK_S),
            exceeds(
                "clock.cpu_s beyond the readings", total_s - used_s, "time x cores", around_s * cores, TICK_S
            ),
        ]
    )


def around(figures: Figures) -> str | None:
    """Check that requests begin soon after the clock's start and end soon before it was read last."""
    began_s, ended_s = moment_s(figures, "clock.started_at"), moment_s(figures, "clock.ended_at")
    at_s, wall_s = figures.column("at_s"), figures.column("wall_s")
    origin_s = float(np.median(wall_s - at_s))
    records = figures.records()
    ends_s = ends_of(records)
    if len(ends_s) != len(records):
        raise NotCheckable("some requests have no end")
    last_s = origin_s + max(ends_s)
    slack_s = READ_S + DRIFT * (ended_s - began_s)
    idle_s = IDLE_S + IDLE * (ended_s - began_s)
    return first(
        [
            exceeds(
                "clock.started_at after the first request, in s,", began_s - origin_s, "none", 0.0, slack_s
            ),
            exceeds("the last end after clock.ended_at, in s,", last_s - ended_s, "none", 0.0, slack_s),
            exceeds("clock.ended_at after the last end, in s,", ended_s - last_s, "none", 0.0, idle_s),
        ]
    )


LAWS = (
    Law("clocks", "the wall's clock and the processor's allow the run's duration", whole_run, "clock"),
    Law("clocks of readings", "the wall's clock goes on as the run's does", readings, "clock"),
    Law("processor", "no more of the processor than its cores had time for", processor, "clock"),
    Law("clocks of requests", "the requests lie within the run", around, "clock"),
)
