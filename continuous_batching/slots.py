"""Hold the batch table: one row for each running request, as numpy columns.

A row has the request's tokens, counts, page table and sampling parameters. The scheduler changes it; the
model runner reads it.
"""

from __future__ import annotations

from collections.abc import KeysView

import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import Batch, PackedTokens, Sampled, ragged_ranges
from continuous_batching.request import Request
from kv_cache.pages import Index


class SlotPool:
    """The batch table. A slot is a row; while a request occupies it, the row holds its current state.

    Columns are numpy arrays over all `num_slots` rows, so that a step over decodes touches whole columns and
    its host cost hardly grows with their number. `busy` lists the occupied rows, oldest request first; it is
    replaced, never changed in place, because a batch may still refer to it.
    """

    def __init__(self, num_slots: int, max_tokens: int, page_size: int) -> None:
        if num_slots < 1 or max_tokens < 1 or page_size < 1:
            raise ValueError(
                f"a slot table of {num_slots} slots x {max_tokens} tokens, {page_size} to a page, is empty"
            )
        self.num_slots, self.max_tokens, self.page_size = num_slots, max_tokens, page_size
        self.max_pages = -(-max_tokens // page_size)

        # Columns are 32-bit if the device reads them or they are large, and 64-bit if numpy indexes with them
        self.token_ids = np.zeros((num_slots, max_tokens), dtype=np.int32)
        self.page_table = np.zeros((num_slots, self.max_pages), dtype=np.int32)
        # The page tables of the groups of windows, which own them (`kv_cache/groups.py`)
        self.window_tables: tuple[NDArray[np.int32], ...] = ()
        # [N] the page of each row's recurrent states, of the group that owns it; None if there are none
        self.state_pages: NDArray[np.int32] | None = None
        self.number = self._integers()  # order of arrival
        self.priority = self._integers()
        self.adapter = np.zeros(num_slots, dtype=np.int32)  # number of its adapter on the device; 0: none
        self.num_prompt = self._integers()
        self.num_given = self._integers()  # tokens that the request came with: the prompt and `Request.known`
        self.num_tokens = self._integers()  # known tokens: prompt and answer so far
        self.num_computed = self._integers()  # known tokens that are in the cache
        self.most_drafts = self._integers()  # drafts that the request allows in a step
        self.num_drafts = self._integers()  # drafts that follow the known tokens in token_ids
        self.num_drafted = self._integers()  # drafts that were verified
        self.num_accepted = self._integers()  # verified drafts that were accepted
        # Last cached tokens that a draft model or head lacks, and that the recurrent state has not taken in
        self.draft_lag, self.state_lag = self._integers(), self._integers()
        self.num_pages = self._integers()  # entries of page_table in use
        # Pages in use that were published in the prefix cache, or found there
        self.num_published = self._integers()
        self.num_shareable = self._integers()  # full pages of the prompt, which are published when computed
        self.limit = self._integers()  # num_tokens at which the request ends
        self.reserved = self._integers()  # tokens that were promised pages at admission

        self.temperature = np.zeros(num_slots, dtype=np.float32)
        self.top_k = self._integers()
        self.top_p = np.ones(num_slots, dtype=np.float32)
        self.min_p = np.zeros(num_slots, dtype=np.float32)
        self.repetition_penalty = np.ones(num_slots, dtype=np.float32)
        self.presence_penalty = np.zeros(num_slots, dtype=np.float32)
        self.frequency_penalty = np.zeros(num_slots, dtype=np.float32)
        self.seed = np.zeros(num_slots, dtype=np.uint64)
        self.beam_width = self._integers()  # 0: the row is no beam
        self.min_total = self._integers()  # stop tokens are forbidden while num_tokens is below this
        self.ignore_eos = np.zeros(num_slots, dtype=np.bool_)
        self.own_stops = np.zeros(num_slots, dtype=np.bool_)  # the request has stop_token_ids
        self.constrained = np.zeros(num_slots, dtype=np.bool_)  # the answer follows a grammar
        self.plain = np.ones(
            num_slots, dtype=np.bool_
        )  # no penalty, bias, mask, processor, logprobs, min_tokens or beams

        self.scoring = np.zeros(num_slots, dtype=np.bool_)  # log-probabilities of the prompt are wanted
        self.pooling = np.zeros(num_slots, dtype=np.bool_)  # an embedding of the prompt is wanted

        # The last request of each row, which stays readable after its end until the row is taken again
        self.requests: NDArray[np.object_] = np.full(num_slots, None, dtype=object)
        self.busy: Index = np.empty(0, dtype=np.int64)
        self._free = list(range(num_slots - 1, -1, -1))
        self._row_of: dict[str, int] = {}

    def _integers(self) -> Index:
        return np.zeros(self.num_slots, dtype=np.int64)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def running_ids(self) -> KeysView[str]:
        """The ids of the requests that are in rows."""
        return self._row_of.keys()

    def find(self, request_id: str) -> int | None:
        """Return the row of a request, from the time it takes one until its tokens are handed back."""
        return self._row_of.get(request_id)

    def decoding(self, rows: Index, computed: Index, known: Index) -> NDArray[np.bool_]:
        """Whether each row decodes: its prompt and all known tokens but the last are computed.

        `computed` is the number of its tokens in the cache, `known` that of all its tokens. A decoding row
        gets a token in every step.
        """
        is_decoding: NDArray[np.bool_] = (known - computed == 1) & (known > self.num_prompt[rows])
        return is_decoding

    def set_drafts(self, rows: Index, tokens: NDArray[np.int32], counts: Index) -> None:
        """Place drafts behind the known tokens of rows [N] that decode and are no beams, for the next batch.

        Row i gets the first `counts[i]` of `tokens[i]` [N, most].
        """
        first = self.num_tokens[rows]
        is_decoding = (self.num_computed[rows] == first - 1) & (first > self.num_prompt[rows])
        assert is_decoding.all(), f"row {rows[~is_decoding][0]} does not decode"
        assert not self.beam_width[rows].any(), "a beam has drafts"
        assert (first + counts < self.limit[rows]).all(), "a draft stands where no token may follow it"
        which, ahead = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
        self.token_ids[rows[which], first[which] + ahead] = tokens[which, ahead]
        self.num_drafts[rows] = counts

    def drop_drafts(self) -> None:
        """Drop the drafts of all rows."""
        self.num_drafts[:] = 0

    def take(self, request: Request, *, is_beam: bool = False) -> int:
        """Put a request with all its known tokens into a free row.

        Only the leader of beams is found by its id.
        """
        row = self._free.pop()
        params, count = request.params, len(request.tokens)
        self.requests[row] = request
        if not is_beam:
            self._row_of[request.id] = row
        self.number[row] = request.number
        self.priority[row] = request.priority
        self.adapter[row] = request.adapter
        self.token_ids[row, :count] = request.tokens
        self.num_prompt[row] = request.num_prompt_tokens
        self.num_given[row] = request.num_prompt_tokens + len(request.known)
        self.num_tokens[row] = count
        self.limit[row] = request.num_prompt_tokens + params.max_tokens
        for column in (self.num_computed, self.num_drafts, self.num_pages, self.num_published):
            column[row] = 0
        self.draft_lag[row] = self.state_lag[row] = 0
        self.most_drafts[row] = (
            self.max_tokens if params.max_draft_tokens is None else params.max_draft_tokens
        )
        self.num_drafted[row], self.num_accepted[row] = request.num_drafted, request.num_accepted
        self.num_shareable[row] = min(len(request.page_keys), request.num_prompt_tokens // self.page_size)

        self.temperature[row] = 0 if params.beam_width else params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition_penalty[row] = params.repetition_penalty
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.seed[row] = request.seed or 0
        self.beam_width[row] = params.beam_width
        self.min_total[row] = request.num_prompt_tokens + params.min_tokens
        self.ignore_eos[row] = params.ignore_eos
        self.own_stops[row] = bool(params.stop_token_ids)
        self.constrained[row] = request.constraint is not None
        self.plain[row] = not (
            params.repetition_penalty != 1
            or params.presence_penalty
            or params.frequency_penalty
            or params.logit_bias
            or params.masks_tokens
            or params.processors
            or params.logprobs is not None
            or params.min_tokens
            or params.beam_width
        )
        self.pooling[row] = params.pooling is not None
        self.scoring[row] = request.is_scoring and not self.pooling[row]
        self._insert_busy(row, request.number)
        return row

    def _insert_busy(self, row: int, number: int) -> None:
        """List a row as busy behind all requests that arrived before its own; most often that is the end."""
        at = len(self.busy)
        if at and self.number[self.busy[-1]] >= number:
            at = int(np.searchsorted(self.number[self.busy], number))
        busy = np.empty(len(self.busy) + 1, dtype=np.int64)
        busy[:at], busy[at], busy[at + 1 :] = self.busy[:at], row, self.busy[at:]
        self.busy = busy

    def hand_back(self, row: int) -> Request:
        """Hand a row's tokens back to its request, which is no longer found here; the row stays taken."""
        request: Request = self.requests[row]
        request.come_back(self.token_ids[row, : self.num_tokens[row]].copy(), int(self.num_computed[row]))
        request.num_drafted, request.num_accepted = int(self.num_drafted[row]), int(self.num_accepted[row])
        if self._row_of.get(request.id) == row:
            del self._row_of[request.id]
        return request

    def release(self, row: int) -> None:
        """Free a row whose pages and tokens have been taken care of."""
        self.busy = self.busy[self.busy != row]
        self.num_shareable[row] = 0  # a free row computes no page that others wait for
        self._free.append(row)

    def add_logprobs(self, rows: Index, sampled: Sampled) -> None:
        """Give requests the log-probabilities and pooled hidden states that they asked for."""
        for index, logprobs in sampled.logprobs.items():
            self.requests[rows[index]].logprobs.append(logprobs)
        # Also of outrun rows, because other samples may share them
        for row, found in sampled.prompt_logprobs.items():
            self.requests[row].prompt_logprobs += found
        for row, part in sampled.pooled.items():
            known = self.requests[row].pooled
            self.requests[row].pooled = part.copy() if known is None else known + part

    def pages(self, row: int) -> Index:
        """Return a copy of a row's pages, in the order of its tokens."""
        return self.page_table[row, : self.num_pages[row]].astype(np.int64)

    def state_of(self, row: int) -> Index:
        """Return the page of a row's recurrent states; empty if there are none."""
        pages = self.state_pages
        return np.empty(0, dtype=np.int64) if pages is None else pages[row : row + 1].astype(np.int64)

    def inputs(self, batch: Batch) -> PackedTokens:
        """Return what the forward pass of this batch reads, and where its keys and values go."""
        if batch.is_one_token_each:  # the arrays are not copied, because they are only read
            positions, rows = batch.starts, batch.slots
        else:
            positions = ragged_ranges(batch.starts, batch.stops)
            rows = np.repeat(batch.slots, batch.stops - batch.starts)
        indexes, offsets = positions // self.page_size, positions % self.page_size
        return PackedTokens(
            token_ids=self.token_ids[rows, positions],
            positions=positions,
            write_indexes=tuple(
                table[rows, indexes] * np.int64(self.page_size) + offsets
                for table in (self.page_table, *self.window_tables)
            ),
        )
