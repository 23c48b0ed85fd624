"""Check the arguments of fused attention beside its tensors: lengths, page table, options.

Lengths and the page table have to agree with the tensors; options are page size, precision, scale, output
order, mask mode and sinks. Rules use the names of the operator's second version.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Rule, is_dtype, shape
from virtual_npu.operators.attention_shapes import DOC, FIELD, head_dim, num_kv_heads, order, packed
from virtual_npu.operators.spans import UNBOUNDED, heads_last
from virtual_npu.simulated_products import A5

MOST_SEQUENCES = 4096


def _lengths(call: Call) -> Iterator[Breach]:
    if packed(call) and not call["actual_seq_qlen"]:
        yield "actual_seq_qlen", call["actual_seq_qlen"]
    if (packed(call) or call["block_table"] is not None) and not call["actual_seq_kvlen"]:
        yield "actual_seq_kvlen", call["actual_seq_kvlen"]


def _query_lens(call: Call) -> Iterator[Breach]:
    lens, query = call["actual_seq_qlen"], call["query"]
    if packed(call):
        if len(lens) > MOST_SEQUENCES:
            yield "actual_seq_qlen", f"a list of {len(lens)}"
        elif lens[0] < 0 or any(after < before for before, after in pairwise(lens)):
            yield "actual_seq_qlen", short(lens)
    elif lens is not None:
        yield from _per_sequence("actual_seq_qlen", lens, call, _heads_last(call, query)[1])


def _query_sum(call: Call) -> Iterator[Breach]:
    tokens = call["query"].shape[0 if order(call) == "TND" else 1]
    if packed(call) and call["actual_seq_qlen"][-1] != tokens:
        yield "actual_seq_qlen", f"{short(call['actual_seq_qlen'])} over {tokens} rows of query"


def _key_lens(call: Call) -> Iterator[Breach]:
    lens, key = call["actual_seq_kvlen"], call["key"]
    if packed(call):
        if len(lens) != len(call["actual_seq_qlen"]):
            yield (
                "actual_seq_kvlen",
                f"a list of {len(lens)} beside {len(call['actual_seq_qlen'])} of queries",
            )
        elif min(lens) < 0:
            yield "actual_seq_kvlen", short(lens)
    elif lens is not None:
        most = None if call["block_table"] is not None else _heads_last(call, key)[1]
        yield from _per_sequence("actual_seq_kvlen", lens, call, most)


def _key_sum(call: Call) -> Iterator[Breach]:
    if packed(call) and call["block_table"] is None:
        lens, tokens = call["actual_seq_kvlen"], call["key"].shape[0 if order(call) == "TND" else 1]
        if any(after < before for before, after in pairwise(lens)) or lens[-1] != tokens:
            yield "actual_seq_kvlen", f"{short(lens)} over {tokens} rows of key"


def _per_sequence(name: str, lens: list[int], call: Call, most: int | None) -> Iterator[Breach]:
    if len(lens) != 1 and len(lens) < call["query"].shape[0]:
        yield name, f"a list of {len(lens)} for {call['query'].shape[0]} sequences"
    elif min(lens) < 0 or (most is not None and max(lens) > most):
        yield name, f"{short(lens)}, in rows of {most}"


def _table(call: Call) -> Iterator[Breach]:
    table = call["block_table"]
    if table is None:
        return
    batch = len(call["actual_seq_qlen"]) if packed(call) else call["query"].shape[0]
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != batch:
        yield "block_table", f"{shape(table)} for {batch} sequences"


def _heads_last(call: Call, tensor: Tensor) -> torch.Size:
    """Return the shape of an unpacked query or key as [Q, S, heads, D]."""
    return heads_last(tensor, order(call)).shape


def short(lens: list[int]) -> str:
    """Abbreviate a list of lengths for a message."""
    return str(lens) if len(lens) <= 8 else f"{str(lens[:4])[:-1]}, ..., {lens[-1]}]"


def _single(call: Call) -> bool:
    """Return whether each sequence has one query, as in decodes."""
    query = heads_last(call["query"], order(call))
    if packed(call):
        return list(call["actual_seq_qlen"] or ()) == list(range(1, len(query) + 1))
    return query.shape[1] == 1


def _page_size(call: Call) -> Iterator[Breach]:
    if call["block_table"] is None:
        return
    size, cache = call["block_size"], call["key"]
    tokens = cache.shape[1] if cache.dim() == 3 else cache.shape[2]
    takes_any = packed(call) and call.conditions.product is not A5
    step, least, most = (16, 16, 1024) if takes_any else (16, 16, 512) if _single(call) else (128, 128, 512)
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
    if call["input_layout"] == "BNSD_BSND":
        rows = heads_last(call["query"], order(call)).shape[1]
        if rows < 2:
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


LENGTHS = (
    Rule(
        "lengths",
        "TND wants the lengths of queries and keys, and paging those of keys",
        DOC,
        "pass a list with an entry a sequence",
        _lengths,
    ),
    Rule(
        "query-lens",
        "lengths of packed queries add up from one sequence to the next, at most 4096 of them; in other "
        "layouts each is at most the row's",
        DOC,
        "pass the running sum, numpy.cumsum(lens).tolist()",
        _query_lens,
    ),
    Rule(
        "query-sum",
        "the last length is the number of query rows",
        FIELD + ": padding is a sequence of its own",
        "cut the query to its tokens, or add a sequence for the padding",
        _query_sum,
    ),
    Rule(
        "key-lens",
        "there is a length of keys for each sequence, none below 0",
        FIELD + ": else error 561002",
        "pass one length a sequence",
        _key_lens,
    ),
    Rule(
        "key-sum",
        "without a page table the lengths of packed keys add up, and the last is the number of key rows",
        DOC,
        "pass the running sum; per sequence they are with a page table",
        _key_sum,
    ),
    Rule(
        "table",
        "the page table is int32 with a row a sequence",
        DOC,
        "take the rows of this step's sequences, as int32",
        _table,
    ),
)
OPTIONS = (
    Rule(
        "page-size",
        "block_size is the cache's: in TND on A2 and A3 a multiple of 16 up to 1024, for single queries "
        "elsewhere one up to 512, else 128, 256, 384 or 512",
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
        "an output in another order wants more than one query token",
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
