"""A recipe made in code is held to the same ranges as one that was read."""

from __future__ import annotations

from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest

from recipes.schema.keys import keys_of
from recipes.schema.reader import load, read
from recipes.schema.recipe import ROOT, CacheSection, DeviceSection, ModelSection, Recipe, SchedulerSection
from recipes.schema.recipe_error import RecipeError
from tests.each_of import each_of


def made(**changes: Any) -> Recipe:
    """A recipe of good values but for some, `cache__page_size=0` standing for `cache.page_size`."""
    values: dict[str, dict[str, Any]] = {
        "model": {"path": Path("x")},
        "device": {"kind": "cpu"},
        "cache": {"num_pages": 64},
        "scheduler": {"num_slots": 4, "max_batch_tokens": 64},
    }
    for name, value in changes.items():
        section, _, leaf = name.partition("__")
        values[section][leaf] = value
    return Recipe(
        model=ModelSection(**values["model"]),
        device=DeviceSection(**values["device"]),
        cache=CacheSection(**values["cache"]),
        scheduler=SchedulerSection(**values["scheduler"]),
    )


@each_of(
    "changes, message",
    [
        ({"cache__page_size": 0}, "cache.page_size: 0 is not allowed; it must be an integer from 1 to 1024"),
        ({"device__kind": "toaster"}, "device.kind: 'toaster' is not allowed; it must be cpu, cuda or npu"),
        ({"device__kind": "npu", "device__threads": 2}, "device.threads: read only where device.kind is cpu"),
        ({"device__kind": "cuda", "device__compile": True}, "device.compile: read only where"),
        ({"cache__dtype": "int8", "device__kind": "cuda"}, "cache.dtype: only plain torch reads int8 keys"),
        ({"device__graphs": 8}, "device.graphs: read only where device.kind is cuda or npu, and it is cpu"),
        ({"device__kind": "cuda", "device__product": "910B"}, "device.product: read only where"),
        ({"device__virtual": True}, "device.virtual: read only where device.kind is npu, and it is cpu"),
        ({"device__kind": "npu", "device__virtual_fp32": True}, "device.virtual_fp32: no product takes"),
        (
            {"device__kind": "cuda", "device__batch_invariant": True, "device__attention": "reference"},
            "device.batch_invariant: device.attention is reference, whose sums depend on",
        ),
        (
            {"device__kind": "npu", "device__graphs": 8, "device__attention": "reference"},
            "device.graphs: device.attention is reference, which synchronizes with the host at every span",
        ),
        ({"model__path": None}, "model.path: required, or model.config in its place; add model.path=FOLDER"),
        ({"cache__num_pages": None}, "cache.num_pages: required, or cache.memory_gib or"),
        ({"cache__memory_gib": 1.0}, "cache.num_pages: excludes cache.memory_gib, and both are set"),
        ({"model__path": None, "model__config": {}}, "model.weights: a model.config has no checkpoint"),
        ({"cache__memory_fraction": 0.5}, "cache.num_pages: excludes cache.memory_fraction, and both are"),
        ({"cache__compact_pages_per_step": 8}, "cache.compact_pages_per_step: read only where"),
        ({"scheduler__victim": "lowest_prio"}, "scheduler.victim: 'lowest_prio' is not allowed; it must be"),
        ({"scheduler__num_slots": 65}, "scheduler.num_slots: 65 is more than scheduler.max_batch_tokens"),
        ({"scheduler__max_request_tokens": 1010}, "scheduler.max_request_tokens: 1010 is more than the 1009"),
    ],
)
def test_contradictions_and_values_out_of_range_are_refused(changes, message):
    with pytest.raises(RecipeError) as caught:
        made(**changes)
    assert str(caught.value).startswith(message)


def test_the_limits_themselves_are_allowed():
    made(scheduler__max_request_tokens=1009)
    made(scheduler__max_batch_tokens=4)
    made(device__kind="npu", device__virtual=True, device__virtual_fp32=True, device__graphs=4)
    made(scheduler__policy="static", scheduler__batch_size=4, scheduler__max_wait_ms=0)


def test_every_key_has_a_meaning_a_range_and_a_default_in_it():
    for key in keys_of(Recipe):
        assert key.meaning
        assert key.meaning[-1] != "."
        if key.kind in (int, float):
            assert key.least is not None
            assert key.most is not None
        if key.default is not MISSING:
            key.check(key.default)


def test_a_profile_stands_between_a_recipe_and_its_overrides():
    path = ROOT / "recipes/tiny/cpu.yaml"
    reading = read(path, ["scheduler.num_slots=8"], "low_latency")
    assert (reading.recipe.scheduler.num_slots, reading.recipe.scheduler.chunk_tokens) == (8, 256)
    assert reading.origin("scheduler.num_slots") == "command line: scheduler.num_slots=8"
    assert reading.origin("scheduler.chunk_tokens").startswith("recipes/profiles/low_latency.yaml:")
    assert reading.origin("model.path").endswith("recipes/tiny/cpu.yaml:3")


def test_an_unknown_profile_is_refused_with_the_nearest_name():
    with pytest.raises(
        RecipeError, match=r"--profile low_latenzy: unknown profile; .*did you mean low_latency\?"
    ):
        load(ROOT / "recipes/tiny/cpu.yaml", [], "low_latenzy")
