import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuous_batching.policies.policy import NO_ROOM, Room, Waiting
from continuous_batching.policies.stall_free import StallFree
from continuous_batching.policies.static import Static
from continuous_batching.request import Request, SamplingParams


def todo(*counts: int) -> np.ndarray:
    return np.array(counts, dtype=np.int64)


def test_stall_free_gives_decodes_their_token_and_chunks_the_rest() -> None:
    assert StallFree().share(todo(100, 1, 50, 1), 64).tolist() == [62, 1, 0, 1]
    assert StallFree().share(todo(30, 1, 50, 1), 64).tolist() == [30, 1, 32, 1]


def test_stall_free_lets_newcomers_bring_what_is_left() -> None:
    waiting = Waiting(3, 0.0)
    assert StallFree().room(todo(1, 1, 20), 64, waiting) == Room(42, 3)
    assert StallFree().room(todo(1, 63), 64, waiting) == NO_ROOM
    assert StallFree().room(todo(1, 90), 64, waiting) == NO_ROOM


def test_static_waits_for_a_full_batch_or_long_enough_and_lets_nobody_join() -> None:
    static = Static(batch_size=4, max_wait_s=2.0)
    assert static.room(todo(), 64, Waiting(3, 1.0)) == NO_ROOM
    assert static.room(todo(), 64, Waiting(4, 0.0)).requests == 4
    assert static.room(todo(), 64, Waiting(1, 2.0)).requests == 4
    assert static.room(todo(1), 64, Waiting(9, 9.0)) == NO_ROOM


def test_static_computes_all_prompts_before_the_first_decode() -> None:
    assert Static(4, 0.0).share(todo(1, 40, 1, 40), 64).tolist() == [0, 40, 0, 24]
    assert Static(4, 0.0).share(todo(1, 70, 1), 64).tolist() == [0, 64, 0]


@pytest.mark.parametrize("policy", [StallFree(), Static(4, 1.0)])
@given(counts=st.lists(st.integers(1, 300), min_size=1, max_size=40), spare=st.integers(0, 200))
def test_a_share_is_within_the_budget_and_wastes_none_of_it(
    policy: StallFree | Static, counts: list[int], spare: int
) -> None:
    wanted = todo(*counts)
    budget = len(counts) + spare
    granted = policy.share(wanted, budget)
    assert (granted >= 0).all()
    assert (granted <= wanted).all()
    assert granted.sum() == min(budget, wanted.sum())


def test_reservations() -> None:
    request = Request("a", np.arange(10), SamplingParams(max_tokens=7))
    assert StallFree().reserve(request) == 11
    assert Static(4, 1.0).reserve(request) == 16
