"""Random right calls of the operators for weights of 4 bits."""

from __future__ import annotations

import numpy as np
import torch

from tests.virtual_npu.right_mixture_calls import HALVES, Arguments, pick
from virtual_npu.contract import Conditions
from virtual_npu.simulated_products import A2, A3


def pack(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    rows, words = rng.integers(1, 20, 2).tolist()
    weight = torch.randint(-8, 8, (rows, 8 * words), dtype=torch.int32)
    return {"weight": weight}, Conditions(product=pick(rng, A2, A3))


def product(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    rows, inner, words = int(rng.integers(1, 20)), int(rng.integers(33, 140)), int(rng.integers(1, 9))
    columns, dtype, size = 8 * words, pick(rng, *HALVES), pick(rng, 0, 32, 96 if inner > 96 else 32)
    shape = (-(-inner // size), columns) if size else pick(rng, (columns,), (1, columns), (1,), (1, 1))
    arguments: Arguments = {
        "x": torch.randn(rows, inner).to(dtype),
        "weight": torch.randint(-(2**31), 2**31, (inner, words)).int(),
        "antiquant_scale": torch.rand(shape).to(dtype),
        "antiquant_offset": pick(rng, None, torch.randint(-7, 9, shape).to(dtype)),
        "antiquant_group_size": int(size),
    }
    if bool(rng.integers(2)):
        bias = torch.randn(columns) if dtype == torch.bfloat16 else torch.randn(columns).half()
        arguments["bias"] = pick(rng, bias, bias[None])
    return arguments, Conditions(product=pick(rng, A2, A3))
