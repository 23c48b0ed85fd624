"""How many replicas should there be?

One more where prompt tokens have waited for a while, more than so many for each replica that is there; one
fewer where the others would long have had room for all. Between the two nothing changes, so that a load that
stays the same never makes replicas come and go. Who asks keeps what `decide` returns, and gives it back with
the next demand: nothing is kept here.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_REPLICAS = 1024
ROOM = 0.5  # of the slots that the other replicas have; one that goes must leave as much free


@dataclass(frozen=True, slots=True)
class ScalingBounds:
    """Between how many replicas, and when one is asked for or let go."""

    least: int
    most: int
    queued_tokens: int = 4096  # of prompts, for each replica
    more_after_s: float = 5.0  # of more than that
    fewer_after_s: float = 120.0  # of room enough without one
    slots: int = 1  # requests that a replica runs at once

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= MOST_REPLICAS:
            raise ValueError(
                f"--replicas is {self.least}:{self.most}; it must be LEAST:MOST, with 1 <= LEAST <= MOST"
                f" <= {MOST_REPLICAS}"
            )


@dataclass(frozen=True, slots=True)
class FleetDemand:
    """What is there now: replicas that take requests, prompt tokens that wait, and all requests."""

    num_ready: int
    queued_tokens: int
    requests: int


@dataclass(frozen=True, slots=True)
class Scale:
    """How many replicas are wanted, and since when another number seems better."""

    wanted: int
    crowded_since_s: float | None = None
    idle_since_s: float | None = None


def decide(bounds: ScalingBounds, scale: Scale, demand: FleetDemand | None, now_s: float) -> Scale:
    """What is wanted now; None as the demand: nobody knows it, so that nothing changes and time begins anew.

    Replicas come and go one at a time. While one is being started, or is lost and started anew, no other is
    asked for: what waits may be what it is for.
    """
    wanted = min(max(scale.wanted, bounds.least), bounds.most)
    if demand is None:
        return Scale(wanted)
    is_crowded = demand.num_ready >= wanted and demand.queued_tokens > bounds.queued_tokens * wanted
    others = wanted - 1
    is_idle = (
        demand.queued_tokens * 2 <= bounds.queued_tokens * others
        and demand.requests <= ROOM * bounds.slots * others
    )
    crowded_s = _since(scale.crowded_since_s, now_s) if is_crowded else None
    idle_s = _since(scale.idle_since_s, now_s) if is_idle else None
    if crowded_s is not None and now_s - crowded_s >= bounds.more_after_s and wanted < bounds.most:
        return Scale(wanted + 1)
    if idle_s is not None and now_s - idle_s >= bounds.fewer_after_s and wanted > bounds.least:
        return Scale(wanted - 1)
    return Scale(wanted, crowded_s, idle_s)


def _since(since_s: float | None, now_s: float) -> float:
    return now_s if since_s is None else since_s
