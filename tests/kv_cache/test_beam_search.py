"""On the real device path, beam searches and their neighbours get what each would get alone.

That holds however pages are moved or rows lost.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from tests.kv_cache import device
from tests.thorough import cases

Found = tuple[tuple[tuple[int, ...], ...], ...]


def requests(count: int) -> list[Request]:
    """Searches of all kinds, with a request that draws after every other; many begin alike."""
    random = np.random.default_rng(11)
    openings = random.integers(1, device.VOCABULARY, (3, 40))
    made = []
    for number in range(count):
        shared, own = int(random.integers(0, 40)), int(random.integers(1, 12))
        prompt = np.append(openings[number % 3][:shared], random.integers(1, device.VOCABULARY, own))
        stops = tuple(random.choice(device.VOCABULARY, number % 9, replace=False).tolist())
        params = SamplingParams(max_tokens=2 + number % 13, seed=number)
        if number % 3:
            params = SamplingParams(
                max_tokens=2 + number % 13,
                beam_width=2 + number % 4,
                length_penalty=(-1.0, 0.0, 1.0, 2.0)[number % 4],
                early_stopping=(False, True, "never")[number // 3 % 3],
                stop_token_ids=stops,
            )
        made.append(Request(f"{number}.0", prompt, params))
    return made


def answers(request: Request) -> tuple[tuple[int, ...], ...]:
    """All that was found, or the one answer that was drawn."""
    found = [each.tokens for each in request.hypotheses] or [request.answer]
    return tuple(tuple(tokens.tolist()) for tokens in found)


@cache
def alone(count: int, attention: str) -> Found:
    """What each of `requests` answers with the machine to itself."""
    made = requests(count)
    for request in made:
        engine = device.make(attention, num_slots=5, num_pages=60, prefix_sharing=False)
        engine.add(request)
        while engine.has_work:
            engine.step()
    return tuple(answers(request) for request in made)


def check(engine: Engine, count: int, meddle=None, attention: str = "reference") -> None:
    made = requests(count)
    device.serve(engine, made, at_once=2, meddle=meddle)
    for each, wanted in zip(made, alone(count, attention)):
        if each.finish_reason != "abort":
            assert answers(each) == wanted, each.id
    pool, prefix = engine.scheduler.pool, engine.scheduler.prefix
    assert pool.num_free + prefix.num_idle == pool.num_pages - 1


def lose_rows(engine: Engine, step: int) -> None:
    """Preempt somebody now and then."""
    busy = engine.slots.busy
    if len(busy) and step % 4 == 3:
        engine.scheduler.preemption.preempt(int(busy[step % len(busy)]))


def meddle_with_all(engine: Engine, step: int) -> None:
    """Preempt, shrink, grow and end requests between steps."""
    lose_rows(engine, step)
    if step % 5 == 4:
        engine.resize(30 + step * 7 % 30, give_up="running")
    if step % 3 == 2:
        engine.abort(f"{step * 5 % 60}.0")


@pytest.mark.parametrize(
    ("attention", "way"),
    cases(
        [("reference", "swaps"), ("int8", "compaction")],
        [*itertools.product(["reference", "int8"], ["swaps", "compaction"])],
    ),
)
def test_searches_that_lose_their_rows_find_what_each_finds_alone(
    attention: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attention == "int8":
        device.exact(monkeypatch)
    options = {"num_host_pages": 40} if way == "swaps" else {"compact_every_steps": 1}
    engine = device.make(attention, num_pages=30, poisoned=True, **options)
    check(engine, 24, meddle=lose_rows, attention=attention)
    assert engine.scheduler.counters.preemptions >= 5
    assert engine.scheduler.counters.copied_pages >= 20


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("attention", cases(["fused"], ["fused", "reference"]))
def test_searches_find_what_each_finds_alone_whatever_happens(attention: str) -> None:
    engine = device.make(
        attention, num_slots=9, num_pages=40, num_host_pages=20, compact_every_steps=1, poisoned=True
    )
    check(engine, cases(60, 150), meddle=meddle_with_all)
