"""Lay out what the host sends to a captured step.

There are columns for each token, and the pages of each row, those of each further group of layers
(`kv_cache/groups.py`) at the end. A row has W tokens; the tokens of a batch stand
at its end, so that the last of them sees all keys of the row, and padding precedes them. Where layers keep
recurrent states, the page of each row's state comes last, which for padding is the null page; with drafts, it
is followed by how many accepted drafts the row reads again, and by its number of tokens.

Legend: R rows, W tokens of each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from continuous_batching.batch import Batch, ragged_ranges
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index
from models.sampling import draw_columns

# Columns of a token: token id, position, cache address to write, kv length, length that sets dynamic rope,
# where its token is read, and its adapter. The next columns are in the order of the batch's tokens: how each
# is drawn, and where it stands
SOURCE, ADAPTER = 5, 6
DRAW = slice(7, 7 + draw_columns.COLUMNS)
PLACE = DRAW.stop
COLUMNS = PLACE + 1


class GraphInputs:
    """Views of `values`, int32 on the host: [COLUMNS, R * W], then [max_pages, R].

    Each of the `num_windows` groups of windows adds a column of addresses to write [R * W], and its pages;
    `num_states` is the number of values for the state of each row: 1 for its page, and 3 with drafts.

    Padding is the first token of the null page, and its keys are written there. A row of nothing but padding
    has W keys, so that no query is left without one. Of each row's pages, those behind its last key are of
    steps before, and nothing reads them.

    `wait_for_copy` waits for the last copy to the device, which must precede a change of the values.
    """

    def __init__(
        self,
        values: Tensor,
        num_rows: int,
        width: int,
        slots: SlotPool,
        first_token: int,
        num_windows: int = 0,
        num_states: int = 0,
    ) -> None:
        self.values, self.width = values, width
        self.wait_for_copy: Callable[[], None] = lambda: None
        self._slots = slots
        columns, pages, windows, states = split(values, num_rows, width, num_windows, num_states)
        self.columns: NDArray[np.int32] = columns.numpy()
        self._pages: NDArray[np.int32] = pages.numpy()
        self._states: NDArray[np.int32] = states.numpy()  # [num_states, R]
        self._windows = [(places.numpy(), pages.numpy()) for places, pages in windows]
        self._pad_pages = -(-width // slots.page_size)  # pages of a row of padding
        self._sources = first_token + np.arange(num_rows * width)  # places of the token ids that are sent
        self._pages[:] = 0
        for _, of_window in self._windows:
            of_window[:] = 0
        self._pad(0, 0)
        self.columns[SOURCE] = self._sources

    def fill(self, batch: Batch) -> None:
        """Enter a batch; if the step has rows of one token, each token of the batch takes a row."""
        slots, columns = self._slots, self.columns
        packed, lens = slots.inputs(batch), batch.stops - batch.starts
        count, owners = batch.num_tokens, batch.slots
        rows = np.repeat(owners, lens) if count > batch.num_spans else owners
        places: slice | Index = slice(0, count)
        if self.width == 1:
            owners = rows
            self._pad(count, count)
        else:
            ends = self.width * np.arange(1, batch.num_spans + 1)
            places = ragged_ranges(ends - lens, ends)
            self._pad(0, batch.num_spans)
            self._write_to_null_page(np.delete(np.arange(columns.shape[1]), places))
            columns[PLACE, :count] = places
        kv_lens = packed.positions + 1
        columns[0, places], columns[1, places] = packed.token_ids, packed.positions
        columns[2, places], columns[3, places] = packed.write_index, kv_lens
        columns[4, places] = np.maximum(slots.num_prompt[rows], kv_lens)
        columns[ADAPTER, places] = slots.adapter[rows]
        columns[SOURCE] = self._sources
        width = -(-int(batch.stops.max()) // slots.page_size)
        self._pages[:width, : len(owners)] = slots.page_table[owners, :width].T
        if len(self._states):
            assert slots.state_pages is not None, "layers keep states, and the slots have none"
            self._states[0, : len(owners)] = slots.state_pages[owners]
        if len(self._states) > 1:
            self._states[1, : len(owners)], self._states[2, : len(owners)] = slots.state_lag[owners], lens
        groups = zip(self._windows, slots.window_tables, packed.write_indexes[1:])
        for (window_places, pages), table, index in groups:
            window_places[places] = index
            pages[:width, : len(owners)] = table[owners, :width].T

    def read_from(self, batch: Batch, sources: Index) -> None:
        """Let the last tokens of the spans `batch.unknown` be read from other places."""
        if self.width == 1:
            last = (batch.stops - batch.starts).cumsum()[batch.unknown] - 1
        else:
            last = self.width * (batch.unknown + 1) - 1
        self.columns[SOURCE, last] = sources

    def read_drafts(self, batch: Batch, first: int) -> None:
        """Let the drafts of a batch be read from consecutive places starting at `first`."""
        lens, guessed = batch.stops - batch.starts, batch.is_draft
        spans, targets = batch.sampled[guessed], batch.targets[guessed]
        ends = lens.cumsum() if self.width == 1 else self.width * np.arange(1, batch.num_spans + 1)
        self.columns[SOURCE, ends[spans] - batch.stops[spans] + targets] = first + np.arange(len(spans))

    def kv_lens(self) -> list[int]:
        """Return the number of keys of each row."""
        lens: list[int] = self.columns[3, self.width - 1 :: self.width].tolist()
        return lens

    def _pad(self, first: int, first_row: int) -> None:
        """Make padding of everything from this token and this row on."""
        columns = self.columns[:, first:]
        columns[:] = 0
        columns[3:5] = self.width
        self._write_to_null_page(np.arange(first, self.columns.shape[1]))
        self._pages[: self._pad_pages, first_row:] = 0
        self._states[:, first_row:] = 0
        for _, pages in self._windows:
            pages[: self._pad_pages, first_row:] = 0

    def _write_to_null_page(self, padding: Index) -> None:
        """Let each of these tokens write to a place of its own, as far as a page has places."""
        in_null_page = np.arange(len(padding)) % self._slots.page_size
        self.columns[2, padding] = in_null_page
        for places, _ in self._windows:
            places[padding] = in_null_page


def num_values(num_rows: int, width: int, max_pages: int, num_windows: int = 0, num_states: int = 0) -> int:
    """Return the number of values in a captured step's inputs, `num_states` of them for each row's state."""
    return num_rows * (width * (COLUMNS + num_windows) + (1 + num_windows) * max_pages + num_states)


def split(
    values: Tensor, num_rows: int, width: int, num_windows: int = 0, num_states: int = 0
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]], Tensor]:
    """Return the columns and the pages of a captured step's inputs, those of each window, and the states'."""
    values, states = values.split([len(values) - num_rows * num_states, num_rows * num_states])
    num_tokens = num_rows * width
    num_columns = COLUMNS * num_tokens
    num_pages = (len(values) - num_columns - num_windows * num_tokens) // (1 + num_windows)
    columns, pages, *further = values.split(
        [num_columns, num_pages, *(size for _ in range(num_windows) for size in (num_tokens, num_pages))]
    )
    windows = [(places, table.view(-1, num_rows)) for places, table in zip(further[::2], further[1::2])]
    return columns.view(COLUMNS, -1), pages.view(-1, num_rows), windows, states.view(num_states, num_rows)
