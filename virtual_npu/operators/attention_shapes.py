"""Check the shapes and types of fused attention's arguments before they are read as a batch.

These rules are checked first, in order; the rules on options and on the batch rely on them. Rules use the
names of the operator's second version.

Two sentences of the first version's page are not rules here. Its heads in TND are of 128 or 192. The page of
the second version has 64 too, but only where each query head has a key head of its own; that fewer key heads
of 64 are read rests on vllm-ascend's use alone, and verify_npu.sh asks a device. The first version's page
asks for as many pages as all sequences have together, which sequences that share a prefix do not need, in
any engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Rule, is_dtype, shape
from virtual_npu.operators.spans import LAYOUTS
from virtual_npu.simulated_products import A2, A3

DOC = "op-plugin npu_fused_infer_attention_score_v2"
FIELD = "vllm-ascend attention/attention_v1.py"

# These are the arguments of either version that the rules and the reference know.
KNOWN = {
    *("query", "key", "value", "atten_mask", "actual_seq_qlen", "actual_seq_kvlen", "block_table"),
    *("num_query_heads", "num_key_value_heads", "softmax_scale", "pre_tokens", "next_tokens", "input_layout"),
    *(
        "sparse_mode",
        "inner_precise",
        "block_size",
        "return_softmax_lse",
        "learnable_sink",
        "workspace",
        "out",
    ),
    *("query_rope", "key_rope", "key_antiquant_scale", "value_antiquant_scale"),
}
# Head sizes of queries and keys in the latent space, and of the part that carries positions.
LATENT, ROPE = 512, 64
MOST_LATENT_HEADS = 128
INT8_STEP = 32  # bytes to which heads and pages in int8 are aligned
# Number of the query's axes by their order.
AXES = {"BSND": 4, "BNSD": 4, "TND": 3, "NTD": 3}


def order(call: Call) -> str:
    """Return the order of the query's axes."""
    return LAYOUTS[call["input_layout"]][0]


def packed(call: Call) -> bool:
    """Return whether all sequences lie one after the other."""
    return order(call) in ("TND", "NTD")


def num_kv_heads(call: Call) -> int:
    """Return the number of kv heads; 0 in the call stands for as many as there are query heads."""
    return int(call["num_key_value_heads"] or call["num_query_heads"])


def head_dim(call: Call, name: str = "query") -> int:
    """Return the size of a head of the query, key or value."""
    tensor: Tensor = call[name]
    heads = int(call["num_query_heads"]) if name == "query" else num_kv_heads(call)
    paged = name != "query" and call["block_table"] is not None
    if paged and tensor.dim() == 3:
        return tensor.shape[-1] // heads
    return tensor.shape[-1]


def is_latent(call: Call) -> bool:
    """Return whether queries are in the latent space, where the latents are both keys and values."""
    return call["query_rope"] is not None and head_dim(call) == LATENT


def _rope(call: Call) -> Iterator[Breach]:
    query, key = call["query_rope"], call["key_rope"]
    if (query is None) != (key is None):
        yield "key_rope" if key is None else "query_rope", "None beside the other"
    if query is None or key is None:
        return
    for name, tensor in (("query", query), ("key", key)):
        own: Tensor = call[name]
        heads = 1 if name == "query" or call["block_table"] is None else num_kv_heads(call)
        if tensor.dtype != own.dtype or tensor.shape != (*own.shape[:-1], heads * ROPE):
            yield f"{name}_rope", f"{shape(tensor)} beside {shape(own)}"
    if not packed(call):
        yield "input_layout", f"{call['input_layout']} with query_rope"


def _latent(call: Call) -> Iterator[Breach]:
    if call["query_rope"] is None:
        return
    heads, kv_heads, dim = int(call["num_query_heads"]), num_kv_heads(call), head_dim(call)
    if dim == LATENT:
        if kv_heads != 1 or heads > MOST_LATENT_HEADS or heads & (heads - 1):
            yield "num_query_heads", f"{heads} over num_key_value_heads {kv_heads}"
        if call["block_table"] is None or not _same(call["key"], call["value"]):
            yield "value", f"{shape(call['value'])} that is not the key, or without a block_table"
    elif dim != 128 or kv_heads != heads or call["block_table"] is not None:
        yield "query_rope", f"given with heads of {dim}, {heads} over {kv_heads}"


def _same(key: Tensor, value: Tensor) -> bool:
    return key.data_ptr() == value.data_ptr() or torch.equal(key, value)


def _layout(call: Call) -> Iterator[Breach]:
    if call["input_layout"] not in LAYOUTS:
        yield "input_layout", call["input_layout"]


def _known(call: Call) -> Iterator[Breach]:
    known = KNOWN | {call.names.get(name, name) for name in KNOWN}
    for name, value in call.arguments.items():
        if name not in known and not (value is None or (isinstance(value, int) and not value)):
            yield name, shape(value) if isinstance(value, Tensor) else value


