"""An engine made from a recipe serves, and is what the recipe says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attention.reference import Attention
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.preemption import lowest_priority
from models.step.warm_up import capture, largest_step_bytes
from recipes.assembly import engine as building
from recipes.assembly.engine import build
from recipes.assembly.sizing import plan_memory
from recipes.machine import Cpu, start
from recipes.schema.recipe import (
    CacheSection,
    DeviceSection,
    ModelSection,
    ParallelSection,
    Recipe,
    SchedulerSection,
)
from recipes.schema.recipe_error import RecipeError
from tests.recipes.test_sizing import LLAMA

CONFIG = LLAMA | {"vocab_size": 256, "max_position_embeddings": 128}
PROMPTS = [np.arange(3, 3 + length) for length in (1, 7, 20, 33)]


def made(*, config: dict[str, Any] | None = None, seed: int = 0, pages: int = 64, **device: Any) -> Recipe:
    return Recipe(
        model=ModelSection(config={**CONFIG, **(config or {})}, weights="random", seed=seed),
        device=DeviceSection(kind="cpu", threads=1, compile=False, **device),
        cache=CacheSection(page_size=8, num_pages=pages),
        scheduler=SchedulerSection(num_slots=3, max_batch_tokens=16),
    )


def answers(recipe: Recipe) -> list[list[int]]:
    engine = build(recipe).engine
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(PROMPTS)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert all(request.finish_reason == "length" for request in requests)
    return [request.answer.tolist() for request in requests]


def test_random_weights_are_those_of_the_seed():
    assert answers(made()) == answers(made())
    assert answers(made()) != answers(made(seed=1))


def test_the_engine_has_the_sizes_of_the_recipe():
    built = build(made(pages=9, attention="reference"))
    engine = built.engine
    assert engine.runner is built.runner
    assert type(built.runner.attention) is Attention
    assert built.runner.cache.num_pages[0] == engine.scheduler.pool.num_pages == built.memory.num_pages == 9
    assert engine.slots.num_slots == 3
    assert engine.slots.max_tokens == 8 * 8 + 1
    assert built.config.vocab_size == 256
    assert built.device_name == start(made().device).name


def test_warming_up_leaves_no_trace():
    engine = build(made()).engine
    assert not engine.has_work
    assert not any(tensor.any() for tensor in engine.runner.cache.tensors)
    assert (engine.scheduler.pool.holders[1:] == 0).all()


def test_the_smallest_table_is_warmed_up_too():
    recipe = Recipe(
        model=made().model,
        device=made().device,
        cache=CacheSection(page_size=2, num_pages=2),
        scheduler=SchedulerSection(num_slots=1, max_batch_tokens=1),
    )
    assert build(recipe).engine.slots.max_tokens == 3


def test_the_engine_has_the_host_tier_compaction_and_victim_of_the_recipe():
    page = 8 * 2 * 16 * 4 * 2 * 2
    cache = CacheSection(
        page_size=8, num_pages=9, host_gib=20 * page / 2**30, compact_every_steps=3, compact_pages_per_step=2
    )
    scheduler = SchedulerSection(num_slots=3, max_batch_tokens=16, victim="lowest_priority")
    built = build(replace(made(), cache=cache, scheduler=scheduler))
    engine = built.engine
    host = engine.scheduler.host_pool
    assert host is not None
    assert host.num_pages == len(built.runner.cache.of_group(0)[1][0]) == built.memory.num_host_pages == 20
    assert engine.scheduler.preemption.victim is lowest_priority
    compaction = engine.scheduler._compaction
    assert (compaction._every_steps, compaction._pages_per_step) == (3, 2)
    assert build(made()).engine.scheduler.host_pool is None


def test_pages_in_int8_are_planned_as_they_are_allocated():
    cache = CacheSection(page_size=8, num_pages=10, dtype="int8", host_gib=0.0001)
    built = build(replace(made(attention="reference"), cache=cache))
    planes = built.runner.cache
    assert built.memory.page_bytes == 2 * 2 * 8 * 2 * (16 + 4)
    assert built.memory.cache_bytes == sum(each.nbytes for each in planes.tensors)
    assert built.memory.host_bytes == sum(each.nbytes for each in planes.of_group(0)[1]) > 0


def test_the_largest_step_is_of_the_whole_budget_and_leaves_no_trace(monkeypatch):
    engine = build(made()).engine
    batches = []
    run = engine.runner.run
    monkeypatch.setattr(engine.runner, "run", lambda batch: batches.append(batch) or run(batch))
    taken = largest_step_bytes(engine.runner, 16)
    assert taken is None or taken >= 0
    assert [batch.num_tokens for batch in batches] == [16]
    assert len(batches[0].owners) == 3
    assert not any(tensor.any() for tensor in engine.runner.cache.tensors)
    assert not engine.slots.temperature.any()


def test_the_largest_step_samples_behind_every_guess_that_its_budget_holds(monkeypatch):
    engine = build(made()).engine
    batches = []
    run = engine.runner.run
    monkeypatch.setattr(engine.runner, "run", lambda batch: batches.append(batch) or run(batch))
    for budget, most_sampled, counts in ((16, 3, [3, 3, 3]), (7, 3, [3, 3, 1]), (16, 1, [1, 1, 1])):
        largest_step_bytes(engine.runner, budget, most_sampled)
        batch = batches.pop()
        assert not batches, "it is timed as one step"
        assert batch.num_tokens == budget
        assert np.bincount(batch.owners).tolist() == counts
        assert (batch.targets[np.cumsum(counts) - 1] == batch.stops).all(), "the last of a span is behind it"


class Allocator:
    """The memory of a device: what is held, and blocks that are free and stay reserved."""

    def __init__(self) -> None:
        self.held, self.free = 100, 30

    def empty_cache(self) -> None:
        self.free = 0

    def memory_reserved(self, device: torch.device) -> int:
        return self.held + self.free


def test_what_captured_steps_leave_free_is_not_counted_as_theirs(monkeypatch):
    memory = Allocator()

    class Runner:
        attention = SimpleNamespace(device=torch.device("cpu"))

        def capture(self, most: int, width: int) -> None:
            memory.held, memory.free = memory.held + 7, 50

    monkeypatch.setattr(torch, "get_device_module", lambda _: memory)
    assert capture(Runner(), 8, 1) == 7


@pytest.mark.parametrize(
    ("error", "graphs", "said"),
    [
        (
            RuntimeError("507000: not in a capture\n[ERROR] at 3"),
            4,
            r"^device.graphs: steps cannot be captured here \(507000: not in a capture\); set it to 0; ",
        ),
        (
            torch.OutOfMemoryError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60 GiB in all)"),
            4,
            r"^device.graphs: the first steps .* \(NPU out of memory. Tried to allocate 2.00 GiB\); lower",
        ),
        (
            torch.OutOfMemoryError("out of memory"),
            0,
            r"^cache.reserve_gib: .*memory\); raise cache.reserve_gib or lower cache.memory_fraction$",
        ),
    ],
)
def test_first_steps_that_cannot_be_made_name_their_key(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError, graphs: int, said: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    def pass_by(*_: Any) -> None:
        pass

    monkeypatch.setattr(building, "warm_up", pass_by if graphs else fail)
    monkeypatch.setattr(building, "capture", fail)
    recipe = replace(made(), device=DeviceSection(kind="cuda", graphs=graphs))
    with pytest.raises(RecipeError, match=said):
        building._first_steps(recipe, None, 8, lambda _: None)
    if not isinstance(error, torch.OutOfMemoryError):  # it may come of a lost rank, which others tell
        several = replace(recipe, parallel=ParallelSection(tensor=2))
        with pytest.raises(RuntimeError, match="507000"):
            building._first_steps(several, None, 8, lambda _: None)


def test_the_plan_follows_how_the_machine_keeps_weights(monkeypatch):
    asked = []

    def planned(*args: Any, **named: Any) -> Any:
        asked.append(named["tiles_weights"])
        return plan_memory(*args, **named)

    monkeypatch.setattr(building, "plan_memory", planned)
    monkeypatch.setattr(Cpu, "tiles_weights", True)
    build(made())
    assert asked
    assert all(asked)


def test_pages_give_way_to_a_step_that_takes_more_than_was_estimated(monkeypatch):
    cache = CacheSection(page_size=8, memory_fraction=0.5)
    monkeypatch.setattr(
        building,
        "plan_memory",
        lambda recipe, config, _, *more, **named: plan_memory(recipe, config, 3 * 2**29, *more, **named),
    )
    recipe = replace(made(), cache=cache)
    before = build(recipe).engine.scheduler.pool.num_pages
    monkeypatch.setattr(building, "largest_step_bytes", lambda *_: 100 * 2**20)
    built = build(recipe)
    engine = built.engine
    assert built.memory.is_measured
    assert built.memory.num_pages == engine.scheduler.pool.num_pages
    assert engine.scheduler.pool.num_pages == engine.runner.cache.num_pages[0] < before
    engine.add(Request("a", PROMPTS[2], SamplingParams(max_tokens=4, temperature=0)))
    while engine.has_work:
        engine.step()
    monkeypatch.setattr(building, "largest_step_bytes", lambda *_: 2**31)
    with pytest.raises(ValueError, match=r"cache.memory_fraction: .* are .* GiB less than"):
        build(recipe)
