"""Pages that move, leave and come back under a running model change no token, on any device."""

from __future__ import annotations

from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
import torch

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from models.step.runner import ModelRunner
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.continuous_batching.recount import recount
from tests.device_kinds import Kind, Way, on_each, settings
from tests.thorough import cases

Pair = tuple[Kind, Way]

PAGE_SIZE, MOST_PAGES = 8, 48


def built(*overrides: str, kind: Kind = "cpu") -> tuple[Engine, ModelRunner]:
    ready = build(load(ROOT / "recipes/tiny/cpu.yaml", [*settings(kind), *overrides]))
    return ready.engine, ready.runner


def requests() -> list[Request]:
    """Prompts of all lengths, half of which begin alike; greedy and by chance."""
    random = np.random.default_rng(5)
    common = random.integers(3, 300, 40)
    made = []
    for number in range(14):
        prompt = random.integers(3, 300, int(random.integers(1, 60)))
        if number % 2:
            prompt = np.concatenate([common[: int(random.integers(16, 41))], prompt])
        params = SamplingParams(
            max_tokens=int(random.integers(8, 40)),
            temperature=0.8 * (number % 3 == 0),
            seed=number,
            ignore_eos=True,
        )
        made.append(Request(str(number), prompt, params, priority=number % 4))
    return made


def tensor_bytes(runner: ModelRunner) -> int:
    return sum(each.untyped_storage().nbytes() for each in runner.cache.tensors)


def process_bytes() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


@pytest.fixture(scope="module")
def undisturbed() -> list[list[int]]:
    engine, _ = built("cache.num_pages=1024")
    served = requests()
    for request in served:
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert engine.scheduler.counters.preemptions == 0
    return [request.answer.tolist() for request in served]


@pytest.mark.parametrize(
    ("host_gib", "victim"),
    cases(
        [(0.001, "youngest"), pytest.param(0, "lowest_priority", marks=pytest.mark.slow)],
        [*product((0.001, 0.01, 0), ("youngest", "fewest_lost", "lowest_priority"))],
    ),
)
def test_resizes_compactions_and_swaps_change_no_token(
    undisturbed: list[list[int]], host_gib: float, victim: str
) -> None:
    disturbed("cpu", PAGE_SIZE, undisturbed, host_gib, victim)


@pytest.mark.slow
@pytest.mark.parametrize("pair", on_each("fused")[1:])
def test_nor_do_they_on_another_device(undisturbed: list[list[int]], pair: Pair) -> None:
    """Steps of more than three rows are not captured."""
    disturbed(pair[0], 2 * PAGE_SIZE, undisturbed[:8], 0.01, "youngest", "device.graphs=3")


@pytest.mark.slow
@pytest.mark.parametrize("pair", on_each("fused")[1:])
def test_capturing_anew_writes_no_page_however_many_rows_a_step_has(pair: Pair) -> None:
    rows = 2 * PAGE_SIZE * 2 + 2  # filling alone would reach two pages beyond the null page
    graphs = (f"cache.page_size={2 * PAGE_SIZE}", f"scheduler.num_slots={rows}", f"device.graphs={rows}")
    engine, runner = built(*graphs, f"cache.num_pages={MOST_PAGES}", kind=pair[0])
    for request in requests():
        engine.add(request)
    for _ in range(3):
        engine.step()
    before = [each[1:].cpu() for each in runner.cache.tensors]
    runner.resize([MOST_PAGES], ())
    after = [each[1:].cpu() for each in runner.cache.tensors]
    assert all(torch.equal(a, b) for a, b in zip(before, after))


@pytest.mark.parametrize("pair", on_each("fused")[1:])
def test_a_captured_step_may_have_more_rows_than_the_cache_has_places(pair: Pair) -> None:
    engine, _ = built(
        "cache.page_size=16", "cache.num_pages=3", "scheduler.num_slots=64", "device.graphs=64", kind=pair[0]
    )
    request = Request("a", np.arange(3, 12), SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    engine.add(request)
    while engine.has_work:
        engine.step()
    assert len(request.answer) == 4


def disturbed(
    kind: Kind, page_size: int, undisturbed: list[list[int]], host_gib: float, victim: str, *more: str
) -> None:
    most_pages = MOST_PAGES * PAGE_SIZE // page_size
    engine, runner = built(
        f"cache.page_size={page_size}",
        f"cache.num_pages={most_pages}",
        f"cache.host_gib={host_gib}",
        "cache.compact_every_steps=1",
        "scheduler.num_slots=6",
        "scheduler.max_batch_tokens=48",
        f"scheduler.victim={victim}",
        *more,
        kind=kind,
    )
    random, served = np.random.default_rng(3), requests()[: len(undisturbed)]
    page_bytes = tensor_bytes(runner) // most_pages
    sizes = set()
    for number, request in enumerate(served):
        engine.add(request)
        engine.step()
        while engine.has_work and (number == len(served) - 1 or random.random() < 0.8):
            if random.random() < 0.3:
                engine.resize(int(random.integers(most_pages * 2 // 5, most_pages + 1)), "running")
                assert tensor_bytes(runner) == engine.scheduler.pool.num_pages * page_bytes
                sizes.add(engine.scheduler.pool.num_pages)
            engine.step()
            recount(engine.scheduler)
    assert [request.answer.tolist() for request in served] == undisturbed
    counters = engine.scheduler.counters
    assert len(sizes) > 10
    assert min(counters.preemptions, counters.compacted_pages) > 10
    assert (counters.swapped_in_pages > 0) == (host_gib > 0)
    assert engine.scheduler.pool.num_held == engine.scheduler.prefix.num_idle


def test_what_a_smaller_cache_does_not_need_goes_back_to_the_machine() -> None:
    engine, runner = built()
    for plane in chain.from_iterable(runner.cache.planes):
        plane.fill_(1)  # the system has no memory for pages of zeros before they are written
    before, held = process_bytes(), tensor_bytes(runner)
    assert held == 64 * 2**20
    engine.resize(16)
    assert tensor_bytes(runner) == 2**20
    assert process_bytes() < before - 50 * 2**20


def test_a_cache_smaller_than_what_is_held_needs_consent() -> None:
    engine, runner = built(f"cache.page_size={PAGE_SIZE}", f"cache.num_pages={MOST_PAGES}")
    request = Request("a", np.arange(3, 103), SamplingParams(max_tokens=4, temperature=0))
    engine.add(request)
    engine.step()
    for give_up in ("nothing", "cached"):
        with pytest.raises(ValueError, match="resize to at least 14"):
            engine.resize(13, give_up)
    assert runner.cache.num_pages[0] == engine.scheduler.pool.num_pages == MOST_PAGES
    engine.resize(14, "nothing")
    while engine.has_work:
        engine.step()
    assert len(request.answer) == 4
