"""Bound the prompt tokens that a step computes beside its decodes, in total and for each request.

The chunk size is fixed, shrinks as a prompt progresses (Sarathi's schedule), or is chosen by a target for the
time between tokens. For the last, the step's time (`continuous_batching.step_time`) is predicted for each
possible chunk size, and multiplied by a margin: the quantile of measured over predicted times of the last
steps with chunks. Long prompts can be held to half of the prompt tokens, so that short ones overtake them and
neither starve.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import Batch
from continuous_batching.policies.policy import ALL, Busy, in_order
from continuous_batching.step_time import Floats, StepTime
from kv_cache.pages import Index


class Limit(NamedTuple):
    """The largest number of prompt tokens in a step."""

    total: int
    each: Index | int = ALL  # bound for each busy slot
    newcomer: int = ALL  # bound for each new request


class Chunks(Protocol):
    """A control of the chunk size."""

    def limit(self, busy: Busy, left: int) -> Limit:
        """Return the limit for a step whose decodes leave `left` tokens of its budget."""
        ...

    def observe(self, batch: Batch, took_s: float) -> None:
        """Learn from the time that a step took."""
        return


@dataclass(frozen=True, slots=True)
class FixedChunks(Chunks):
    """Chunks of at most `chunk_tokens` tokens, as many as fit into the budget."""

    chunk_tokens: int

    def limit(self, busy: Busy, left: int) -> Limit:
        """Return the same limit in every step."""
        return Limit(left, self.chunk_tokens, self.chunk_tokens)


class StagedChunks(Chunks):
    """Chunks that shrink as a prompt progresses, from `max_tokens` to `min_tokens` in equal stages.

    This is Sarathi's dynamic schedule, by which a long prompt takes less and less from the other requests. A
    stage covers `staged_tokens / num_stages` tokens of the prompt; the rest of a longer prompt stays in the
    last stage. It deviates from Sarathi in that the decodes of a step do not count against the size of a
    chunk, only against the budget.
    """

    def __init__(
        self, min_tokens: int, max_tokens: int, num_stages: int, staged_tokens: int, tile_tokens: int
    ) -> None:
        sizes = np.linspace(min_tokens, max_tokens, num_stages).astype(np.int64)[::-1]
        tile = min(tile_tokens, min_tokens)
        num_tiles = np.minimum(np.round(sizes / tile), max_tokens // tile)
        self.sizes: Index = (num_tiles * tile).astype(np.int64)
        self._stage_tokens = -(-staged_tokens // num_stages)

    def limit(self, busy: Busy, left: int) -> Limit:
        """Choose the size of each chunk by how many tokens of its prompt are computed."""
        stages = np.minimum(busy.computed // self._stage_tokens, len(self.sizes) - 1)
        return Limit(left, self.sizes[stages], int(self.sizes[0]))


QUANTILE = 0.99  # quantile of the times between tokens that is kept below the target
_WINDOW = 256  # steps whose errors are remembered
_EARLY_MARGIN = 1.5  # margin before there are enough of them
_ENOUGH = 32


class AdaptiveChunks(Chunks):
    """The largest number of prompt tokens that fits between two tokens of the running requests.

    The tokens of a step, decodes included, are a multiple of `tile_tokens`, because that is what a matrix
    unit computes. At least `min_tokens` are computed even if the target is missed, so that prompts make
    progress; and at most twice the largest number tried so far, so that little depends on a model that has
    seen little. `step_time` is the scheduler's own, which observes each step first.
    """

    def __init__(
        self, step_time: StepTime, target_itl_s: float, min_tokens: int, max_tokens: int, tile_tokens: int
    ) -> None:
        self.margin = _EARLY_MARGIN
        self._step_time = step_time
        self._target_itl_s = target_itl_s
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._tile_tokens = tile_tokens
        self._most_seen = 0
        self._ratios: NDArray[np.float64] = np.ones(_WINDOW)
        self._num_ratios = 0

    def limit(self, busy: Busy, left: int) -> Limit:
        """Choose the largest step whose predicted time is within the target."""
        decodes = busy.decodes
        num_decodes = int(np.count_nonzero(decodes))
        most = min(left, self._max_tokens)
        if not num_decodes:
            return Limit(most)  # no decode waits for a token
        most = min(most, max(self._min_tokens, 2 * self._most_seen))
        first = self._min_tokens + -(num_decodes + self._min_tokens) % self._tile_tokens
        sizes = np.arange(first, most + 1, self._tile_tokens)
        if not len(sizes):
            return Limit(min(most, self._min_tokens))
        prompts = busy.computed[~decodes]
        start, read = int(prompts[0]) if len(prompts) else 0, int(busy.computed[decodes].sum())
        num_tokens: Floats = (num_decodes + sizes).astype(np.float64)
        num_pairs: Floats = read + num_decodes / 2 + sizes * (start + sizes / 2)
        times_s = self._step_time.prompts.seconds(num_tokens, read + start, num_pairs)
        within = self.margin * times_s <= self._target_itl_s
        num_fitting = len(sizes) if within.all() else int(np.argmin(within))
        return Limit(int(sizes[num_fitting - 1]) if num_fitting else self._min_tokens)

    def observe(self, batch: Batch, took_s: float) -> None:
        """Remember how large a chunk was, and how far its step was from the prediction."""
        num_chunk_tokens = batch.num_tokens - batch.num_spans - batch.num_drafts
        self._most_seen = max(self._most_seen, num_chunk_tokens)
        ratio = self._step_time.prompt_ratio
        if not ratio:
            return
        self._ratios[self._num_ratios % _WINDOW] = ratio
        self._num_ratios += 1
        if self._num_ratios >= _ENOUGH and self._num_ratios % 8 == 0:
            self.margin = float(np.quantile(self._ratios[: self._num_ratios], QUANTILE))


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """At most `max_long` prompts of more than `long_tokens` tokens are computed at once.

    While there are any, half of a step's prompt tokens are theirs if they need it, so that they make progress
    however many short prompts come. The other half is for short prompts, so that none of these waits for a
    long one.
    """

    max_long: int
    long_tokens: int

    def left(self, busy: Busy, wanted: Index, total: int) -> tuple[int, int, int]:
        """Return the tokens left for new requests, how many of these may be long, and what is theirs of it.

        `wanted` is the number of prompt tokens of each busy slot, `total` that of this step.
        """
        is_long = self._is_long(busy)
        wanted_long = int(wanted[is_long].sum())
        kept = min(wanted_long, self._half(total))
        left = total - kept - (int(wanted.sum()) - wanted_long)
        return left, self.max_long - int(np.count_nonzero(is_long)), self._half(total) - kept

    def sharing(self, busy: Busy) -> Callable[[Index, int], Index]:
        """Return a function that shares the prompt tokens of a step among these slots."""
        is_long = self._is_long(busy)

        def share(wanted: Index, total: int) -> Index:
            longs, shorts = np.where(is_long, wanted, 0), np.where(is_long, 0, wanted)
            granted = in_order(shorts, total - min(int(longs.sum()), self._half(total)))
            both: Index = granted + in_order(longs, total - int(granted.sum()))
            return both

        return share

    def _is_long(self, busy: Busy) -> NDArray[np.bool_]:
        is_long: NDArray[np.bool_] = ~busy.decodes & (busy.todo + busy.computed > self.long_tokens)
        return is_long

    def _half(self, total: int) -> int:
        return -(-max(total, 0) // 2)
