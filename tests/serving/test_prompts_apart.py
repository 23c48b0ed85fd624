"""Two real servers: one computes prompts, one answers. What does a client get when the first is killed?"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.serving.server import TINY, Server

ANSWER_S = 120.0
WORDS = "the little green fox and the river "


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server, str]]:
    """The one of prompts, the one that answers, and the endpoint between them."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    prompts = Server(TINY, f"server.pages_at={endpoint}")
    answers = Server(TINY, f"server.prompt_replicas=[{endpoint}]", "server.page_transport=shared_memory")
    try:
        yield prompts.ready(), answers.ready(), endpoint
    finally:
        answers.close()
        prompts.close()


def ask(server: Server, prompt: str, endpoint: str = "") -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    headers = {"x-prompt-replica": endpoint} if endpoint else {}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def counted(server: Server, name: str) -> int:
    text = httpx.get(f"{server.url}/metrics", timeout=ANSWER_S).text
    found = re.search(rf"^cb_{name}\{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert found, name
    return int(float(found[1]))


def until(holds) -> None:
    until_s = time.monotonic() + ANSWER_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.05)


@pytest.mark.slow
def test_answers_are_those_of_one_server_and_a_kill_costs_time_alone(servers) -> None:
    prompts, answers, endpoint = servers
    texts = [f"{number} {WORDS * 20}" for number in range(16)]
    alone = [ask(prompts, text)["choices"] for text in texts]

    first = ask(answers, texts[0], endpoint)
    assert first["choices"] == alone[0]
    num_tokens = first["usage"]["prompt_tokens"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == (num_tokens - 1) // 16 * 16
    until(lambda: counted(answers, "arrived_pages_total") == (num_tokens - 1) // 16)
    assert counted(answers, "missed_pages_total") == 0

    # kill -9 of the engine of prompts, while it computes some
    found = re.search(r"ready after .*, process (\d+)", "\n".join(prompts.log))
    assert found
    killer = threading.Timer(0.05, os.kill, (int(found[1]), signal.SIGKILL))
    with ThreadPoolExecutor(8) as threads:
        killer.start()
        said = list(threads.map(lambda text: ask(answers, text, endpoint), texts[1:]))
    killer.join()
    assert [each["choices"] for each in said] == alone[1:], "no answer is lost, cut or another"
    until(lambda: counted(answers, "kv_page_leak_total") == 0)

    # it comes back, and so does what it computes
    until(lambda: httpx.get(f"{prompts.url}/ready", timeout=ANSWER_S).status_code == 200)
    before = counted(answers, "arrived_pages_total")

    def comes_back() -> bool:
        ask(answers, f"{time.monotonic()} {WORDS * 20}", endpoint)
        return counted(answers, "arrived_pages_total") > before

    until(comes_back)


@pytest.mark.slow
def test_a_server_says_whose_name_it_does_not_know(servers) -> None:
    _, answers, _ = servers
    body = {"model": "tiny", "prompt": WORDS}
    answer = httpx.post(
        f"{answers.url}/v1/completions",
        json=body,
        headers={"x-prompt-replica": "tcp://192.0.2.1:1"},
        timeout=ANSWER_S,
    )
    assert answer.status_code == 400
    assert "x-prompt-replica is none of this server's server.prompt_replicas" in answer.text
