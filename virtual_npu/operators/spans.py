"""Interpret the arguments of fused attention: which queries read which keys.

A layout is an order of the axes; lengths and the page table divide the tensors into sequences.
`FusedAttentionCall` presents one call in the same terms for every layout, either version of the operator, and
keys with or without pages.

Legend: T packed tokens, Q sequences, S tokens a sequence, H query heads, K kv heads, D head dim, P pages, B
tokens a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from virtual_npu.contract import Call

UNBOUNDED = 2**31 - 1

# The orders of query and output for each `input_layout` that is modelled; keys and values have the query's.
LAYOUTS = {
    "BSND": ("BSND", "BSND"),
    "BNSD": ("BNSD", "BNSD"),
    "BNSD_BSND": ("BNSD", "BSND"),
    "TND": ("TND", "TND"),
    "TND_NTD": ("TND", "NTD"),
    "NTD_TND": ("NTD", "TND"),
}


def heads_last(tensor: Tensor, order: str) -> Tensor:
    """Return a tensor in an input order as [T, heads, D] if it is packed, otherwise as [Q, S, heads, D]."""
    return tensor.transpose(-3, -2) if order in ("BNSD", "NTD") else tensor


def in_order(tensor: Tensor, order: str) -> Tensor:
    """Return [T, H, D] or [Q, S, H, D] in an output order, contiguous."""
    return (tensor.transpose(-3, -2) if order in ("BNSD", "NTD") else tensor).contiguous()


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence: where its queries and keys lie, and the first key that the mask shows to any query.

    `row` is its first row of the packed query, or its number in the batch; `reach` is the first key that any
    of its queries reads.
    """

    number: int
    row: int
    num_queries: int
    key_row: int
    num_keys: int
    reach: int


