"""Where do a head's features lie: what the target model thought of the tokens before?

A head reads beside each token what was found at the position before it. These features lie in the pages of
the keys and values, so that whoever finds a page by its tokens, forks from it, or comes back to it finds them
too. A page holds those of the last positions that were written to it, as many as a step may write and take
back. Where the target has not been yet, the head's own output stands in its place, until the step that checks
the draft overwrites it.

Legend: T tokens of the step, P pages, B tokens a page, C features a page.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kv_cache.device.storage import KVCache


class FeaturePages:
    """Features in a cache with pages of [P, C, 1, hidden], which have the numbers of those with the keys."""

    def __init__(self, cache: KVCache, page_size: int) -> None:
        self._cache, self._page_size = cache, page_size

    def read(self, index: Tensor) -> Tensor:
        """Return the features [T, hidden] at cache places `index` [T], page * B + offset."""
        return self._rows.index_select(0, self._places(index))

    def write(self, features: Tensor, index: Tensor) -> None:
        """Store features [T, hidden] of places `index` [T], span after span.

        A page keeps those of its last positions.
        """
        places = self._places(index)
        is_over = torch.zeros_like(index, dtype=torch.bool)
        if self._kept < self._page_size and self._kept < len(index):
            ahead = index[self._kept :] == index[: -self._kept] + self._kept
            is_over = F.pad(ahead, (0, self._kept))
            is_over &= index % self._page_size + self._kept < self._page_size
        self._rows.index_copy_(0, places.masked_fill(is_over, 0), features)

    def write_ends(self, features: Tensor, index: Tensor, before_index: Tensor) -> None:
        """Store the features of those tokens of a step that no further token of their row follows."""
        is_followed = F.pad(before_index[1:] == index[:-1], (0, 1))
        self._rows.index_copy_(0, self._places(index).masked_fill(is_followed, 0), features)

    @property
    def _kept(self) -> int:
        return self._cache.page_size

    @property
    def _rows(self) -> Tensor:
        """[P * C, hidden]; derived anew each time, since a resize replaces the tensor."""
        return self._cache.keys[0].flatten(0, 2)

    def _places(self, index: Tensor) -> Tensor:
        page, offset = index.long() // self._page_size, index.long() % self._page_size
        return page * self._kept + offset % self._kept
