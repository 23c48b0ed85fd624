"""An engine on the virtual NPU reads and writes pages that a request holds, and places that were written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import settings
from virtual_npu.contract import Conditions

pytestmark = [pytest.mark.npu, pytest.mark.usefixtures("device")]


@pytest.fixture
def engine(device: Any) -> Iterator[Engine]:
    """One with few pages, whose cache holds NaN but for the null page, so that requests share and preempt."""
    few = ["cache.num_pages=14", "scheduler.num_slots=6", "scheduler.max_batch_tokens=48"]
    before = device.conditions
    made = build(load(ROOT / "recipes/tiny/cpu.yaml", [*settings("npu"), *few])).engine
    cache = made.runner.cache
    for tensor in cache.tensors:
        tensor[1:] = torch.nan
    yield made
    device.contract(before)


def serve(engine: Engine) -> list[list[int]]:
    random, params = np.random.default_rng(3), SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    prefix = random.integers(3, 300, 40)
    made = [
        Request(
            str(number),
            np.concatenate([prefix[: 20 * (number % 3)], random.integers(3, 300, length)]),
            params,
        )
        for number, length in enumerate((5, 70, 16, 1, 33, 90, 17))
    ]
    for request in made:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return [request.answer.tolist() for request in made]


@pytest.mark.slow
def test_every_page_that_is_touched_is_held(engine: Engine, device: Any) -> None:
    pool = engine.scheduler.pool
    asked = 0

    def held() -> list[int]:
        nonlocal asked
        asked += 1
        return (1 + np.flatnonzero(pool.holders[1:])).tolist()

    conditions = Conditions(fp32=True, capture=device.capture)
    device.contract(replace(conditions, held=held))
    answers = serve(engine)
    assert asked > 100
    counters = engine.scheduler.counters
    assert min(counters.preemptions, counters.hit_tokens, counters.evicted_pages) > 0
    assert all(len(answer) == 20 for answer in answers)


def test_a_page_that_nobody_holds_is_refused(engine: Engine, device: Any) -> None:
    device.contract(Conditions(fp32=True, capture=device.capture, held=lambda: [13]))
    with pytest.raises(ValueError, match=r"slot_mapping is page \d+ in row 0, which no request holds"):
        serve(engine)
