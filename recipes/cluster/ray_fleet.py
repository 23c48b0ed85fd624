"""Keep as many replicas of a server in a Ray cluster as there is work for."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from continuous_batching.routing.scaling import ScalingBounds
from recipes.cluster.ray_cluster import connected
from recipes.cluster.ray_replica import RayReplica, ReplicaJob
from recipes.cluster.replica_set import ReplicaSet
from recipes.cluster.router_client import RouterClient

_TURN_S, _LOOKS_S = 1.0, 0.05
ENDS_S = 15.0  # time for replicas to end, beyond that for their requests


@dataclass(frozen=True, slots=True)
class RayFleet:
    """What each replica runs, how many there may be, and the router that they are announced to."""

    job: ReplicaJob
    bounds: ScalingBounds
    router: str
    drain_s: float  # time for the last requests of a replica that leaves
    end_s: float  # time for all requests when the command ends


def serve(fleet: RayFleet, say: Callable[[str], None]) -> int:
    """Serve until a signal, which lets replicas end with their requests; a second signal does not wait."""
    router = RouterClient(fleet.router, say)
    # A list and no lock, since a handler may run between any two steps of this thread.
    signals: list[int] = []
    with connected(fleet.job.interface) as ray:
        for number in (signal.SIGTERM, signal.SIGINT):  # set after Ray's own handlers
            signal.signal(number, lambda number, _: signals.append(number))
        replicas = ReplicaSet(
            lambda name: RayReplica(ray, fleet.job, name, say), router, fleet.bounds, fleet.drain_s, say
        )
        due_s = time.monotonic()
        while not signals:
            if (now_s := time.monotonic()) >= due_s:
                replicas.turn(now_s)
                due_s = now_s + _TURN_S
            time.sleep(_LOOKS_S)
        say(f"ends: {replicas.count} replicas may go on for {fleet.end_s:g} s")
        replicas.stop()
        until_s = time.monotonic() + fleet.end_s + ENDS_S
        while replicas.count:
            replicas.bury(now_s := time.monotonic())
            if len(signals) > 1 or now_s > until_s:
                replicas.kill()
            time.sleep(_LOOKS_S)
    return 0
