"""`kill -9` of what answers, under load: nobody is left waiting, or believes in half an answer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import aiohttp
import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.serving.router.resumed import Outcome, session
from tests.serving.router.under_fire import (
    NUM_CLIENTS,
    Tally,
    expected,
    figure,
    fire,
    fleet,
    router,
    send,
    wait,
    wait_ready,
)
from tests.serving.server import TINY, Server
from tests.thorough import THOROUGH, cases

RUNS = cases(1, 50)
TOLD_S = 5.0  # claimed only where the machine has nothing else to do

pytestmark = [pytest.mark.slow, pytest.mark.timeout(cases(600, 86_400))]


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Server]]:
    """Two, each of which a test may replace by another at the same port."""
    servers = [Server(TINY, port=free_port()) for _ in range(2)]
    for each in servers:
        each.ready()
    yield servers
    for each in servers:
        each.process.kill()
        each.wait()


@pytest.fixture(scope="module")
def whole(replicas: list[Server]) -> list[Outcome]:
    return expected(replicas[0].url)


def check(tally: Tally, runs: int) -> None:
    print(f"{runs} runs: {dict(tally.outcomes)}, told within {max(tally.told_s, default=0):.2f} s")
    assert not tally.wrong, tally.wrong[:3]
    assert tally.outcomes.total() == runs * NUM_CLIENTS
    if THOROUGH:
        assert max(tally.told_s, default=0.0) < TOLD_S


@pytest.mark.parametrize("what", ["replica", "engine"])
def test_a_replica_or_its_engine_is_killed(what: str, replicas: list[Server], whole: list[Outcome]) -> None:
    """What had begun is told, and all else is answered by the other replica, once."""
    front, tally = router(replicas), Tally()
    for run in range(RUNS):
        number = run % 2
        victim, other, before = replicas[number], replicas[1 - number], tally.outcomes["whole"]
        answered, since, pid = figure(other, "vllm:request_success_total"), len(victim.log), victim.engine_pid

        def kill(victim: Server = victim, pid: int = pid) -> None:
            os.kill(victim.process.pid if what == "replica" else pid, signal.SIGKILL)

        fire(front.url, whole, kill, tally, after=3 + 20 * run % 160)
        if what == "replica":
            assert figure(other, "vllm:request_success_total") - answered <= tally.outcomes["whole"] - before
            victim.wait()
            replicas[number] = Server(TINY, port=victim.port).ready()
        else:
            victim.wait_for(r"ready .*process \d+", since)
        wait_ready(front.url, 2)
    check(tally, RUNS)
    assert tally.outcomes["whole"] > 0
    assert tally.outcomes["broken"] == 0, "the router tells why"
    assert fleet(front.url)["open"] == 0
    front.close()


def test_a_router_is_killed(replicas: list[Server], whole: list[Outcome]) -> None:
    """Its clients see that their connections break, and the replicas give their slots back."""
    tally, run = Tally(), 0

    def num_aborted() -> int:
        return sum(figure(each, "cb_aborts_total") for each in replicas)

    before = num_aborted()
    # A kill may come when all have been answered
    while run < RUNS or (num_aborted() == before and run < RUNS + 10):
        front = router(replicas)
        fire(front.url, whole, front.process.kill, tally, after=3 + 20 * run % 160)
        front.wait()
        for each in replicas:
            wait(lambda each=each: not figure(each, "vllm:num_requests_running"))
            wait(lambda each=each: not figure(each, "vllm:num_requests_waiting"))
        run += 1
    check(tally, run)
    assert tally.outcomes["broken"] > 0
    assert num_aborted() > before


def test_all_replicas_are_restarted_in_turn(replicas: list[Server], whole: list[Outcome]) -> None:
    """Drained, stopped, started and resumed, while clients go on asking: nobody sees anything of it."""
    front, is_over, tally = router(replicas), False, Tally()

    async def client(http: aiohttp.ClientSession, number: int) -> None:
        while not is_over:
            await send(http, front.url, number, whole, tally)
            await asyncio.sleep(0.1)

    def restart_all() -> None:
        nonlocal is_over
        try:
            for number, old in enumerate(replicas):
                seen = tally.outcomes.total()
                httpx.post(f"{front.url}/fleet/drain?{old.url}", timeout=PATIENCE_S).raise_for_status()
                wait(lambda number=number: fleet(front.url)["replicas"][number]["open"] == 0)
                assert old.close() == 0
                replicas[number] = Server(TINY, port=old.port).ready()
                wait_ready(front.url, len(replicas))
                httpx.post(f"{front.url}/fleet/resume?{old.url}", timeout=PATIENCE_S).raise_for_status()
                wait(lambda seen=seen: tally.outcomes.total() > seen + 8)
        finally:
            is_over = True

    async def run() -> None:
        async with session() as http:
            clients = [asyncio.ensure_future(client(http, number)) for number in range(4)]
            await asyncio.to_thread(restart_all)
            await asyncio.gather(*clients)

    asyncio.run(run())
    assert {*tally.outcomes} == {"whole"}
    assert all(each["sent"] for each in fleet(front.url)["replicas"])
    front.close()
