"""Layers with a window keep only the pages that a query sees, and give transformers' tokens all the same.

The cache has exactly the pages that the plan names for the longest request, whose prompt is many windows
long; a pool with one page less is refused. So a request that keeps a page too long is the next to lack it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from kv_cache.groups import WindowGroup
from recipes.assembly import engine as assembly
from recipes.assembly.engine import BuiltEngine, build
from recipes.assembly.sizing import plan_memory
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError
from tests.device_kinds import Kind, Way, on_each, settings
from tests.models.families import VARIANTS, make, wide
from tests.models.test_state_schedules import check, everyone, lived, requests, served
from tests.models.variants import Variant
from tests.thorough import cases

Pair = tuple[Kind, Way]

WINDOW, PAGE_SIZE, LONGEST, NUM_NEW = 9, 4, 100, 12
NUM_PAGES, NUM_WINDOW_PAGES = 25, 3  # pages of the longest request: 99 cached tokens, and 9 of them anywhere
NAMES = ("mistral_window", "gemma3")  # all layers have a window, or every other one
WAYS: dict[str, dict[str, Any]] = {
    "preempted": {},
    "swapped": {"cache.host_gib": 0.01, "cache.num_pages": 40, "cache.num_window_pages": 9},
    "one slot": {"scheduler.num_slots": 1},
    "compacted": {"cache.compact_every_steps": 1},
    "whole prompts": {"scheduler.policy": "orca", "scheduler.max_batch_tokens": 120},
    "long chunks": {"scheduler.max_batch_tokens": 64},
    "overlapped": {"scheduler.overlap": "true"},
    "n-gram drafts": {
        "speculation.kind": "ngram",
        "speculation.max_tokens": 4,
        "cache.num_pages": 40,
        "cache.num_window_pages": 8,
    },
    "draft model": {"speculation.kind": "draft", "speculation.max_tokens": 3},
}
# Each way on one of the checkpoints: the pages of a window are the scheduler's, whatever the family
QUICK = ("swapped", "n-gram drafts")
FEW = ("preempted", "swapped", "overlapped", "n-gram drafts", "compacted", "whole prompts", "draft model")
CELLS = cases([*zip(cycle(NAMES), FEW)], [*product(NAMES, WAYS)])


def of_window(name: str) -> Variant:
    """The checkpoint of that name, with a window of 9 tokens."""
    (variant,) = (each for each in VARIANTS if each.name == name)
    return replace(variant, name=f"{name}_of_nine", options=variant.options | {"sliding_window": WINDOW})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda name: make(of_window(name), folder))


def built(path: Path, changes: dict[str, Any], kind: Kind = "cpu") -> BuiltEngine:
    overrides = {
        "model.path": path,
        "model.dtype": "float32",
        "cache.page_size": PAGE_SIZE,
        "cache.num_pages": 1 + NUM_PAGES,
        "cache.num_window_pages": 1 + NUM_WINDOW_PAGES,
        "cache.memory_gib": "null",
        "scheduler.num_slots": 4,
        "scheduler.max_batch_tokens": 24,
        "scheduler.max_request_tokens": LONGEST,
    } | changes
    if overrides.get("speculation.kind") == "draft":
        overrides["speculation.draft_path"] = path
    texts = [*settings(kind), *(f"{key}={value}" for key, value in overrides.items())]
    return build(load(ROOT / "recipes/any/cpu.yaml", texts))


PARTS = [(60, 28), (0, 88), (60, 20), (0, 1), (60, 5), (31, 40)]  # of up to ten windows


@pytest.mark.parametrize(
    ("name", "way"),
    [pytest.param(*each, marks=[] if each[1] in QUICK else pytest.mark.slow) for each in CELLS],
)
def test_tokens_are_those_of_transformers_with_exactly_the_pages_of_the_plan(
    name: str, way: str, checkpoint: Callable[[str], tuple[Any, Path]]
) -> None:
    model, path = checkpoint(name)
    engine = built(path, WAYS[way]).engine
    check(model, served(engine, requests(PARTS)))
    _, group = engine.scheduler.tables.groups
    counters = engine.scheduler.counters
    assert isinstance(group, WindowGroup)
    assert group.window == WINDOW
    if way == "swapped":
        assert group.counts.swapped_in_pages
    elif way != "one slot":
        assert counters.preemptions, "the pool was too large to force preemptions"
    if way == "draft model":
        assert counters.accepted_tokens
    if way == "n-gram drafts":
        assert counters.drafts


def test_a_restart_resumes_from_pages_of_all_groups_in_a_folder(
    checkpoint: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    """The second life finds every prompt; of a window it reads only what the next query sees."""
    model, path = checkpoint("gemma3")
    more = {
        "cache.num_pages": 120,
        "cache.num_window_pages": 40,
        "cache.host_gib": 0.01,
        "cache.tier": f"{{kind: disk, gib: 0.1, path: {tmp_path}, wait_s: 60}}",
        "scheduler.num_slots": 2,
    }
    fetched = []
    for _ in range(2):
        made, found = lived(built(path, more).engine, requests(PARTS))
        check(model, everyone(made))
        fetched.append(found)
    assert [each.num_cached_tokens for each in made] == [
        (request.num_prompt_tokens - 1) // PAGE_SIZE * PAGE_SIZE for request in made
    ]
    num_pages = sum((request.num_prompt_tokens - 1) // PAGE_SIZE for request in made)
    assert num_pages < fetched[1] <= num_pages + len(made) * NUM_WINDOW_PAGES


@pytest.mark.slow
@pytest.mark.parametrize("pair", on_each("fused")[1:])
def test_so_they_are_on_other_devices(pair: Pair, tmp_path: Path) -> None:
    """Pages of 16 tokens: ten of the longest request, and two of its window; graphs have a table of each."""
    model, path = make(wide(of_window("gemma3")), tmp_path)
    kind, _ = pair
    more = {
        "cache.page_size": 16,
        "cache.num_pages": 1 + 10,
        "cache.num_window_pages": 1 + 2,
        "scheduler.max_request_tokens": 160,
        "device.graphs": 8,
    }
    engine = built(path, more, kind).engine
    check(model, served(engine, requests(PARTS)))
    assert engine.scheduler.counters.preemptions, "the pool was too large to force preemptions"


@pytest.mark.parametrize("name", NAMES)
def test_prefixes_are_found_again_while_their_last_window_is_held(
    name: str, checkpoint: Callable[[str], tuple[Any, Path]]
) -> None:
    model, path = checkpoint(name)
    more = {"cache.num_pages": 120, "cache.num_window_pages": 40}
    engine = built(path, more).engine
    check(model, served(engine, requests(PARTS)))
    assert engine.scheduler.counters.hit_tokens >= 3 * 60


def test_pages_of_windows_give_way_to_a_step_that_takes_more_than_was_estimated(
    checkpoint: Callable[[str], tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers have a window, whose pages take all memory of the cache."""
    model, path = checkpoint("mistral_window")
    monkeypatch.setattr(
        assembly,
        "plan_memory",
        lambda recipe, config, _, *more, **named: plan_memory(recipe, config, 2**27, *more, **named),
    )
    more = dict.fromkeys(("cache.num_pages", "cache.num_window_pages"), "null") | {
        "cache.memory_fraction": 0.5,
        "cache.reserve_gib": 0,
        "cache.host_gib": 0.001,
    }
    before = built(path, more)
    monkeypatch.setattr(assembly, "largest_step_bytes", lambda *_: 2**25)
    after = built(path, more)
    (plan,) = after.memory.windows
    _, group = after.engine.scheduler.tables.groups
    assert 100 < plan.num_pages < before.memory.windows[0].num_pages
    assert plan.num_host_pages == before.memory.windows[0].num_host_pages > 0
    assert after.engine.runner.cache.num_pages == (after.memory.num_pages, plan.num_pages)
    assert group.pool.num_pages == plan.num_pages
    assert after.facts["limits"]["windows"][0][1] == plan.num_pages
    check(model, served(after.engine, requests(PARTS)))


@pytest.mark.parametrize("key", ["cache.num_pages", "cache.num_window_pages"])
@pytest.mark.parametrize("name", ["mistral_window", "gemma3"])
def test_one_page_less_than_the_longest_request_needs_is_refused(
    name: str, key: str, checkpoint: Callable[[str], tuple[Any, Path]]
) -> None:
    _, path = checkpoint(name)
    held = {"cache.num_pages": NUM_PAGES, "cache.num_window_pages": NUM_WINDOW_PAGES}
    with pytest.raises(RecipeError, match=f"{LONGEST} is more than the"):
        built(path, {key: held[key]})
