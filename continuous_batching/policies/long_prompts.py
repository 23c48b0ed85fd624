"""Let short prompts overtake long ones without starving either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from continuous_batching.policies.policy import Busy, in_order
from kv_cache.pages import Index


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """At most `max_long` prompts of more than `long_tokens` tokens are computed at once.

    While there are any, half of a step's prompt tokens are theirs if they need it, so that they make progress
    however many short prompts come. The other half is for short prompts, so that none of these waits for a
    long one.
    """

    max_long: int
    long_tokens: int

    def left(self, busy: Busy, wanted: Index, total: int) -> tuple[int, int]:
        """Return the tokens left for new requests, and how many of these requests may be long.

        `wanted` is the number of prompt tokens of each busy slot, `total` that of this step.
        """
        is_long = self._is_long(busy)
        wanted_long = int(wanted[is_long].sum())
        kept = min(wanted_long, self._half(total))
        left = total - kept - (int(wanted.sum()) - wanted_long)
        return left, self.max_long - int(np.count_nonzero(is_long))

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