def _int8(call: Call) -> Iterator[Breach]:
    for name in ("key", "value"):
        if call[name].dtype != torch.int8:
            continue
        said = f"{shape(call[name])} for {call['num_query_heads']}:{num_kv_heads(call)} heads"
        if call.conditions.product not in (A2, A3):
            yield name, f"{said} on the {call.conditions.product.name}"
        elif packed(call) or call["block_table"] is None or call["query_rope"] is not None:
            yield name, f"{said} in {call['input_layout']}"
        elif call[f"{name}_antiquant_scale"] is None:
            yield name, f"{said}, without {name}_antiquant_scale"
        elif _queries(call) != 1:
            yield name, f"{said} and {_queries(call)} query tokens a sequence"
        elif head_dim(call, name) % INT8_STEP or call["block_size"] % INT8_STEP:
            yield name, f"{said}, with a block_size of {call['block_size']}"


def _queries(call: Call) -> int:
    """Return the query tokens of each sequence, where sequences have an axis of their own."""
    return int(call["query"].shape[2 if order(call) == "BNSD" else 1])


def _channels(call: Call) -> Iterator[Breach]:
    heads, query = num_kv_heads(call), call["query"]
    for name in ("key", "value"):
        scale, dim = call[f"{name}_antiquant_scale"], head_dim(call, name)
        if scale is None:
            continue
        shapes = ((1, heads, 1, dim), (1, heads, dim), (1, heads * dim))
        if call[name].dtype != torch.int8:
            yield f"{name}_antiquant_scale", f"{shape(scale)} beside {name} {shape(call[name])}"
        elif scale.dtype != query.dtype or tuple(scale.shape) not in shapes:
            yield f"{name}_antiquant_scale", f"{shape(scale)} for {heads} kv heads of {dim}"


def _dtype(call: Call) -> Iterator[Breach]:
    query = call["query"].dtype
    for name in ("query", "key", "value"):
        tensor: Tensor = call[name]
        if tensor.dtype == torch.int8 and name != "query" and call["key"].dtype == call["value"].dtype:
            continue
        if not is_dtype(tensor, call.conditions.product.dtypes, call.conditions) or tensor.dtype != query:
            yield name, shape(tensor)


def _axes(call: Call) -> Iterator[Breach]:
    axes = AXES[order(call)]
    if call["query"].dim() != axes:
        yield "query", shape(call["query"])
    for name in ("key", "value"):
        if call["block_table"] is None and call[name].dim() != axes:
            yield name, shape(call[name])


def _heads(call: Call) -> Iterator[Breach]:
    heads, kv_heads = int(call["num_query_heads"]), num_kv_heads(call)
    group = MOST_LATENT_HEADS if is_latent(call) else 64
    if heads < 1 or heads > 256 or kv_heads < 1 or heads % kv_heads or heads // kv_heads > group:
        yield "num_query_heads", f"{heads} over num_key_value_heads {kv_heads}"


def _heads_fit(call: Call) -> Iterator[Breach]:
    at = {"BSND": 2, "BNSD": 1, "TND": 1, "NTD": 0}[order(call)]
    names = ["query"] if call["block_table"] is not None else ["query", "key", "value"]
    for name in names:
        heads = int(call["num_query_heads"]) if name == "query" else num_kv_heads(call)
        tensor: Tensor = call[name]
        if tensor.shape[at] != heads:
            yield name, f"{shape(tensor)} for {heads} heads"


def _batch(call: Call) -> Iterator[Breach]:
    if not packed(call) and not 0 < call["query"].shape[0] <= 65536:
        yield "query", shape(call["query"])


def _cache_axes(call: Call) -> Iterator[Breach]:
    if call["block_table"] is None:
        return
    heads = num_kv_heads(call)
    for name in ("key", "value"):
        cache: Tensor = call[name]
        if cache.dim() not in ((3, 4) if order(call) in ("BNSD", "TND") else (3,)):
            yield name, shape(cache)
        elif cache.shape[2] % heads if cache.dim() == 3 else cache.shape[1] != heads:
            yield name, f"{shape(cache)} for {heads} kv heads"


def _cache_by_heads(call: Call) -> Iterator[Breach]:
    own = call["num_query_heads"] == num_kv_heads(call)
    if own and call["block_table"] is not None and packed(call) and call["key"].dim() == 4:
        yield "key", f"{shape(call['key'])} with as many kv heads as query heads"


def _row_width(call: Call) -> Iterator[Breach]:
    if call["block_table"] is not None and call["key"].dim() == 3 and call["key"].shape[2] > 65535:
        yield "key", shape(call["key"])


def _elements(call: Call) -> Iterator[Breach]:
    for name in ("key", "value"):
        if call["block_table"] is not None and math.prod(call[name].shape) > 2**31 - 1:
            yield name, shape(call[name])


def _kv_alike(call: Call) -> Iterator[Breach]:
    key, value = call["key"], call["value"]
    alike = key.shape == value.shape
    if packed(call) and call["block_table"] is None:
        alike = key.shape[:-1] == value.shape[:-1]
    if not alike:
        yield "value", f"{shape(value)} beside key {shape(key)}"


