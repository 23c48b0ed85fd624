"""A cache that changes its size keeps what is held, is captured anew, and gives its memory back.

That resizes, compaction and swaps change no token is in test_draft_model.py and test_every_product.py.
"""

from __future__ import annotations

import os
from itertools import chain
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
from tests.device_kinds import Kind, Way, on_each, settings

Pair = tuple[Kind, Way]

PAGE_SIZE, MOST_PAGES = 8, 48


def built(*overrides: str, kind: Kind = "cpu") -> tuple[Engine, ModelRunner]:
    ready = build(load(ROOT / "recipes/tiny/cpu.yaml", [*settings(kind), *overrides]))
    return ready.engine, ready.runner


def tensor_bytes(runner: ModelRunner) -> int:
    return sum(each.untyped_storage().nbytes() for each in runner.cache.tensors)


def process_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("pair", on_each("fused")[1:])
def test_capturing_anew_writes_no_page_however_many_rows_a_step_has(pair: Pair) -> None:
    rows = 2 * PAGE_SIZE * 2 + 2  # filling alone would reach two pages beyond the null page
    graphs = (f"cache.page_size={2 * PAGE_SIZE}", f"scheduler.num_slots={rows}", f"device.graphs={rows}")
    engine, runner = built(*graphs, f"cache.num_pages={MOST_PAGES}", kind=pair[0])
    random = np.random.default_rng(5)
    for number in range(14):
        prompt = random.integers(3, 300, int(random.integers(1, 100)))
        engine.add(Request(str(number), prompt, SamplingParams(max_tokens=40, ignore_eos=True)))
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
