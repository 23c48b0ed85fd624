"""A rank that ends or hangs ends the engine within seconds; clients are told, and the next engine serves."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.engine.messages import Ready, Starting, decode_from_engine
from serving.engine.process import EngineProcess
from serving.engine.worker import BEAT_S
from tests.patience import PATIENCE_S
from tests.serving.router.under_fire import figure
from tests.serving.server import TINY, Server
from tests.thorough import cases

pytestmark = pytest.mark.in_order

TENSOR, STAGES = "parallel.tensor=2", "parallel.pipeline=2"
OPTIONS = (
    "device.compile=false",
    "device.threads=1",
    "cache.prefix_sharing=false",
    *("scheduler.num_slots=8", "scheduler.max_batch_tokens=16"),  # so that a prompt takes many steps
)
STEPS = "cb_steps_total"
NO_LIMIT = "server.step_timeout_s=300"
FOLLOWER = "recipes.assembly.follower_process"
COMM = FOLLOWER.rpartition(".")[2][:15]  # a fork's name, see `warm`; the system keeps so much of it


def parents_of_ranks() -> dict[int, int]:
    """Every rank of this machine that does not lead, and the process that has started it."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = re.search(r"^PPid:\s*(\d+)$", (entry / "status").read_text(), re.MULTILINE)
            command = (entry / "cmdline").read_text() + (entry / "comm").read_text()
        except OSError:  # it has just ended
            continue
        if parent and (FOLLOWER in command or COMM in command):
            found[int(entry.name)] = int(parent[1])
    return found


def followers(leader: int) -> list[int]:
    return [rank for rank, parent in parents_of_ranks().items() if parent == leader]


def ranks_of(server: Server, but: int) -> list[int]:
    """The ranks that follow an engine of this server, but for those of engine `but`."""
    ranks = parents_of_ranks().items()
    return [rank for rank, leader in ranks if is_child_of(leader, server.process.pid) and leader != but]


