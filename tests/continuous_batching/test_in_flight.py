"""Requests that end, fail or fork between schedule and commit leave nothing wrong behind."""

from __future__ import annotations

import numpy as np
import pytest

from continuous_batching.batch import Sampled
from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from tests.continuous_batching.checksum import alone
from tests.continuous_batching.recount import recount
from tests.continuous_batching.test_slot_lifecycle import ask, check, make, run_out


def found(engine: Engine, request: Request) -> int:
    """Tokens that a request of the same prompt would find."""
    again = Request("again", request.prompt, SamplingParams(max_tokens=1))
    again.page_keys = engine.scheduler.lifecycle.matching.keys(again)
    return len(engine.scheduler.lifecycle.find(again)) * engine.slots.page_size


def test_a_fork_that_is_aborted_before_its_first_commit_ends_with_it() -> None:
    engine = make()
    leader, long = ask("a", num_prompt=10, max_tokens=6, num_samples=2), ask("long", 100, 2)
    (follower,) = leader.followers
    engine.add(leader)
    engine.add(long)
    batch = engine.scheduler.schedule(0.0)  # as many tokens as spans: a fork's, but not the chunk's
    assert len(batch.owners) == len(batch.slots) == 2
    assert engine.abort(follower.id) is follower
    recount(engine.scheduler)
    assert engine.scheduler.commit(batch, engine.runner.run(batch), 0.0).finished == []
    assert (follower.finish_reason, follower.answer.tolist()) == ("abort", [])
    recount(engine.scheduler)
    run_out(engine)
    check(leader, long)


def test_a_request_that_is_aborted_while_it_fails_is_never_found() -> None:
    engine = make()
    bad = ask("bad", num_prompt=13, max_tokens=4)
    engine.add(bad)
    batch = engine.scheduler.schedule(0.0)
    engine.abort("bad")
    engine.scheduler.commit(batch, Sampled(np.array([-1])), 0.0)
    recount(engine.scheduler)
    assert bad.answer.tolist() == []
    assert found(engine, bad) == 0


def test_what_a_failed_request_computed_before_it_was_preempted_is_never_found() -> None:
    engine = make(num_slots=1)
    engine.scheduler.max_batch_tokens = 8
    bad = ask("bad", num_prompt=13, max_tokens=4)
    engine.add(bad)
    engine.step()
    engine.scheduler.preemption.preempt(0)
    engine.runner.fail = {"bad"}
    run_out(engine)
    assert bad.num_preemptions == 1
    assert bad.finish_reason == "error"
    assert found(engine, bad) == 0


def test_the_pool_never_shrinks_below_what_a_follower_may_need() -> None:
    engine = make(num_slots=2, num_pages=40)
    leader = ask("a", num_prompt=10, max_tokens=2, num_samples=2)
    (follower,) = leader.followers
    follower.params = SamplingParams(max_tokens=60, seed=1)
    engine.add(leader)
    with pytest.raises(ValueError, match="cannot hold the longest accepted request, 70 tokens"):
        engine.resize(10)
    engine.resize(19)
    run_out(engine)
    assert follower.answer.tolist() == alone(leader.prompt.tolist(), 60, seed=1)


def test_samples_need_ids_of_their_own() -> None:
    engine = make()
    leader = ask("a", num_prompt=10, max_tokens=2, num_samples=3)
    leader.followers[1].id = "a1"
    with pytest.raises(ValueError, match="request a1 is sampled twice"):
        engine.add(leader)
    assert not engine.has_work
