"""Define the ATB operators that attention on the 310P calls, with the rules of a correct call.

Keys lie in pages as [P, C, B, 16] on the 310P, and as [P, B, K, D] elsewhere. A mask is added to the scores.

Legend: T tokens, S sequences, H query heads, K kv heads, D head dim, P pages, B tokens a page,
C = K * D / 16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, is_dtype, shape
from virtual_npu.operators.paging import holding_rules, page_id_rule, unwritten
from virtual_npu.operators.softmax import softmax_attention
from virtual_npu.simulated_products import A2, A3, P310, Product

QUERY_ROWS = 256


@dataclass(frozen=True)
class AtbAttentionCall:
    """One call of ATB's attention."""

    call: Call

    @cached_property
    def query_lens(self) -> list[int]:
        """The number of queries of each sequence; 1 where the call does not say."""
        lens = self.call["seq_len"]
        return [1] * self.call["query"].shape[0] if lens is None else lens.tolist()

    @cached_property
    def key_lens(self) -> list[int]:
        """The number of keys of each sequence."""
        lens: list[int] = self.call["context_lens"].tolist()
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
        counts = [-(-length // self.page_size) for length in self.key_lens]
        return [row[:count].long() for row, count in zip(self.call["block_table"], counts)]

    @cached_property
    def read(self) -> list[tuple[Tensor, Tensor]]:
        """The keys and values of each sequence, [keys, K, D]."""
        caches = [self.cache("key_cache"), self.cache("value_cache")]
        return [
            (caches[0][pages].flatten(0, 1)[:length], caches[1][pages].flatten(0, 1)[:length])
            for pages, length in zip(self.pages, self.key_lens)
        ]


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


PAGED = "CANN PagedAttentionOperation"
PLACED = "ascend-transformer-boost PagedAttentionFusionVariantPackParam"
FIELD = "vllm-ascend _310p/attention"
MASK_SIDE = 2048
PAGE_ELEMENTS = 128 * 128  # most elements of one head in a page
MOST_SEQUENCES = 2000  # limit of the 310P
HIDES = -10000.0  # what the mask adds to a hidden score
MASK_TYPE = 5  # one mask for all positions, in rows


def _dtype(call: Call) -> Iterator[Breach]:
    query = call["query"].dtype
    for name in ("query", "key_cache", "value_cache", "out"):
        tensor = call[name]
        taken = call.conditions.product.dtypes
        if tensor.dtype != query or not is_dtype(tensor, taken, call.conditions):
            yield name, shape(tensor)


def _heads(call: Call) -> Iterator[Breach]:
    query, heads, kv_heads = call["query"], call["num_heads"], call["num_kv_heads"]
    if query.dim() != 3 or query.shape[1] != heads or kv_heads < 1 or heads % max(kv_heads, 1):
        yield "query", f"{shape(query)} for {heads} heads over {kv_heads}"
    elif not 0 < query.shape[2] <= 256 or query.shape[2] % 16:
        yield "query", shape(query)


def _cache(call: Call) -> Iterator[Breach]:
    width = call["num_kv_heads"] * call["query"].shape[2]
    for name in ("key_cache", "value_cache"):
        cache: Tensor = call[name]
        if call.conditions.product.split_heads:
            fits = cache.dim() == 4 and (cache.shape[1], cache.shape[3]) == (width // 16, 16)
        else:
            fits = cache.dim() == 4 and tuple(cache.shape[2:]) == (
                call["num_kv_heads"],
                call["query"].shape[2],
            )
        if not fits or cache.shape != call["key_cache"].shape:
            yield name, f"{shape(cache)} for {call['num_kv_heads']} kv heads of {call['query'].shape[2]}"


def _page_size(asked: AtbAttentionCall) -> Iterator[Breach]:
    sizes, size = asked.call.conditions.product.page_sizes, asked.page_size
    dim = asked.call["query"].shape[2]
    if size % 16 or size * dim > PAGE_ELEMENTS or (sizes and size not in sizes):
        yield "key_cache", f"{shape(asked.call['key_cache'])}, pages of {size} with heads of {dim}"


def _contiguous(call: Call) -> Iterator[Breach]:
    for name, tensor in call.arguments.items():
        if isinstance(tensor, Tensor) and not tensor.is_contiguous():
            yield name, f"strided {tuple(tensor.stride())} over {shape(tensor)}"


def _out(call: Call) -> Iterator[Breach]:
    if call["out"].shape != call["query"].shape:
        yield "out", f"{shape(call['out'])} for query {shape(call['query'])}"


def _lens(call: Call) -> Iterator[Breach]:
    query = call["query"].shape[0]
    for name in ("seq_len", "context_lens"):
        lens = call[name]
        if lens is not None and (lens.dtype != torch.int32 or lens.dim() != 1 or not len(lens)):
            yield name, shape(lens)
        elif lens is not None and int(lens.min()) < 1:
            yield name, f"{lens.tolist()[:8]}"
    if call["seq_len"] is not None and int(call["seq_len"].sum()) != query:
        yield "seq_len", f"one that adds up to {int(call['seq_len'].sum())} over {query} rows of query"


def _placed(call: Call) -> Iterator[Breach]:
    on_device, on_310p = call.conditions.on_device, call.conditions.product is P310
    for name, wanted in (("seq_len", False), ("context_lens", on_310p)):
        if on_device and call[name] is not None and on_device(call[name]) != wanted:
            yield name, "on the host" if wanted else "on the device"


def _frozen(call: Call) -> Iterator[Breach]:
    on_device = call.conditions.on_device
    for name in ("seq_len", "context_lens"):
        on_host = on_device is not None and call[name] is not None and not on_device(call[name])
        if on_host and call.conditions.capture() != "group":
            yield name, "on the host, frozen by the capture"


def _context(call: Call) -> Iterator[Breach]:
    context, queries = call["context_lens"], call["seq_len"]
    batch = call["query"].shape[0] if queries is None else len(queries)
    if len(context) != batch:
        yield "context_lens", f"{shape(context)} for {batch} sequences"
    elif queries is not None and bool((context < queries).any()):
        yield "context_lens", f"below seq_len in sequence {int((context < queries).nonzero()[0])}"


def _table(call: Call) -> Iterator[Breach]:
    table, batch = call["block_table"], len(call["context_lens"])
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != batch:
        yield "block_table", f"{shape(table)} for {batch} sequences"


def _table_width(asked: AtbAttentionCall) -> Iterator[Breach]:
    table, longest = asked.call["block_table"], max(asked.key_lens)
    if table.shape[1] * asked.page_size < longest:
        yield "context_lens", f"{longest} with rows of {table.shape[1]} pages of {asked.page_size}"


def _batch(asked: AtbAttentionCall) -> Iterator[Breach]:
    if asked.call.conditions.product is P310 and len(asked.query_lens) > MOST_SEQUENCES:
        yield "query", f"of {len(asked.query_lens)} sequences"


def _mask_shape(asked: AtbAttentionCall) -> Iterator[Breach]:
    call, mask = asked.call, asked.call["mask"]
    if call["mask_type"] != MASK_TYPE:
        yield "mask_type", call["mask_type"]
    if mask.shape != (MASK_SIDE, MASK_SIDE) or not is_dtype(mask, (torch.float16,), call.conditions):
        yield "mask", shape(mask)


def _mask_content(asked: AtbAttentionCall) -> Iterator[Breach]:
    mask: Tensor = asked.call["mask"]
    if not torch.equal(mask, torch.full_like(mask, HIDES).triu(1)):
        yield "mask", f"not 0 up to each query and {HIDES} after"


def _never_written(asked: AtbAttentionCall) -> Iterator[Breach]:
    yield from unwritten(asked.read, ("key_cache", "value_cache"))


def _scale(call: Call) -> Iterator[Breach]:
    if not 0 < call["scale_value"] < math.inf:
        yield "scale_value", call["scale_value"]


FIRST = (
    Rule("dtype", "all are float16, or bfloat16 off the 310P", PAGED, "cast to float16", _dtype),
    Rule(
        "heads",
        "query is [T, heads, dim], heads a multiple of kv heads, dim a multiple of 16 up to 256",
        PAGED,
        "pass the model's numbers of heads",
        _heads,
    ),
    Rule("contiguous", "tensors are contiguous", PAGED, "call contiguous() first", _contiguous),
    Rule("out", "out has the shape of query", "the schema: Tensor(a!) out", "allocate it alike", _out),
    Rule("scale", "the scale is above 0 and finite", PAGED, "pass head_dim ** -0.5", _scale),
    Rule(
        "lens",
        "lengths are int32 tensors, one a sequence and above 0, and those of queries add up to the rows",
        FIELD + "/attention_v1.py",
        "count the padding in the last sequence, or cut the query",
        _lens,
    ),
    Rule(
        "placed",
        "lengths of queries lie on the host, and those of keys too, but for the 310P, where it is the device",
        PLACED + "; op-plugin AtbCommon.cpp",
        "leave them, or send them, there",
        _placed,
    ),
)
CAPTURED = (
    Rule(
        "task-group",
        "lengths on the host can be updated after a capture only in a task group",
        "vllm-ascend compilation/acl_graph.py",
        "put the call between graph_task_group_begin and graph_task_group_end",
        _frozen,
    ),
)
PAGES = (
    Rule(
        "cache",
        "the caches are alike: [pages, kv heads * dim / 16, page, 16] on the 310P, else "
        "[pages, page, kv heads, dim]",
        FIELD + "/attention_v1.py: get_kv_cache_shape",
        "allocate the cache of the product",
        _cache,
    ),
    Rule(
        "context-lens",
        "context_lens has the keys of each sequence, no fewer than its queries",
        FIELD + "/attention_v1.py",
        "count a span's own tokens among its keys",
        _context,
    ),
    Rule("table", "the page table is int32 with a row a sequence", PAGED, "take the step's rows", _table),
)
READ_PAGES = (
    Rule(
        "page-size",
        "a page is of 128 or 64 tokens on the 310P, else of a multiple of 16; times dim it is at most 16384",
        PAGED + "; " + FIELD + "/attention_v1.py",
        "choose cache.page_size 128, or 64 with heads of 256",
        _page_size,
    ),
    Rule("batch", f"the 310P takes {MOST_SEQUENCES} sequences", PAGED, "split the batch", _batch),
    Rule(
        "table-width",
        "a row of the page table reaches as far as the longest sequence",
        PAGED,
        "pass a wider table",
        _table_width,
    ),
    page_id_rule(
        "block_table",
        lambda asked: list(asked.pages),
        lambda asked: int(asked.call["key_cache"].shape[0]),
    ),
    *holding_rules("block_table", lambda asked: list(asked.pages)),
    Rule(
        "written",
        "a read of a place that was never written comes to NaN",
        "virtual_npu: unwritten places hold NaN",
        "write keys and values before attention, at the places that the page table names",
        _never_written,
    ),
)
MASK = (
    Rule(
        "mask-shape",
        "the mask is float16, [2048, 2048] with mask_type 5",
        FIELD + "/attention_mask.py",
        "make it as the source does",
        _mask_shape,
    ),
    Rule(
        "mask-content",
        "the mask adds 0 up to each query's own key, and -10000 after it",
        FIELD + "/attention_mask.py",
        "make it as the source does",
        _mask_content,
    ),
)


def _over_pages(schema: str, products: tuple[Product, ...], more: tuple[Rule, ...] = ()) -> Operator:
    return Operator(
        schema=schema,
        products=products,
        source=f"{PAGED}; {FIELD}/attention_v1.py",
        read=AtbAttentionCall,
        first=FIRST + PAGES,
        rules=READ_PAGES + more,
        captured=CAPTURED,
        reference=attend,
    )


_CACHES = "Tensor query, Tensor key_cache, Tensor value_cache, "
OPERATORS = (
    _over_pages(
        f"atb::_npu_paged_attention({_CACHES}int num_kv_heads, int num_heads, float scale_value, "
        "Tensor block_table, Tensor context_lens, Tensor(a!) out, *, Tensor? workspace=None) -> ()",
        (P310, A2, A3),
    ),
    _over_pages(
        f"atb::_npu_paged_attention_splitfuse_v2({_CACHES}Tensor block_table, Tensor context_lens, "
        "Tensor mask, Tensor seq_len, int num_kv_heads, int num_heads, float scale_value, "
        "*, int? mask_type=5, Tensor(a!) out) -> ()",
        (P310,),
        MASK,
    ),
)
