"""How do short prompts overtake long ones?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from continuous_batching.policies.policy import Busy, in_order
from kv_cache.pages import Index


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """At most `max_long` prompts of more than `long_tokens` are computed at once.

    While there are any, half of the prompts' tokens are theirs if they need it, so that they get on however
    many short ones come; the other half is the short ones', so that none of these waits for a long one.
    """

    max_long: int
    long_tokens: int

    def left(self, busy: Busy, wanted: Index, total: int) -> tuple[int, int]:
        """Tokens that are left for newcomers, and how many of these may be long.

        `wanted` are the prompts' tokens of each busy slot, `total` those of this step.
        """
        is_long = self._is_long(busy)
        wanted_long = int(wanted[is_long].sum())
        kept = min(wanted_long, self._half(total))
        left = total - kept - (int(wanted.sum()) - wanted_long)
        return left, self.max_long - int(np.count_nonzero(is_long))

    def sharing(self, busy: Busy) -> Callable[[Index, int], Index]:
        """How these slots share the prompts' tokens of a step."""
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
