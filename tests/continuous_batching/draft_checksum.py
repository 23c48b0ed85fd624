"""A draft model beside the checksum model: its keys lie in the same pages, and what it reads is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from continuous_batching.batch import Batch, Sampled
from continuous_batching.slots import SlotPool
from kv_cache.groups import WindowGroup
from kv_cache.pages import PageCopy, PagePool
from tests.continuous_batching.checksum import VOCAB_SIZE, ChecksumRunner, Free, answer_token, key, keys_of


class DraftingRunner(ChecksumRunner):
    """Makes the drafts of the batches that it runs; three in four are what the model says, by their keys."""

    def __init__(
        self,
        slots: SlotPool,
        pool: PagePool,
        host_pool: PagePool | None = None,
        groups: Sequence[WindowGroup] = (),
    ) -> None:
        super().__init__(slots, pool, host_pool, groups)
        self.drafter = ChecksumRunner(slots, pool, host_pool)  # only its keys are used
        self.num_caught_up = 0  # tokens that decodes had left out

    def run(self, batch: Batch, free: Free | None = None) -> Sampled:
        self.drafter._copy(batch.copies, self.drafter._free())
        counts = batch.drafts_by_span
        drafts = [
            self._draft(batch, span, int(counts[span]))
            for span in range(batch.num_spans)
            if batch.draft_stops[span] > batch.draft_starts[span]
        ]
        made = np.array([token for each in drafts for token in each], dtype=np.int64)
        places = batch.owners[batch.is_draft], batch.targets[batch.is_draft]
        held = self.slots.token_ids[places]
        assert not held.any(), "the host knows the drafts before the device has made them"
        self.slots.token_ids[places] = made  # only the device knows them
        sampled = super().run(batch, free)
        self.slots.token_ids[places] = held
        return replace(sampled, drafts=made)

    def resize(self, num_pages: Sequence[int], copies: tuple[PageCopy, ...]) -> None:
        super().resize(num_pages, copies)
        self.drafter.resize(num_pages, copies)

    def _draft(self, batch: Batch, span: int, count: int) -> list[int]:
        row, start, stop = int(batch.slots[span]), int(batch.draft_starts[span]), int(batch.stops[span])
        known, size, slots = stop - count, self.slots.page_size, self.slots
        assert int(batch.draft_stops[span]) == stop - (count > 0), "the last draft is never fed"
        assert span not in batch.unknown, "a decode of an unknown token is left out"
        tokens = slots.token_ids[row, :known].tolist()
        positions = np.arange(stop)
        pages = slots.page_table[row, positions // size].astype(np.int64)
        places = pages * size + positions % size
        lacking = pages[start : int(batch.starts[span])]
        assert (self.pool.holders[lacking] == 1).all(), "wrote to a page that others hold"
        self.num_caught_up += len(lacking)
        keys = keys_of(tokens[:start])
        assert self.drafter.cache[places[:start]].tolist() == keys, "the draft model's keys are not there"
        drafts: list[int] = []
        while True:
            for position in range(len(keys), len(tokens)):
                keys.append(key(tokens[position], position, keys[-1] if keys else 1))
                self.drafter.cache[places[position]] = keys[-1]
            if len(drafts) == count:
                return drafts
            token = answer_token(np.array(keys, dtype=np.uint64), slots.requests[row].params.seed or 0)
            drafts.append(token if keys[-1] % 4 else (token + 1) % VOCAB_SIZE)
            if len(drafts) == count:
                return drafts
            tokens.append(drafts[-1])
