"""A head beside the checksum model: its keys, and the target's features that it reads, are checked.

The target's key of a position is its feature, too. The head's entry is made of the token and the feature
before it, so that it equals the target's key if and only if that was the right feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from continuous_batching.batch import Batch, Sampled
from continuous_batching.slots import SlotPool
from kv_cache.groups import WindowGroup
from kv_cache.pages import PageCopy, PagePool
from tests.continuous_batching.checksum import VOCAB_SIZE, ChecksumRunner, Free, answer_token, key, keys_of

ITS_OWN = 77  # what the head itself says in place of a feature


class HeadRunner(ChecksumRunner):
    """Makes the drafts of the batches that it runs, at most `most` a row; three in four are right."""

    def __init__(
        self,
        slots: SlotPool,
        pool: PagePool,
        host_pool: PagePool | None,
        most: int,
        groups: Sequence[WindowGroup] = (),
    ) -> None:
        super().__init__(slots, pool, host_pool, groups)
        self.head = ChecksumRunner(slots, pool, host_pool)  # only its keys are used
        self.features = ChecksumRunner(slots, pool, host_pool)  # only the target's features are used
        self.kept = min(slots.page_size, most + 2)  # features of a page
        self.num_caught_up = 0

    def run(self, batch: Batch, free: Free | None = None) -> Sampled:
        for each in (self.head, self.features):
            each._copy(batch.copies, each._free())
        counts = batch.drafts_by_span.tolist()
        drafts = [self._draft(batch, span, count) if count else [] for span, count in enumerate(counts)]
        plain = [span for span, count in enumerate(counts) if not count]
        before = {span: self._before(batch, span) for span in plain}
        made = np.array([token for each in drafts for token in each], dtype=np.int64)
        places = batch.owners[batch.is_draft], batch.targets[batch.is_draft]
        held = self.slots.token_ids[places]
        assert not held.any(), "the host knows the drafts before the device has made them"
        self.slots.token_ids[places] = made  # only the device knows them
        sampled = super().run(batch, free)
        self.slots.token_ids[places] = held
        for row, start, stop in zip(batch.slots.tolist(), batch.starts.tolist(), batch.stops.tolist()):
            for position in range(start, stop):
                self.features.cache[self._ring(row, position)] = self.cache[self._place(row, position)]
        for span in plain:
            self._fill(batch, span, before[span])
        return replace(sampled, drafts=made)

    def resize(self, num_pages: Sequence[int], copies: tuple[PageCopy, ...]) -> None:
        super().resize(num_pages, copies)
        for each in (self.head, self.features):
            each.resize(num_pages, copies)

    def _draft(self, batch: Batch, span: int, count: int) -> list[int]:
        row, start = int(batch.slots[span]), int(batch.draft_starts[span])
        known = int(batch.stops[span]) - count
        assert int(batch.draft_stops[span]) == known, "entries for drafts do not last"
        keys = self._known(batch, span)
        self.num_caught_up += known - 1 - start
        tokens = self.slots.token_ids[row, :known].tolist()
        for position in range(start, known):
            feature = int(self.features.cache[self._ring(row, position - 1)])
            keys.append(self._enter(row, position, feature))
        drafts: list[int] = []
        for position in range(known, known + count):
            self.features.cache[self._ring(row, position - 1)] = ITS_OWN
            token = answer_token(np.array(keys, dtype=np.uint64), self.slots.requests[row].params.seed or 0)
            drafts.append(token if keys[-1] % 4 else (token + 1) % VOCAB_SIZE)
            if len(drafts) < count:
                keys.append(key(drafts[-1], position, keys[-1]))
                self.head.cache[self._place(row, position)] = ITS_OWN
        assert keys[:known] == keys_of(tokens), "a feature was not the one before its token"
        return drafts

    def _before(self, batch: Batch, span: int) -> list[int]:
        """The features of positions before the span that its entries read."""
        row, start, stop = (int(each[span]) for each in (batch.slots, batch.draft_starts, batch.draft_stops))
        read = range(max(start, 1), min(stop, int(batch.starts[span]) + 1))
        return [int(self.features.cache[self._ring(row, position - 1)]) for position in read]

    def _fill(self, batch: Batch, span: int, before: list[int]) -> None:
        row, start, stop = (int(each[span]) for each in (batch.slots, batch.draft_starts, batch.draft_stops))
        if stop == start:
            return
        assert span not in batch.unknown or stop < batch.stops[span], "a token that the host does not know"
        keys = self._known(batch, span)
        for position in range(max(start, 1), stop):
            found = int(self.cache[self._place(row, position - 1)])
            keys.append(self._enter(row, position, before.pop(0) if before else found))
        tokens = self.slots.token_ids[row, :stop].tolist()
        assert keys == keys_of(tokens), "a feature was not the one before its token"

    def _known(self, batch: Batch, span: int) -> list[int]:
        """The keys that the head has computed; the first position has none."""
        row, start = int(batch.slots[span]), int(batch.draft_starts[span])
        places = [self._place(row, position) for position in range(int(batch.starts[span]))]
        lacking = np.array(places[start:], dtype=np.int64) // self.slots.page_size
        assert (self.pool.holders[lacking] == 1).all(), "wrote to a page that others hold"
        known = keys_of(self.slots.token_ids[row, : max(start, 1)].tolist())
        entries = [int(self.head.cache[place]) for place in places[1:start]]
        assert entries == known[1:], "the head's keys are not there"
        return known

    def _enter(self, row: int, position: int, feature: int) -> int:
        place = self._place(row, position)
        self.head.cache[place] = key(int(self.slots.token_ids[row, position]), position, feature)
        return int(self.head.cache[place])

    def _place(self, row: int, position: int) -> int:
        size = self.slots.page_size
        return int(self.slots.page_table[row, position // size]) * size + position % size

    def _ring(self, row: int, position: int) -> int:
        """Where the feature of a position is kept, until one stands there that is `kept` further on."""
        size = self.slots.page_size
        return int(self.slots.page_table[row, position // size]) * size + position % size % self.kept
