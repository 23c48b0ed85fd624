"""Engines whose ranks divide each page of the cache give each request the tokens that it would get alone.

Two and four ranks divide latents, and two a key-value head of which both would have copies. Prompts are
chunked, beginnings shared, and the pool is so small that requests are preempted, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from recipes.cluster.in_ranks import in_ranks
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import stand_in_alone
from tests.models.families import followed, generated, make
from tests.models.mtp_layers import target_of
from tests.models.rank_engines import Asked, Served, serve_all
from tests.models.test_rank_identity import CPU, NPU, Crowd, variant_of

CROWD = Crowd(8, 40, 20, 16, page_size=4, num_pages=22, num_slots=4, batch_tokens=24)
PLAIN = "device.attention=reference"
GUESSES = ("speculation.kind=mtp", "speculation.max_tokens=3")


@dataclass(frozen=True, slots=True)
class Engine:
    """A checkpoint, options of it, and overrides of its recipe beside `parallel.context`."""

    name: str
    options: dict[str, Any]
    settings: tuple[str, ...] = ()


ENGINES = {
    "latents": Engine("deepseek_v3", {}),
    "one head": Engine("qwen2_yarn", {"num_key_value_heads": 1}, (PLAIN,)),
    "guesses": Engine("glm4_moe_lite", {}, GUESSES),
}
OF_RANKS = {2: tuple(ENGINES), 4: ("latents",)}


def checkpoint(engine: Engine, folder: Path) -> tuple[Any, Path]:
    if engine.settings == GUESSES:
        return target_of(engine.name, folder, **engine.options)
    variant = variant_of(engine.name, on_npus=False)
    return make(replace(variant, options=variant.options | engine.options), folder)


@cache
def served(ranks: int, folder: Path) -> dict[str, tuple[list[list[int]], list[Served]]]:
    """By engine, the tokens of transformers and what each rank said."""
    asked, expected, prompts = {}, {}, CROWD.prompts()
    for key in OF_RANKS[ranks]:
        engine = ENGINES[key]
        model, path = checkpoint(engine, folder)
        expected[key] = [generated(model, prompt, CROWD.num_new)[0] for prompt in prompts]
        more = (f"parallel.context={ranks}", *engine.settings)
        settings = (f"model.path={path}", *CROWD.settings, *CPU, *more)
        asked[key] = Asked(key.replace(" ", "_"), settings, prompts, CROWD.num_new)
    world = load(ROOT / "recipes/any/cpu.yaml", [*CPU, f"model.path={folder}", f"parallel.tensor={ranks}"])
    found = in_ranks(world, serve_all, [*asked.values()], folder)
    return {key: (expected[key], [rank[each.name] for rank in found]) for key, each in asked.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("divided")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, of in OF_RANKS.items() for name in of])
def test_ranks_that_divide_pages_answer_as_transformers_does(ranks: int, name: str, folder: Path) -> None:
    expected, (leader, *followers) = served(ranks, folder)[name]
    assert leader.answers == expected
    assert all(each.logits == leader.logits for each in followers), "ranks have the same logits, to the bit"
    assert leader.happened["preemptions"] >= 2, "the pool was too large to force preemptions"
    assert leader.happened["hit_tokens"] > 0, "no prefix was shared"
    assert name == "guesses" or leader.happened["chunks"] > 0, "no prompt was cut"


@pytest.mark.slow
@pytest.mark.npu
@stand_in_alone
@pytest.mark.timeout(3600)
def test_captured_steps_and_guesses_divide_pages(tmp_path: Path) -> None:
    model, path = target_of("deepseek_v3", tmp_path, is_wide=True, moe_intermediate_size=32)
    crowd = Crowd(8, 90, 40, 24, page_size=32, num_pages=12, num_slots=4, batch_tokens=48)
    prompts = crowd.prompts()
    settings = (
        f"model.path={path}",
        *crowd.settings,
        *NPU,
        "device.graphs=16",
        "parallel.context=2",
        *GUESSES,
    )
    world = load(ROOT / "recipes/any/cpu.yaml", [*NPU, f"model.path={tmp_path}", "parallel.tensor=2"])
    asked = [Asked("guesses", settings, prompts, crowd.num_new)]
    leader, follower = (rank["guesses"] for rank in in_ranks(world, serve_all, asked, tmp_path))
    right = [followed(model, *each, crowd.num_new)[0] for each in zip(prompts, leader.answers)]
    assert leader.answers == right
    assert leader.happened["replays"] > 10
    assert leader.logits == follower.logits
