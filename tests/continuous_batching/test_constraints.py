"""The place of an answer in its grammar is a function of the answer's tokens alone."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from continuous_batching.constraints import NOTHING, SLOW_S, Constraint, Making, Mask
from tests.matchers import Allowing
from tests.patience import PATIENCE_S

END = 9
NONE = np.empty(0, dtype=np.int64)


class Counting(Allowing):
    """Takes rising tokens from 0 to 8; ends behind an even one. `fails_at` a token, it grows too complex."""

    vocabulary, end = 10, END

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self._fails_at = fails_at

    def allowed(self) -> set[int]:
        last = self.tokens[-1] if self.tokens else -1
        if last == self._fails_at:
            self.error = "too complex"
        return {*range(last + 1, 9)} | ({END} if last >= 0 and last % 2 == 0 else set())

    def forced(self) -> list[int]:
        return [8] if self.tokens[-1:] == [7] else []


def places(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def alone(*tokens: int) -> int:
    (mask,) = Constraint(Counting).masks(places(*tokens), NONE)
    assert mask is not None
    return int(mask[0])


def test_every_place_of_a_run_has_the_mask_that_it_has_alone() -> None:
    constraint = Constraint(Counting)
    for answer, drafts in (((0,), (2, 5)), ((0, 2, 5), (6,)), ((0, 2, 5, 7), ()), ((0, 2, 5, 7, 8), ())):
        masks = constraint.masks(places(*answer), places(*drafts))
        assert [int(mask[0]) for mask in masks if mask is not None] == [
            alone(*answer, *drafts[:count]) for count in range(1 + len(drafts))
        ]


def test_behind_a_wrong_draft_or_an_end_anything_goes() -> None:
    constraint = Constraint(Counting)
    masks = constraint.masks(places(3), places(4, 2, 6))
    assert [mask is None for mask in masks] == [False, False, True, True]
    masks = constraint.masks(places(3), places(4, END, 6))
    assert [mask is None for mask in masks] == [False, False, True, True]
    (mask,) = constraint.masks(places(3), NONE)  # nothing of it has stayed
    assert mask is not None
    assert int(mask[0]) == alone(3)


def test_a_request_that_comes_back_is_where_it_was() -> None:
    constraint = Constraint(Counting)
    constraint.masks(places(1, 3), NONE)
    constraint.leave()
    (mask,) = constraint.masks(places(1, 3, 4), NONE)
    assert mask is not None
    assert int(mask[0]) == alone(1, 3, 4)
    (mask,) = constraint.masks(places(1), NONE)  # shorter than before: from the beginning
    assert mask is not None
    assert int(mask[0]) == alone(1)


def test_drafts_are_cut_where_the_grammar_ends_them() -> None:
    constraint = Constraint(Counting)
    assert constraint.num_possible(places(1), [2, 4, 3, 5]) == 2
    assert constraint.num_possible(places(1), [0]) == 0
    assert constraint.forced(places(1, 7)) == [8]
    assert Constraint(Counting).forced(places(1, 6)) == []


def test_a_grammar_that_fails_lets_nothing_come_and_says_why() -> None:
    constraint = Constraint(lambda: Counting(fails_at=4))
    (mask,) = constraint.masks(places(1, 3), NONE)
    assert mask is not None
    assert mask.any()
    assert constraint.masks(places(1, 3, 4), NONE)[0] is NOTHING
    assert constraint.error == "too complex"
    assert constraint.masks(places(1, 3, 4), places(5)) == [NOTHING, NOTHING]
    assert constraint.num_possible(places(1, 3, 4), [5]) == 0


def test_a_guess_that_makes_it_fail_fails_no_answer() -> None:
    constraint = Constraint(lambda: Counting(fails_at=4))
    masks = constraint.masks(places(1, 3), places(4, 5))
    assert masks[1] is NOTHING  # the mask is that without the guess, should it be right
    assert masks[2] is None
    assert not constraint.error
    assert constraint.num_possible(places(1, 3), [4, 5, 6]) <= 2
    (mask,) = constraint.masks(places(1, 3, 5), NONE)
    assert mask is not None
    assert int(mask[0]) == alone(1, 3, 5)


def test_a_token_that_does_not_follow_is_said() -> None:
    constraint = Constraint(Counting)
    assert constraint.masks(places(5, 2), NONE) == [NOTHING]
    assert constraint.error == "token 2 does not follow it"


def test_guesses_that_took_long_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for took_s, again in ((SLOW_S / 2, 2), (2 * SLOW_S, 0)):
        clock = iter([0.0, took_s, 10.0, 10.0, 20.0, 20.0])
        monkeypatch.setattr(time, "thread_time", lambda clock=clock: next(clock))
        constraint = Constraint(Counting)
        assert constraint.num_possible(places(3), [4, 6]) == 2
        assert constraint.num_possible(places(3), [4, 6]) == again
        assert constraint.forced(places(3, 7)) == ([8] if again else [])
        (mask,) = constraint.masks(places(3, 7), NONE)
        assert mask is not None
        assert int(mask[0]) == alone(3, 7), "its masks are made as before"


def test_a_matcher_stays_while_a_thread_makes_its_masks() -> None:
    """A request may be preempted meanwhile, and then leaves its matcher, which the thread is advancing."""
    is_asked, may_go_on, made = threading.Event(), threading.Event(), list[Counting]()

    class Slow(Counting):
        def mask(self) -> Mask:
            is_asked.set()
            assert may_go_on.wait(PATIENCE_S)
            return super().mask()

    def start() -> Counting:
        made.append(Slow())
        return made[-1]

    constraint = Constraint(start)
    job = constraint.making = Making(constraint, NONE, NONE)
    thread = threading.Thread(target=job.make)
    thread.start()
    assert is_asked.wait(PATIENCE_S)
    constraint.leave()
    may_go_on.set()
    thread.join()
    (mask,) = constraint.masks(places(3, 5), NONE)
    assert len(made) == 1
    assert mask is not None
    assert mask[0] == alone(3, 5)
    constraint.leave()
    constraint.masks(places(3, 5), NONE)
    assert len(made) == 2, "nothing holds the matcher then"
