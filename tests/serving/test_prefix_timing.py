"""A client cannot tell from the time of its first token what another client has sent.

Times are measured, which takes a machine at rest: only THOROUGH asks for it. The cause of the times, that no
key finds another key's pages, is counted in test_security_tree.py.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.serving.server import TINY, Server
from tests.thorough import THOROUGH

NUM_PROMPTS = int(os.environ.get("TIMING_PROMPTS", "40"))
NUM_TOKENS = 1500
KEYS = ("victim", "attacker")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not THOROUGH, reason="times need a machine at rest: THOROUGH=1 asks for them"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("\n".join(KEYS), encoding="utf-8")
    server = Server(TINY, "cache.num_pages=4096", "--api-keys", str(path)).ready()
    yield server
    server.close()


def first_token_s(client: httpx.Client, key: str, prompt: list[int]) -> float:
    asked = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True, "stream": True}
    start_s = time.perf_counter()
    with client.stream(
        "POST", "/v1/completions", json=asked, headers={"authorization": f"Bearer {key}"}
    ) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {"), answer.status_code
        taken_s = time.perf_counter() - start_s
        for _ in lines:
            pass
    return taken_s


def auc(sent: list[float], fresh: list[float]) -> float:
    """How often a prompt that was sent before is the quicker of a pair; 0.5: it cannot be told."""
    wins = sum((a < b) + 0.5 * (a == b) for a in sent for b in fresh)
    return wins / (len(sent) * len(fresh))


@pytest.mark.parametrize(("attacker", "least", "most"), [("attacker", 0.2, 0.8), ("victim", 0.95, 1.0)])
def test_only_the_same_key_is_answered_sooner(
    server: Server, attacker: str, least: float, most: float
) -> None:
    """The interval allows for chance (4.6 standard deviations of 40 prompts), not for a leak."""
    chance = random.Random(len(attacker))
    sent: list[float] = []
    fresh: list[float] = []
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        for _ in range(NUM_PROMPTS):
            known, unknown = ([chance.randrange(3, 1000) for _ in range(NUM_TOKENS)] for _ in range(2))
            first_token_s(client, "victim", known)
            pair = [(known, sent), (unknown, fresh)]
            chance.shuffle(pair)
            for prompt, times in pair:
                times.append(first_token_s(client, attacker, prompt))
    found = auc(sent, fresh)
    print(f"AUC over {NUM_PROMPTS} prompts of {NUM_TOKENS} tokens, {attacker} after victim: {found:.3f}")
    assert least <= found <= most
