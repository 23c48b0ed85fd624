"""A small random model on the real device path, with a scheduler of any kind above it.

Its attention is a recipe's, or "int8": plain torch over pages of int8. A number that lies between two of int8
goes to either for the smallest change of a sum, so there every row of a product is computed by itself, and
`exact` does the same for attention: the sums then have one order under every schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention import reference
from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine
from continuous_batching.policies.batching import StallFree
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.device.storage import KVCache, LayerPages
from kv_cache.pages import PageCopy, PagePool
from models.ops.cpu import ops as cpu
from models.ops.cpu.ops import CpuOps
from models.ops.reference import Packed
from models.step.runner import ModelRunner
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.continuous_batching.recount import recount

PAGE_SIZE, LONGEST, VOCABULARY = 8, 96, 128
OVERRIDES = {
    "model.config": "{model_type: llama, vocab_size: 128, hidden_size: 32, intermediate_size: 48,"
    " num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, eos_token_id: 0,"
    " max_position_embeddings: 256, rms_norm_eps: 1.0e-5}",
    "model.weights": "random",
    "model.dtype": "float32",
    "device.threads": "1",
    "device.compile": "false",
    "cache.page_size": str(PAGE_SIZE),
    "cache.num_pages": "20",
    "cache.memory_gib": "null",
    "scheduler.num_slots": "2",
    "scheduler.max_batch_tokens": "16",
    "scheduler.max_request_tokens": str(LONGEST),
}


class PoisonedRunner:
    """Fills what holds nothing of worth with NaN before each step: free pages, and pages just taken."""

    def __init__(self, inner: ModelRunner, pool: PagePool, host_pool: PagePool | None) -> None:
        self.inner, self.pool, self.host_pool = inner, pool, host_pool

    def run(self, batch: Batch) -> Sampled:
        return self.inner.run(self._prepared(batch))

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        return self.inner.start(self._prepared(batch))

    def resize(self, num_pages: Sequence[int], copies: tuple[PageCopy, ...]) -> None:
        self.inner.resize(num_pages, copies)

    def _prepared(self, batch: Batch) -> Batch:
        self.inner.cache.apply(batch.copies)
        self._poison()
        return dataclasses.replace(batch, copies=())

    def _poison(self) -> None:
        slots, cache = self.inner.slots, self.inner.cache
        fresh = [
            slots.pages(row)[-(-slots.num_computed[row] // slots.page_size) :] for row in slots.busy.tolist()
        ]
        pages = torch.from_numpy(np.concatenate([self.pool.free_pages, *fresh]))
        for tensor in cache.tensors:
            tensor[pages] = _poison(tensor)
        if self.host_pool is not None:
            pages = torch.from_numpy(self.host_pool.free_pages)
            for tensor in cache.of_group(0)[1]:
                tensor[pages] = _poison(tensor)


def _poison(pages: Tensor) -> float:
    """NaN; in int8 the four bytes of a scale that are all -1 are one."""
    return torch.nan if pages.is_floating_point() else -1


class RowOps(CpuOps):
    """Multiplies each row by itself, so that its sums do not depend on how many rows there are."""

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        linear = super().linear  # takes two rows at least
        return torch.cat([linear(row.expand(2, -1).contiguous(), packed)[:1] for row in x.split(1)])


def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plain attention compute each query by itself."""
    monkeypatch.setattr(reference, "QUERY_ROWS", 1)


@cache
def model(attention: str) -> ModelRunner:
    """The model, built once; each engine has a cache and a slot table of its own."""
    overrides = [f"{key}={value}" for key, value in OVERRIDES.items()]
    recipe = ROOT / "recipes/any/cpu.yaml"
    if attention != "int8":
        return build(load(recipe, [*overrides, f"device.attention={attention}"])).runner
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "CpuOps", RowOps)
        return build(load(recipe, [*overrides, "device.attention=reference", "cache.dtype=int8"])).runner


def make(
    attention: str = "fused",
    *,
    num_slots: int = 8,
    num_pages: int = 400,
    num_host_pages: int = 0,
    poisoned: bool = False,
    **options: Any,
) -> Engine:
    """An engine over the small model; `options` are the scheduler's."""
    base = model(attention)
    config = base.config
    slots = SlotPool(num_slots, LONGEST, PAGE_SIZE)
    pool, host = PagePool(num_pages), PagePool(num_host_pages) if num_host_pages else None
    scheduler = Scheduler(
        slots,
        pool,
        StallFree(),
        max_batch_tokens=num_slots + 40,
        vocab_size=VOCABULARY,
        eos_token_ids=config.eos_token_ids,
        host_pool=host,
        **options,
    )
    layers = [LayerPages(base.attention.new_planes)] * config.num_layers
    cache = KVCache(layers, PAGE_SIZE, [num_pages], [num_host_pages])
    runner = ModelRunner(base.decoder, cache, base.attention, base.sampler, slots)
    return Engine(scheduler, PoisonedRunner(runner, pool, host) if poisoned else runner, clock=lambda: 0.0)


def requests(count: int, num_samples: int = 1) -> list[Request]:
    """Requests of all lengths; many begin alike, some are asked twice, some are samples of one prompt."""
    random = np.random.default_rng(5)
    openings = random.integers(1, VOCABULARY, (4, 64))
    made: list[Request] = []
    while len(made) < count:
        shared, own = int(random.integers(0, 60)), int(random.integers(1, 20))
        prompt = np.append(openings[len(made) % 4][:shared], random.integers(1, VOCABULARY, own))
        family = []
        for index in range(num_samples):
            number = len(made) + index
            params = SamplingParams(
                max_tokens=2 + number % 15,
                temperature=float(number % 2),
                seed=number,
                ignore_eos=number % 3 == 0,
            )
            family.append(Request(f"{len(made)}.{index}", prompt, params))
        family[0].followers = family[1:]
        made += family
    return made


@cache
def alone(attention: str, count: int, num_samples: int) -> tuple[tuple[int, ...], ...]:
    """What each of `requests` answers with the machine to itself."""
    answers = []
    for request in requests(count, num_samples):
        engine = make(attention, num_slots=1, num_pages=14, prefix_sharing=False)
        request.followers = []
        engine.add(request)
        while engine.has_work:
            engine.step()
        answers.append(tuple(request.answer.tolist()))
    return tuple(answers)


def serve(
    engine: Engine, made: Sequence[Request], at_once: int, meddle: Callable[[Engine, int], None] | None = None
) -> None:
    """Serve requests, some arriving at each step; `meddle` may do anything to the engine between steps."""
    leaders = [each for each in made if each.id.endswith(".0")]
    steps = 0
    while leaders or engine.has_work:
        for request in leaders[:at_once]:
            engine.add(request)
        leaders = leaders[at_once:]
        if meddle is not None:
            meddle(engine, steps)
        engine.step()
        recount(engine.scheduler)
        steps += 1
        assert steps < 200 * len(made), "no progress"


def resize(engine: Engine, step: int) -> None:
    """Shrink and grow the pool, taking pages from running requests."""
    if step % 5 == 4:
        engine.resize(14 + step * 7 % 40, give_up="running")
