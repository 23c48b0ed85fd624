"""A request ends inside an accepted run where it would end without drafts.

Nothing behind that token is counted.
"""

from __future__ import annotations

import numpy as np
import pytest

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from tests.continuous_batching.checksum import alone
from tests.continuous_batching.recount import recount
from tests.continuous_batching.test_drafts import Guesser, engine_of
from tests.each_of import each_of

PROMPT, BESIDE = list(range(10)), list(range(20, 26))
LONGEST = 24
SAID = alone(PROMPT, LONGEST)


def drafted(params: SamplingParams, timeout_s: float | None = None) -> tuple[Engine, Request, Request]:
    """A request whose drafts are all right, and one beside it."""
    engine, guesser = engine_of(max_batch_tokens=60)
    request = Request("a", np.array(PROMPT), params, timeout_s=timeout_s)
    long = SamplingParams(max_tokens=LONGEST, temperature=0.0, ignore_eos=True)
    for each in (request, Request("b", np.array(BESIDE), long)):
        know(guesser, each)
        engine.add(each)
    return engine, request, engine.scheduler.waiting.find("b")


def know(guesser: Guesser, request: Request) -> None:
    prompt = request.prompt.tolist()
    guesser.stories[request.id] = prompt + alone(prompt, 40)


def told(engine: Engine) -> dict[str, list[int]]:
    """What the steps say that was said, to the end."""
    said: dict[str, list[int]] = {"a": [], "b": []}
    while engine.has_work:
        step = engine.step()
        assert step is not None
        for row, token in zip(step.owners.tolist(), step.sampled.tokens.tolist()):
            said[engine.slots.requests[row].id].append(token)
        recount(engine.scheduler)
    return said


def check_beside(engine: Engine, beside: Request) -> None:
    assert beside.answer.tolist() == alone(BESIDE, LONGEST), "the other request did not go on as it was"
    assert engine.scheduler.counters.accepted_tokens > 10
    pool, prefix = engine.scheduler.pool, engine.scheduler.prefix
    assert pool.num_free + prefix.num_idle == pool.num_pages - 1, "a page is held by nobody"


@each_of("place", range(2, 14))  # the first run goes from the second token to the eleventh
def test_a_limit_ends_a_run(place: int) -> None:
    engine, request, beside = drafted(SamplingParams(max_tokens=place, temperature=0.0, ignore_eos=True))
    assert told(engine)["a"] == request.answer.tolist() == SAID[:place]
    assert request.finish_reason == "length"
    check_beside(engine, beside)


@each_of("place", range(1, 13))
def test_a_stop_token_ends_a_run(place: int) -> None:
    params = SamplingParams(
        max_tokens=LONGEST, temperature=0.0, ignore_eos=True, stop_token_ids=(SAID[place],)
    )
    engine, request, beside = drafted(params)
    assert told(engine)["a"] == request.answer.tolist() == SAID[: SAID.index(SAID[place]) + 1]
    assert request.finish_reason == "stop"
    check_beside(engine, beside)
    # What follows the end in its page is no part of the request, and is found by nobody
    again = Request("c", np.array(PROMPT + SAID[:13]), SamplingParams(max_tokens=1))
    engine.scheduler.speculation = None
    engine.add(again)
    engine.step()
    assert again.num_cached_tokens <= len(PROMPT) + SAID.index(SAID[place]) + 1
    assert again.answer.tolist() == SAID[13:14]


@pytest.mark.parametrize("ended_in_flight", [False, True])
def test_a_time_limit_ends_a_run(ended_in_flight: bool) -> None:
    """Over between two steps, it keeps whole runs; over while the device checks one, nothing of that."""
    params = SamplingParams(max_tokens=LONGEST, temperature=0.0, ignore_eos=True)
    engine, request, beside = drafted(params, timeout_s=None if ended_in_flight else 5.0)
    now = 0.0
    engine.clock = lambda: now
    engine.step()
    if ended_in_flight:
        batch = engine.scheduler.schedule(0.0)
        assert batch.num_drafts > 9
        assert engine.scheduler.end("a", "timeout") is request
        booked = engine.scheduler.commit(batch, engine.runner.run(batch), 1.0)
        assert {engine.slots.requests[row].id for row in booked.owners.tolist()} == {"b"}
        recount(engine.scheduler)
        assert request.answer.tolist() == SAID[:1]
    else:
        now = 4.0
        engine.step()
        now = 6.0
        step = engine.step()
        assert step.finished == [request]
        assert "a" not in {engine.slots.requests[row].id for row in step.owners.tolist()}
        assert request.answer.tolist() == SAID[:11]
    assert request.finish_reason == "timeout"
    assert not told(engine)["a"]
    check_beside(engine, beside)
