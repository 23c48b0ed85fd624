"""Compute ATB's attention operators, which the 310P has in place of fused attention.

Keys lie in pages as [P, C, B, 16] on the 310P, and as [P, B, K, D] elsewhere. Masks are added to the scores:
they hold 0 and -inf in tiles of 16 columns, except that of the second splitfuse, which lies in rows.

Legend: T tokens, S sequences, H query heads, K kv heads, D head dim, P pages, B tokens a page,
C = K * D / 16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from virtual_npu.contract import Call
from virtual_npu.operators.softmax import softmax_attention

QUERY_ROWS = 256


@dataclass(frozen=True)
class AtbAttentionCall:
    """One call of ATB's attention; `paged` says that its keys lie in pages."""

    call: Call
    paged: bool

    @cached_property
    def query_lens(self) -> list[int]:
        """The number of queries of each sequence; 1 where the call does not say."""
        lens = self.call["seq_len"]
        return [1] * self.call["query"].shape[0] if lens is None else lens.tolist()

    @cached_property
    def key_lens(self) -> list[int]:
        """The number of keys of each sequence."""
        lens: list[int] = self.call["context_lens" if self.paged else "seq_len"].tolist()
        return lens

    @cached_property
    def cache(self) -> Callable[[str], Tensor]:
        """A function that returns the cache of a name as [P, B, K, D]."""
        split, kv_heads = self.call.conditions.product.split_heads, self.call["num_kv_heads"]

        def view(name: str) -> Tensor:
            cache: Tensor = self.call[name]
            return (
                cache.transpose(1, 2).reshape(cache.shape[0], cache.shape[2], kv_heads, -1)
                if split
                else cache
            )

        return view

    @property
    def page_size(self) -> int:
        return int(self.call["key_cache"].shape[2 if self.call.conditions.product.split_heads else 1])

    @cached_property
    def pages(self) -> list[Tensor]:
        """The pages that each sequence reads, int64."""
        if not self.paged:
            return []
        counts = [-(-length // self.page_size) for length in self.key_lens]
        return [row[:count].long() for row, count in zip(self.call["block_table"], counts)]

    @cached_property
    def read(self) -> list[tuple[Tensor, Tensor]]:
        """The keys and values of each sequence, [keys, K, D]."""
        if self.paged:
            caches = [self.cache("key_cache"), self.cache("value_cache")]
            return [
                (caches[0][pages].flatten(0, 1)[:length], caches[1][pages].flatten(0, 1)[:length])
                for pages, length in zip(self.pages, self.key_lens)
            ]
        return list(zip(*(self.call[name].split(self.key_lens) for name in ("key", "value"))))


def attend(asked: AtbAttentionCall) -> None:
    """Fill `out`: queries are the last tokens of their sequence, and see the keys up to their own."""
    query, out = asked.call["query"], asked.call["out"]
    first = 0
    for count, (keys, values) in zip(asked.query_lens, asked.read):
        for start in range(0, count, QUERY_ROWS):
            rows = slice(first + start, first + min(start + QUERY_ROWS, count))
            at = torch.arange(start, min(start + QUERY_ROWS, count))[:, None] + len(keys) - count
            seen = torch.arange(len(keys))[None] <= at
            result, _ = softmax_attention(
                query[rows].float(),
                keys.float(),
                values.float(),
                asked.call["scale_value"],
                None if bool(seen.all()) else seen,
            )
            out[rows] = result.to(out.dtype)
        first += count


def in_tiles(mask: Tensor) -> Tensor:
    """Convert [rows, columns] to [1, columns / 16, rows, 16]; both are padded with 0 to multiples of 16."""
    rows, columns = (-(-size // 16) * 16 for size in mask.shape)
    padded = mask.new_zeros(rows, columns)
    padded[: mask.shape[0], : mask.shape[1]] = mask
    return padded.view(1, rows, columns // 16, 16).permute(0, 2, 1, 3).contiguous()


def in_rows(mask: Tensor) -> Tensor:
    """Invert `in_tiles`; returns [rows, columns]."""
    return mask[0].transpose(0, 1).flatten(1)
