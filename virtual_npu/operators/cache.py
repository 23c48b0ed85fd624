"""Define the operators that write to the paged cache, with their rules.

Legend: T tokens or rows written, K kv heads, D head dim, P pages, B tokens a page, C = K * D / 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, is_dtype, shape
from virtual_npu.operators.paging import NULL_PAGE, holding_rules
from virtual_npu.simulated_products import A2, A3, A5, P310

SCATTER = "op-plugin npu_scatter_pa_kv_cache"
RESHAPE = "op-plugin _npu_reshape_and_cache; CANN ReshapeAndCacheOperation"
ANY_TYPE = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32)


@dataclass(frozen=True)
class CacheWriteCall:
    """One call that writes rows to places of a cache; `split` says that the cache is [P, C, B, 16]."""

    call: Call
    split: bool

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The names of the rows, each with the name of the cache that they are written to."""
        return [(name, f"{name}_cache") for name in ("key", "value")]

    @property
    def slots(self) -> Tensor:
        found: Tensor = self.call["slot_mapping"]
        return found

    @property
    def num_pages(self) -> int:
        return int(self.call["key_cache"].shape[0])

    @property
    def page_size(self) -> int:
        return int(self.call["key_cache"].shape[2 if self.split else 1])

    @property
    def pages(self) -> Tensor:
        """The page of each place, int64."""
        return self.slots.long().div(self.page_size, rounding_mode="floor")


def write(asked: CacheWriteCall) -> None:
    """Write the rows into the caches, in place."""
    pages, places = asked.pages, asked.slots.long() % asked.page_size
    for rows, cache in asked.pairs:
        into: Tensor = asked.call[cache]
        into = into.transpose(1, 2) if asked.split else into
        into[pages, places] = asked.call[rows].reshape(len(pages), *into.shape[2:])


def _by_mode(call: Call) -> CacheWriteCall:
    return CacheWriteCall(call, call["cache_mode"] == "PA_NZ")


def _by_product(call: Call) -> CacheWriteCall:
    return CacheWriteCall(call, call.conditions.product.split_heads)


def _any_type(call: Call) -> Iterator[Breach]:
    yield from _types(call, ANY_TYPE)


def _product_types(call: Call) -> Iterator[Breach]:
    yield from _types(call, (*call.conditions.product.dtypes, torch.int8))


def _types(call: Call, taken: tuple[torch.dtype, ...]) -> Iterator[Breach]:
    for name in ("key", "value", "key_cache", "value_cache"):
        tensor = call[name]
        if not is_dtype(tensor, taken, call.conditions) or tensor.dtype != call["key"].dtype:
            yield name, shape(tensor)


def _slots(call: Call) -> Iterator[Breach]:
    slots, rows = call["slot_mapping"], call["key"].shape[0]
    wide = call.operator == "npu_scatter_pa_kv_cache"
    if slots.dtype not in ((torch.int32, torch.int64) if wide else (torch.int32,)) or slots.shape != (rows,):
        yield "slot_mapping", f"{shape(slots)} for {rows} rows of key"
    if call["value"].shape[0] != rows:
        yield "value", f"{shape(call['value'])} beside key {shape(call['key'])}"


def _contiguous(call: Call) -> Iterator[Breach]:
    for name in ("key", "value", "key_cache", "value_cache", "slot_mapping"):
        if not call[name].is_contiguous():
            yield name, f"strided {tuple(call[name].stride())} over {shape(call[name])}"


def _mode(call: Call) -> Iterator[Breach]:
    if call["cache_mode"] not in (None, "Norm", "PA_NZ"):
        yield "cache_mode", call["cache_mode"]
    for name in ("compress_lens", "compress_seq_offsets", "seq_lens"):
        if call[name] is not None:
            yield name, shape(call[name])


