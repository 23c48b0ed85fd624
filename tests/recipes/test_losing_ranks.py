"""A rank that is lost while the engine starts is told, and ends its leader only where that cannot go on."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from continuous_batching.recording.listeners import Listeners, RankLost
from recipes.cluster import node
from recipes.cluster import ranks as ranks_module
from recipes.cluster.cluster import Cluster
from recipes.cluster.ranks import LOST, Ranks
from recipes.schema.reader import load
from recipes.schema.recipe import Recipe
from serving.engine import main
from tests.patience import PATIENCE_S

TINY = "recipes/tiny/cpu.yaml"


class Leader:
    """The ranks of an engine that starts, as its leader sees them, and the other end of the only one."""

    def __init__(self) -> None:
        near, self.rank = socket.socketpair()
        self.has_reacted = threading.Event()
        self.ranks = object.__new__(Ranks)
        self.ranks.ends_process, self.ranks._is_building = False, True
        self.ranks._processes, self.ranks._end = [], lambda: None
        self.ranks._listeners = Listeners({"rank 1": near}, 20.0, self._lost, 1800.0)

    def _lost(self, why: str) -> None:
        self.ranks._lost(why)
        self.has_reacted.set()


@pytest.fixture
def leader() -> Iterator[Leader]:
    found = Leader()
    yield found
    found.rank.close()
    found.ranks._listeners.close()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which this process would have ended."""
    found: list[int] = []
    monkeypatch.setattr(os, "_exit", found.append)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    return found


def test_a_build_that_fails_with_a_rank_raises_and_ends_no_process(leader: Leader, exits: list[int]) -> None:
    def build() -> NoReturn:
        with leader.ranks.building():
            leader.rank.close()
            raise RuntimeError("a collective has failed")

    with pytest.raises(RankLost, match="rank 1 has ended"):
        build()
    assert leader.has_reacted.wait(PATIENCE_S)
    assert exits == []


def test_a_build_that_waits_for_a_lost_rank_ends_the_process(
    leader: Leader, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "_GRACE_S", 0.05)
    with leader.ranks.building():
        leader.rank.close()
        assert leader.has_reacted.wait(PATIENCE_S)
        assert exits == [LOST]


def test_a_rank_lost_before_the_engine_serves_ends_it(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the server would say that it is ready, and its first request would fail."""

    def ended(status: int) -> NoReturn:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", ended)
    with leader.ranks.building():
        pass
    leader.rank.close()
    assert leader.has_reacted.wait(PATIENCE_S)
    worker: Any = SimpleNamespace(serve=lambda: None)
    with pytest.raises(SystemExit) as end:
        main._serve(worker, leader.ranks)
    assert end.value.code == LOST


@pytest.mark.parametrize(
    ("nodes", "threads"), [("[127.0.0.1,127.0.0.1]", 2), ("[10.0.0.1,10.0.0.2]", 4)], ids=["one", "two"]
)
def test_the_ranks_of_all_machines_of_a_host_divide_its_cores(
    nodes: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the machine that follows as on the leader."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(ranks_module, "usable_cores", lambda: 8)
    monkeypatch.setattr(node, "stay_near", lambda *_: None)
    monkeypatch.setattr(node.signal, "signal", lambda *_: None)
    told: list[Recipe] = []

    class Ended:
        status, ended, rank = 0, "with status 0", 2

        def __init__(self, recipe: Recipe, *_: object) -> None:
            told.append(recipe)

        def end(self, within_s: float = 0.0) -> None:
            """It has ended."""

    monkeypatch.setattr(node, "RankProcess", Ended)
    recipe = load(TINY, ["parallel.tensor=4", f"parallel.nodes={nodes}", "device.threads=null"])
    assert node.hold(recipe, Cluster("a test", 2, 1, "10.0.0.1", 29400)) == 0
    assert [each.device.threads for each in told] == [threads] * 2
