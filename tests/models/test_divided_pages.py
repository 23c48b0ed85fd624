"""Four ranks, and two virtual NPUs, that divide each page of the cache give each request its tokens.

Prompts are chunked, beginnings shared, and the pool is so small that requests are preempted, in float32. That
two ranks on processors do, stands in test_rank_identity.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.cluster.in_ranks import in_ranks
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import stand_in_alone
from tests.models.families import followed, make
from tests.models.mtp_layers import target_of
from tests.models.rank_engines import Asked, Served, serve_all
from tests.models.test_rank_identity import CPU, GUESSES, LONGER, NPU, Crowd, variant_of
from tests.thorough import THOROUGH

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.usefixtures("forked_ranks")]


def served(model: Any, path: Path, crowd: Crowd, ranks: int, *settings: str) -> Served:
    """What the leader of so many ranks says: transformers' tokens, by logits that all ranks have."""
    device, prompts = settings[: len(NPU if "device.kind=npu" in settings else CPU)], crowd.prompts()
    world = load(ROOT / "recipes/any/cpu.yaml", [*device, f"model.path={path}", f"parallel.tensor={ranks}"])
    settings = (f"model.path={path}", *crowd.settings, *settings, f"parallel.context={ranks}")
    asked = Asked("asked", settings, prompts, crowd.num_new)
    leader, *followers = (rank["asked"] for rank in in_ranks(world, serve_all, [asked], path))
    right = [followed(model, *each, crowd.num_new)[0] for each in zip(prompts, leader.answers, strict=True)]
    assert leader.answers == right
    assert all(each.logits == leader.logits for each in followers), "ranks have the same logits, to the bit"
    return leader


@pytest.mark.skipif(not THOROUGH, reason="test_divided.py has what four ranks read")
def test_four_ranks_that_divide_pages_answer_as_transformers_does(tmp_path: Path) -> None:
    model, path = make(variant_of("deepseek_v3"), tmp_path)
    happened = served(model, path, LONGER, 4, *CPU).happened
    assert happened["preemptions"] >= 2, "the pool was too large to force preemptions"
    assert happened["hit_tokens"] > 0, "no prefix was shared"
    assert happened["chunks"] > 0, "no prompt was cut"


@pytest.mark.npu
@stand_in_alone
def test_captured_steps_and_guesses_divide_pages(tmp_path: Path) -> None:
    model, path = target_of("deepseek_v3", tmp_path, is_wide=True, moe_intermediate_size=32)
    crowd = Crowd(8, 60, 40, 12, page_size=32, num_pages=10, num_slots=4, batch_tokens=48)
    happened = served(model, path, crowd, 2, *NPU, "device.graphs=8", *GUESSES).happened
    assert happened["replays"] > 10
