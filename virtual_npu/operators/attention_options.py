"""Which options does fused attention take: page size, precision, scale, output order, mask mode, sinks?

Rules use the names of the operator's second version.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from virtual_npu.contract import Breach, Call, Rule, is_dtype, shape
from virtual_npu.operators.attention_shapes import DOC, head_dim, num_kv_heads, order, packed
from virtual_npu.operators.spans import UNBOUNDED, heads_last


def _single(call: Call) -> bool:
    """Whether each sequence has one query, as in decodes."""
    query = heads_last(call["query"], order(call), call["num_query_heads"])
    if packed(call):
        return list(call["actual_seq_qlen"] or ()) == list(range(1, len(query) + 1))
    return query.shape[1] == 1


def _page_size(call: Call) -> Iterator[Breach]:
    if call["block_table"] is None:
        return
    size, cache = call["block_size"], call["key"]
    tokens = cache.shape[1] if cache.dim() == 3 else cache.shape[2]
    step, least, most = (
        (16, 16, 1024) if packed(call) else (16, 16, 512) if _single(call) else (128, 128, 512)
    )
    if size != tokens:
        yield "block_size", f"{size} over {shape(cache)}"
    elif size % step or not least <= size <= most:
        yield "block_size", size


def _precision(call: Call) -> Iterator[Breach]:
    allowed = {0, 1, 2, 3}
    if packed(call) and call["num_query_heads"] == num_kv_heads(call):
        allowed = {0} if call["query"].dtype == torch.bfloat16 else {0, 1}
    elif _single(call):
        allowed = {0, 1}
    if call["inner_precise"] not in allowed:
        yield "inner_precise", call["inner_precise"]


def _scale(call: Call) -> Iterator[Breach]:
    if not (0 < call["softmax_scale"] < math.inf):
        yield "softmax_scale", call["softmax_scale"]


def _output_order(call: Call) -> Iterator[Breach]:
    if call["input_layout"] in ("BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD"):
        rows = heads_last(call["query"], order(call), call["num_query_heads"]).shape[1]
        if rows < 2 or (rows > 16 and call["input_layout"].endswith("NBSD")):
            yield "input_layout", f"{call['input_layout']} with {rows} query tokens a sequence"


def _sparse_mode(call: Call) -> Iterator[Breach]:
    mode = call["sparse_mode"]
    if mode not in (0, 1, 2, 3, 4) or (packed(call) and mode not in (0, 3, 4)):
        yield "sparse_mode", f"{mode} with input_layout {call['input_layout']}"


def _band(call: Call) -> Iterator[Breach]:
    for name in ("pre_tokens", "next_tokens"):
        if call["sparse_mode"] == 4 and call[name] < 0:
            yield name, call[name]
        if call["sparse_mode"] == 0 and call["atten_mask"] is not None and call[name] != UNBOUNDED:
            yield name, f"{call[name]} with a mask of one's own"


def _sink(call: Call) -> Iterator[Breach]:
    sink = call["learnable_sink"]
    if sink is None:
        return
    if not is_dtype(sink, (torch.bfloat16,), call.conditions) or sink.shape != (call["num_query_heads"],):
        yield "learnable_sink", shape(sink)
    if call["input_layout"] not in ("TND", "NTD_TND") or head_dim(call, "value") > 128:
        yield "learnable_sink", f"given with {call['input_layout']} and values of {head_dim(call, 'value')}"


OPTIONS = (
    Rule(
        "page-size",
        "block_size is the cache's: in TND a multiple of 16 up to 1024, for single queries of other layouts "
        "one up to 512, else 128, 256, 384 or 512",
        DOC,
        "choose cache.page_size 128",
        _page_size,
    ),
    Rule(
        "inner-precise",
        "0 or 1 chooses the precision and +2 clears blind rows; single queries and TND without grouped heads "
        "take no 2 or 3, and the last in bfloat16 only 0",
        DOC,
        "leave it at 0",
        _precision,
    ),
    Rule("scale", "the scale is above 0 and finite", DOC, "pass head_dim ** -0.5", _scale),
    Rule(
        "output-order",
        "an output in another order wants more than one query token, and NBSD at most 16",
        DOC,
        "use the same order for both",
        _output_order,
    ),
    Rule(
        "sparse-mode",
        "the modes are 0 to 4, in TND 0, 3 and 4",
        DOC,
        "use 3, causal from the lower right corner",
        _sparse_mode,
    ),
    Rule(
        "band",
        "pre_tokens and next_tokens are at least 0, and are left alone beside a mask of one's own",
        DOC,
        "pass window - 1 and 0 with sparse_mode 4",
        _band,
    ),
    Rule(
        "sink",
        "a sink is bfloat16 [query heads], in TND or NTD_TND, with values of at most 128",
        DOC,
        "cast it to bfloat16",
        _sink,
    ),
)
