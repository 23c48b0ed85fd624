"""Engines of two ranks whose layers keep states give transformers' tokens.

The ranks divide the heads of each state (in kimi_linear the rows of prompts, too), hold whole experts each,
or half of the layers each. Prompts are chunked, go on from states of others, and are preempted and swapped.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kv_cache.states import GRID
from recipes.cluster.in_ranks import in_ranks
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.models.families import VOCABULARY, followed, make
from tests.models.rank_engines import Asked, Served, serve_all
from tests.models.recurrent_variants import RECURRENT_VARIANTS

# A test waits for the two processes that serve all engines of its module
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

VARIANTS = {each.name: each for each in RECURRENT_VARIANTS}
CPU = ("device.compile=false", "device.threads=1")
NUM_NEW, NEAR = 16, 1e-3
CELLS: dict[tuple[str, str], tuple[str, ...]] = {
    ("qwen3_5", "TP 2"): (),
    ("qwen3_next", "EP 2"): ("parallel.expert=2",),
    ("kimi_linear", "TP 2"): ("parallel.least_divided_tokens=8",),
    ("qwen3_5", "PP 2"): ("parallel.pipeline=2",),
}


def prompts() -> list[list[int]]:
    random = np.random.default_rng(5)
    opening = random.integers(0, VOCABULARY, 2 * GRID).tolist()
    tails = [random.integers(0, VOCABULARY, count).tolist() for count in (9, 30, 1, 60, 100, 2)]
    return [opening + tail for tail in tails[:4]] + [*tails[4:], opening + tails[0]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Served]]:
    folder = tmp_path_factory.mktemp("ranks")
    asked = []
    for (name, way), spread in CELLS.items():
        path = folder / name
        if not path.exists():
            make(VARIANTS[name], folder)
        settings = (
            *(f"model.path={path}", "model.dtype=float32", "cache.page_size=16", "cache.num_pages=17"),
            *("cache.memory_gib=null", "cache.host_gib=0.01", "scheduler.num_slots=4"),
            *(f"scheduler.max_batch_tokens={GRID + 4}", "scheduler.max_request_tokens=220", *CPU, *spread),
        )
        asked.append(Asked(f"{name} {way}", settings, prompts(), NUM_NEW))
    world = load(ROOT / "recipes/any/cpu.yaml", [*CPU, f"model.path={folder}", "parallel.tensor=2"])
    ranks = in_ranks(world, serve_all, asked, folder)
    return {cell: [rank[each.name] for rank in ranks] for cell, each in zip(CELLS, asked)}


@pytest.mark.parametrize(("name", "way"), CELLS)
def test_two_ranks_answer_as_transformers_does(
    name: str, way: str, served: dict[tuple[str, str], list[Served]], tmp_path: Path
) -> None:
    leader, follower = served[name, way]
    model, _ = make(VARIANTS[name], tmp_path)
    told = (followed(model, *each, NUM_NEW) for each in zip(prompts(), leader.answers, strict=True))
    tokens, logprobs = zip(*told)
    assert leader.answers == list(tokens)
    ours = torch.tensor(leader.logprobs)  # [prompts, NUM_NEW, 1 + NUM_TOP, 2]
    theirs = torch.stack(logprobs).gather(2, ours[..., 0].long())
    torch.testing.assert_close(ours[..., 1], theirs, rtol=0, atol=NEAR)
    assert leader.happened["preemptions"], "the pool was too large to force preemptions"
    assert leader.happened["hit_tokens"], "no state was found"
    assert follower.happened.items() <= leader.happened.items()