def is_child_of(pid: int, parent: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return f"PPid:\t{parent}\n" in status


def wait_for_end(pid: int) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until_s, f"process {pid} is still there"
        time.sleep(0.02)


def stream(client: httpx.Client, prompt: str, max_tokens: int) -> Iterator[dict[str, Any]]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "model": "tiny"}
    with client.stream("POST", "/v1/completions", json=body, timeout=PATIENCE_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


@pytest.fixture(scope="module", params=cases((TENSOR,), (TENSOR, STAGES)))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """What follows leads it from its start to its end by a kill."""
    # A spare process has ranks of its own, one of which would be followed by another without a word
    served = Server(TINY, request.param, *OPTIONS, NO_LIMIT, "server.spare_engine=false").ready()
    yield served
    if served.process.poll() is None:  # a test has failed, or was not asked for
        assert served.close() == 0


def ask(server: Server) -> str:
    body = {"prompt": "12+7=", "max_tokens": 5, "temperature": 0, "model": "tiny"}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def lose(server: Server, number: signal.Signals, *, leader: bool = False) -> str:
    """A rank gets a signal while an answer is streamed; what its client was told, and the log says."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        events = stream(client, "One day", 1900)
        assert "choices" in next(events)
        with replaced(server, number, leader=leader):
            last = [event for event in events if "choices" not in event][-1]
    return last["error"]["message"]


@contextmanager
def replaced(server: Server, number: signal.Signals, *, leader: bool = False) -> Iterator[None]:
    """A rank gets a signal; afterwards all ranks have ended, and those of another engine serve."""
    engine = server.engine_pid
    (follower,) = followers(engine)
    since, began_s = len(server.log), time.monotonic()
    os.kill(engine if leader else follower, number)
    yield
    told_s = time.monotonic() - began_s
    wait_for_end(follower)
    wait_for_end(engine)
    print(f"{number.name}: told after {told_s:.2f} s, all ended after {time.monotonic() - began_s:.2f} s")
    server.wait_for(r"ready .*process", since)
    assert server.engine_pid != engine
    assert ask(server) == "19"


@pytest.mark.parametrize("_", range(cases(1, 20)))
def test_the_death_of_a_rank_in_a_step_is_told_by_its_name(server: Server, _: int) -> None:
    (follower,) = followers(server.engine_pid)
    told = lose(server, signal.SIGKILL)
    assert "the engine's process ended with status 70: " in told
    assert f"rank 1 (process {follower} on " in told


@pytest.mark.parametrize("_", range(cases(1, 20)))
@pytest.mark.parametrize("leader", cases((True,), (False, True)))
def test_the_death_of_a_rank_in_a_prompt_is_told_by_its_name(server: Server, leader: bool, _: int) -> None:
    (follower,) = followers(server.engine_pid)
    prompt, first, num_asked = [300] * 1900, steps_at_rest(server), figure(server, "cb_samples_total")

    def asked() -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, "model": "tiny"}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)

    with ThreadPoolExecutor(4) as threads:
        # Four prompts of a hundred steps, of which the first few have begun
        answers = [threads.submit(asked) for _ in range(4)]
        until_s = time.monotonic() + PATIENCE_S
        while figure(server, STEPS) < first + 3 or figure(server, "cb_samples_total") < num_asked + 4:
            assert time.monotonic() < until_s, "they do not begin"
            time.sleep(0.002)
        with replaced(server, signal.SIGKILL, leader=leader):
            told = [each.result() for each in answers]
    assert {each.status_code for each in told} == {503}
    said = "ended by signal 9" if leader else f"rank 1 (process {follower} on "
    assert all(said in each.json()["error"]["message"] for each in told)


def steps_at_rest(server: Server) -> int:
    """The steps of requests that have ended, of which a beat may still have to tell."""
    told, until_s = figure(server, STEPS), time.monotonic() + PATIENCE_S
    while True:
        time.sleep(2 * BEAT_S)
        if (told_since := figure(server, STEPS)) == told:
            return told
        assert time.monotonic() < until_s, "there is no rest"
        told = told_since


@pytest.mark.parametrize("_", range(cases(1, 20)))
def test_ranks_that_end_while_the_engine_is_idle_and_while_the_next_is_built_are_followed_by_others(
    server: Server, _: int
) -> None:
    engine, since = server.engine_pid, len(server.log)
    (follower,) = followers(engine)
    os.kill(follower, signal.SIGKILL)
    server.wait_for(rf"rank 1 \(process {follower} on .*\) has ended", since)
    wait_for_end(engine)
    until_s = time.monotonic() + PATIENCE_S
    while not (new := ranks_of(server, but=engine)):
        assert time.monotonic() < until_s
    since = len(server.log)
    os.kill(new[0], signal.SIGKILL)
    server.wait_for("rank 1 .*has ended|a spare rank has ended", since)  # it may have been taken by then
    server.wait_for(r"ready .*process", since)
    assert ask(server) == "19"


def test_a_server_that_is_killed_leaves_no_rank_behind(server: Server) -> None:
    (follower,) = followers(server.engine_pid)
    server.process.kill()
    server.wait()
    wait_for_end(follower)


@pytest.mark.parametrize("_", range(cases(1, 20)))
@pytest.mark.parametrize("way", cases((STAGES,), (TENSOR, STAGES)))
def test_a_rank_that_is_stopped_is_named(way: str, _: int) -> None:
    server = Server(TINY, way, *OPTIONS, "server.step_timeout_s=3").ready()
    try:
        (follower,) = followers(server.engine_pid)
        told = lose(server, signal.SIGSTOP)
        assert f"rank 1 (process {follower} on " in told
        assert "has said nothing for" in told
    finally:
        assert server.close() == 0


@pytest.mark.slow
def test_a_rank_that_has_waited_follows_an_engine_that_is_begun_later() -> None:
    """As beside a spare process, of which only the priority differs."""

    async def test() -> None:
        patient = f"parallel.connect_timeout_s={PATIENCE_S:g}"  # they may import at the lowest priority
        engine = await EngineProcess.started([TINY, TENSOR, *OPTIONS, patient])
        try:
            assert engine.pid is not None
            while not (waiting := followers(engine.pid)):
                await asyncio.sleep(0.02)
            engine.hurry()
            engine.wake("")
            stages: list[str] = []
            while not isinstance(said := decode_from_engine(await engine.socket.recv()), Ready):
                assert isinstance(said, Starting)
                stages.append(said.doing)
            assert followers(engine.pid) == waiting
            assert "gathering its ranks" in stages
        finally:
            await engine.end()
        wait_for_end(waiting[0])

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))
