"""A placement made from counted tokens is obeyed by the next server, whose answers are the same."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

from models.parallel.placement import balanced
from scripts.place import main as place
from tests.models.test_expert_counts import NUM_CHOSEN, checkpoint
from tests.patience import PATIENCE_S
from tests.serving.server import Server

PROMPT, NUM_NEW = list(range(3, 43)), 12
SPREAD = ("parallel.tensor=2", "parallel.expert=2")


def served(path: Path, *changes: str) -> tuple[list[int], dict[str, list[list[int]]] | None]:
    """The answer of a server, and what it says of experts, if it counts them."""
    small = ("device.compile=false", "cache.memory_gib=null", "cache.num_pages=64", "device.threads=1")
    server = Server("recipes/any/cpu.yaml", f"model.path={path}", *small, *changes).ready()
    try:
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
            asked = {"prompt": PROMPT, "max_tokens": NUM_NEW, "temperature": 0}
            answer = http.post("/v1/completions", json=asked | {"return_token_ids": True}).json()
            assert "choices" in answer, answer
            tokens = answer["choices"][0]["token_ids"]
            if "device.count_experts=true" not in changes:
                return tokens, None
            until_s = time.monotonic() + PATIENCE_S
            while not any(map(sum, (found := http.get("/experts").json()).get("counts", []))):
                assert time.monotonic() < until_s, "nothing was counted"
                time.sleep(0.2)
            assert "cb_expert_imbalance" in http.get("/metrics").text
            return tokens, found
    finally:
        server.close()


@pytest.mark.slow
def test_what_was_counted_places_the_experts_of_the_next_server(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    tokens, found = served(path, *SPREAD, "device.count_experts=true")
    assert found is not None
    computed = len(PROMPT) + NUM_NEW - 1
    assert [sum(layer) for layer in found["counts"]] == [NUM_CHOSEN * computed, 0, NUM_CHOSEN * computed]
    (tmp_path / "counts").write_text(json.dumps(found))
    place([str(tmp_path / "counts"), "--ranks", "2", "--output", str(tmp_path / "placed")])
    written = json.loads((tmp_path / "placed").read_text())["placement"]
    assert written == [list(balanced(layer, 2)) if layer else [] for layer in found["counts"]]
    assert served(path, *SPREAD, f"parallel.placement={tmp_path / 'placed'}")[0] == tokens
