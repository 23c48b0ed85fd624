"""A later setting replaces an earlier one, two in one place contradict, and `show` displays both."""

from __future__ import annotations

import logging

import pytest

from recipes.__main__ import main
from recipes.schema.reader import load, profiles, read
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError
from recipes.schema.speculation_section import SpeculationSection
from tests.each_of import each_of
from tests.pairs import pairs
from tests.recipes.conftest import GOOD, error
from tests.thorough import cases

POLICIES = ["stall_free", "split", "prefill_first", "orca", "static"]
WAYS = pairs(POLICIES, [None, "fixed", "dynamic", "adaptive"], [None, *profiles()])
RECIPES = sorted(path for path in ROOT.glob("recipes/**/*.yaml") if path.parent.name != "profiles")


def test_an_alternative_of_a_later_place_replaces_the_earlier_one(recipe):
    reading = read(recipe(), ["cache.memory_gib=1"])
    assert (reading.recipe.cache.num_pages, reading.recipe.cache.memory_gib) == (None, 1.0)
    assert reading.origin("cache.memory_gib") == (
        "command line: cache.memory_gib=1, in place of cache.num_pages (r.yaml:7)"
    )
    assert reading.origin("cache.num_pages") == "r.yaml:7 said 64, which gives way to cache.memory_gib"
    recipe(GOOD.replace("num_pages: 64", "memory_fraction: 0.5"), "base.yaml")
    child = recipe("base: base.yaml\ncache:\n  memory_gib: 2\n", "child.yaml")
    assert load(child).cache.memory_fraction is None
    assert load(child, [], "memory_constrained").cache.num_pages == 33
    reading = read(child, ["cache.memory_fraction=0.25"], "memory_constrained")
    assert reading.recipe.cache.memory_fraction == 0.25
    assert reading.origin("cache.memory_fraction").count(", in place of ") == 2


def test_a_model_named_later_replaces_the_one_written_out():
    path = ROOT / "recipes/bench/llama_125m.yaml"
    model = load(path, ["model.path=recipes/tiny/weights"]).model
    assert (model.path, model.config) == (ROOT / "recipes/tiny/weights", None)
    tiny = ROOT / "recipes/tiny/cpu.yaml"
    model = load(tiny, ["model.config.model_type=llama", "model.weights=random"]).model
    assert (model.path, model.config) == (None, {"model_type": "llama"})


def test_two_alternatives_in_one_place_are_refused(recipe):
    two = "excludes cache.memory_gib, and both are set; set one of them to null"
    twice = recipe(GOOD.replace("num_pages: 64", "num_pages: 64\n  memory_gib: 1"))
    assert error(twice) == f"r.yaml:7: cache.num_pages: {two}"
    assert load(twice, ["cache.memory_fraction=0.5"]).cache.memory_fraction == 0.5
    path = recipe(GOOD.replace("num_pages: 64", "memory_fraction: 0.5"))
    assert error(path, "cache.num_pages=8", "cache.memory_gib=1") == (
        f"command line: cache.memory_gib=1: cache.num_pages: {two}"
    )


@each_of("number, path", enumerate(RECIPES))
def test_every_policy_and_way_of_chunking_works_on_recipes_by_its_name(number, path, monkeypatch):
    """Each recipe with a twentieth of the ways, which differ from those of the next; all with --thorough."""
    monkeypatch.setenv("MODELS", "/models")
    for policy, chunk, profile in cases(WAYS[number % 20 :: 20], WAYS):
        overrides = ["model.path=x"] if path.parent.name == "any" else []
        overrides += [f"scheduler.policy={policy}"]
        if chunk is not None and policy in ("stall_free", "split"):
            overrides += [f"scheduler.chunk={chunk}"]
        assert load(path, overrides, profile).scheduler.policy == policy


def test_what_the_new_policy_does_not_read_gives_way_and_is_shown(recipe, caplog):
    said = "\n  policy: stall_free\n  chunk: adaptive\n  target_itl_ms: 20\n  max_long_prefills: 2"
    path = recipe(GOOD.rstrip() + said + "\n  long_prompt_tokens: 50\n")
    with caplog.at_level(logging.INFO, "recipes"):
        reading = read(path, ["scheduler.policy=static"])
    scheduler = reading.recipe.scheduler
    assert (scheduler.chunk, scheduler.target_itl_ms) == ("fixed", None)
    assert (scheduler.max_long_prefills, scheduler.long_prompt_tokens) == (None, None)
    origin = "r.yaml:12 said 'adaptive', which gives way to scheduler.policy static"
    assert reading.origin("scheduler.chunk") == origin
    assert f"scheduler.chunk: {origin}" in caplog.messages
    assert len(caplog.messages) == 4
    reading = read(path, ["scheduler.chunk=dynamic"])
    assert reading.recipe.scheduler.target_itl_ms is None
    assert reading.recipe.scheduler.max_long_prefills == 2


