"""Check that the batch of a fused attention call is consistent: keys, mask, and the values that are read.

Rules use the names of the operator's second version.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Rule, shape
from virtual_npu.operators.attention_arguments import short
from virtual_npu.operators.attention_shapes import DOC, FIELD
from virtual_npu.operators.paging import holding_rules, page_id_rule, unwritten
from virtual_npu.operators.spans import FusedAttentionCall

MASK_SIDE = 2048
MOST_KEYS = 262144  # most keys of a sequence with a single query
WRONG_PAST = 512  # the key from which sparse_mode 0 ignores its mask


@cache
def causal_mask() -> Tensor:
    """Return the one mask of the sparse modes 2, 3 and 4: 1, above the diagonal, hides. int8 [2048, 2048]"""
    return torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.int8).triu(1)


def _table_width(asked: FusedAttentionCall) -> Iterator[Breach]:
    if asked.table is not None:
        size, longest = asked.key.shape[1], max(asked.key_lens)
        if asked.table.shape[1] * size < longest:
            yield "actual_seq_kvlen", f"{longest} with rows of {asked.table.shape[1]} pages of {size}"


def _most_keys(asked: FusedAttentionCall) -> Iterator[Breach]:
    for each in asked.sequences:
        if each.num_queries == 1 and each.num_keys > MOST_KEYS:
            yield "actual_seq_kvlen", each.num_keys


def _mixed(asked: FusedAttentionCall) -> Iterator[Breach]:
    lens = {each.num_queries == 1 for each in asked.sequences if each.num_queries}
    if not asked.call.conditions.product.mixed_spans and len(lens) > 1:
        yield "actual_seq_qlen", f"of sequences with {short(asked.query_lens)} query tokens"


def _mask_given(asked: FusedAttentionCall) -> Iterator[Breach]:
    if asked.call["atten_mask"] is None and (
        asked.mode == 1 or (asked.mode in (2, 3, 4) and not asked.single)
    ):
        yield "atten_mask", f"None with sparse_mode {asked.mode}"


def _mask_shape(asked: FusedAttentionCall) -> Iterator[Breach]:
    mask = asked.call["atten_mask"]
    if mask is None:
        return
    if mask.dtype not in (torch.bool, torch.int8, torch.uint8):
        yield "atten_mask", shape(mask)
    elif asked.mode in (2, 3, 4):
        if mask.shape[-2:] != (MASK_SIDE, MASK_SIDE) or math.prod(mask.shape[:-2]) != 1 or mask.dim() > 4:
            yield "atten_mask", f"{shape(mask)} with sparse_mode {asked.mode}"
    elif asked.packed or not _own_shape(asked, mask):
        yield "atten_mask", f"{shape(mask)} with sparse_mode {asked.mode}, input_layout {asked.layout}"


def _own_shape(asked: FusedAttentionCall, mask: Tensor) -> bool:
    """Return whether a mask for modes 0 and 1 has a row for each query and a column for each key.

    Further rows and columns are padding.
    """
    rows, keys = asked.query.shape[1], max(asked.key_lens)
    if asked.single and mask.dim() == 2:
        return mask.shape[0] == asked.batch and mask.shape[1] >= keys
    batches = {2: (), 3: (1,), 4: (mask.shape[0], 1)}.get(mask.dim())
    one_or_all = mask.dim() < 4 or mask.shape[0] in (1, asked.batch)
    return (
        batches is not None
        and mask.shape[:-2] == batches
        and one_or_all
        and mask.shape[-2] >= rows
        and mask.shape[-1] >= keys
    )


def _mask_content(asked: FusedAttentionCall) -> Iterator[Breach]:
    mask = asked.call["atten_mask"]
    if mask is None or asked.mode not in (2, 3, 4):
        return
    mask = mask.view(torch.int8).reshape(MASK_SIDE, MASK_SIDE)
    # The comparison takes eight elements at once where the alignment allows it.
    wide = torch.int64 if mask.storage_offset() % 8 == 0 else torch.int8
    if not torch.equal(mask.view(wide), causal_mask().view(wide)):
        corner = f"its lower left corner is {int(mask[-1, 0])}, its upper right {int(mask[0, -1])}"
        yield "atten_mask", f"not 1 above the diagonal and 0 elsewhere: {corner}"


def _blind(asked: FusedAttentionCall) -> Iterator[Breach]:
    if asked.single and asked.mode in (2, 3, 4):
        return
    for each in asked.sequences:
        after = int(asked.call["next_tokens"]) if asked.mode == 4 else 0
        if each.num_queries and (
            not each.num_keys or (asked.mode in (3, 4) and each.num_keys + after < each.num_queries)
        ):
            said = f"{each.num_keys} for the {each.num_queries} query tokens of sequence {each.number}"
            yield "actual_seq_kvlen", said
    mask = asked.call["atten_mask"]
    if mask is not None and asked.mode in (0, 1) and asked.call["inner_precise"] < 2:
        for each in asked.sequences:
            for _, seen, some in asked.chunks(each, 1024):
                if some is not None and not bool(some[:, seen].any(1).all()):
                    yield "atten_mask", f"one that hides all keys from a query of sequence {each.number}"


def _never_written(asked: FusedAttentionCall) -> Iterator[Breach]:
    if asked.table is not None:
        yield from unwritten(asked.read, ("key", "value"))


def _average(asked: FusedAttentionCall) -> Iterator[Breach]:
    if asked.averages and not asked.call.conditions.faithful:
        yield "sparse_mode", f"0 without a mask in {asked.layout}"


def _forgets(asked: FusedAttentionCall) -> Iterator[Breach]:
    longest = max(asked.key_lens)
    own = asked.mode == 0 and asked.call["atten_mask"] is not None
    if own and longest > WRONG_PAST and not asked.call.conditions.faithful:
        yield "atten_mask", f"of sparse_mode 0 over {longest} keys"


BATCH = (
    Rule(
        "table-width",
        "a row of the page table reaches as far as the longest sequence, which counts its own keys alone",
        DOC,
        "with a page table pass lengths per sequence, not their running sum",
        _table_width,
    ),
    Rule("most-keys", f"a single query reads at most {MOST_KEYS} keys", DOC, "split the keys", _most_keys),
    Rule(
        "mixed-spans",
        "single query tokens and longer spans go in two calls on this product",
        FIELD + ": chunked prefill on the 950",
        "call once for the single tokens and once for the others",
        _mixed,
    ),
    Rule("mask-given", "modes 1 to 4 want a mask", DOC, "pass triu(ones(2048, 2048), 1)", _mask_given),
    Rule(
        "mask-shape",
        "a mask is bool, int8 or uint8: [2048, 2048] in modes 2, 3 and 4; in 0 and 1, not in TND, a row a "
        "query and a column a key",
        DOC,
        "pass triu(ones(2048, 2048), 1) with sparse_mode 3",
        _mask_shape,
    ),
    Rule(
        "mask-content",
        "1 hides: the mask of modes 2, 3 and 4 is 1 above the diagonal alone",
        FIELD + " and cann-recipes-infer; example 3 of the op-plugin document has it the other way round",
        "pass triu(ones(2048, 2048), 1), not tril",
        _mask_content,
    ),
    Rule(
        "blind-rows",
        "each query sees a key, or inner_precise 2 or 3 clears the rows that do not",
        DOC + ": inner_precise",
        "count a span's own tokens among its keys",
        _blind,
    ),
    page_id_rule("block_table", lambda asked: list(asked.pages), lambda asked: int(asked.key.shape[0])),
    *holding_rules("block_table", lambda asked: list(asked.pages)),
    Rule(
        "written",
        "a read of a place that was never written comes to NaN",
        "virtual_npu: unwritten places hold NaN",
        "write keys and values before attention, at the places that the page table names",
        _never_written,
    ),
    Rule(
        "silent-average",
        "with spans of several queries this comes to the mean of the values, without an error; a batch of "
        "decodes wants no mask",
        "vllm-ascend #13699; #10302 and #16889 for decodes",
        "use sparse_mode 3, or another layout",
        _average,
    ),
    Rule(
        "silent-mask",
        f"past key {WRONG_PAST} the mask is ignored, without an error",
        "vllm-ascend #15503",
        "use sparse_mode 1 or 3",
        _forgets,
    ),
)
