"""Define the operator that replaces rows of a tensor in place, with the rules of a correct call.

Legend: T rows written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, shape
from virtual_npu.simulated_products import A2, A3, P310

UPDATE = "op-plugin npu_scatter_nd_update_"
TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64, torch.int8)
ON_310P = (torch.float32, torch.float16, torch.bool)


def _update(call: Call) -> Tensor:
    into: Tensor = call["input"]
    into[call["indices"].long()[:, 0]] = call["updates"]
    return into


def _update_types(call: Call) -> Iterator[Breach]:
    taken = ON_310P if call.conditions.product is P310 else TYPES
    for name in ("input", "updates"):
        if call[name].dtype not in taken or call[name].dtype != call["input"].dtype:
            yield name, shape(call[name])


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


UPDATE_RULES = (
    Rule(
        "dtype",
        "input and updates are of one type: float32, float16, bool, and off the 310P bfloat16, int64, int8",
        UPDATE,
        "cast the rows",
        _update_types,
    ),
    Rule(
        "axes",
        "indices are int32 or int64 [T, 1], and a row of updates is one of input",
        UPDATE,
        "view the cache as (-1, heads, dim) and the places as (-1, 1)",
        _update_axes,
    ),
    Rule("rows-in-range", "indices are rows of input", UPDATE, "cut them to the real tokens", _update_range),
    Rule(
        "rows-unique",
        "each row is written once, since it is not defined which of two writes remains",
        "virtual_npu/operators/scatter.py",
        "drop all but one",
        _update_unique,
    ),
)


OPERATORS = (
    Operator(
        schema="npu::npu_scatter_nd_update_(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)",
        products=(P310, A2, A3),
        source=UPDATE,
        rules=UPDATE_RULES,
        reference=_update,
    ),
)
