"""Track the batches in flight on the device, whose tokens the host does not know yet.

The scheduler asks here which rows it may schedule ahead of the device, and which last tokens are only known
there; a request that ends while its row is in flight is kept until its last batch is committed.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from continuous_batching.batch import LATE, Batch, Sampled
from continuous_batching.paging.page_tables import EMPTY
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index


class _Flight(NamedTuple):
    batch: Batch
    rows: Index  # rows that it computes or samples for
    prompts: Index  # those rows whose prompts it may have computed
    since_s: float


class InFlight:
    """Batches that were made and are not committed: one, or two if the host works ahead of the device.

    Before a second batch is made, the first is booked as done except for the values of its tokens
    (`advance`): these are on the device, where the second batch reads them. With a `depth` above 1 there may
    be so many batches in flight instead, of which no two have a row in common.

    A request may end while the device still computes its row. The row is then outrun: none of its tokens
    count any more, and it is freed when the last batch with it is committed.
    """

    def __init__(self, slots: SlotPool, depth: int = 1) -> None:
        self._slots, self._depth = slots, depth
        self._batches: deque[_Flight] = deque()
        self._unknown = EMPTY  # rows whose last token has no value on the host yet
        self.outrun: dict[int, bool] = {}  # row -> whether what it has computed may be wrong

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def last(self) -> Batch:
        """The batch that was made last."""
        return self._batches[-1].batch

    @property
    def rows(self) -> Index:
        """The rows that the device computes or samples for."""
        return np.unique(np.concatenate([EMPTY, *(each.rows for each in self._batches)]))

    @property
    def takes_another(self) -> bool:
        """Whether a batch may be made beside those in flight, of which there is at least one."""
        if self._depth > 1:
            return 0 < len(self._batches) < self._depth
        if len(self._batches) != 1 or self.last.num_drafts:
            return False
        return bool(self._slots.plain[self.last.owners].all())

    def holds(self, row: int) -> bool:
        """Whether the device computes or samples for a row."""
        return any(row in each.rows for each in self._batches)

    def launch(self, batch: Batch, rows: Index, prompts: Index, now_s: float) -> None:
        """Add a batch that computes or samples for `rows`, and may compute prompts for `prompts`."""
        self._batches.append(_Flight(batch, rows, prompts, now_s))

    def advance(self) -> None:
        """Book the one batch in flight as done, with placeholders for its tokens."""
        if self._depth > 1:
            return
        assert len(self._batches) == 1, f"the host is {len(self._batches)} batches ahead already"
        assert not self.last.num_drafts, "how many tokens a draft brings is not known ahead"
        slots, batch = self._slots, self.last
        rows = batch.owners[~np.isin(batch.owners, list(self.outrun))] if self.outrun else batch.owners
        slots.num_computed[batch.slots] = batch.stops
        slots.state_lag[batch.slots] = 0
        self._book_draft_model(batch)
        # Any legal token will do, because the device has the real one
        slots.token_ids[rows, slots.num_tokens[rows]] = 0
        slots.num_tokens[rows] += 1
        self._unknown = rows

    def withheld(self) -> Index:
        """Return the rows that are outrun or end with a token whose value is unknown.

        If batches have no row in common, these are all rows in flight.
        """
        if self._depth > 1:
            return self.rows
        slots, rows = self._slots, self._unknown
        full: Index = rows[slots.num_tokens[rows] >= slots.limit[rows]]
        return np.concatenate([full, np.array(list(self.outrun), dtype=np.int64)])

    def is_unknown(self, rows: Index) -> Index:
        """Return the indices of those rows whose last token has no value on the host yet."""
        return np.flatnonzero(np.isin(rows, self._unknown)) if len(self._unknown) else EMPTY

    def land(self, batch: Batch) -> tuple[Index, float]:
        """Book the oldest batch in flight as computed; afterwards no token is unknown.

        Returns the rows that may have new prompt pages to publish, and when the batch was made.
        """
        assert self._batches, "a batch was committed that is not in flight"
        landed = self._batches.popleft()
        assert landed.batch is batch, "batches are committed in the order in which they were made"
        self._slots.num_computed[batch.slots] = batch.stops
        self._slots.state_lag[batch.slots] = 0
        self._book_draft_model(batch)
        if len(self._unknown):
            self._slots.num_tokens[self._unknown] -= 1
            self._unknown = EMPTY
        return landed.prompts, landed.since_s

    def put_off(self, batch: Batch, sampled: Sampled) -> int:
        """Have the last tokens of the rows that are LATE computed once more; return the number of these rows.

        In a row with drafts, the first token says whether the row is late.
        """
        slots, is_first = self._slots, np.diff(batch.owners, prepend=-1) != 0
        late = batch.owners[is_first & (sampled.tokens == LATE)]
        rows = late[~np.isin(late, list(self.outrun))]
        slots.num_computed[rows] = slots.num_tokens[rows] - 1
        if len(batch.draft_starts):
            spans = np.flatnonzero(np.isin(batch.slots, rows))
            lacking = slots.num_computed[batch.slots[spans]] - batch.draft_stops[spans]
            slots.draft_lag[batch.slots[spans]] = np.maximum(lacking, 0)
        return len(late)

    def _book_draft_model(self, batch: Batch) -> None:
        if len(batch.draft_stops):
            self._slots.draft_lag[batch.slots] = batch.stops - batch.draft_stops

    def outrun_by(self, row: int, *, is_wrong: bool) -> None:
        """Note that the request in this row ends while the device still computes it."""
        if row in self._unknown:
            self._slots.num_tokens[row] -= 1
            self._unknown = self._unknown[self._unknown != row]
        self.outrun[row] = is_wrong

    def take_landed(self) -> dict[int, bool]:
        """Remove and return the outrun rows that are no longer in flight, with whether they may be wrong."""
        landed = {row: is_wrong for row, is_wrong in self.outrun.items() if not self.holds(row)}
        for row in landed:
            del self.outrun[row]
        return landed
