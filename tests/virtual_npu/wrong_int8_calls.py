"""Wrong calls of the fused operators that end in rows of int8; see wrong_calls."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.virtual_npu.wrong import Change, Wrong, cut, put, to

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
    Wrong("scales", in_groups(128, weight_scale=torch.ones(1, 128)), "weight_scale", "in 2"),
    Wrong("whole", in_groups(128, group_index=torch.tensor([9, 90])), "group_index", "99 of"),
    Wrong("width", in_groups(192), "x", "(3, 192) with group_index"),
    Wrong("width", in_groups(2 * 5312), "x", "(3, 10624) with group_index"),
]
