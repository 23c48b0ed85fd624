"""A row whose mask takes long comes when the mask is ready.

A row that stands behind it is late at most once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from continuous_batching.constraints import SLOW_S, Constraint
from continuous_batching.request import Request, SamplingParams
from continuous_batching.samples.mask_maker import MOST_THREADS, Made, MaskMaker
from continuous_batching.slots import SlotPool
from tests.continuous_batching.test_constraints import Counting
from tests.patience import PATIENCE_S

PROMPT, NONE = 3, np.empty(0, dtype=np.int64)


class Holding(Counting):
    """Makes no mask until it is let."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self._gate = gate

    def mask(self) -> np.ndarray:
        assert self._gate.wait(PATIENCE_S), "nobody let it"
        return super().mask()


class Broken(Counting):
    def mask(self) -> np.ndarray:
        raise RuntimeError("a defect")


@pytest.fixture
def slots() -> SlotPool:
    return SlotPool(4, 64, 16)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def put(slots: SlotPool, constraint: Constraint, *answer: int) -> int:
    """The row of a request that has answered this."""
    request = Request(f"r{slots.num_free}", np.arange(PROMPT), SamplingParams(grammar="[]"))
    request.constraint = constraint
    row = slots.take(request)
    slots.token_ids[row, PROMPT : PROMPT + len(answer)] = answer
    slots.num_tokens[row] = PROMPT + len(answer)
    return row


def take(maker: MaskMaker, slots: SlotPool, rows: list[int], *, is_alone: bool = False) -> Made:
    at = np.array(rows)
    return maker.take(at, slots.num_tokens[at], slots, is_alone=is_alone)


def words(made: Made) -> dict[int, int]:
    return {row: int(mask[0]) for row, mask in zip(made.rows, made.masks)}


RISING = {last: sum(1 << token for token in range(last + 1, 9)) for last in range(9)}


def test_a_row_that_takes_long_comes_when_it_is_ready(slots: SlotPool, gate: threading.Event) -> None:
    maker = MaskMaker(patience_s=0.05)
    rows = [put(slots, Constraint(Counting), 3), put(slots, Constraint(lambda: Holding(gate)), 1)]
    assert take(maker, slots, rows[1:]).late == [0]
    maker._patience_s = PATIENCE_S  # for the other row alone, since this one is known to take long
    for _ in range(3):
        made = take(maker, slots, rows)
        assert (words(made), made.late) == ({0: RISING[3]}, [1])
    gate.set()
    while made.late:
        made = take(maker, slots, rows, is_alone=True)
    assert words(made) == {0: RISING[3], 1: RISING[1]}


def test_who_stands_behind_it_is_late_once(slots: SlotPool, gate: threading.Event) -> None:
    maker = MaskMaker(patience_s=0.05)
    rows = [put(slots, Constraint(lambda: Holding(gate)), 1), put(slots, Constraint(Counting), 3)]
    at = np.array(rows)
    assert take(maker, slots, rows).late == [0, 1]
    while (made := take(maker, slots, rows)).late == [0, 1]:
        maker.begin(at, slots.num_tokens[at], slots)
    assert (words(made), made.late) == ({1: RISING[3]}, [0])


def test_a_first_token_is_waited_for(slots: SlotPool, gate: threading.Event) -> None:
    maker = MaskMaker(patience_s=0.0)
    row = put(slots, Constraint(lambda: Holding(gate)))
    threading.Timer(0.2, gate.set).start()
    assert not take(maker, slots, [row]).late


def test_a_quick_mask_is_made_while_slow_ones_hold_all_their_threads(gate: threading.Event) -> None:
    slots, maker = SlotPool(MOST_THREADS + 1, 64, 16), MaskMaker(patience_s=0.0)
    slow = [Constraint(lambda: Holding(gate)) for _ in range(MOST_THREADS)]
    for constraint in slow:
        constraint.took_s = 2 * SLOW_S
    rows = [put(slots, constraint, 1) for constraint in slow]
    assert len(take(maker, slots, rows).late) == MOST_THREADS
    maker._patience_s = PATIENCE_S / 2
    quick = put(slots, Constraint(Counting), 3)
    made = take(maker, slots, [*rows, quick])
    assert words(made) == {MOST_THREADS: RISING[3]}


def test_masks_behind_guesses_count_as_far_as_the_guesses_stayed(slots: SlotPool) -> None:
    maker, row = MaskMaker(patience_s=60), put(slots, Constraint(Counting), 1)
    rows, targets = np.array([row] * 3), np.array([PROMPT + 1, PROMPT + 2, PROMPT + 3])
    slots.token_ids[row, PROMPT + 1 : PROMPT + 3] = 3, 5
    maker.begin(rows, targets, slots)
    slots.token_ids[row, PROMPT + 1 : PROMPT + 3] = 3, 6
    made = maker.take(rows, targets, slots, is_alone=True)
    assert words(made) == {0: RISING[1], 1: RISING[3]}
    assert made.late == [2]


def test_what_was_made_ahead_is_used(slots: SlotPool) -> None:
    started = []
    maker, row = MaskMaker(patience_s=60), put(slots, Constraint(lambda: started.append(1) or Counting()), 1)
    at = np.array([row])
    maker.begin(at, slots.num_tokens[at], slots)
    assert words(take(maker, slots, [row])) == {0: RISING[1]}
    slots.token_ids[row, PROMPT + 1] = 4
    slots.num_tokens[row] += 1
    assert words(take(maker, slots, [row])) == {0: RISING[4] | 1 << 9}
    assert started == [1]


def test_a_defect_is_told(slots: SlotPool) -> None:
    row = put(slots, Constraint(Broken), 1)
    with pytest.raises(RuntimeError, match="a defect"):
        take(MaskMaker(patience_s=60), slots, [row])


def test_a_wait_for_late_masks_ends_when_its_engine_is_called(slots: SlotPool, gate: threading.Event) -> None:
    maker, calls = MaskMaker(patience_s=1e6), iter([False, False, True])
    constraint = Constraint(lambda: Holding(gate))
    constraint.took_s = 2 * SLOW_S
    put(slots, constraint, 3)
    late = maker.late_rows(slots, NONE)
    assert len(late) == 1
    maker.wait(late, slots, lambda: next(calls))
    assert next(calls, None) is None, "it was asked until it was called"
    assert maker.late_rows(slots, NONE).tolist() == late.tolist()
    gate.set()
    maker.wait(late, slots, bool)
    assert not len(maker.late_rows(slots, NONE))


def test_nothing_is_guessed_for_a_row_that_is_slow(slots: SlotPool, gate: threading.Event) -> None:
    gate.set()
    constraint = Constraint(lambda: Holding(gate))
    row = put(slots, constraint, 7)
    assert constraint.forced(np.array([7])) == [8]
    assert constraint.num_possible(np.array([7]), [8]) == 1
    gate.clear()
    take(MaskMaker(patience_s=0.0), slots, [row])  # a thread is at it
    assert constraint.forced(np.array([7])) == []
    assert constraint.num_possible(np.array([7]), [8]) == 0
    slow = Constraint(Counting)
    slow.took_s = 2 * SLOW_S
    assert slow.forced(np.array([7])) == []
