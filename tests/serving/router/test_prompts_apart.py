"""The real router before a real server that computes prompts and one that answers, which prove a secret."""

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

WORDS = "the little green fox and the river "
SHORT = "348+275="
CERTIFICATES = Path(__file__).parents[1] / "certificates"


@pytest.fixture(params=cases(("shared_memory",), ("shared_memory", "tcp")))
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Server]]:
    """One of prompts, which is asked as a plain one too, and one of answers; and a router before both."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    secret = tmp_path / "pages"
    secret.write_text("a secret of these engines of enough bytes\n")
    proofs = [
        f"server.pages_key_file={secret}",
        f"server.pages_tls_certificate={CERTIFICATES / 'engine.pem'}",
        f"server.pages_tls_private_key={CERTIFICATES / 'engine.key'}",
        f"server.pages_tls_authority={CERTIFICATES / 'authority.pem'}",
    ]
    asks = f"server.prompt_replicas=[{endpoint}]", f"server.page_transport={request.param}"
    asks += ("server.page_wait_s=300",)
    found = [Server(TINY, f"server.pages_at={endpoint}", *proofs), Server(TINY, *asks, *proofs)]
    try:
        behind = [option for each in found for option in ("--replica", each.ready().url)]
        found.append(Server(*behind, "--recipe", TINY, "--split", "always", verb="scripts.route"))
        wait_ready(found[-1].url, 2)
        yield found
    finally:
        for each in found:
            each.process.terminate()
        for each in found:
            each.close()


def asked(server: Server, prompt: str) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ask(server: Server, prompt: str) -> Any:
    (choice,) = asked(server, prompt)["choices"]
    return choice["text"], choice["finish_reason"]


@pytest.mark.slow
def test_answers_are_those_of_a_plain_server_also_when_prompts_are_killed(servers: list[Server]) -> None:
    """A plain server is asked afterwards: it shall not have computed what the other one fetches."""
    plain, answers, router = servers
    first = f"first {WORDS * 20}"
    answer = asked(router, first)
    told = fleet(router.url)
    (choice,) = told["choices"]
    assert (told["split"], choice["replica"], choice["prompt_at"]) == (1, answers.url, plain.url)
    num_pages = (choice["prompt_tokens"] - 1) // 16
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16 * num_pages
    wait(lambda: figure(answers, "cb_arrived_pages_total") == num_pages)
    assert figure(answers, "cb_missed_pages_total") == 0
    assert answer["choices"] == asked(plain, first)["choices"]

    assert ask(router, SHORT) == ask(plain, SHORT)
    told = fleet(router.url)
    assert (told["split"], told["choices"][0]["prompt_at"]) == (1, None), "a short prompt stays"

    def kill() -> None:
        wait(lambda: fleet(router.url)["split"] > 1)  # another beside the first
        os.kill(plain.engine_pid, signal.SIGKILL)

    prompts = [f"{number} {WORDS * 20}" for number in range(10)]
    started = figure(plain, "cb_engine_restarts_total")
    killer = threading.Thread(target=kill)
    with ThreadPoolExecutor(8) as threads:
        killer.start()
        said = [*threads.map(lambda each: ask(router, each), prompts)]
    killer.join()
    # The router may take the killed engine for ready until it hears of its end
    wait(lambda: figure(plain, "cb_engine_restarts_total") > started)
    wait(lambda: figure(answers, "cb_kv_page_leak_total") == 0)
    wait_ready(router.url, 2)  # it comes back, and so does what it computes
    assert said == [ask(plain, each) for each in prompts], "no answer is lost, cut or another"
    before = figure(answers, "cb_arrived_pages_total")

    def comes_back() -> bool:
        ask(router, f"{time.monotonic()} {WORDS * 20}")
        return figure(answers, "cb_arrived_pages_total") > before

    wait(comes_back)
    body, headers = {"model": "tiny", "prompt": WORDS}, {"x-prompt-replica": "tcp://192.0.2.1:1"}
    unknown = httpx.post(f"{answers.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)
    assert unknown.status_code == 400
    assert "x-prompt-replica is not one of server.prompt_replicas" in unknown.text
