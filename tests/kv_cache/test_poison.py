"""NaN in every page that is free, or taken and not yet written, reaches no answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from continuous_batching.engine import Engine
from tests.kv_cache import device
from tests.pairs import pairs
from tests.thorough import cases, first_quick

COUNT = cases(16, 24)
SCENARIOS: dict[str, dict[str, object]] = {
    "recomputed": {"num_pages": 14},
    "swapped": {"num_pages": 14, "num_host_pages": 60},
    "compacted": {"num_pages": 30, "compact_every_steps": 1},
    "all": {"num_pages": 14, "num_host_pages": 9, "compact_every_steps": 1, "compact_pages_per_step": 1},
}


@pytest.mark.parametrize(
    ("attention", "scenario", "num_samples"),
    first_quick(3, pairs(["fused", "reference", "int8"], [*SCENARIOS], [3, 1])),
)
def test_poison_reaches_no_answer(
    attention: str, num_samples: int, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attention == "int8":
        device.exact(monkeypatch)
    engine = device.make(attention, poisoned=True, **SCENARIOS[scenario])
    made = device.requests(COUNT, num_samples)
    meddle: Callable[[Engine, int], None] | None = device.resize if scenario == "all" else None
    device.serve(engine, made, at_once=3, meddle=meddle)
    assert [tuple(each.answer.tolist()) for each in made] == list(device.alone(attention, COUNT, num_samples))
    counters = engine.scheduler.counters
    assert scenario not in ("recomputed", "swapped", "all") or counters.preemptions
    assert scenario not in ("swapped", "all") or counters.swapped_in_pages
    assert scenario != "swapped" or counters.promoted_pages
    assert scenario not in ("compacted", "all") or counters.compacted_pages
    assert num_samples == 1 or counters.copied_pages


def test_poison_would_be_noticed() -> None:
    engine = device.make(poisoned=True)
    (request,) = device.requests(1)
    request.params = type(request.params)(max_tokens=3)
    engine.add(request)
    engine.step()
    cache = engine.runner.inner.cache
    page = engine.slots.pages(0)[0]
    assert not torch.isnan(cache.of(0)[0][page]).all()
    for tensor in cache.tensors:
        tensor[page] = torch.nan
    step = engine.step()
    assert step is not None
    assert step.sampled.tokens.tolist() == [-1]
    assert request.finish_reason == "error"
