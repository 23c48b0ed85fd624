"""A head finds its keys and the target's features wherever a row is moved, and never changes a token."""

from __future__ import annotations

import pytest

from continuous_batching.slots import SlotPool
from continuous_batching.speculation.proposer import head_spans
from tests.continuous_batching.checksum import alone
from tests.continuous_batching.head_checksum import HeadRunner
from tests.continuous_batching.test_draft_model import DRAWN, ask, crowded, drafting
from tests.continuous_batching.test_draft_schedules import schedulers
from tests.continuous_batching.test_schedules import (
    Arrival,
    Made,
    Resizes,
    check_answers,
    over_schedules,
    serve,
)


@over_schedules(15, 2500, schedulers(), **DRAWN)
def test_its_keys_and_features_are_there_in_every_schedule(
    made: Made,
    plan: list[Arrival],
    resizes: Resizes,
    overlap: bool,
    most: int,
    seed: int | None,
) -> None:
    scheduler, runner = made
    scheduler.speculation = drafting(scheduler.slots, most, seed, head_spans)
    runner = HeadRunner(scheduler.slots, scheduler.pool, runner.host_pool, most, runner.groups)
    ended = serve(scheduler, runner, plan, resizes, overlap=overlap)
    check_answers(ended, runner.fail)
    assert not scheduler.slots.draft_lag[scheduler.slots.busy].any()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("most", "page_size"), [(1, 8), (3, 8), (6, 4)])
def test_rows_lack_few_tokens_while_they_have_no_drafts(most: int, page_size: int, overlap: bool) -> None:
    slots = SlotPool(4, 64, page_size)
    scheduler = crowded(slots, drafting(slots, most, 0, head_spans))
    runner = HeadRunner(slots, scheduler.pool, scheduler.host_pool, most)
    for request in ask((scheduler, runner), overlap=overlap):
        assert request.answer.tolist() == alone(request.prompt.tolist(), 34, seed=request.params.seed or 0)
    counters = scheduler.counters
    assert runner.num_caught_up > 10
    assert counters.preemptions > 0
    assert counters.swapped_in_pages > 0
    assert counters.draft_tokens > counters.accepted_tokens > counters.draft_tokens / 5
