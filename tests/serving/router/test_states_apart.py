"""The real router before two real servers of a model whose layers keep states, one of which computes prompts.

The router expects a hit only where a state stands; an engine that is killed while others wait for its prompts
loses no answer.
"""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from kv_cache.states import GRID
from tests.models.families import VOCABULARY, make
from tests.models.recurrent_variants import RECURRENT_VARIANTS
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.serving.conftest import write_settings
from tests.serving.router.under_fire import figure, fleet, wait, wait_ready
from tests.serving.server import Server

pytestmark = pytest.mark.in_order

RECIPE = """\
model: {{path: {path}, dtype: float32}}
device: {{kind: cpu, compile: false}}
cache: {{page_size: 16, num_pages: 200}}
scheduler: {{num_slots: 8, max_batch_tokens: 136, max_request_tokens: 256}}
"""


def recipe_of(folder: Path) -> str:
    """A recipe of a small Qwen3.5, with a tokenizer of as many words."""
    _, path = make(next(each for each in RECURRENT_VARIANTS if each.name == "qwen3_5"), folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(path / "tokenizer.json"))
    write_settings(path, unk_token="w0")
    (folder / "recipe.yaml").write_text(RECIPE.format(path=path))
    return str(folder / "recipe.yaml")


def asked(server: Server, prompt: list[int]) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text(answer: dict[str, Any]) -> Any:
    (choice,) = answer["choices"]
    return choice["text"], choice["finish_reason"]


@pytest.mark.slow
def test_a_router_expects_states_and_loses_no_answer_with_an_engine_of_prompts(tmp_path: Path) -> None:
    random, recipe = np.random.default_rng(3), recipe_of(tmp_path)
    endpoint, *events = (f"tcp://127.0.0.1:{free_port()}" for _ in range(3))
    plain = Server(recipe, f"server.pages_at={endpoint}", f"cache.events={events[0]}")
    answers = Server(recipe, f"server.prompt_replicas=[{endpoint}]", f"cache.events={events[1]}")
    servers = [plain, answers]
    try:
        urls = [each.ready().url for each in servers]
        behind = [option for url in urls for option in ("--replica", url)]
        router = Server(*behind, "--recipe", recipe, "--split", "always", verb="scripts.route")
        servers.append(router)
        wait_ready(router.url, 2)

        def drawn(opening: list[int], length: int = 190) -> list[int]:
            return [*opening, *random.integers(1, VOCABULARY, length - len(opening)).tolist()]

        first = drawn([])
        answer = asked(router, first)
        (choice,) = fleet(router.url)["choices"]
        assert (choice["prompt_at"], choice["replica"]) == (plain.url, answers.url)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * GRID
        assert figure(answers, "cb_missed_pages_total") == 0

        def is_expected() -> bool:
            said = asked(router, first)
            assert text(said) == text(answer)
            return bool(fleet(router.url)["choices"][0]["best_hit_tokens"] == 2 * GRID)

        wait(is_expected)
        asked(router, drawn(first[:100]))
        assert fleet(router.url)["choices"][0]["best_hit_tokens"] == 0, "pages are there, and no state"

        prompts, split = [drawn([]) for _ in range(8)], fleet(router.url)["split"]
        started = figure(plain, "cb_engine_restarts_total")

        def kill() -> None:
            wait(lambda: fleet(router.url)["split"] > split)
            os.kill(plain.engine_pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with ThreadPoolExecutor(8) as threads:
            said = [*threads.map(lambda each: text(asked(router, each)), prompts)]
        killer.join()
        wait(lambda: figure(plain, "cb_engine_restarts_total") > started)
        wait(lambda: figure(answers, "cb_kv_page_leak_total") == 0)
        wait_ready(router.url, 2)
        assert said == [text(asked(plain, each)) for each in prompts], "no answer is lost, cut or another"
    finally:
        for each in servers:
            each.process.terminate()
        for each in servers:
            each.close()
