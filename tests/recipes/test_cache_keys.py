"""The cache keys of a YAML file reach the engine, and pages move as they say; the tokens stay the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from continuous_batching.counters import Counters
from continuous_batching.request import Request, SamplingParams
from recipes.assembly.engine import build
from recipes.schema.reader import load

RECIPE = """\
model:
  config: {{model_type: llama, vocab_size: 256, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
    num_key_value_heads: 2, intermediate_size: 96, max_position_embeddings: 128, eos_token_id: 2}}
  weights: random
  dtype: float32
device:
  kind: cpu
  threads: 1
  compile: false
cache:
  page_size: 8
  num_pages: 10
{more}
scheduler:
  num_slots: 3
  max_batch_tokens: 32
"""
PAGE_BYTES = 2 * 2 * 8 * 2 * 16 * 4  # keys and values, layers, tokens, kv heads, head dim, float32


def serve(path: Path, *more: str) -> tuple[list[list[int]], Counters, int]:
    """Answers, counters, and the most pages that were compacted before one step."""
    file = path / "recipe.yaml"
    file.write_text(RECIPE.format(more="\n".join(f"  {line}" for line in more)), encoding="utf-8")
    engine = build(load(file, [])).engine
    random = np.random.default_rng(1)
    openings = random.integers(3, 256, (3, 16))
    requests = []
    for number in range(9):
        prompt = np.append(openings[number % 3], random.integers(3, 256, 1 + number % 7))
        params = SamplingParams(max_tokens=10 + 8 * (number % 4), temperature=0, ignore_eos=True)
        requests.append(Request(str(number), prompt, params))
        engine.add(requests[-1])
    most = 0
    while engine.has_work:
        step = engine.step()
        assert step is not None
        moves = [len(each.sources) for each in step.batch.copies if each.way == "within"]
        most = max(most, *moves, 0)
    return [request.answer.tolist() for request in requests], engine.scheduler.counters, most


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    answers, counters, _ = serve(tmp_path_factory.mktemp("plain"))
    assert counters.preemptions > 0
    assert counters.swapped_out_pages == counters.rested_pages == counters.compacted_pages == 0
    return answers


def test_host_gib_keeps_what_has_no_room_on_the_device(tmp_path: Path, plain: list[list[int]]) -> None:
    answers, counters, _ = serve(tmp_path, f"host_gib: {60 * PAGE_BYTES / 2**30}")
    assert answers == plain
    assert min(counters.swapped_in_pages, counters.rested_pages, counters.promoted_pages) > 0


@pytest.mark.parametrize("pages_per_step", [0, 1])
def test_compaction_keys_move_pages_as_many_at_a_time_as_they_say(
    tmp_path: Path, plain: list[list[int]], pages_per_step: int
) -> None:
    keys = ("prefix_sharing: false", "compact_every_steps: 8", f"compact_pages_per_step: {pages_per_step}")
    answers, counters, most = serve(tmp_path, *keys)
    assert answers == plain
    assert counters.compacted_pages > 0
    assert (most > 1) == (pages_per_step == 0)


def test_all_of_them_at_once(tmp_path: Path, plain: list[list[int]]) -> None:
    answers, counters, _ = serve(tmp_path, f"host_gib: {6 * PAGE_BYTES / 2**30}", "compact_every_steps: 1")
    assert answers == plain
    assert min(counters.rested_pages, counters.compacted_pages) > 0


@pytest.mark.parametrize(("dtype", "head_bytes"), [("auto", 16 * 4), ("int8", 16 + 4)])
def test_dtype_says_what_a_page_takes(tmp_path: Path, dtype: str, head_bytes: int) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.format(more=f"  dtype: {dtype}\n  host_gib: 0.0001"), encoding="utf-8")
    built = build(load(file, ["device.attention=reference"]))
    cache = built.runner.cache
    assert built.memory.page_bytes == 2 * 2 * 8 * 2 * head_bytes
    assert built.memory.cache_bytes == sum(each.nbytes for each in cache.tensors)
    assert built.memory.host_bytes == sum(each.nbytes for each in cache.of_group(0)[1]) > 0
