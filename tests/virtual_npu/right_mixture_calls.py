"""Random right calls of what a mixture of experts asks for; see right_calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from virtual_npu.contract import Conditions
from virtual_npu.simulated_products import A2, A3, A5

Arguments = dict[str, Any]
HALVES = (torch.float16, torch.bfloat16)


def pick(rng: np.random.Generator, *choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def gating(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    tokens, experts = rng.integers(1, 30, 2).tolist()
    x = torch.randn(tokens, experts).to(pick(rng, torch.float32, *HALVES))
    return {"x": x, "k": int(rng.integers(1, experts + 1))}, Conditions(product=pick(rng, A2, A3))


def gating_as_one(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    made, conditions = gating(rng)
    return made | {"renorm": int(rng.integers(2))}, conditions


def gating_in_groups(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    tokens, groups, size = int(rng.integers(1, 30)), int(rng.integers(1, 5)), int(rng.integers(3, 8))
    dtype, chosen_groups = pick(rng, torch.float32, *HALVES), int(rng.integers(1, groups + 1))
    made = {
        "x": torch.randn(tokens, groups * size).to(dtype),
        "k": int(rng.integers(1, chosen_groups * size + 1)),
        "bias": pick(rng, None, torch.randn(groups * size).to(dtype)),
        "k_group": chosen_groups,
        "group_count": groups,
        "group_select_mode": int(rng.integers(2)),
        "norm_type": int(rng.integers(2)),
        "out_flag": bool(rng.integers(2)),
        "routed_scaling_factor": pick(rng, 1.0, 2.5),
    }
    return made, Conditions(product=pick(rng, A2, A3, A5))


def routing(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    tokens, chosen, experts = int(rng.integers(1, 30)), int(rng.integers(1, 5)), int(rng.integers(1, 20))
    product = pick(rng, A2, A3, A5)
    made = {
        "x": torch.randn(tokens, int(rng.integers(1, 30))).to(pick(rng, torch.float32, *HALVES)),
        "expert_idx": torch.from_numpy(rng.integers(experts, size=(tokens, chosen), dtype=np.int32)),
        "active_num": pick(rng, -1, tokens * chosen),
        "expert_num": experts,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, experts],
        "quant_mode": -1 if product is A5 else pick(rng, -1, 1),
    }
    return made, Conditions(product=product)


def combining(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    tokens, chosen, dtype = int(rng.integers(1, 30)), int(rng.integers(1, 5)), pick(rng, *HALVES)
    made = {
        "permuted_tokens": torch.randn(tokens * chosen, int(rng.integers(1, 30))).to(dtype),
        "sorted_indices": torch.from_numpy(rng.permutation(tokens * chosen).astype(np.int32)),
        "probs": torch.rand(tokens, chosen).to(dtype),
    }
    return made, Conditions(product=pick(rng, A2, A3, A5))


def products(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    dtype = pick(rng, *HALVES)
    experts, rows, inner, width = rng.integers(1, 20, 4).tolist()
    counts = torch.from_numpy(rng.multinomial(rows, [1 / experts] * experts))
    by_counts = bool(rng.integers(2)) and experts > 1
    weight, x = torch.randn(experts, inner, width).to(dtype), torch.randn(rows, inner).to(dtype)
    more: Arguments = {}
    if int(rng.integers(4)) == 0:
        x, (weight, more) = (100 * x.float()).to(torch.int8), of_4_and_8_bits(experts, inner, width, rows)
        more["output_dtype"] = dtype
    elif bool(rng.integers(2)):
        weight, x = (100 * weight.float()).to(torch.int8), (100 * x.float()).to(torch.int8)
        more["output_dtype"] = pick(rng, torch.int32, dtype)
        if more["output_dtype"] != torch.int32:
            scale = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
            more["scale"] = [torch.rand(experts, width).to(scale)]
            more["per_token_scale"] = [torch.rand(rows)]
    else:
        if bool(rng.integers(2)):
            weight, inner, more = _in_4_bits(rng, experts, width, dtype)
            x, width = torch.randn(rows, inner).to(dtype), 8 * width
        if bool(rng.integers(2)):
            more["bias"] = [torch.randn(experts, width).to({torch.bfloat16: torch.float32}.get(dtype, dtype))]
    is_turned = weight.dtype != torch.int32 and bool(rng.integers(2))
    made = {
        "x": [x],
        "weight": [weight.mT.contiguous().mT if is_turned else weight],
        "split_item": pick(rng, 2, 3),
        "group_type": 0,
        "group_list": counts if by_counts else counts.cumsum(0),
        "group_list_type": int(by_counts),
        **more,
    }
    return made, Conditions(product=pick(rng, A2, A3))


def gated_products(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    experts, rows = rng.integers(1, 20, 2).tolist()
    inner, width = 16 * int(rng.integers(1, 5)), 32 * int(rng.integers(1, 5))
    counts = torch.from_numpy(rng.multinomial(int(rng.integers(rows + 1)), [1 / experts] * experts))
    by_counts = bool(rng.integers(2))
    scale = torch.rand(experts, width) / 1000
    made: Arguments = {
        "x": torch.randint(-128, 128, (rows, inner)).to(torch.int8),
        "weight": [torch.randint(-128, 128, (experts, inner, width)).to(torch.int8)],
        "weight_scale": [scale.to(pick(rng, torch.float32, *HALVES))],
        "x_scale": torch.rand(rows) / 100,
        "group_list": counts if by_counts else counts.cumsum(0),
        "group_list_type": int(by_counts),
    }
    return made, Conditions(product=pick(rng, A2, A3))


def of_4_and_8_bits(experts: int, inner: int, words: int, rows: int) -> tuple[torch.Tensor, Arguments]:
    """A weight of so many words a row, to be multiplied with int8 rows, and what goes with it."""
    numbers = torch.randint(-8, 8, (experts, inner, 8 * words))
    nibbles = [(numbers[..., place::8] & 15) << (4 * place) for place in range(8)]
    weight = torch.stack(nibbles).sum(0)
    scale = torch.rand(experts, 8 * words)
    more: Arguments = {
        "scale": [scale.view(torch.int32).long()[:, None]],
        "per_token_scale": [torch.rand(rows)],
        "bias": [8 * numbers.sum(1) * scale],
    }
    return (weight - 2**32 * (weight >= 2**31)).int(), more


def _in_4_bits(
    rng: np.random.Generator, experts: int, words: int, dtype: torch.dtype
) -> tuple[torch.Tensor, int, Arguments]:
    """A weight of so many words a row, its inputs, and its scales and offsets."""
    groups, size = rng.integers(1, 5, 2).tolist()
    shape = (experts, groups, 8 * words) if bool(rng.integers(2)) else (experts, 8 * words)
    weight = torch.randint(-(2**31), 2**31, (experts, groups * size, words)).int()
    scale, offset = torch.rand(shape).to(dtype), torch.randint(-7, 9, shape).to(dtype)
    return weight, groups * size, {"antiquant_scale": [scale], "antiquant_offset": [offset]}


def clipped_gate(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    x = 9 * torch.randn(*rng.integers(1, 5, 2).tolist(), 2 * int(rng.integers(1, 40)))
    made: Arguments = {"x": x.to(pick(rng, torch.float32, *HALVES)), "interleaved": bool(rng.integers(2))}
    return made, Conditions(product=pick(rng, A2, A3))
