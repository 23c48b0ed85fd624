"""Every profile fits every machine, and says what it took."""

from __future__ import annotations

import pytest

from recipes.assembly.families import model_config
from recipes.assembly.memory_plan import GIB, MemoryPlan, report
from recipes.assembly.sizing import plan_memory
from recipes.schema.reader import load, profiles, read
from recipes.schema.recipe import ROOT, Recipe
from recipes.schema.recipe_error import RecipeError
from tests.each_of import each_of

MODELS = {"tiny": ROOT / "recipes/tiny/cpu.yaml", "125m": ROOT / "recipes/bench/llama_125m.yaml"}


def planned(recipe: Recipe, gib: float, **more: int) -> MemoryPlan:
    return plan_memory(recipe, model_config(recipe), int(gib * GIB), host_memory=int(gib * GIB), **more)


@each_of("gib", [2, 8, 24, 512])
@each_of("model", MODELS)
@each_of("name", profiles())
def test_a_profile_fits_machines_of_all_sizes(name: str, model: str, gib: int) -> None:
    plan = planned(load(MODELS[model], [], name), gib)
    assert plan.total_bytes <= gib * GIB
    assert plan.num_pages > 2


@pytest.mark.parametrize(
    ("gib", "least", "most"), [(2, 0.6, 0.8), (8, 3.6, 3.8), (24, 11.5, 12), (512, 31.9, 32)]
)
def test_the_host_tier_is_half_of_what_is_left_and_the_sources_size_at_most(
    gib: int, least: float, most: float
) -> None:
    recipe = load(MODELS["tiny"], [], "memory_constrained")
    plan = planned(recipe, gib)
    assert least * GIB <= plan.host_bytes <= most * GIB
    line = dict(report(recipe, model_config(recipe), plan))["host tier"]
    assert ("cache.host_gib is 32, and cache.host_fraction allows 0.5 of the " in line) == (gib < 512)


def test_a_host_that_has_no_room_holds_no_pages_and_says_so() -> None:
    recipe = load(MODELS["tiny"], ["cache.host_fraction=0.01"], "memory_constrained")
    left = planned(recipe, 1).memory_bytes - planned(recipe, 1).total_bytes
    tight = planned(recipe, 1 - (left - 2**20) / GIB)
    assert tight.num_host_pages == 0
    assert "cache.host_fraction allows 0.01" in tight.host_because


def test_a_cache_that_takes_a_share_leaves_the_host_its_own() -> None:
    overrides = ["cache.memory_fraction=0.5"]
    plan = planned(load(MODELS["tiny"], overrides, "memory_constrained"), 8)
    assert plan.total_bytes <= 4 * GIB
    assert plan.host_bytes == pytest.approx(plan.cache_bytes, rel=0.02)


def test_a_size_that_the_user_gives_is_kept_or_refused() -> None:
    asked = read(MODELS["tiny"], ["cache.host_gib=1"], "memory_constrained")
    assert asked.recipe.cache.host_fraction is None
    assert "gives way to cache.host_gib" in asked.origin("cache.host_fraction")
    assert planned(asked.recipe, 2).host_bytes == GIB
    with pytest.raises(RecipeError, match=r"cache\.host_gib: .*set at most"):
        planned(load(MODELS["tiny"], ["cache.host_gib=4"], "memory_constrained"), 2)


def test_a_share_needs_something_to_share() -> None:
    with pytest.raises(RecipeError, match=r"read only where cache\.host_gib is set"):
        load(MODELS["tiny"], ["cache.host_fraction=0.5"])


def test_a_second_plan_keeps_the_host_tier_that_is_allocated() -> None:
    recipe = load(MODELS["tiny"], [], "memory_constrained")
    first = planned(recipe, 8)
    again = planned(
        recipe, 8, activation_bytes=first.activation_bytes + GIB, num_host_pages=first.num_host_pages
    )
    assert again.num_host_pages == first.num_host_pages
