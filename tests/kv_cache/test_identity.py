"""Fifty requests at once, or with --thorough two hundred, get the tokens of each alone.

Pages move, go and are shared meanwhile. `test_poison.py` shows each of these ways by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from continuous_batching.engine import Engine
from tests.kv_cache import device
from tests.kv_cache.short_keys import shorten_keys
from tests.thorough import cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
COUNT = cases(50, 200)


@dataclass
class Aborts:
    """Ends a request before every step, wherever it is."""

    names: list[str]
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(2))
    count: int = 0

    def __call__(self, engine: Engine, step: int) -> None:
        self.count += engine.abort(self.names[self.random.integers(len(self.names))]) is not None


def check(engine: Engine, attention: str, num_samples: int = 1, **how) -> None:
    made = device.requests(COUNT, num_samples)
    device.serve(engine, made, at_once=how.pop("at_once", 3), **how)
    for each, wanted in zip(made, device.alone(attention, COUNT, num_samples)):
        got = tuple(each.answer.tolist())
        assert got == (wanted[: len(got)] if each.finish_reason == "abort" else wanted), each.id
    pool, prefix = engine.scheduler.pool, engine.scheduler.prefix
    assert pool.num_free + prefix.num_idle == pool.num_pages - 1


@pytest.fixture(params=cases(["fused"], ["fused", "reference", "int8"]))
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose pages they are, the host's tables alone decide; `test_poison.py` has each way to attend."""
    if request.param == "int8":
        device.exact(monkeypatch)
    return str(request.param)


def test_prompts_that_arrive_together_give_the_tokens_of_each_alone(attention: str) -> None:
    engine = device.make(attention, num_slots=16)
    check(engine, attention, at_once=COUNT)
    assert engine.scheduler.counters.hit_tokens > 10 * COUNT


@pytest.mark.parametrize("num_samples", [1, 4])
def test_aborts_at_every_step_leave_the_others_the_tokens_of_each_alone(
    attention: str, num_samples: int
) -> None:
    aborts = Aborts([each.id for each in device.requests(COUNT, num_samples)])
    engine = device.make(attention, num_pages=24, num_host_pages=20)
    check(engine, attention, num_samples, meddle=aborts)
    assert aborts.count >= COUNT // 5


def test_all_at_once_gives_the_tokens_of_each_alone(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_keys(monkeypatch, bits=4)
    aborts = Aborts([each.id for each in device.requests(COUNT, 4)])

    def meddle(engine: Engine, step: int) -> None:
        device.resize(engine, step)
        aborts(engine, step)

    engine = device.make(attention, num_pages=24, num_host_pages=20, compact_every_steps=1, poisoned=True)
    check(engine, attention, 4, meddle=meddle)
