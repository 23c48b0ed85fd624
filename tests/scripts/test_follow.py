"""Two machines, both on this one: a verb leads on the first, and `scripts.follow` holds the second's rank."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import httpx
import pytest

from recipes.build import node as nodes
from recipes.build.cluster import Cluster
from recipes.build.rank_process import ALONE
from recipes.schema.reader import load
from recipes.schema.recipe import Recipe
from tests.serving.server import PATIENCE_S, TINY, Server
from tests.serving.test_lost_ranks import followers, wait_for_end
from tests.test_imports import ROOT

RECIPE = (
    TINY,
    "parallel.tensor=2",
    "parallel.nodes=[127.0.0.1,127.0.0.1]",
    "device.compile=false",
    "device.threads=1",
    "server.step_timeout_s=300",
)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@contextmanager
def second_machine(port: str, *changes: str) -> Iterator[subprocess.Popen[str]]:
    """The agent of the second machine; it is killed if it has not ended."""
    node = subprocess.Popen(
        [sys.executable, "-m", "scripts.follow", *RECIPE, *changes],
        cwd=ROOT,
        env=os.environ | {"NODE_RANK": "1", "MASTER_PORT": port},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield node
    finally:
        node.kill()
        node.wait()
        assert node.stderr is not None
        node.stderr.close()


def generate(port: str, *changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.generate", *RECIPE, *changes, "--prompt", "12+7="],
        cwd=ROOT,
        env=os.environ | {"NODE_RANK": "0", "MASTER_PORT": port},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_two_machines_answer_together_and_end_together() -> None:
    port = free_port()
    with second_machine(port) as node:
        assert generate(port).stdout == "19\n"
        _, said = node.communicate(timeout=PATIENCE_S)
        assert node.returncode == 0, said
        assert "ranks 1 to 1 of 2 follow 127.0.0.1" in said
        assert "the leader has closed its engine" in said


def test_recipes_that_differ_are_named() -> None:
    port = free_port()
    with second_machine(port, "scheduler.num_slots=3"):
        done = generate(port)
        assert done.returncode == 2
        assert (
            "a rank cannot join: rank 1: scheduler.num_slots is 3 here, and 32 on the leader; make them equal"
            in done.stderr
        )


@pytest.mark.slow
def test_of_a_sweep_each_engine_is_followed_with_its_own_settings() -> None:
    port = free_port()
    with second_machine(port, "--in-turn") as agent:
        for num_slots in (3, 5):
            assert generate(port, f"scheduler.num_slots={num_slots}").stdout == "19\n"
        assert agent.poll() is None
        agent.terminate()
        _, said = agent.communicate(timeout=PATIENCE_S)
        assert agent.returncode == 128 + signal.SIGTERM, said
        assert said.count("the leader has closed its engine") <= 2
        assert said.count("follow 127.0.0.1") >= 2


class Ended:
    """Stands in for a rank, which has ended already, with the next of these statuses."""

    statuses: ClassVar[list[int]] = []

    def __init__(self, recipe: Recipe, rank: int, leader: str, device: str | None, *, adopts: bool) -> None:
        self.rank, self.status, self.ended = rank, self.statuses.pop(0), "in a test"

    def end(self, within_s: float = 0.0) -> None:
        pass


@pytest.mark.parametrize(
    ("in_turn", "statuses", "expected"),
    [(False, [0], 0), (False, [ALONE], ALONE), (True, [0, 0, ALONE], 0), (True, [ALONE], ALONE)],
)
def test_a_machine_ends_when_no_further_engine_comes(
    in_turn: bool, statuses: list[int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "RankProcess", Ended)
    monkeypatch.setattr(Ended, "statuses", statuses)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert nodes.hold(load(TINY, list(RECIPE[1:])), Cluster("test", 2, 1), in_turn=in_turn) == expected
    assert not statuses


def test_what_a_sweep_cannot_change_is_named() -> None:
    port = free_port()
    with second_machine(port, "--in-turn"):
        done = generate(port, "parallel.connect_timeout_s=90")
        assert done.returncode == 2
        assert (
            "parallel.connect_timeout_s is 120.0 here, and 90.0 on the leader; make them equal" in done.stderr
        )


def test_a_machine_without_a_leader_says_so() -> None:
    port = free_port()
    with second_machine(port, "parallel.connect_timeout_s=1") as node:
        _, said = node.communicate(timeout=PATIENCE_S)
        assert node.returncode == 4
        assert f"there is no leader at 127.0.0.1:{port}" in said


def test_a_leader_without_its_others_names_them() -> None:
    done = generate(free_port(), "parallel.connect_timeout_s=1")
    assert done.returncode == 2
    assert "of 2 ranks, 1 has not joined within 1 s" in done.stderr


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = generate(port)
    assert done.returncode == 2
    assert f"port {port}, at which the ranks of other machines join, cannot be used" in done.stderr
    assert "set MASTER_PORT to another on all machines" in done.stderr


@pytest.mark.parametrize(
    "lost",
    [
        "the second machine's rank",
        pytest.param("the engine", marks=pytest.mark.slow),
        pytest.param("the agent", marks=pytest.mark.slow),
    ],
)
def test_the_next_engine_serves_with_the_next_ranks(lost: str) -> None:
    port = free_port()
    environment = {"NODE_RANK": "0", "MASTER_PORT": port}
    with second_machine(port) as node:
        server = Server(*RECIPE, environment=environment).ready()
        engine, since = server.engine_pid, len(server.log)
        (rank,) = followers(node.pid)
        pid = {"the second machine's rank": rank, "the engine": engine, "the agent": node.pid}[lost]
        os.kill(pid, signal.SIGKILL)
        wait_for_end(rank)
        if lost == "the agent":
            with second_machine(port):
                check(server, since)
            return
        check(server, since)
        node.communicate(timeout=PATIENCE_S)
        assert node.returncode == 0


def check(server: Server, since: int) -> None:
    """The next engine is there, answers, and ends."""
    server.wait_for(r"ready .*process", since)
    body = {"prompt": "12+7=", "max_tokens": 5, "temperature": 0, "model": "tiny"}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert response.json()["choices"][0]["text"] == "19"
    assert server.close() == 0


def test_the_first_machine_is_to_lead() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.follow", *RECIPE],
        cwd=ROOT,
        env=os.environ | {"NODE_RANK": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "this machine is the first of 2 (parallel.nodes), which leads; start a verb here" in done.stderr