def _axes(asked: CacheWriteCall) -> Iterator[Breach]:
    for rows, cache in asked.pairs:
        new, into = asked.call[rows], asked.call[cache]
        if new.dim() != 3 or into.dim() != 4:
            yield cache, f"{shape(into)} for {rows} {shape(new)}"
            continue
        column = 32 if into.dtype == torch.int8 else 16
        width = new.shape[1] * new.shape[2]
        if asked.split:
            fits = (into.shape[1], into.shape[3]) == (width // column, column) and not width % column
        else:
            fits = into.shape[2:] == new.shape[1:]
        if not fits:
            yield cache, f"{shape(into)} for {rows} {shape(new)}"


def _caches_alike(asked: CacheWriteCall) -> Iterator[Breach]:
    key, value = asked.call["key_cache"], asked.call["value_cache"]
    size = 2 if asked.split else 1
    if (key.shape[0], key.shape[size]) != (value.shape[0], value.shape[size]):
        yield "value_cache", f"{shape(value)} beside {shape(key)}"


def _page_size(asked: CacheWriteCall) -> Iterator[Breach]:
    sizes = asked.call.conditions.product.page_sizes
    if sizes and asked.page_size not in sizes:
        yield "key_cache", f"{shape(asked.call['key_cache'])}, pages of {asked.page_size}"


def _in_range(asked: CacheWriteCall) -> Iterator[Breach]:
    places = asked.num_pages * asked.page_size
    wrong = asked.slots[(asked.slots < 0) | (asked.slots >= places)]
    if len(wrong):
        yield "slot_mapping", f"one with place {int(wrong[0])} of {places}"


def _unique(asked: CacheWriteCall) -> Iterator[Breach]:
    slots = asked.slots[asked.pages != NULL_PAGE]
    places, counts = torch.unique(slots, return_counts=True)
    if len(places) != len(slots):
        yield "slot_mapping", f"one with place {int(places[counts > 1][0])} more than once"


_TYPES = "rows and caches have one type, which the product takes"
_DUPLICATES = "each place is written once, but for padding on page 0"


_ALIKE = Rule(
    "caches-alike", "both caches have as many pages, as large", SCATTER, "allocate both alike", _caches_alike
)
_PAGE_SIZE = Rule(
    "page-size",
    "pages are of a size that the product takes",
    "vllm-ascend _310p/attention/attention_v1.py",
    "choose cache.page_size 128",
    _page_size,
)


def _rules(source: str, *more: Rule) -> tuple[Rule, ...]:
    return (
        Rule(
            "cache-axes",
            "rows are [T, heads, dim]; the cache is [pages, page, heads, dim], or [pages, heads * dim / 16, "
            "page, 16] (32 of int8) with cache_mode PA_NZ and on the 310P",
            source,
            'pass cache_mode="Norm" for the first, which is not the default',
            _axes,
        ),
        *more,
        Rule(
            "slots-in-range",
            "places are from 0 to pages * page - 1; nothing is said of negative ones",
            SCATTER,
            "cut rows and places to the step's real tokens",
            _in_range,
        ),
        Rule(
            "slots-unique", _DUPLICATES, SCATTER + ": else nothing is promised", "drop all but one", _unique
        ),
        *holding_rules("slot_mapping", lambda asked: [asked.pages]),
    )


def _first(source: str, types: Rule) -> tuple[Rule, ...]:
    return (
        types,
        Rule(
            "slots",
            "key and value have a row a place: int32, or int64 where npu_scatter_pa_kv_cache writes",
            source,
            "cast them, and cut them to the rows",
            _slots,
        ),
        Rule("contiguous", "tensors are contiguous", source, "call contiguous() first", _contiguous),
    )


def _reshape(schema: str, *more: Rule) -> Operator:
    types = Rule("dtype", _TYPES, RESHAPE, "cast to float16, or to bfloat16 off the 310P", _product_types)
    return Operator(
        schema=schema,
        products=(P310, A2, A3),
        source=RESHAPE,
        read=_by_product,
        first=_first(RESHAPE, types),
        rules=_rules(RESHAPE, _PAGE_SIZE, *more),
        reference=write,
        names={"slot_mapping": "slot_indices"},
    )


OPERATORS = (
    Operator(
        schema="npu::npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, "
        "Tensor(b!) value_cache, Tensor slot_mapping, *, Tensor? compress_lens=None, "
        "Tensor? compress_seq_offsets=None, Tensor? seq_lens=None, "
        'str? cache_mode="PA_NZ") -> ()',
        products=(A2, A3, A5),
        source=SCATTER,
        read=_by_mode,
        first=(
            Rule(
                "mode",
                'cache_mode is None, "Norm" or "PA_NZ"; writing what is compressed is not checked here',
                SCATTER,
                'pass cache_mode="Norm" and no compress_ arguments',
                _mode,
            ),
            *_first(SCATTER, Rule("dtype", _TYPES, SCATTER, "cast the rows to the cache's type", _any_type)),
        ),
        rules=_rules(SCATTER, _ALIKE),
        reference=write,
    ),
    _reshape(
        "atb::_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, "
        "Tensor(b!) value_cache, Tensor slot_indices) -> ()",
        _ALIKE,
    ),
)
