"""Decide how many replicas there should be.

A replica is added when more prompt tokens than a limit for each replica have waited for a while. One is
removed when the others would long have had room for all requests. Between the two nothing changes, so that a
constant load never makes replicas come and go. The state is the caller's: it keeps what `decide` returns, and
passes it in with the next demand.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_REPLICAS = 1024
ROOM = 0.5  # share of the other replicas' slots that may be in use when one is removed


@dataclass(frozen=True, slots=True)
class ScalingBounds:
    """The range of the number of replicas, and when one is added or removed."""

    least: int
    most: int
    queued_tokens: int = 4096  # waiting prompt tokens for each replica, above which one is added
    more_after_s: float = 5.0  # how long more than that must have waited
    fewer_after_s: float = 120.0  # how long the others must have had room enough
    slots: int = 1  # requests that a replica runs at once

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= MOST_REPLICAS:
            raise ValueError(
                f"--replicas is {self.least}:{self.most}; it must be LEAST:MOST, with 1 <= LEAST <= MOST"
                f" <= {MOST_REPLICAS}"
            )


@dataclass(frozen=True, slots=True)
class FleetDemand:
    """The present demand: replicas that take requests, prompt tokens that wait, and all requests."""

    num_ready: int
    queued_tokens: int
    requests: int


@dataclass(frozen=True, slots=True)
class Scale:
    """The wanted number of replicas, and since when another number seems better."""

    wanted: int
    crowded_since_s: float | None = None
    idle_since_s: float | None = None


def decide(bounds: ScalingBounds, scale: Scale, demand: FleetDemand | None, now_s: float) -> Scale:
    """Return the wanted scale; if the demand is unknown (None), nothing changes and the timers restart.

    Replicas come and go one at a time. While one is being started, or is lost and restarted, no other is
    asked for, because the waiting tokens may be what it is for.
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
