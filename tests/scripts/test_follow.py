"""Two machines, both on this one: a verb leads on the first, and `scripts.follow` holds the second's rank."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from serving.llm import LLM, SamplingParams
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.serving import warm
from tests.serving.server import TINY, Server
from tests.serving.test_lost_ranks import followers, wait_for_end
from tests.test_imports import ROOT

RECIPE = (
    *(TINY, "parallel.tensor=2", "parallel.nodes=[127.0.0.1,127.0.0.1]", "device.compile=false"),
    *("device.threads=1", "server.step_timeout_s=300"),
)


Agent = warm.Process | subprocess.Popen[str]


@contextmanager
def second_machine(port: str, *changes: str) -> Iterator[Agent]:
    """The agent of the second machine; it is killed if it has not ended."""
    asked, variables = [*RECIPE, *changes], os.environ | {"NODE_RANK": "1", "MASTER_PORT": port}
    node: Agent
    if warm.is_possible():
        node = warm.start("scripts.follow", asked, variables, {})
    else:
        command = [sys.executable, "-m", "scripts.follow", *asked]
        node = subprocess.Popen(command, cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True)
    try:
        yield node
    finally:
        node.kill()
        node.wait()
        assert node.stderr is not None
        node.stderr.close()


def end_of(node: Agent) -> str:
    """What it has said, once it has ended."""
    node.wait(PATIENCE_S)
    assert node.stderr is not None
    return node.stderr.read()


def lead(port: str, monkeypatch: pytest.MonkeyPatch, *changes: str) -> str:
    """What an engine answers that this process leads, until it is closed."""
    monkeypatch.setenv("NODE_RANK", "0")
    monkeypatch.setenv("MASTER_PORT", port)
    llm = LLM(*RECIPE, *changes)
    try:
        (output,) = llm.generate("12+7=", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    finally:
        llm.engine.observer.close()
        del llm
        gc.collect()  # the store listens at its port while anything holds it
    return output.outputs[0].text


@pytest.mark.slow
def test_two_machines_answer_together_and_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(free_port())
    with second_machine(port) as node:
        assert lead(port, monkeypatch) == "19"
        said = end_of(node)
        assert node.returncode == 0, said
        assert "ranks 1 to 1 of 2 follow 127.0.0.1" in said
        assert "the leader has closed its engine" in said


@pytest.mark.slow
def test_recipes_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(free_port())
    differ = (
        "a rank cannot join: rank 1: scheduler.num_slots is 3 here, and 32 on the leader; make them equal"
    )
    with second_machine(port, "scheduler.num_slots=3"), pytest.raises(OSError, match=differ):
        lead(port, monkeypatch)


def test_a_machine_without_a_leader_says_so() -> None:
    port = str(free_port())
    with second_machine(port, "parallel.connect_timeout_s=1") as node:
        said = end_of(node)
        assert node.returncode == 4
        assert f"there is no leader at 127.0.0.1:{port}" in said


def test_a_leader_without_its_others_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="of 2 ranks, 1 has not joined within 1 s"):
        lead(str(free_port()), monkeypatch, "parallel.connect_timeout_s=1")


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        named = f"port {port}, at which the ranks of other machines join, cannot be used.*"
        with pytest.raises(OSError, match=f"{named}set MASTER_PORT to another on all machines"):
            lead(port, monkeypatch)


@pytest.mark.slow
def test_the_next_engine_serves_with_the_next_ranks() -> None:
    """Where the second machine loses its rank, then the first its engine, then the second its agent."""
    port = str(free_port())
    with second_machine(port) as agent:
        server = Server(*RECIPE, environment={"NODE_RANK": "0", "MASTER_PORT": port}).ready()
        for lost in ("the rank", "the engine"):
            engine, since = server.engine_pid, len(server.log)
            (rank,) = followers(agent.pid)
            os.kill({"the rank": rank, "the engine": engine}[lost], signal.SIGKILL)
            wait_for_end(rank)
            check(server, since)
        since = len(server.log)
        (rank,) = followers(agent.pid)
        agent.kill()
        wait_for_end(rank)
    with second_machine(port) as next_agent:
        check(server, since)
        assert server.close() == 0
        assert next_agent.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_an_answer_ends_whole_where_both_machines_are_asked_to_end() -> None:
    """As by the end of a whole job: the leader needs the second machine's rank until it has answered."""
    port, drain = str(free_port()), f"server.drain_s={PATIENCE_S:g}"
    body = {"prompt": "12+7=", "max_tokens": 200, "ignore_eos": True, "model": "tiny", "stream": True}
    with second_machine(port, drain) as agent:
        server = Server(*RECIPE, drain, environment={"NODE_RANK": "0", "MASTER_PORT": port}).ready()
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            agent.send_signal(signal.SIGTERM)
            server.process.terminate()
            said = [line for line in lines if line]
        assert said[-1] == "data: [DONE]", said[-1]
        assert '"finish_reason":"length"' in "".join(said)
        assert server.wait() == 0
        log = end_of(agent)
        assert agent.returncode == 0, log
        assert "the leader has closed its engine" in log


def test_a_second_signal_ends_a_machine_that_waits_for_its_leader() -> None:
    with second_machine(str(free_port()), f"server.drain_s={PATIENCE_S:g}") as agent:
        assert agent.stderr is not None
        assert any("ranks 1 to 1 of 2 follow" in line for line in agent.stderr)
        agent.send_signal(signal.SIGTERM)
        assert any("a second signal does not wait" in line for line in agent.stderr)
        agent.send_signal(signal.SIGINT)
        assert agent.wait(PATIENCE_S) in (128 + signal.SIGINT, 128 + signal.SIGTERM)


def check(server: Server, since: int) -> None:
    """The next engine is there, and answers."""
    server.wait_for(r"ready .*process", since)
    body = {"prompt": "12+7=", "max_tokens": 5, "temperature": 0, "model": "tiny"}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert response.json()["choices"][0]["text"] == "19"


def test_the_first_machine_is_to_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_RANK", "0")
    done = warm.completed("scripts.follow", *RECIPE)
    assert done.returncode == 2
    assert "this machine is the first of 2 (parallel.nodes), which leads; start a verb here" in done.stderr
