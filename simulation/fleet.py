"""How would many engines behind a router serve a trace?"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from continuous_batching.request import Request
from simulation.replica import Replica
from simulation.serve import in_order

Route = Literal["round_robin", "least_loaded", "prefix"]
MOST_PREFIXES = 2**16  # that a router remembers
AFFINITY_TOKENS = 128  # of a prompt, by which it finds the engine that may hold its pages
CROWDED = 1.5  # times the mean load, from which on the prefix is not worth the wait


class Router(Protocol):
    """Chooses the engine for a request; `looks` says whether it needs the engines' loads at that time."""

    looks: bool

    def choose(self, request: Request, loads: NDArray[np.int64]) -> int:
        """The number of an engine; `loads` are the requests in each."""
        ...


class RoundRobin:
    """Sends requests to the engines in turn."""

    looks = False

    def __init__(self) -> None:
        self._next = -1

    def choose(self, request: Request, loads: NDArray[np.int64]) -> int:
        """The next engine."""
        self._next = (self._next + 1) % len(loads)
        return self._next


class LeastLoaded:
    """Sends a request to the engine with the fewest requests; of several, to the first."""

    looks = True

    def choose(self, request: Request, loads: NDArray[np.int64]) -> int:
        """The engine with the fewest requests."""
        return int(loads.argmin())


class PrefixAffinity:
    """Sends a request where the last prompt with the same beginning went, unless that engine is crowded."""

    looks = True

    def __init__(self) -> None:
        self._last: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, request: Request, loads: NDArray[np.int64]) -> int:
        """The engine that may hold the first pages, or else the one with the fewest requests."""
        key = request.cache_salt.encode() + request.prompt[:AFFINITY_TOKENS].tobytes()
        found = self._last.pop(key, None)
        if found is None or loads[found] > CROWDED * loads.mean() + 1:
            found = int(loads.argmin())
        self._last[key] = found
        if len(self._last) > MOST_PREFIXES:
            self._last.popitem(last=False)
        return found


ROUTERS: dict[Route, type[RoundRobin | LeastLoaded | PrefixAffinity]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix": PrefixAffinity,
}


class Fleet:
    """Engines behind a router. Each is simulated only up to the last arrival that it or the router sees."""

    def __init__(self, replicas: Sequence[Replica], router: Router) -> None:
        self.replicas = replicas
        self._router = router
        self._loads = np.zeros(len(replicas), dtype=np.int64)
        self._behind: list[tuple[float, int]] = []  # clocks of those with work, if the router looks
        self._is_behind = np.zeros(len(replicas), dtype=np.bool_)

    def add(self, request: Request, at_s: float) -> None:
        """Send a request to an engine, at a time not before that of the last request."""
        if self._router.looks:
            self._catch_up(at_s)
        number = self._router.choose(request, self._loads)
        replica = self.replicas[number]
        replica.advance(at_s)
        replica.add(request)
        self._loads[number] = replica.num_requests
        if self._router.looks and not self._is_behind[number]:
            self._is_behind[number] = True
            heapq.heappush(self._behind, (replica.clock.now_s, number))

    def advance(self, until_s: float) -> None:
        """Bring all engines to this time."""
        for replica in self.replicas:
            replica.advance(until_s)

    def close(self) -> None:
        """Serve all requests to their end."""
        self.advance(math.inf)
        for replica in self.replicas:
            replica.counter.close()

    def _catch_up(self, until_s: float) -> None:
        while self._behind and self._behind[0][0] < until_s:
            _, number = self._behind[0]
            replica = self.replicas[number]
            replica.advance(until_s)
            self._loads[number] = replica.num_requests
            if replica.engine.has_work:
                heapq.heapreplace(self._behind, (replica.clock.now_s, number))
            else:
                heapq.heappop(self._behind)
                self._is_behind[number] = False


def serve_fleet(trace: Iterable[Request], replicas: Sequence[Replica], route: Route = "round_robin") -> None:
    """Serve requests, in order of arrival, to the end; their figures are in the replicas' totals."""
    fleet = Fleet(replicas, ROUTERS[route]())
    for request in in_order(trace):
        fleet.add(request, request.arrival_s)
    fleet.close()
