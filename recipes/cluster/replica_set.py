"""Keep as many replicas running as are wanted, and tell the router which there are.

Each turn replaces the replicas that have ended, tells the router which ones are there, asks
`continuous_batching.routing.scaling` how many there should be for the requests that wait, and starts or stops
one. A turn does not depend on what earlier turns found, so a restarted router knows all again within a turn.
A replica that is to stop gets no new request, and stops when its last one has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from continuous_batching.routing.scaling import FleetDemand, Scale, ScalingBounds, decide
from recipes.cluster.router_client import FleetReport, RouterClient

LEAST_PAUSE_S, MOST_PAUSE_S = 2.0, 60.0  # pauses between replicas that end before they were ever ready


class PlacedReplica(Protocol):
    """A replica that was requested; none of its methods waits."""

    url: str | None  # address on which it listens, or will listen

    @property
    def ended(self) -> str | None:
        """The reason why it has ended; None while it runs."""

    def stop(self) -> None:
        """Let it end when its requests have ended."""

    def kill(self) -> None:
        """End it now."""


@dataclass(slots=True)
class _Member:
    name: str
    replica: PlacedReplica
    leaves_since_s: float | None = None
    is_stopped: bool = False
    was_ready: bool = False


class ReplicaSet:
    """Replicas that `place` starts by name; one that leaves may take `drain_s` for its requests."""

    def __init__(
        self,
        place: Callable[[str], PlacedReplica],
        router: RouterClient,
        bounds: ScalingBounds,
        drain_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._place = place
        self._router = router
        self._bounds = bounds
        self._drain_s = drain_s
        self._say = say
        self._scale = Scale(bounds.least)
        self._members: list[_Member] = []
        self._gone: set[str] = set()  # addresses that the router is to forget
        self._num_placed = 0
        self._pause_s = LEAST_PAUSE_S  # it doubles with each replica that ends before it is ready
        self._not_before_s = float("-inf")

    @property
    def count(self) -> int:
        """The number of replicas that have not ended."""
        return len(self._members)

    def turn(self, now_s: float) -> None:
        """Look at all replicas once, and do what is due."""
        report = self._router.report()
        self.bury(now_s)
        for each in self._staying:
            known = report and report.replicas.get(each.replica.url or "")
            if known and known.state == "ready":
                each.was_ready, self._pause_s = True, LEAST_PAUSE_S
        before = self._scale.wanted
        self._scale = decide(self._bounds, self._scale, self._demand(report), now_s)
        if self._scale.wanted != before:
            self._say(f"{self._scale.wanted} replicas are wanted, after {before}")
        self._adjust(report, now_s)
        if report is not None:
            self._announce(report)
            self._stop_drained(report, now_s)

    def stop(self) -> None:
        """Let all replicas end with their requests; the caller continues with `bury` until `count` is 0."""
        for each in self._members:
            if each.replica.url is not None:
                self._router.remove(each.replica.url)
            each.replica.stop()
            each.is_stopped, each.leaves_since_s = True, each.leaves_since_s or 0.0

    def kill(self) -> None:
        """End all replicas now."""
        for each in self._members:
            each.replica.kill()

    def bury(self, now_s: float) -> None:
        """Remove replicas that have ended."""
        for each in [each for each in self._members if each.replica.ended is not None]:
            self._members.remove(each)
            self._say(f"{each.name} has ended: {each.replica.ended}")
            if each.replica.url is not None:
                self._gone.add(each.replica.url)
            if each.leaves_since_s is None and not each.was_ready:
                self._not_before_s = now_s + self._pause_s
                self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)

    @property
    def _staying(self) -> list[_Member]:
        return [each for each in self._members if each.leaves_since_s is None]

    def _demand(self, report: FleetReport | None) -> FleetDemand | None:
        if report is None:
            return None
        ours = [
            report.replicas[url] for each in self._staying if (url := each.replica.url) in report.replicas
        ]
        return FleetDemand(
            sum(each.state == "ready" for each in ours),
            sum(each.queued_tokens for each in ours) + report.waiting_tokens,
            sum(each.requests for each in ours),
        )

    def _adjust(self, report: FleetReport | None, now_s: float) -> None:
        """Start missing replicas, or let a surplus one leave.

        A replica that is not ready leaves first, then the one with the fewest requests.
        """
        while len(self._staying) < self._scale.wanted and now_s >= self._not_before_s:
            self._num_placed += 1
            name = f"replica {self._num_placed}"
            self._members.append(_Member(name, self._place(name)))
        if len(self._staying) > self._scale.wanted:

            def requests(each: _Member) -> int:
                known = report.replicas.get(each.replica.url or "") if report else None
                return known.requests if known and known.state == "ready" else -1

            least = min(reversed(self._staying), key=requests)
            least.leaves_since_s = now_s
            self._say(f"{least.name} leaves")

    def _announce(self, report: FleetReport) -> None:
        known = {url: each.leaves for url, each in report.replicas.items()}
        for each in self._members:
            if (url := each.replica.url) is None:
                continue
            self._gone.discard(url)  # one that has ended had this address before
            if each.leaves_since_s is None and known.get(url, True):
                self._router.add(url)
            elif each.leaves_since_s is not None and not known.get(url, True):
                self._router.remove(url)
        for url in self._gone & {url for url, leaves in known.items() if not leaves}:
            self._router.remove(url)
        self._gone &= {*known}

    def _stop_drained(self, report: FleetReport, now_s: float) -> None:
        """Stop the leaving replicas that the router has forgotten."""
        for each in self._members:
            if each.leaves_since_s is None or each.is_stopped:
                continue
            is_forgotten = each.replica.url is None or each.replica.url not in report.replicas
            if is_forgotten or now_s - each.leaves_since_s > self._drain_s:
                each.is_stopped = True
                each.replica.stop()
