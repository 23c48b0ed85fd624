"""A token leaves the same bytes in int8 pages, however its prompt was cut and whatever ran beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from tests.kv_cache import device

PROMPT = np.random.default_rng(9).integers(1, device.VOCABULARY, 60)
ANSWER = 6


def stored(num_slots: int, num_neighbours: int, num_host_pages: int = 0) -> tuple[Tensor, list[int], int]:
    """All bytes of the request's tokens, the tokens, and how many steps its prompt took."""
    engine = device.make("int8", num_slots=num_slots, num_host_pages=num_host_pages)
    params = SamplingParams(max_tokens=ANSWER + 1, temperature=0, ignore_eos=True)
    beside = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    for number in range(num_neighbours):
        prompt = np.random.default_rng(number).integers(1, device.VOCABULARY, 5 + number)
        engine.add(Request(f"beside {number}", prompt, beside))
    request = Request("it", PROMPT, params)
    engine.add(request)
    num_steps, row = 0, None
    while row is None or engine.slots.num_tokens[row] < len(PROMPT) + ANSWER:
        num_steps += row is None or engine.slots.num_tokens[row] == len(PROMPT)
        engine.step()
        row = row_of(engine, request)
        if num_host_pages and row is not None and engine.slots.num_tokens[row] == len(PROMPT) + 2:
            engine.scheduler.preemption.preempt(row)
            row = None
    counters = engine.scheduler.counters
    assert (min(counters.preemptions, counters.swapped_in_pages) > 0) == (num_host_pages > 0)
    pages = torch.from_numpy(engine.slots.pages(row).astype(np.int64))
    cache, num_tokens = engine.runner.cache, int(engine.slots.num_computed[row])
    tensors = [each[pages].flatten(0, 1)[:num_tokens] for each in cache.tensors]
    return torch.stack(tensors), engine.slots.token_ids[row, : num_tokens + 1].tolist(), num_steps


def row_of(engine: Engine, request: Request) -> int | None:
    """Its slot, if it has one."""
    rows = (row for row in engine.slots.busy.tolist() if engine.slots.requests[row] is request)
    return next(rows, None)


def test_the_same_bytes_under_any_chunking(monkeypatch: pytest.MonkeyPatch) -> None:
    device.exact(monkeypatch)
    whole, tokens, num_steps = stored(num_slots=30, num_neighbours=0)
    assert whole.dtype == torch.int8
    assert num_steps == 1
    cuts = set()
    for num_slots, num_neighbours in ((1, 0), (8, 6), (12, 9)):
        found, same, num_steps = stored(num_slots, num_neighbours)
        cuts.add(num_steps)
        assert torch.equal(found, whole)
        assert same == tokens
    assert max(cuts) > 1
    found, same, _ = stored(num_slots=1, num_neighbours=0, num_host_pages=40)
    assert torch.equal(found, whole), "a page that was in the host's memory holds something else"
    assert same == tokens
