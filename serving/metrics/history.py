"""Keep the last minutes of a server's figures, so that a page that opens later shows them at once.

A sample a second holds the gauges of the engine, the rates of that second, and the quantiles of the times
that were observed in it. Beside it, a column of cells says what was in each slot. Both are bounded, and both
cost nothing for a request: what a sample needs is counted anyway.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from serving.metrics.server_stats import ServerStats

EVERY_S = 1.0
NUM_SAMPLES = 300
# What a cell says of a slot: nothing is in it, a request of another key, or the viewer's own request, whose
# prompt is read, or whose answer has one of the colours.
FREE, OTHERS, PROMPT, FIRST_COLOUR = range(4)
NUM_COLOURS = 5  # four would leave none where both neighbours and the last request in a slot differ


class Sample(NamedTuple):
    """The figures of one second; times are null where none was observed, gauges where no engine runs."""

    at_s: float  # seconds since 1970
    running: int | None
    waiting: int | None
    used_pages: int | None
    cached_pages: int | None
    output_tokens_per_s: float
    prompt_tokens_per_s: float  # those that were computed, and not found in the prefix cache
    first_token_p50_s: float | None
    first_token_p95_s: float | None
    next_token_p50_s: float | None
    next_token_p95_s: float | None


class Occupant(NamedTuple):
    """What is in a slot; `owner` is the only one who may see more of it than that it is there."""

    stream: int
    owner: str | None
    reads_prompt: bool


class SlotColours:
    """The colours of the requests in the slots.

    Requests in neighbouring slots differ, as do those that follow each other in a slot.
    """

    def __init__(self) -> None:
        self._streams: list[int | None] = []
        self._colours: list[int] = []  # that of the last request of each slot; -1: there was none

    def paint(self, streams: Sequence[int | None]) -> list[int]:
        """Return the colour of each slot, given the stream in it; that of an empty slot means nothing."""
        more = len(streams) - len(self._streams)
        before, colours = self._streams + [None] * more, self._colours + [-1] * more
        for slot, stream in enumerate(streams):
            if stream is None or stream == before[slot]:
                continue
            taken = {colours[slot], *colours[max(0, slot - 1) : slot], *colours[slot + 1 : slot + 2]}
            turns = ((stream + each) % NUM_COLOURS for each in range(NUM_COLOURS))
            colours[slot] = next(each for each in turns if each not in taken)
        self._streams, self._colours = [*streams], colours
        return colours


class History:
    """The samples of the last minutes, the oldest first."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=NUM_SAMPLES)
        self.colours: list[int] = []  # colours of the requests in the slots, as of the last reading
        self._columns: deque[tuple[bytes, list[str | None]]] = deque(
            maxlen=NUM_SAMPLES
        )  # cells, their owners
        self._painter = SlotColours()
        self._last_s = time.monotonic()
        self._last_tokens: tuple[int, int] | None = None

    def look(self, slots: Sequence[Occupant | None]) -> None:
        """Take a reading of the slots, by which requests get their colours."""
        self.colours = self._painter.paint([None if each is None else each.stream for each in slots])

    def add(self, stats: ServerStats, slots: Sequence[Occupant | None]) -> None:
        """Add a sample, and the slots as they were read last; none is known without an engine."""
        now_s, tokens = time.monotonic(), (stats.answer_tokens, stats.prefill_tokens)
        since_s, last = max(1e-9, now_s - self._last_s), self._last_tokens or tokens
        first_s, next_s = stats.recent_times()
        output_per_s, prompt_per_s = (round((new - old) / since_s, 1) for new, old in zip(tokens, last))
        gauges = None if stats.last_beat is None else stats.last_beat.gauges
        self.samples.append(
            Sample(
                round(time.time(), 1),
                None if gauges is None else gauges.running_requests,
                None if gauges is None else gauges.waiting_requests,
                None if gauges is None else gauges.held_pages,
                None if gauges is None else gauges.idle_pages,
                output_per_s,
                prompt_per_s,
                *_quantiles(first_s),
                *_quantiles(next_s),
            )
        )
        self._last_s, self._last_tokens = now_s, tokens
        cells = bytes(
            FREE if each is None else PROMPT if each.reads_prompt else FIRST_COLOUR + colour
            for each, colour in zip(slots, self.colours)
        )
        self._columns.append((cells, [None if each is None else each.owner for each in slots]))

    def cells(self, owner: str, num_slots: int, *, only_last: bool = False) -> bytes:
        """Return what this owner may see of each slot, sample by sample, or of the last sample alone."""
        columns = [self._columns[-1]] if only_last and self._columns else self._columns
        return b"".join(_seen_by(owner, *each).ljust(num_slots, b"\0")[:num_slots] for each in columns)


def _quantiles(values: Collection[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    ordered = np.sort(np.fromiter(values, float, len(values)))
    median, late = np.interp((0.5, 0.95), np.linspace(0, 1, len(ordered)), ordered).round(6).tolist()
    return median, late


def _seen_by(owner: str, cells: bytes, owners: Sequence[str | None]) -> bytes:
    if not any(cells):
        return cells
    return bytes(cell if not cell or its == owner else OTHERS for cell, its in zip(cells, owners))