def test_keys_of_drafts_give_way_to_a_later_place_that_wants_none(recipe):
    drafts = "kind: draft\n  draft_path: ${NOWHERE}\n  max_tokens: 2\n  adaptive: source\n  window: 9\n"
    path = recipe(f"{GOOD}speculation:\n  {drafts}")
    reading = read(path, ["speculation.kind=none"])
    assert reading.recipe.speculation == SpeculationSection()
    origin = "r.yaml:14 said 2, which gives way to speculation.kind none"
    assert reading.origin("speculation.max_tokens") == origin
    asked = read(path, ["speculation.kind=ngram", "speculation.adaptive=fixed"]).recipe.speculation
    assert asked == SpeculationSection(kind="ngram", max_tokens=2, adaptive="fixed")
    assert "not none, and it is none" in error(path, "speculation.kind=none", "speculation.max_tokens=3")


def test_what_is_said_with_the_policy_or_after_it_still_contradicts(recipe):
    path = recipe()
    text = error(path, "scheduler.policy=static", "scheduler.chunk_tokens=16")
    assert text.startswith("command line: scheduler.chunk_tokens=16: scheduler.chunk_tokens: read only where")
    static = recipe(GOOD.rstrip() + "\n  policy: static\n", "static.yaml")
    assert "scheduler.prompt_share: read only where" in error(static, "scheduler.prompt_share=0.5")
    whole = ["scheduler.policy=orca", "scheduler.max_batch_tokens=32", "scheduler.max_request_tokens=33"]
    assert "33 is more than scheduler.max_batch_tokens (32)" in error(path, *whole)


def test_a_step_too_small_for_whole_prompts_gives_way(recipe):
    path = recipe(GOOD.rstrip() + "\n  max_request_tokens: 65\n")
    assert load(path, ["scheduler.policy=orca"]).scheduler.max_batch_tokens is None
    shorter = ["scheduler.policy=orca", "scheduler.max_request_tokens=64"]
    assert load(path, shorter).scheduler.max_batch_tokens == 64  # it is enough
    assert load(path, ["scheduler.policy=static"]).scheduler.max_batch_tokens == 64
    explicit = ["scheduler.policy=orca", "scheduler.max_batch_tokens=100"]
    assert load(path, explicit).scheduler.max_batch_tokens == 100


def test_show_says_what_a_policy_takes_and_why(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)

    def shown(*overrides: str) -> list[str]:
        main(["show", "recipes/tiny/cpu.yaml", *overrides])
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    static = shown("scheduler.policy=static")
    assert "scheduler.batch_size 32 default of static: scheduler.num_slots" in static
    assert "scheduler.max_wait_ms 100.0 default of static" in static
    assert (
        "scheduler.max_batch_tokens 2048 default of orca: the longest request, up to 8192 tokens;"
        " recipes/tiny/cpu.yaml:17 said 256, which gives way to scheduler.policy orca"
    ) in shown("scheduler.policy=orca")
    both = shown("scheduler.policy=orca", "scheduler.max_batch_tokens=256")
    assert "longest request 256 tokens (one step, in which orca computes a prompt)" in both
    assert "scheduler.target_itl_ms 50.0 default of adaptive" in shown("scheduler.chunk=adaptive")


def test_a_refusal_is_data(recipe):
    with pytest.raises(RecipeError) as caught:
        load(recipe(), ["scheduler.num_slots=65"])
    refused = caught.value
    assert refused.keys == ("scheduler.num_slots", "scheduler.max_batch_tokens")
    assert (refused.value, refused.limit) == (65, 64)
    assert refused.fix == "lower the first or raise the second"
    assert refused.place == "command line: scheduler.num_slots=65"
    assert str(refused) == f"{refused.place}: scheduler.num_slots: {refused.problem}; {refused.fix}"
