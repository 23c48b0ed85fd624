"""The longest request decides which of a Phi's two lists of factors its rope uses.

The tokens are then those of transformers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from recipes.assembly.engine import build
from recipes.assembly.families import model_config
from recipes.assembly.memory_plan import report
from recipes.assembly.sizing import plan_memory
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT, Recipe
from tests.models.families import Variant, generated, make
from tests.models.variants import LONGROPE
from tests.thorough import first_quick

ORIGINAL, NUM_NEW = 64, 20
PHI = Variant("phi3_128k", "phi3", {"original_max_position_embeddings": ORIGINAL}, LONGROPE)
PROMPTS = [[7 * each % 160 for each in range(start, start + length)] for start, length in
           ((0, 5), (3, 40), (0, 43), (9, 66), (9, 100), (9, 150))]  # fmt: skip


def recipe_of(path: Path, longest: int) -> Recipe:
    settings = (f"model.path={path}", "model.dtype=float32", "device.compile=false", "cache.page_size=16")
    more = ("cache.num_pages=40", "cache.memory_gib=null", f"scheduler.max_request_tokens={longest}")
    return load(ROOT / "recipes/any/cpu.yaml", [*settings, *more, "scheduler.max_batch_tokens=64"])


def greedy(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """The answers, all served at once."""
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    made = [Request(str(index), np.array(each), params) for index, each in enumerate(prompts)]
    for each in made:
        engine.add(each)
    while engine.has_work:
        engine.step()
    return [each.tokens[len(each.prompt) :].tolist() for each in made]


@pytest.mark.parametrize(("longest", "is_long"), first_quick(1, [(ORIGINAL + 1, False), (200, True)]))
def test_the_longest_request_says_which_factors_turn_all(longest: int, is_long: bool, tmp_path: Path) -> None:
    model, path = make(PHI, tmp_path)
    recipe = recipe_of(path, longest)
    plan = dict(report(recipe, model_config(recipe), plan_memory(recipe, model_config(recipe))))
    said = "long factors for all requests; short ones with scheduler.max_request_tokens=65"
    assert (plan["rotary embedding"] == said) == is_long
    prompts = [each for each in PROMPTS if len(each) + NUM_NEW <= longest]
    found = greedy(build(recipe).engine, prompts)
    same = [generated(model, each, NUM_NEW)[0] == tokens for each, tokens in zip(prompts, found)]
    # transformers turns requests of its own choice by the long ones: those whose prompt needs them
    expected = [not is_long or len(each) > ORIGINAL for each in prompts]
    assert [one or not other for one, other in zip(same, expected)] == [True] * len(prompts)
    if is_long:
        rope = model.config.rope_parameters
        rope["short_factor"] = rope["long_factor"]
        assert [generated(model, each, NUM_NEW)[0] for each in prompts] == found
        assert not all(same), "the lists differ, and it shows"
