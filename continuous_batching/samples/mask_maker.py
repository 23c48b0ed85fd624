"""Make grammar masks in threads, while the device computes.

A row whose mask is not ready in time gets no token in this step: the device's answer says LATE for it, and so
does a recording, so that followers agree. Its last token is computed once more in the next step, and all
other rows go on. A recurrent state cannot take a token in twice: rows of models with states are left out of
the steps before which a mask that is known to be slow is not made, and the scheduler is told which.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from continuous_batching.constraints import Constraint, Making, Mask
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index

_NONE: Index = np.empty(0, dtype=np.int64)
PATIENCE_S = 0.05  # how long a step waits for masks that were quick so far
_LOOK_S = 0.001  # how often a wait looks whether it is called away
MOST_THREADS = 16  # Quick grammars have so many, and so have slow ones, each of which occupies one


class MaskPlace(NamedTuple):
    """A row that yields tokens in this step, with the state of its answer."""

    indexes: list[int]  # indices of its tokens among all that the step yields
    constraint: Constraint
    answer: Index
    drafts: Index


@dataclass(slots=True)
class Made:
    """The masks of a step, by index into its rows; a row in neither list may get any token."""

    rows: list[int] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    late: list[int] = field(default_factory=list)  # rows that get no token in this step


class MaskMaker:
    """Makes masks in threads: one task for all quick constraints, and one for each that was slow before.

    Those that were slow have threads of their own, so that no quick one waits in a queue behind them.

    A step waits `patience_s` for those that were quick before, and for any of them if no row of the step
    would get a token otherwise. The mask of an answer's first token is always waited for: it was made when
    the grammar was compiled, and other requests may share the pages of the prompt. With `waits`, a step waits
    for all masks: its row could not compute a token once more, because its state has taken it in already. Of
    masks that were slow before it has none that are not made, if it leaves out the rows of `late_rows`.
    """

    def __init__(self, patience_s: float = PATIENCE_S, *, waits: bool = False) -> None:
        self._patience_s, self._waits = patience_s, waits
        self._quick = ThreadPoolExecutor(MOST_THREADS, "masks")
        self._slow = ThreadPoolExecutor(MOST_THREADS, "slow masks")
        self._made = threading.Condition()

    def begin(self, rows: Index, targets: Index, slots: SlotPool) -> None:
        """Start making the masks that these rows need for tokens at positions `targets`, without waiting."""
        if slots.constrained[rows].any():
            self._begin(_places(rows, targets, slots), again=True)

    def late_rows(self, slots: SlotPool, flying: Index) -> Index:
        """Return the rows whose masks were slow and are not made yet, of which none waits to be begun.

        Answers of rows that are `flying` may become longer, so nothing is begun for them.
        """
        rows = slots.busy[slots.constrained[slots.busy]]
        if not len(rows):
            return _NONE
        rows = rows[(slots.num_tokens[rows] > slots.num_prompt[rows]) & ~np.isin(rows, flying)]
        rows = rows[[slots.requests[row].constraint.is_slow for row in rows.tolist()]] if len(rows) else rows
        places = _places(rows, slots.num_tokens[rows], slots)
        self._begin(places, again=False)
        jobs = [place.constraint.making for place in places]
        return rows[[job is not None and not job.is_done for job in jobs]] if jobs else _NONE

    def wait(self, rows: Index, slots: SlotPool, is_called: Callable[[], bool]) -> None:
        """Wait a short time for the mask of any of these late rows, because no other row has work.

        It ends as soon as `is_called`, which is asked every millisecond.
        """
        jobs = [slots.requests[row].constraint.making for row in rows.tolist()]
        until_s = time.monotonic() + self._patience_s
        with self._made:
            while not (any(job.is_done for job in jobs) or is_called()):
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return
                self._made.wait(min(left_s, _LOOK_S))

    def take(self, rows: Index, targets: Index, slots: SlotPool, *, is_alone: bool) -> Made:
        """Return the masks for these rows, some of which follow a grammar.

        `is_alone` says that the step yields tokens for no other rows.
        """
        places = _places(rows, targets, slots)
        self._begin(places, again=False)
        self._wait(places, is_alone=is_alone)
        made = Made()
        for place in places:
            job = place.constraint.making
            assert job is not None, "nobody makes its masks"
            found = job.masks_for(place.drafts) if job.is_done else []
            if job.is_done:
                place.constraint.making = None
            else:
                job.is_late = True
            for index, mask in zip(place.indexes, found):
                if mask is not None:
                    made.rows.append(index)
                    made.masks.append(mask)
            made.late += place.indexes[len(found) :]
        return made

    def _begin(self, places: Sequence[MaskPlace], *, again: bool) -> None:
        """Submit the masks that are not made yet; with `again`, also those still queued behind a slow one."""
        quick: list[Making] = []
        for place in places:
            job = place.constraint.making
            is_it = job is not None and not (job.is_done and len(job.answer) != len(place.answer))
            if job is None or not is_it:
                job = place.constraint.making = Making(place.constraint, place.answer, place.drafts)
            elif job.is_begun or not again:
                continue
            if place.constraint.is_slow:
                self._slow.submit(self._make, [job])
            else:
                quick.append(job)
        if quick:
            self._quick.submit(self._make, quick)

    def _make(self, jobs: Sequence[Making]) -> None:
        try:
            for job in jobs:
                with self._made:
                    is_mine, job.is_begun = not job.is_begun, True
                if is_mine:
                    job.make()
        finally:
            with self._made:
                self._made.notify()

    def _wait(self, places: Sequence[MaskPlace], *, is_alone: bool) -> None:
        jobs = [place.constraint.making for place in places if place.constraint.making is not None]
        first = [job for job in jobs if self._waits or not len(job.answer)]
        quick = [job for job in jobs if not (job.is_late or job.constraint.is_slow)]
        until_s = time.monotonic() + self._patience_s
        with self._made:
            self._made.wait_for(lambda: _are_done(first))
            self._made.wait_for(lambda: _are_done(quick), until_s - time.monotonic())
            if is_alone:
                self._made.wait_for(lambda: any(job.is_done for job in jobs), until_s - time.monotonic())


def _are_done(jobs: Sequence[Making]) -> bool:
    """Whether all jobs are done, or one has failed."""
    return all(job.is_done for job in jobs) or any(job.failed is not None for job in jobs)


def _places(rows: Index, targets: Index, slots: SlotPool) -> list[MaskPlace]:
    """Return the constrained rows. The entries of a row are adjacent, because its last tokens are drafts.

    The known tokens are copied, because a thread may read them when the row belongs to another request.
    """
    indexes = np.flatnonzero(slots.constrained[rows])
    found: list[MaskPlace] = []
    starts = np.flatnonzero(np.diff(rows[indexes], prepend=-1))
    for of_row in np.split(indexes, starts[1:]) if len(indexes) else ():
        row, first, last = int(rows[of_row[0]]), int(targets[of_row[0]]), int(targets[of_row[-1]])
        num_prompt = int(slots.num_prompt[row])
        known = slots.token_ids[row, num_prompt:last].astype(np.int64)
        constraint = slots.requests[row].constraint
        found.append(
            MaskPlace(of_row.tolist(), constraint, known[: first - num_prompt], known[first - num_prompt :])
        )
    return found