def _head_dim(call: Call) -> Iterator[Breach]:
    query, key, value = (head_dim(call, name) for name in ("query", "key", "value"))
    said = f"query {query}, key {key}, value {value}"
    if query != key:
        yield "key", f"of head sizes {said}"
    elif is_latent(call):
        return
    elif packed(call):
        grouped = call["num_query_heads"] != num_kv_heads(call) or call["block_table"] is not None
        values = {64: (64,), 128: (128,), 192: (128,) if grouped or order(call) == "NTD" else (128, 192)}
        if value not in values.get(query, ()):
            yield "query", f"of head sizes {said}"
    elif query > 512 or query % 16 or value % 16:
        yield "query", f"of head sizes {said}"


def _contiguous(call: Call) -> Iterator[Breach]:
    for name in ("query", "key", "value", "query_rope", "key_rope", "atten_mask", "block_table"):
        if call[name] is not None and not call[name].is_contiguous():
            yield name, f"strided {tuple(call[name].stride())} over {shape(call[name])}"


SHAPES = (
    Rule(
        "layout",
        f"of the layouts, {', '.join(LAYOUTS)} are modelled here",
        DOC,
        "choose TND for a packed batch",
        _layout,
    ),
    Rule(
        "modelled",
        "other quantisation, shifts, padding and shared prefixes are outside what is checked here",
        "virtual_npu/operators/attention_shapes.py",
        "leave the argument out",
        _known,
    ),
    Rule(
        "dtype",
        "query, key and value are all float16, or all bfloat16 where the product has it",
        DOC + "; CANN PagedAttentionOperation for the 310P",
        "cast them to one of these",
        _dtype,
    ),
    Rule("axes", "each tensor has the axes that input_layout names", DOC, "reshape it", _axes),
    Rule(
        "heads",
        "query heads are a multiple of kv heads, at most 64 times as many, and at most 256",
        DOC,
        "split the heads over devices, or repeat the kv heads",
        _heads,
    ),
    Rule(
        "heads-fit", "the heads are those of the shape", DOC, "pass the model's numbers of heads", _heads_fit
    ),
    Rule(
        "int8",
        "int8 keys and values, with a scale for each channel, are read on the 910B and the 910C from pages of"
        " a multiple of 32, by a single query a sequence in BSND or BNSD, of heads of a multiple of 32;"
        " pages in FRACTAL_NZ, which up to 16 queries read, are not modelled here",
        "op-plugin npu_fused_infer_attention_score: paging with Q_S 1, pseudo-quantisation in TND",
        "pass each query as a sequence, or multiply keys and values by their scales before the call",
        _int8,
    ),
    Rule(
        "channels",
        "scales of int8 keys and values are of the query's type, [1, kv heads, 1, dim], [1, kv heads, dim] or"
        " [1, kv heads * dim]",
        "op-plugin npu_fused_infer_attention_score: key_antiquant_scale, example 7",
        "cast them to the query's type when weights are loaded",
        _channels,
    ),
    Rule("batch", "a batch holds 1 to 65536 sequences", DOC, "split the batch", _batch),
    Rule(
        "cache-axes",
        "the cache is [pages, page, kv heads * dim], or with BNSD and TND also [pages, kv heads, page, dim]",
        DOC,
        "view the cache as (pages, page, -1)",
        _cache_axes,
    ),
    Rule(
        "cache-by-heads",
        "in TND the cache is [pages, page, kv heads * dim] where each query head has its own kv head",
        DOC,
        "view the cache as (pages, page, -1)",
        _cache_by_heads,
    ),
    Rule(
        "row-width",
        "kv heads * dim is at most 65535 in a cache of [pages, page, kv heads * dim]",
        DOC,
        "lay the cache out as [pages, kv heads, page, dim]",
        _row_width,
    ),
    Rule(
        "rope",
        "query_rope and key_rope are both given, of 64, with the axes and the type of query and key, in TND",
        DOC + "; vllm-ascend attention/mla_v1.py",
        "pass the parts that carry positions apart from the others",
        _rope,
    ),
    Rule(
        "latent",
        "with rope, heads are 128 with as many kv heads and no paging; or 512 with one kv head, 1 to 128"
        " query heads (a power of two), a page table, and the key as value. The page excludes softmax_lse,"
        " for which vllm-ascend asks where ranks divide a sequence",
        DOC + "; vllm-ascend attention/mla_v1.py and attention/context_parallel/mla_cp.py",
        "expand the latents for long spans, absorb the queries of short ones",
        _latent,
    ),
    Rule("elements", "a cache has at most 2**31 - 1 elements", DOC, "make the pool smaller", _elements),
    Rule("kv-alike", "key and value have one shape", DOC, "allocate both alike", _kv_alike),
    Rule(
        "head-dim",
        "in TND heads are of 64, 128, or 192 with values of 128 (or 192 without paging and grouping); "
        "elsewhere a multiple of 16 up to 512",
        DOC + "; vllm-ascend #9632",
        "use plain attention for this model",
        _head_dim,
    ),
    Rule("contiguous", "tensors are contiguous", DOC, "call contiguous() when it is made", _contiguous),
)
