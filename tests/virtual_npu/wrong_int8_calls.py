"""Wrong calls of the fused operators that end in rows of int8; see wrong_calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.virtual_npu.wrong import Change, Wrong, cut, put, spoil, to

NORM = [
    Wrong("halves", to("x1", Tensor.double), "x1", "float64"),
    Wrong("halves", cut("x2"), "x2", "beside"),
    Wrong("columns", to("gamma", Tensor.double), "gamma", "float64"),
    Wrong("outputs", put(output_mask=[False, False]), "output_mask", "[False, False]"),
    Wrong("int8", put(y_dtype=16), "y_dtype", "is 16"),
]


def in_groups(columns: int, **values: object) -> Change:
    """A call over two groups of three rows, with other values."""
    right = {
        "x": torch.ones(3, columns).int(),
        "weight_scale": torch.ones(2, columns),
        "activation_scale": torch.ones(3),
        "group_index": torch.tensor([1, 2]),
    }
    return put(**right | values)


SWIGLU = [
    Wrong("summed", to("x", Tensor.double), "x", "float64"),
    Wrong("summed", to("x", lambda x: x[:, 1:]), "x", "int32"),
    Wrong("scales", put(activation_scale=None), "activation_scale", "None for int32"),
    Wrong("scales", to("weight_scale", lambda scale: scale[0]), "weight_scale", "for int32"),
    Wrong("modelled", put(quant_mode=0), "quant_mode", "is 0"),
    Wrong("modelled", put(swiglu_mode=1), "swiglu_mode", "is 1"),
    Wrong("grouped", put(group_index=torch.ones(1).int()), "group_index", "int32"),
    Wrong("whole", in_groups(128, group_index=torch.tensor([9, 90])), "group_index", "99 of"),
    Wrong("width", in_groups(192), "x", "(3, 192) with group_index"),
    Wrong("width", in_groups(2 * 5312), "x", "(3, 10624) with group_index"),
]


def in_list(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    """Change the one tensor of a list."""
    return to(name, lambda listed: [make(listed[0])])


def of_experts(inner: int, columns: int) -> Change:
    """A call of two experts with weights of these sizes, which hold nothing."""
    return put(
        x=torch.zeros(3, inner, dtype=torch.int8),
        weight=[torch.zeros(1, dtype=torch.int8).expand(2, inner, columns)],
        weight_scale=[torch.zeros(1).expand(2, columns)],
        x_scale=torch.zeros(3),
        group_list=torch.tensor([1, 2]),
        group_list_type=1,
    )


GATED = [
    Wrong("lists", to("weight", lambda listed: listed * 2), "weight", "a list of 2"),
    Wrong("lists", put(weight_scale=[]), "weight_scale", "a list of 0"),
    Wrong("dtypes", to("x", Tensor.half), "x", "float16"),
    Wrong("dtypes", in_list("weight", Tensor.int), "weight", "int32"),
    Wrong("dtypes", in_list("weight_scale", Tensor.bfloat16), "weight_scale", "bfloat16"),
    Wrong("dtypes", in_list("weight_scale", Tensor.half), "weight_scale", "float16"),
    Wrong("dtypes", to("x_scale", Tensor.bfloat16), "x_scale", "bfloat16"),
    Wrong("axes", in_list("weight", lambda weight: weight[0]), "weight", "for int8"),
    Wrong("axes", in_list("weight", lambda weight: weight[:, 1:]), "weight", "for int8"),
    Wrong("sizes", of_experts(64, 10272), "weight", "(2, 64, 10272)"),
    Wrong("sizes", of_experts(65536, 64), "weight", "(2, 65536, 64)"),
    Wrong("tiles", of_experts(64, 80), "weight", "(2, 64, 80)"),
    Wrong("tiles", of_experts(24, 64), "weight", "(2, 24, 64)"),
    Wrong("modelled", put(smooth_scale=torch.ones(3)), "smooth_scale", "float32 (3,)"),
    Wrong("modelled", put(dequant_mode=1), "dequant_mode", "is 1"),
    Wrong("counts", put(group_list_type=2), "group_list_type", "is 2"),
    Wrong(
        "counts",
        lambda call: {"group_list": spoil(call["group_list"], -1, 99), "group_list_type": 0},
        "group_list",
        "99 of",
    ),
]
