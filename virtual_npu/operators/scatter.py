"""How are rows of a tensor replaced in place, and when is that called right?

Legend: T rows written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, shape
from virtual_npu.products import A2, A3, A5

UPDATE = "cann-recipes-infer models/qwen/models/modeling_qwen.py: npu_scatter_nd_update_"


def _update(call: Call) -> Tensor:
    into: Tensor = call["input"]
    into[call["indices"].long()[:, 0]] = call["updates"]
    return into


def _update_types(call: Call) -> Iterator[Breach]:
    if call["updates"].dtype != call["input"].dtype:
        yield "updates", f"{shape(call['updates'])} into {shape(call['input'])}"


def _update_axes(call: Call) -> Iterator[Breach]:
    into, index, rows = call["input"], call["indices"], call["updates"]
    if index.dtype not in (torch.int32, torch.int64) or index.dim() != 2 or index.shape[1] != 1:
        yield "indices", shape(index)
    elif rows.shape != (index.shape[0], *into.shape[1:]):
        yield "updates", f"{shape(rows)} for {shape(index)} into {shape(into)}"


def _update_range(call: Call) -> Iterator[Breach]:
    index = call["indices"]
    wrong = index[(index < 0) | (index >= call["input"].shape[0])]
    if len(wrong):
        yield "indices", f"one with row {int(wrong[0])} of {call['input'].shape[0]}"


def _update_unique(call: Call) -> Iterator[Breach]:
    rows, counts = torch.unique(call["indices"], return_counts=True)
    if len(rows) != call["indices"].shape[0]:
        yield "indices", f"one with row {int(rows[counts > 1][0])} more than once"


def _update_contiguous(call: Call) -> Iterator[Breach]:
    for name in ("input", "indices", "updates"):
        if not call[name].is_contiguous():
            yield name, f"strided {tuple(call[name].stride())} over {shape(call[name])}"


UPDATE_RULES = (
    Rule("one-type", "rows are of the cache's type", UPDATE, "cast them", _update_types),
    Rule(
        "axes",
        "indices are int32 or int64 [T, 1], and a row of updates is one of input",
        UPDATE,
        "view the cache as (-1, heads, dim) and the places as (-1, 1)",
        _update_axes,
    ),
    Rule("contiguous", "tensors are contiguous", UPDATE, "call contiguous() first", _update_contiguous),
    Rule("rows-in-range", "indices are rows of input", UPDATE, "cut them to the real tokens", _update_range),
    Rule("rows-unique", "each row is written once", UPDATE, "drop all but one", _update_unique),
)


OPERATORS = (
    Operator(
        schema="npu::npu_scatter_nd_update_(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)",
        products=(A2, A3, A5),
        source=UPDATE,
        rules=UPDATE_RULES,
        reference=_update,
    ),
)
