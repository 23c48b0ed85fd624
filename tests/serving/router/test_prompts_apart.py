"""The real router before real servers, of which one computes prompts and others answer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.serving.router.under_fire import figure, fleet, wait, wait_ready
from tests.serving.server import TINY, Server
from tests.thorough import cases

pytestmark = pytest.mark.in_order

TRANSPORTS = cases(("shared_memory",), ("shared_memory", "tcp"))
WORDS = "the little green fox and the river "
SHORT = "348+275="


CERTIFICATES = Path(__file__).parents[1] / "certificates"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One of prompts, which is asked as a plain one too, and one of answers for each transport.

    They prove a secret to each other, and encrypt.
    """
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    secret = tmp_path_factory.mktemp("secret") / "pages"
    secret.write_text("a secret of these engines of enough bytes\n")
    proofs = [
        f"server.pages_key_file={secret}",
        f"server.pages_tls_certificate={CERTIFICATES / 'engine.pem'}",
        f"server.pages_tls_private_key={CERTIFICATES / 'engine.key'}",
        f"server.pages_tls_authority={CERTIFICATES / 'authority.pem'}",
    ]
    found = {"prompts": Server(TINY, f"server.pages_at={endpoint}", *proofs)}
    for each in TRANSPORTS:
        found[each] = Server(
            TINY, f"server.prompt_replicas=[{endpoint}]", f"server.page_transport={each}", *proofs
        )
    try:
        yield {name: each.ready() for name, each in found.items()}
    finally:
        for each in found.values():
            each.process.terminate()
        for each in found.values():
            each.close()


def asked(url: str, prompt: str) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ask(url: str, prompt: str) -> Any:
    (choice,) = asked(url, prompt)["choices"]
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
    """A plain server is asked afterwards: it shall not have computed what the other one fetches."""
    plain, answers = servers["prompts"].url, servers[transport]
    router = routed(servers, transport, "always")
    try:
        first = f"{transport} first {WORDS * 20}"
        answer = asked(router.url, first)
        told = fleet(router.url)
        (choice,) = told["choices"]
        assert (told["split"], choice["replica"]) == (1, answers.url)
        assert choice["prompt_at"] == plain
        num_pages = (choice["prompt_tokens"] - 1) // 16
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16 * num_pages
        wait(lambda: figure(answers, "cb_arrived_pages_total") == num_pages)
        assert figure(answers, "cb_missed_pages_total") == 0
        assert answer["choices"] == asked(plain, first)["choices"]

        assert ask(router.url, SHORT) == ask(plain, SHORT)
        told = fleet(router.url)
        assert (told["split"], told["choices"][0]["prompt_at"]) == (1, None), "a short prompt stays"

        prompts = texts(transport, 10)

        def kill() -> None:
            wait(lambda: fleet(router.url)["split"] > 1)  # another beside the first
            os.kill(servers["prompts"].engine_pid, signal.SIGKILL)

        started = figure(servers["prompts"], "cb_engine_restarts_total")
        killer = threading.Thread(target=kill)
        with ThreadPoolExecutor(8) as threads:
            killer.start()
            said = [*threads.map(lambda each: ask(router.url, each), prompts)]
        killer.join()
        # The router may take the killed engine for ready until it hears of its end
        wait(lambda: figure(servers["prompts"], "cb_engine_restarts_total") > started)
        wait(lambda: figure(answers, "cb_kv_page_leak_total") == 0)
        wait_ready(router.url, 2)  # it comes back, and so does what it computes
        assert said == [ask(plain, each) for each in prompts], "no answer is lost, cut or another"
        before = figure(answers, "cb_arrived_pages_total")

        def comes_back() -> bool:
            ask(router.url, f"{time.monotonic()} {WORDS * 20}")
            return figure(answers, "cb_arrived_pages_total") > before

        wait(comes_back)
    finally:
        router.close()


@pytest.mark.slow
def test_a_router_says_which_were_split_and_why(servers: dict[str, Server]) -> None:
    plain = servers["prompts"].url
    router = routed(servers, TRANSPORTS[0], "cost")
    try:
        alone = "alone " + WORDS * 20
        said = ask(router.url, alone)
        (choice,) = fleet(router.url)["choices"]
        assert choice["prompt_at"] is None, "nothing else runs there"
        assert choice["cost_here"] == choice["prompt_tokens"] < choice["cost_there"]
        assert said == ask(plain, alone)

        prompts = texts("together", 12)
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = [*threads.map(lambda each: ask(router.url, each), prompts)]
        told = fleet(router.url)
        assert answers == [ask(plain, each) for each in prompts]
        for each in told["choices"]:
            is_cheaper = each["cost_there"] < each["cost_here"]
            assert is_cheaper == (each["prompt_at"] == plain), each
        assert 0 < told["split"] < len(prompts)
    finally:
        router.close()


@pytest.mark.slow
def test_a_server_says_whose_name_it_does_not_know(servers: dict[str, Server]) -> None:
    answer = httpx.post(
        f"{servers[TRANSPORTS[0]].url}/v1/completions",
        json={"model": "tiny", "prompt": WORDS},
        headers={"x-prompt-replica": "tcp://192.0.2.1:1"},
        timeout=PATIENCE_S,
    )
    assert answer.status_code == 400
    assert "x-prompt-replica is not one of server.prompt_replicas" in answer.text


@pytest.mark.slow
def test_an_engine_of_prompts_that_is_stopped_is_a_miss(servers: dict[str, Server]) -> None:
    """Its connection stays open, and nothing comes over it; its server replaces it."""
    plain, answers = servers["prompts"], servers[TRANSPORTS[0]]
    said = httpx.get(f"{answers.url}/server_info", timeout=PATIENCE_S).json()
    (endpoint,) = said["recipe"]["server"]["prompt_replicas"]
    prompt, stopped = f"stopped {WORDS * 20}", plain.engine_pid
    missed = figure(answers, "cb_missed_pages_total")
    os.kill(stopped, signal.SIGSTOP)
    answer = httpx.post(
        f"{answers.url}/v1/completions",
        json={"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True},
        headers={"x-prompt-replica": endpoint},
        timeout=PATIENCE_S,
    )
    wait(lambda: figure(answers, "cb_missed_pages_total") > missed)  # told with the next sign of life
    wait(lambda: plain.engine_pid != stopped)
    (choice,) = answer.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ask(plain.url, prompt)
