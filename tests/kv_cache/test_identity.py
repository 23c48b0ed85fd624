"""A hundred requests at once, or with --thorough two hundred, get the tokens of each alone.

Pages move, go and are shared meanwhile.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import pytest

from continuous_batching.engine import Engine
from kv_cache import page_keys
from tests.kv_cache import device
from tests.thorough import cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
COUNT = cases(100, 200)
PLAIN = {
    "swap": {"num_pages": 20, "num_host_pages": 200},
    "rest in a host that is full": {"num_pages": 14, "num_host_pages": 24},
    "recompute": {"num_pages": 20},
    "compaction every step": {"num_pages": 40, "compact_every_steps": 1},
    "no sharing": {"num_pages": 40, "prefix_sharing": False},
}


class FourBits:
    """Stands in for hashlib."""

    def __init__(self, data: bytes = b"") -> None:
        self._data = data

    def digest(self) -> bytes:
        return bytes([hashlib.md5(self._data).digest()[0] & 15])

    @classmethod
    def sha256(cls, data: bytes) -> FourBits:
        return cls(data)


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


@pytest.fixture(params=["fused", "reference", "int8"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "int8":
        device.exact(monkeypatch)
    return str(request.param)


@pytest.fixture(params=cases(["fused"], ["fused", "reference", "int8"]))
def of_the_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The attention where the host's tables alone decide: whose pages they are is the same to them."""
    if request.param == "int8":
        device.exact(monkeypatch)
    return str(request.param)


@pytest.mark.parametrize("way", PLAIN)
def test_every_way_gives_the_tokens_of_each_alone(of_the_host: str, way: str) -> None:
    engine = device.make(of_the_host, **PLAIN[way])
    check(engine, of_the_host)
    counters = engine.scheduler.counters
    print(way, counters)
    assert counters.preemptions >= COUNT // 10 or "recompute" not in way
    assert counters.swapped_in_pages >= COUNT // 10 or "swap" not in way
    assert counters.promoted_pages >= COUNT // 10 or "rest" not in way
    assert counters.compacted_pages >= COUNT // 10 or "compaction" not in way


def test_a_pool_that_shrinks_and_grows_gives_the_tokens_of_each_alone(of_the_host: str) -> None:
    check(device.make(of_the_host, num_pages=40, num_host_pages=30), of_the_host, meddle=device.resize)


def test_forks_give_the_tokens_of_each_alone(of_the_host: str) -> None:
    engine = device.make(of_the_host, num_slots=24, num_pages=50, num_host_pages=30)
    check(engine, of_the_host, num_samples=4, at_once=1)
    print(engine.scheduler.counters)
    assert engine.scheduler.counters.copied_pages >= COUNT // 4


def test_prompts_that_arrive_together_give_the_tokens_of_each_alone(of_the_host: str) -> None:
    engine = device.make(of_the_host, num_slots=16)
    check(engine, of_the_host, at_once=COUNT)
    assert engine.scheduler.counters.hit_tokens > 10 * COUNT


def test_keys_of_four_bits_give_the_tokens_of_each_alone(
    of_the_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_keys, "hashlib", FourBits)
    check(device.make(of_the_host, num_pages=60), of_the_host)
    engine = device.make(of_the_host, num_pages=14, num_host_pages=60, poisoned=True)
    check(engine, of_the_host)
    assert engine.scheduler.counters.promoted_pages


@pytest.mark.parametrize("num_samples", [1, 4])
def test_aborts_at_every_step_leave_the_others_the_tokens_of_each_alone(
    of_the_host: str, num_samples: int
) -> None:
    aborts = Aborts([each.id for each in device.requests(COUNT, num_samples)])
    engine = device.make(of_the_host, num_pages=24, num_host_pages=20)
    check(engine, of_the_host, num_samples, meddle=aborts)
    assert aborts.count >= COUNT // 5


def test_all_at_once_gives_the_tokens_of_each_alone(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_keys, "hashlib", FourBits)
    aborts = Aborts([each.id for each in device.requests(COUNT, 4)])

    def meddle(engine: Engine, step: int) -> None:
        device.resize(engine, step)
        aborts(engine, step)

    engine = device.make(attention, num_pages=24, num_host_pages=20, compact_every_steps=1, poisoned=True)
    check(engine, attention, 4, meddle=meddle)
