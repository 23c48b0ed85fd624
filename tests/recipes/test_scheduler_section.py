"""The scheduler section of a recipe is checked, and the scheduler is built as it asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from continuous_batching.policies.batching import Orca, PrefillFirst, Split, StallFree, Static
from continuous_batching.policies.prefill_budget import AdaptiveChunks, StagedChunks
from continuous_batching.queueing import Aged, EarliestDeadline, shortest_first
from continuous_batching.request import Request
from continuous_batching.step_time import StepTime
from recipes.assembly.scheduler import (
    SchedulerLimits,
    chunks,
    facts_of,
    order,
    policy,
    scheduler_from,
    scheduler_of,
)
from recipes.schema.checks import contradictions
from recipes.schema.recipe import CacheSection
from recipes.schema.recipe_error import RecipeError
from recipes.schema.scheduler_defaults import LONGEST_STEP, completed, longest_request
from recipes.schema.scheduler_section import SchedulerSection
from tests.each_of import each_of

DYNAMIC = {
    "chunk": "dynamic", "min_chunk_tokens": 64, "max_chunk_tokens": 256, "chunk_stages": 5,
    "staged_tokens": 500,
}  # fmt: skip
ADAPTIVE = {"chunk": "adaptive", "min_chunk_tokens": 32, "max_chunk_tokens": 256, "target_itl_ms": 50.0}
STATIC = {"policy": "static", "batch_size": 4, "max_wait_ms": 1.0}


def section(**values: Any) -> SchedulerSection:
    return SchedulerSection(**{"num_slots": 8, "max_batch_tokens": 512, **values})


def whole(**values: Any) -> SchedulerSection:
    return completed(section(**values)).section


@each_of(
    "values, message",
    [
        ({"num_slots": 600}, "num_slots: 600 is more than scheduler.max_batch_tokens (512), so that not"),
        ({"chunk_tokens": 513}, "chunk_tokens: 513 is more than scheduler.max_batch_tokens (512)"),
        ({**DYNAMIC, "max_chunk_tokens": 1024}, "max_chunk_tokens: 1024 is more than"),
        ({**ADAPTIVE, "min_chunk_tokens": 288}, "min_chunk_tokens: 288 is more than"),
        ({"target_itl_ms": 50.0}, "target_itl_ms: read only where scheduler.chunk is adaptive, and it is"),
        ({"tile_tokens": 64}, "tile_tokens: read only where scheduler.chunk is dynamic or adaptive"),
        ({**DYNAMIC, "chunk_tokens": 64}, "chunk_tokens: read only where scheduler.chunk is fixed, and it"),
        ({"policy": "split", "num_slots": 512}, "max_batch_tokens: 512 leaves too little for prompts beside"),
        ({"prompt_share": 0.5}, "prompt_share: read only where scheduler.policy is split"),
        ({"policy": "split", "prompt_share": 0.99}, "prompt_share: 0.99 of 512 tokens leaves 6 for decodes"),
        ({"policy": "split", "prompt_share": 0.001}, "prompt_share: 0.001 of 512 tokens leaves 512 for"),
        ({**STATIC, **ADAPTIVE}, "chunk: read only where scheduler.policy is stall_free or split, and it is"),
        ({"policy": "orca", "chunk_tokens": 64}, "chunk_tokens: read only where scheduler.policy is"),
        ({"policy": "prefill_first", "max_request_tokens": 513}, "max_request_tokens: 513 is more than"),
        ({**STATIC, "max_long_prefills": 2}, "max_long_prefills: read only where scheduler.policy is"),
        ({"max_long_prefills": 2}, "long_prompt_tokens: required where scheduler.max_long_prefills is set"),
        ({"deadline_s": 1.0}, "deadline_s: read only where scheduler.queue is deadline, and it is fcfs"),
        ({"queue": "deadline"}, "deadline_s: required where scheduler.queue is deadline"),
        ({"queue": "sjf", "length_s": 1.0}, "length_s: read only where scheduler.queue is priority, and it"),
        ({"outrank": True}, "outrank: read only where scheduler.queue is priority, and it is fcfs; leave it"),
        ({"tenant_weights": {"a": 2}}, "tenant_weights: read only where scheduler.fair_tenants is true"),
        ({"fair_tenants": True, "tenant_weights": {"a": 0}}, "tenant_weights: 'a': 0 is not a weight"),
        ({"fair_tenants": True, "tenant_weights": {"a": "much"}}, "tenant_weights: 'a': 'much' is not a"),
    ],
)
def test_what_cannot_stand_together_is_refused(values: dict[str, Any], message: str) -> None:
    problem = next(contradictions(section(**values)), None)
    assert isinstance(problem, RecipeError)
    assert str(problem).startswith(f"scheduler.{message}")


@each_of(
    "values, kind",
    [
        ({}, StallFree),
        ({"policy": "split", "prompt_share": 0.5}, Split),
        ({"policy": "split"}, Split),
        ({"policy": "static"}, Static),
        ({"policy": "orca", "max_batch_tokens": None}, Orca),
        ({"policy": "orca", "max_request_tokens": 512}, Orca),
        ({"policy": "prefill_first"}, PrefillFirst),
        (STATIC, Static),
    ],
)
def test_a_policy_is_what_was_asked_for(values: dict[str, Any], kind: type) -> None:
    asked = section(**values)
    assert not list(contradictions(asked))
    assert type(policy(completed(asked).section, StepTime())) is kind


def test_chunks_are_what_was_asked_for() -> None:
    assert not list(contradictions(section(**DYNAMIC)))
    staged = chunks(whole(**DYNAMIC), StepTime())
    assert isinstance(staged, StagedChunks)
    assert staged.sizes.tolist() == [256, 192, 160, 128, 64]
    assert not list(contradictions(section(**ADAPTIVE)))
    assert isinstance(chunks(whole(**ADAPTIVE), StepTime()), AdaptiveChunks)


def test_an_order_is_what_was_asked_for() -> None:
    assert order(section()) is None
    assert order(section(queue="sjf")) is shortest_first
    assert order(whole(queue="priority")) == Aged(10.0, 1.0)
    assert order(section(queue="priority", priority_s=0.0, length_s=3.0)) == Aged(0.0, 3.0)
    assert order(section(queue="deadline", deadline_s=9.0)) == EarliestDeadline(9.0)


def test_the_scheduler_of_a_recipe_keeps_its_bounds() -> None:
    asked = section(fair_tenants=True, tenant_weights={"a": 2.0}, max_waiting_requests=1)
    limits = SchedulerLimits(64, 0, 100, 10, (), None)
    scheduler = scheduler_of(asked, CacheSection(num_pages=64), limits)
    assert scheduler.waiting.shares is not None
    scheduler.add(Request("a", [1]))
    with pytest.raises(
        ValueError, match=r"a queue of 2 requests; it may hold 1 \(scheduler.max_waiting_requests\)"
    ):
        scheduler.add(Request("b", [1]))


def test_the_tokens_of_a_split_step_are_exactly_what_the_decodes_leave() -> None:
    for most in range(9, 700):
        share = whole(policy="split", max_batch_tokens=most).prompt_share
        assert share is not None
        assert int(share * most) == most - 8
    for most in (9, 2**20):  # a recording's header, which holds it, is checked when it is read
        asked = whole(policy="split", max_batch_tokens=most)
        scheduler_from(facts_of(asked, CacheSection(num_pages=64), SchedulerLimits(64, 0, 100, 10, (), None)))


def test_a_recording_says_nothing_of_where_events_are_published() -> None:
    cache = CacheSection(
        num_pages=64, events="tcp://127.0.0.1:5557", events_key_file=Path("/run/secrets/events")
    )
    facts = facts_of(section(), cache, SchedulerLimits(64, 0, 100, 10, (), None))
    written = msgspec.json.decode(msgspec.json.encode(facts))
    assert not [name for name in written["cache"] if name.startswith("events")]
    scheduler_from(written)


@pytest.mark.parametrize(
    ("values", "longest_tokens", "step_tokens", "request_tokens"),
    [
        ({}, 2048, 2048, 2048),
        ({}, 4, 8, 4),  # never less than a decode of each slot
        ({}, 100_000, LONGEST_STEP, LONGEST_STEP),
        ({"max_request_tokens": 10_000}, 10_000, 10_000, 10_000),
        ({"max_batch_tokens": 512}, 2048, 512, 512),
    ],
)
def test_a_step_of_whole_prompts_is_as_long_as_the_longest_request(
    values: dict[str, Any], longest_tokens: int, step_tokens: int, request_tokens: int
) -> None:
    asked = section(**{"policy": "orca", "max_batch_tokens": None, **values})
    assert not list(contradictions(asked))
    assert completed(asked, longest_tokens).section.max_batch_tokens == step_tokens
    assert longest_request(asked, longest_tokens) == request_tokens
    scheduler = scheduler_of(
        asked, CacheSection(page_size=16), SchedulerLimits(10_000, 0, longest_tokens, 10, (), None)
    )
    assert (scheduler.max_batch_tokens, scheduler.slots.max_tokens) == (step_tokens, request_tokens)
