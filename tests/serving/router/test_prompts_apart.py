"""The real router before real servers, of which one computes prompts and others answer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.serving.router.under_fire import figure, fleet, wait, wait_ready
from tests.serving.server import PATIENCE_S, TINY, Server
from tests.serving.test_prompts_apart import free_port

TRANSPORTS = ("tcp", "shared_memory")
WORDS = "the little green fox and the river "
SHORT = "348+275="


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    """A plain one, one of prompts, and one of answers for each transport."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    found = {"plain": Server(TINY), "prompts": Server(TINY, f"server.pages_at={endpoint}")}
    for each in TRANSPORTS:
        found[each] = Server(TINY, f"server.prompt_replicas=[{endpoint}]", f"server.page_transport={each}")
    try:
        yield {name: each.ready() for name, each in found.items()}
    finally:
        for each in found.values():
            each.process.terminate()
        for each in found.values():
            each.close()


def ask(url: str, prompt: str) -> Any:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["text"], choice["finish_reason"]


def texts(name: str, count: int) -> list[str]:
    """Long prompts that share no page."""
    return [f"{name} {number} {WORDS * 20}" for number in range(count)]


def routed(servers: dict[str, Server], transport: str, split: str) -> Server:
    urls = (servers["prompts"].url, servers[transport].url)
    behind = [option for url in urls for option in ("--replica", url)]
    found = Server(*behind, "--recipe", TINY, "--split", split, verb="scripts.route")
    wait_ready(found.url, len(urls))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_answers_are_those_of_a_plain_server_also_when_prompts_are_killed(
    servers: dict[str, Server], transport: str
) -> None:
    plain, answers = servers["plain"].url, servers[transport]
    router = routed(servers, transport, "always")
    try:
        first = f"{transport} first {WORDS * 20}"
        assert ask(router.url, first) == ask(plain, first)
        told = fleet(router.url)
        (choice,) = told["choices"]
        assert (told["split"], choice["replica"]) == (1, answers.url)
        assert choice["prompt_at"] == servers["prompts"].url
        wait(lambda: figure(answers, "cb_arrived_pages_total") == (choice["prompt_tokens"] - 1) // 16)

        assert ask(router.url, SHORT) == ask(plain, SHORT)
        told = fleet(router.url)
        assert (told["split"], told["choices"][0]["prompt_at"]) == (1, None), "a short prompt stays"

        asked = texts(transport, 16)
        alone = [ask(plain, each) for each in asked]

        def kill() -> None:
            wait(lambda: fleet(router.url)["split"] > 1)  # beside the first
            os.kill(servers["prompts"].engine_pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        with ThreadPoolExecutor(8) as threads:
            killer.start()
            assert [*threads.map(lambda each: ask(router.url, each), asked)] == alone
        killer.join()
        wait(lambda: figure(answers, "cb_kv_page_leak_total") == 0)
        wait_ready(router.url, 2)  # it comes back
    finally:
        router.close()


@pytest.mark.slow
def test_a_router_says_which_were_split_and_why(servers: dict[str, Server]) -> None:
    router = routed(servers, "tcp", "cost")
    try:
        alone = "alone " + WORDS * 20
        assert ask(router.url, alone) == ask(servers["plain"].url, alone)
        (choice,) = fleet(router.url)["choices"]
        assert choice["prompt_at"] is None, "nothing else runs there"
        assert choice["cost_here"] == choice["prompt_tokens"] < choice["cost_there"]

        asked = texts("together", 20)
        with ThreadPoolExecutor(len(asked)) as threads:
            said = [*threads.map(lambda each: ask(router.url, each), asked)]
        told = fleet(router.url)
        assert said == [ask(servers["plain"].url, each) for each in asked]
        for each in told["choices"]:
            is_cheaper = each["cost_there"] < each["cost_here"]
            assert is_cheaper == (each["prompt_at"] == servers["prompts"].url), each
        assert 0 < told["split"] < len(asked)
    finally:
        router.close()