@dataclass(frozen=True)
class FusedAttentionCall:
    """One call of fused attention, with its arguments interpreted."""

    call: Call

    @property
    def layout(self) -> str:
        return str(self.call["input_layout"])

    @property
    def packed(self) -> bool:
        return LAYOUTS[self.layout][0] in ("TND", "NTD")

    @property
    def mode(self) -> int:
        return int(self.call["sparse_mode"])

    @property
    def num_heads(self) -> int:
        return int(self.call["num_query_heads"])

    @property
    def num_kv_heads(self) -> int:
        return int(self.call["num_key_value_heads"]) or self.num_heads

    @property
    def table(self) -> Tensor | None:
        found: Tensor | None = self.call["block_table"]
        return found

    @cached_property
    def query(self) -> Tensor:
        """The query as [T, H, D], or [Q, S, H, D]."""
        return heads_last(self.call["query"], LAYOUTS[self.layout][0])

    @cached_property
    def key(self) -> Tensor:
        """The cache [P, B, K, D] with a page table; otherwise the keys in the query's order."""
        return self._kv("key")

    @cached_property
    def value(self) -> Tensor:
        """The values, in the order of the keys."""
        return self._kv("value")

    def _kv(self, name: str) -> Tensor:
        tensor: Tensor = self.call[name]
        if self.table is None:
            return heads_last(tensor, LAYOUTS[self.layout][0])
        return (
            tensor.transpose(1, 2)
            if tensor.dim() == 4
            else tensor.view(*tensor.shape[:2], self.num_kv_heads, -1)
        )

    @cached_property
    def batch(self) -> int:
        """The number of sequences."""
        return len(self.call["actual_seq_qlen"]) if self.packed else self.query.shape[0]

    @cached_property
    def query_lens(self) -> list[int]:
        """The number of queries of each sequence."""
        given = self.call["actual_seq_qlen"]
        if self.packed:
            return _steps(given)
        return _each(given, self.batch, self.query.shape[1])

    @cached_property
    def key_lens(self) -> list[int]:
        """The number of keys of each sequence."""
        given = self.call["actual_seq_kvlen"]
        if self.packed and self.table is None:
            return _steps(given)
        return _each(given, self.batch, self.key.shape[1] if self.table is None else 0)

    @cached_property
    def sequences(self) -> list[Sequence]:
        """All sequences, in order."""
        found, row, key_row = [], 0, 0
        for number, (queries, keys) in enumerate(zip(self.query_lens, self.key_lens)):
            reach = 0
            if self.mode == 4 and not self.single:
                reach = max(0, keys - queries - int(self.call["pre_tokens"]))
            found.append(
                Sequence(number, row if self.packed else number, queries, key_row, keys, min(reach, keys))
            )
            row, key_row = row + queries, key_row + keys
        return found

    @property
    def single(self) -> bool:
        """Whether the operator takes its path for one query a sequence, which ignores `sparse_mode`."""
        return not self.packed and self.query.shape[1] == 1

    @property
    def averages(self) -> bool:
        """Whether the result is the mean of the values: packed spans of several queries without a mask."""
        bare = self.packed and self.mode == 0 and self.call["atten_mask"] is None
        return bare and any(length > 1 for length in self.query_lens)

    @cached_property
    def pages(self) -> list[Tensor]:
        """The pages that each sequence reads, in order, int64; none without a page table."""
        if self.table is None:
            return []
        size, table = self.key.shape[1], self.table.long()
        return [table[each.number, each.reach // size : -(-each.num_keys // size)] for each in self.sequences]

    @cached_property
    def read(self) -> list[tuple[Tensor, Tensor]]:
        """The keys and values of each sequence from its reach on, [keys, K, D]."""
        found = [(self._read("key", each), self._read("value", each)) for each in self.sequences]
        if self.call["key_rope"] is None:
            return found
        rope = self._kv("key_rope")
        ropes = (self._gather(rope, each) for each in self.sequences)
        return [(torch.cat((keys, more), -1), values) for (keys, values), more in zip(found, ropes)]

    @cached_property
    def full_query(self) -> Tensor:
        """The query, followed by the part that carries positions where that is passed separately."""
        rope = self.call["query_rope"]
        if rope is None:
            return self.query
        return torch.cat((self.query, heads_last(rope, LAYOUTS[self.layout][0])), -1)

    def _gather(self, tensor: Tensor, sequence: Sequence) -> Tensor:
        first, last = sequence.reach, sequence.num_keys
        if self.table is not None:
            skipped = first // tensor.shape[1] * tensor.shape[1]
            return tensor[self.pages[sequence.number]].flatten(0, 1)[first - skipped : last - skipped]
        if self.packed:
            return tensor[sequence.key_row + first : sequence.key_row + last]
        return tensor[sequence.number, first:last]

    def _read(self, name: str, sequence: Sequence) -> Tensor:
        """Return a sequence's keys or values [keys, K, D], those in int8 times the scales of channels."""
        read = self._gather(self.key if name == "key" else self.value, sequence)
        scale: Tensor | None = self.call[f"{name}_antiquant_scale"]
        return read if scale is None else read * scale.view(read.shape[1:])

    def queries(self, tensor: Tensor, sequence: Sequence) -> Tensor:
        """Return a sequence's rows of the query, or of an output with the same layout."""
        if self.packed:
            return tensor[sequence.row : sequence.row + sequence.num_queries]
        return tensor[sequence.number, : sequence.num_queries]

    def chunks(self, sequence: Sequence, rows: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Yield query rows, the keys (from the reach on) that they may see, and a mask of these or None."""
        for start in range(0, sequence.num_queries, rows):
            stop = min(start + rows, sequence.num_queries)
            yield from self._chunk(sequence, start, stop)

    def _chunk(
        self, sequence: Sequence, start: int, stop: int
    ) -> Iterator[tuple[slice, slice, Tensor | None]]:
        offset = sequence.num_keys - sequence.num_queries
        reach, keys = sequence.reach, sequence.num_keys
        mode = 0 if self.single and self.mode in (2, 3, 4) else self.mode
        if mode in (0, 1):
            yield slice(start, stop), slice(0, keys - reach), self._own_mask(sequence, start, stop)
            return
        at = torch.arange(start, stop)[:, None] + (0 if mode == 2 else offset)
        after = int(self.call["next_tokens"]) if mode == 4 else 0
        last = max(0, min(keys, stop + (0 if mode == 2 else offset) + after))
        places = torch.arange(reach, max(last, reach))[None]
        seen = places <= at + after
        if mode == 4:
            seen &= places >= at - int(self.call["pre_tokens"])
        yield slice(start, stop), slice(0, places.shape[1]), None if bool(seen.all()) else seen

    def _own_mask(self, sequence: Sequence, start: int, stop: int) -> Tensor | None:
        """Return which keys the caller's mask shows to the rows; 1 in the caller's mask hides a key."""
        mask: Tensor | None = self.call["atten_mask"]
        if mask is None or (self.single and self.mode in (2, 3, 4)):
            return None
        if self.single and mask.dim() == 2:
            mask = mask[:, None]
        hidden = mask[min(sequence.number, mask.shape[0] - 1)] if mask.dim() > 2 else mask
        return hidden.reshape(hidden.shape[-2:])[start:stop, : sequence.num_keys] == 0


def _steps(given: list[int]) -> list[int]:
    return [after - before for before, after in pairwise([0, *given])]


def _each(given: list[int] | None, batch: int, length: int) -> list[int]:
    if given is None:
        return [length] * batch
    return list(given) * batch if len(given) == 1 else list(given[:batch])
