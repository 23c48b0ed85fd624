"""Who makes the masks of grammars, and what becomes of a row whose mask takes long?

Threads make them while the device computes. A row whose mask is not there in time gets no token in this step:
what the device answers says LATE for it, and so does a recording, so that whoever follows agrees. Its last
token is computed once more in the next step; all other rows have gone on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from continuous_batching.constraints import Constraint, Making, Mask
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index

PATIENCE_S = 0.05  # that a step waits for masks which were quick so far
MOST_THREADS = 16  # each grammar that takes long holds one


class MaskPlace(NamedTuple):
    """Where a row yields tokens: of its entries in the step, and of its answer."""

    indexes: list[int]  # of its tokens among all that the step yields
    constraint: Constraint
    answer: Index
    drafts: Index


@dataclass(slots=True)
class Made:
    """The masks of a step, by index into its rows; rows of neither may get any token."""

    rows: list[int] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    late: list[int] = field(default_factory=list)  # that get no token in this step


class MaskMaker:
    """Makes masks in threads: one for all that are quick, and one for each that was slow before.

    `patience_s` is what a step waits for those that were quick before, and for any of them where no row of
    the step would get a token. The first token of an answer is always waited for: its mask was made when the
    grammar was compiled, and others may share the pages of its prompt.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._threads = ThreadPoolExecutor(MOST_THREADS, "masks")
        self._made = threading.Condition()

    def begin(self, rows: Index, targets: Index, slots: SlotPool) -> None:
        """Begin to make what these rows need for tokens at positions `targets`; nothing is waited for."""
        if slots.constrained[rows].any():
            self._begin(_places(rows, targets, slots), again=True)

    def take(self, rows: Index, targets: Index, slots: SlotPool, *, is_alone: bool) -> Made:
        """The masks for these rows, some of which follow a grammar, in a step whose other rows have none
        (`is_alone`: there are no others)."""
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
        """Let threads make what is not made; `again`: also what is still behind another that takes long."""
        quick: list[Making] = []
        for place in places:
            job = place.constraint.making
            is_it = job is not None and not (job.is_done and len(job.answer) != len(place.answer))
            if job is None or not is_it:
                job = place.constraint.making = Making(place.constraint, place.answer, place.drafts)
            elif job.is_begun or not again:
                continue
            if place.constraint.is_slow:
                self._threads.submit(self._make, [job])
            else:
                quick.append(job)
        if quick:
            self._threads.submit(self._make, quick)

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
        first = [job for job in jobs if not len(job.answer)]
        quick = [job for job in jobs if not (job.is_late or job.constraint.is_slow)]
        until_s = time.monotonic() + self._patience_s
        with self._made:
            self._made.wait_for(lambda: _are_done(first))
            self._made.wait_for(lambda: _are_done(quick), until_s - time.monotonic())
            if is_alone:
                self._made.wait_for(lambda: any(job.is_done for job in jobs), until_s - time.monotonic())


def _are_done(jobs: Sequence[Making]) -> bool:
    """Whether all are, or one cannot be made."""
    return all(job.is_done for job in jobs) or any(job.failed is not None for job in jobs)


def _places(rows: Index, targets: Index, slots: SlotPool) -> list[MaskPlace]:
    """The rows with grammars. Those of a span stand behind one another: its last tokens are drafts.

    What is known of a row is copied: a thread may read it when the row is another's.
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
