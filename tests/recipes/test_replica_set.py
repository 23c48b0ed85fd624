"""As many replicas as are wanted, whatever becomes of them and of the router: against a router in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from continuous_batching.routing.scaling import ScalingBounds
from recipes.cluster.replica_set import ReplicaSet
from recipes.cluster.router_client import FleetReport, ReplicaReport, RouterClient

DRAIN_S = 100.0


@dataclass
class Placed:
    """A replica that is wherever a test puts it."""

    url: str | None = None
    ended: str | None = None
    stopped: int = 0
    killed: int = 0

    def stop(self) -> None:
        self.stopped += 1

    def kill(self) -> None:
        self.killed += 1


@dataclass
class Router:
    """Knows whom it was told of; each is `ready` where the test says so, and has `open` requests."""

    is_away: bool = False
    waiting_tokens: int = 0
    leaves: dict[str, bool] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    open: dict[str, int] = field(default_factory=dict)

    def report(self) -> FleetReport | None:
        if self.is_away:
            return None
        self.leaves = {url: leaves for url, leaves in self.leaves.items() if not leaves or self.open.get(url)}
        rows = {
            url: ReplicaReport("ready" if url in self.ready else "lost", leaves, 0, self.open.get(url, 0))
            for url, leaves in self.leaves.items()
        }
        return FleetReport(rows, self.waiting_tokens)

    def add(self, url: str) -> None:
        if not self.is_away:
            self.leaves[url] = False

    def remove(self, url: str) -> None:
        if not self.is_away and url in self.leaves:
            self.leaves[url] = True


class Fleet:
    """A set of replicas, and a clock that goes on by turns."""

    def __init__(self, least: int, most: int) -> None:
        self.router, self.placed, self.said, self.now_s = Router(), list[Placed](), list[str](), 0.0
        bounds = ScalingBounds(least, most, queued_tokens=100, more_after_s=2, fewer_after_s=10, slots=8)
        self.set = ReplicaSet(self.place, self.router, bounds, DRAIN_S, self.said.append)

    def place(self, name: str) -> Placed:
        self.placed.append(Placed())
        return self.placed[-1]

    def turns(self, count: int = 1) -> None:
        for _ in range(count):
            self.now_s += 1
            self.set.turn(self.now_s)

    def become_ready(self, *numbers: int) -> None:
        for number in numbers:
            url = self.placed[number].url = f"http://{number}"
            self.router.ready.add(url)


def started(least: int, most: int, count: int) -> Fleet:
    fleet = Fleet(least, most)
    fleet.turns()
    fleet.become_ready(*range(least))
    fleet.router.waiting_tokens = 10**6
    while len(fleet.placed) < count:
        fleet.turns(3)
        fleet.become_ready(*range(len(fleet.placed)))
    fleet.router.waiting_tokens = 0
    fleet.turns(2)
    return fleet


def test_the_router_is_told_as_soon_as_it_is_known_where() -> None:
    fleet = Fleet(2, 3)
    fleet.turns(3)
    assert len(fleet.placed) == 2
    assert not fleet.router.leaves
    fleet.become_ready(1)
    fleet.turns()
    assert fleet.router.leaves == {"http://1": False}
    fleet.router.leaves = {}  # another router, which knows nothing
    fleet.become_ready(0)
    fleet.turns()
    assert fleet.router.leaves == {"http://0": False, "http://1": False}


def test_more_come_one_at_a_time_and_never_too_many() -> None:
    fleet = started(1, 3, 1)
    fleet.router.waiting_tokens = 10**6
    fleet.turns(100)
    assert len(fleet.placed) == 2, "the second is not ready yet"
    fleet.become_ready(1)
    fleet.turns(100)
    fleet.become_ready(2)
    fleet.turns(100)
    assert len(fleet.placed) == fleet.set.count == 3


def test_who_goes_is_stopped_when_its_last_request_has_ended() -> None:
    fleet = started(1, 3, 2)
    fleet.router.open = {"http://0": 2, "http://1": 1}
    fleet.turns(12)
    assert fleet.router.leaves == {"http://0": False, "http://1": True}, "the one with the fewest requests"
    fleet.turns(5)
    assert (fleet.placed[1].stopped, fleet.set.count) == (0, 2)
    fleet.router.open.pop("http://1")
    fleet.turns(5)
    assert (fleet.placed[1].stopped, fleet.placed[0].stopped) == (1, 0)
    fleet.placed[1].ended = "in order"
    fleet.turns(30)
    assert (fleet.set.count, len(fleet.placed)) == (1, 2)


def test_who_does_not_come_to_an_end_is_stopped_all_the_same() -> None:
    fleet = started(1, 2, 2)
    fleet.router.open = {"http://0": 1, "http://1": 1}
    fleet.turns(12)
    (going,) = [number for number in (0, 1) if fleet.router.leaves[f"http://{number}"]]
    fleet.turns(int(DRAIN_S) - 5)
    assert fleet.placed[going].stopped == 0
    fleet.turns(10)
    assert fleet.placed[going].stopped == 1


def test_one_that_is_still_starting_goes_first() -> None:
    fleet = started(1, 3, 2)
    fleet.router.waiting_tokens = 10**6
    fleet.turns(3)
    assert len(fleet.placed) == 3
    fleet.router.waiting_tokens = 0
    fleet.turns(11)
    assert [each.stopped for each in fleet.placed] == [0, 0, 1]


def test_who_has_died_is_replaced_and_forgotten() -> None:
    fleet = started(2, 2, 2)
    fleet.placed[0].ended = "what ran on node 0 has ended with status -9"
    fleet.turns()
    assert (len(fleet.placed), fleet.set.count) == (3, 2)
    assert fleet.router.leaves == {"http://0": True, "http://1": False}
    assert "replica 1 has ended: what ran on node 0 has ended with status -9" in fleet.said
    fleet.router.open = {"http://0": 1}  # whose client is still to be told
    fleet.placed[2].url = "http://0"  # the next one may get the same port
    for _ in range(4):
        fleet.turns()
        assert fleet.router.leaves == {"http://0": False, "http://1": False}


def test_what_never_gets_ready_is_tried_less_and_less_often() -> None:
    fleet, at_s = Fleet(1, 1), list[float]()
    for _ in range(200):
        fleet.turns()
        if fleet.placed[-1].ended is None:
            fleet.placed[-1].ended = "a wrong model"
            at_s.append(fleet.now_s)
    pauses = [later - sooner for sooner, later in pairwise(at_s)]
    assert pauses[:4] == [3, 5, 9, 17]
    assert max(pauses) <= 61
    fleet = started(1, 1, 1)
    fleet.placed[0].ended = "killed"
    fleet.turns()
    assert len(fleet.placed) == 2, "one that was ready is replaced at once"


def test_what_never_gets_ready_is_tried_for_ever() -> None:
    fleet = Fleet(1, 1)
    for count in range(1, 1100):
        fleet.turns()
        assert len(fleet.placed) == count
        fleet.placed[-1].ended = "a wrong model"
        fleet.turns()
        fleet.now_s += 60


def test_without_a_router_replicas_stay_and_are_replaced() -> None:
    fleet = started(2, 3, 3)
    fleet.router.is_away, fleet.router.waiting_tokens = True, 10**6
    fleet.placed[1].ended = "killed"
    fleet.turns(50)
    assert (fleet.set.count, len(fleet.placed)) == (3, 4)
    assert not any(each.stopped for each in fleet.placed)
    fleet.router.is_away, fleet.router.waiting_tokens = False, 0
    fleet.become_ready(3)
    fleet.turns(3)
    assert {url for url, leaves in fleet.router.leaves.items() if not leaves} == {
        "http://0", "http://2", "http://3",
    }  # fmt: skip


def test_at_the_end_all_are_let_go() -> None:
    fleet = started(2, 2, 2)
    fleet.set.stop()
    assert all(fleet.router.leaves.values())
    assert [each.stopped for each in fleet.placed] == [1, 1]
    fleet.placed[0].ended = "in order"
    fleet.set.bury(fleet.now_s)
    assert fleet.set.count == 1
    fleet.set.kill()
    assert [each.killed for each in fleet.placed] == [0, 1]


def test_a_router_that_does_not_answer_is_spoken_of_once() -> None:
    said = list[str]()
    client = RouterClient("http://127.0.0.1:9", said.append)
    assert client.report() is client.report() is None
    assert len(said) == 1
    assert said[0].startswith("the router at http://127.0.0.1:9 does not take GET /fleet: ")
    with pytest.raises(ValueError, match="--router 8080 is not of the form http://HOST:PORT"):
        RouterClient("8080", said.append)
