"""A pool that hardly holds one request finishes all of them, and aborts leave nothing behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.preemption import Victim, fewest_lost, lowest_priority, youngest
from tests.continuous_batching import test_slot_lifecycle as small
from tests.continuous_batching.checksum import VOCAB_SIZE, alone
from tests.continuous_batching.recount import recount
from tests.pairs import pairs
from tests.thorough import cases, first_quick

NUM_CLIENTS, LARGEST = 64, 64  # tokens, prompt and answer
COMMON = np.random.default_rng(7).integers(0, VOCAB_SIZE, LARGEST).tolist()


def make(num_pages: int, num_host_pages: int = 0, **options: Any) -> Engine:
    return small.make(NUM_CLIENTS, num_pages, num_host_pages or None, budget=NUM_CLIENTS + 32, **options)


def draw(random: np.random.Generator, name: str, *, largest: bool = False) -> Request:
    """A request of any length, with a beginning that others may share; or the largest there is."""
    num_prompt = 24 if largest else int(random.integers(1, 41))
    max_tokens = LARGEST - 24 if largest else int(random.integers(1, LARGEST - num_prompt + 1))
    common = int(random.integers(0, num_prompt))
    prompt = COMMON[:common] + random.integers(0, VOCAB_SIZE, num_prompt - common).tolist()
    return Request(name, np.array(prompt), SamplingParams(max_tokens=max_tokens))


def closed_loop(engine: Engine, requests: list[Request]) -> None:
    """Serve all, as many at a time as there are clients; each finished one is followed by the next."""
    waiting = list(requests)
    in_service, steps = 0, 0
    while waiting or engine.has_work:
        while waiting and in_service < NUM_CLIENTS:
            engine.add(waiting.pop(0))
            in_service += 1
        step = engine.step()
        assert step is not None, "work is left, and nothing is computed"
        in_service -= len(step.finished)
        steps += 1
        assert steps < 100 * len(requests), "no progress"
    recount(engine.scheduler)


@pytest.mark.parametrize(
    ("factor", "victim", "num_host_pages"),
    first_quick(4, pairs([1.0, 1.1, 1.2], [youngest, fewest_lost, lowest_priority], [0, 40])),
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_pool_of_the_largest_request_finishes_a_closed_loop(
    factor: float, victim: Victim, num_host_pages: int
) -> None:
    num_pages = 1 + round(factor * -(-(LARGEST - 1) // 4))
    engine = make(num_pages, num_host_pages=num_host_pages, victim=victim)
    random = np.random.default_rng(3)
    requests = [draw(random, str(number), largest=number % 10 == 0) for number in range(cases(50, 150))]
    closed_loop(engine, requests)
    for request in requests:
        assert request.answer.tolist() == alone(request.prompt.tolist(), request.params.max_tokens)
    counters = engine.scheduler.counters
    print(f"{counters.preemptions / len(requests):.2f} preemptions a request")
    assert counters.preemptions <= 3 * len(requests)


def test_the_oldest_is_never_preempted_whoever_is_chosen() -> None:
    engine = make(1 + 20, victim=lambda slots, rows: int(rows[0]))
    requests = [draw(np.random.default_rng(number), str(number), largest=True) for number in range(6)]
    closed_loop(engine, requests)
    assert engine.scheduler.counters.preemptions
    assert requests[0].num_preemptions == 0


def test_a_prompt_that_fills_the_pool_is_admitted() -> None:
    engine = make(1 + 4)
    prompt = np.arange(16)  # the token it is asked for is never cached
    request = Request("a", prompt, SamplingParams(max_tokens=1))
    closed_loop(engine, [request])
    assert request.answer.tolist() == alone(prompt.tolist(), 1)
