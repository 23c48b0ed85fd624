"""Policies share a step's token budget among decodes, prompts and newcomers as each of them states."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuous_batching.policies.batching import Orca, PrefillFirst, Split, StallFree, Static
from continuous_batching.policies.policy import NO_ROOM, Busy, Policy, Room, Waiting
from continuous_batching.policies.prefill_budget import FixedChunks, LongPrompts, StagedChunks
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.pages import PagePool
from tests.each_of import each_of


def busy(*todo: int, computed: tuple[int, ...] | None = None) -> Busy:
    """Slots that lack so many tokens."""
    have = np.zeros(len(todo), dtype=np.int64) if computed is None else np.array(computed)
    return Busy(np.array(todo, dtype=np.int64), have, np.array(todo) == 1)


def test_stall_free_gives_decodes_their_token_and_chunks_the_rest() -> None:
    assert StallFree().share(busy(100, 1, 50, 1), 64).tolist() == [62, 1, 0, 1]
    assert StallFree().share(busy(30, 1, 50, 1), 64).tolist() == [30, 1, 32, 1]


def test_stall_free_lets_newcomers_bring_what_is_left() -> None:
    waiting = Waiting(3, 0.0)
    assert StallFree().room(busy(1, 1, 20), 64, waiting) == Room(42, 3)
    assert StallFree().room(busy(1, 63), 64, waiting) == NO_ROOM
    assert StallFree().room(busy(1, 90), 64, waiting) == NO_ROOM


def test_a_fixed_chunk_is_the_most_of_one_prompt() -> None:
    policy = StallFree(FixedChunks(16))
    assert policy.share(busy(100, 1, 50, 9), 64).tolist() == [16, 1, 16, 9]
    assert policy.room(busy(100, 1), 64, Waiting(3, 0.0)) == Room(47, 3, chunk=16)


def test_stages_are_those_that_sarathi_computes_and_not_those_that_its_comment_tells() -> None:
    staged = StagedChunks(64, 256, num_stages=5, staged_tokens=5000, tile_tokens=32)
    assert staged.sizes.tolist() == [256, 192, 160, 128, 64]
    each = staged.limit(busy(*[9000] * 5, computed=(0, 999, 1000, 4999, 70_000)), 512).each
    assert list(np.atleast_1d(each)) == [256, 256, 192, 64, 64], "beyond the last stage is the last stage"


def test_a_chunk_of_whole_tiles_is_not_rounded_above_the_longest() -> None:
    staged = StagedChunks(48, 112, num_stages=4, staged_tokens=448, tile_tokens=32)
    assert staged.sizes.tolist() == [96, 96, 64, 64], "112 tokens are 3.5 tiles"


def test_short_prompts_overtake_long_ones_which_keep_half() -> None:
    policy = StallFree(long_prompts=LongPrompts(max_long=2, long_tokens=100))
    assert policy.share(busy(500, 1, 30, 500), 61).tolist() == [30, 1, 30, 0]
    assert policy.share(busy(500, 1, 20, 20), 61).tolist() == [30, 1, 20, 10]
    assert policy.share(busy(500, 1, 5), 61).tolist() == [55, 1, 5], "what the short ones leave is not wasted"
    assert policy.share(busy(8, 30, computed=(200, 0)), 40).tolist() == [8, 30], "long by its whole prompt"
    room = policy.room(busy(500, 1, 20), 61, Waiting(3, 0.0))
    assert (room.tokens, room.long_requests) == (10, 1)
    assert policy.room(busy(500, 500, 1), 61, Waiting(3, 0.0)).long_requests == 0


def test_split_leaves_to_nobody_what_decodes_do_not_need() -> None:
    assert Split(32).share(busy(100, 1, 50, 1), 64).tolist() == [32, 1, 0, 1]
    assert Split(32).room(busy(1, 20), 64, Waiting(3, 0.0)) == Room(12, 3)


def test_orca_computes_whole_prompts_beside_all_decodes() -> None:
    assert Orca().share(busy(1, 40, 1, 30), 64).tolist() == [1, 40, 1, 0]
    assert Orca().share(busy(1, 40, 1, 22), 64).tolist() == [1, 40, 1, 22]
    assert Orca().share(busy(1, 63, 1, 5), 64).tolist() == [1, 0, 1, 0], "nobody overtakes"
    assert Orca().room(busy(1, 40), 64, Waiting(3, 0.0)) == Room(23, 3, whole=True)


def test_prefill_first_stops_the_decodes() -> None:
    assert PrefillFirst().share(busy(1, 40, 1, 30), 64).tolist() == [0, 40, 0, 0]
    assert PrefillFirst().share(busy(1, 40, 1, 24), 64).tolist() == [0, 40, 0, 24]
    assert PrefillFirst().room(busy(1, 40, 1), 64, Waiting(3, 0.0)) == Room(24, 3, whole=True)


def test_a_policy_of_whole_prompts_needs_a_budget_for_the_longest() -> None:
    def build(budget: int) -> Scheduler:
        return Scheduler(SlotPool(2, 64, 4), PagePool(40), Orca(), max_batch_tokens=budget, vocab_size=9)

    assert build(64).max_batch_tokens == 64
    with pytest.raises(ValueError, match=r"computes prompts whole, and a request may have 64 tokens"):
        build(63)


def test_static_waits_for_a_full_batch_or_long_enough_and_lets_nobody_join() -> None:
    static = Static(batch_size=4, max_wait_s=2.0)
    assert static.room(busy(), 64, Waiting(3, 1.0)) == NO_ROOM
    assert static.room(busy(), 64, Waiting(4, 0.0)).requests == 4
    assert static.room(busy(), 64, Waiting(1, 2.0)).requests == 4
    assert static.room(busy(1), 64, Waiting(9, 9.0)) == NO_ROOM
    assert static.room(busy()._replace(num_others=1), 64, Waiting(9, 9.0)) == NO_ROOM


def test_static_computes_all_prompts_before_the_first_decode() -> None:
    assert Static(4, 0.0).share(busy(1, 40, 1, 40), 64).tolist() == [0, 40, 0, 24]
    assert Static(4, 0.0).share(busy(1, 70, 1), 64).tolist() == [0, 64, 0]


@pytest.mark.parametrize(
    "policy",
    [StallFree(), StallFree(long_prompts=LongPrompts(2, 50)), Static(4, 1.0)],
    ids=["stall_free", "long_prompts", "static"],
)
@given(counts=st.lists(st.integers(1, 300), min_size=1, max_size=40), spare=st.integers(0, 200))
def test_a_share_is_within_the_budget_and_wastes_none_of_it(
    policy: Policy, counts: list[int], spare: int
) -> None:
    wanted = busy(*counts)
    budget = len(counts) + spare
    granted = policy.share(wanted, budget)
    assert (granted >= 0).all()
    assert (granted <= wanted.todo).all()
    assert granted.sum() == min(budget, wanted.todo.sum())


@pytest.mark.parametrize(
    "policy", [Orca(), PrefillFirst(), Split(90)], ids=["orca", "prefill_first", "split"]
)
@given(counts=st.lists(st.integers(1, 300), min_size=1, max_size=40), spare=st.integers(300, 400))
def test_a_share_gets_on_within_the_budget(policy: Policy, counts: list[int], spare: int) -> None:
    wanted = busy(*counts, 2)  # not all decode
    budget = len(counts) + spare
    granted = policy.share(wanted, budget)
    assert ((granted >= 0) & (granted <= wanted.todo)).all()
    assert 0 < granted.sum() <= budget
    if policy.whole:
        assert ((granted == 0) | (granted == wanted.todo)).all()


@each_of(
    "policy, granted",
    [
        (StallFree(), [1, 1, 6]),
        (StallFree(FixedChunks(4)), [1, 1, 4]),
        (StallFree(StagedChunks(2, 8, 3, 24, 2)), [1, 1, 6]),
        (StallFree(long_prompts=LongPrompts(1, 5)), [1, 1, 6]),
        (Split(5), [1, 1, 4]),
        (Orca(), [1, 1, 0]),
        (PrefillFirst(), [0, 1, 0]),
        (Static(3, 0.0), [0, 1, 7]),
    ],
)
def test_a_prompt_of_one_token_is_no_decode(policy: Policy, granted: list[int]) -> None:
    """Of a decode, such a prompt and one of nine tokens, in a step of eight."""
    asked = Busy(np.array([1, 1, 9]), np.array([5, 0, 0]), np.array([True, False, False]))
    assert policy.share(asked, 8).tolist() == granted


def test_reservations() -> None:
    request = Request("a", np.arange(10), SamplingParams(max_tokens=7))
    assert [policy.reserve(request) for policy in (StallFree(), Split(9), PrefillFirst())] == [11] * 3
    assert [policy.reserve(request) for policy in (Static(4, 1.0), Orca())] == [16] * 2
