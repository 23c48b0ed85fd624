"""Draw sample calls of the operators of a mixture of experts; see `sample_calls`."""

from __future__ import annotations

from typing import Any

import torch

from virtual_npu.random_inputs import RandomInputs
from virtual_npu.simulated_products import A5


def gating(draw: RandomInputs) -> dict[str, Any]:
    """Draw scores so far apart that rounding does not change their order."""
    tokens, experts = draw.number(1, 200), draw.one(8, 64, 128)
    scores = torch.stack([draw.order(experts) for _ in range(tokens)]).float() / 4
    return {"x": scores, "k": draw.one(1, 2, 8), "renorm": draw.one(0, 1)}


def gating_in_groups(draw: RandomInputs) -> dict[str, Any]:
    """Draw gating in groups, as of DeepSeek-V3 or V2, with scores too far apart for rounding to matter."""
    tokens, groups, size = draw.number(1, 200), draw.one(1, 8), draw.one(16, 32)
    experts = groups * size
    scores = torch.stack([draw.order(experts) for _ in range(tokens)]).float() * (12.0 / experts) - 6
    by_sigmoid = draw.one(0, 1)
    return {
        "x": scores,
        "k": draw.one(6, 8),
        "bias": draw.one(None, torch.zeros(experts)) if by_sigmoid else None,
        "k_group": draw.one(1, max(1, groups // 2)),
        "group_count": groups,
        "group_select_mode": by_sigmoid,
        "norm_type": by_sigmoid,
    }


def routing(draw: RandomInputs) -> dict[str, Any]:
    """Draw tokens that each choose several of many experts."""
    tokens, chosen, experts = draw.number(1, 200), draw.one(1, 2, 8), draw.one(8, 64, 128)
    return {
        "x": draw.tensor(tokens, draw.one(64, 2048)),
        "expert_idx": torch.stack([draw.order(experts)[:chosen] for _ in range(tokens)]).int(),
        "active_num": tokens * chosen,
        "expert_num": experts,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, experts],
        "quant_mode": draw.one(-1, 1),
    }


def combining(draw: RandomInputs) -> dict[str, Any]:
    """Draw rows in any order, with a weight for each."""
    tokens, chosen = draw.number(1, 200), draw.one(1, 2, 8)
    return {
        "permuted_tokens": draw.tensor(tokens * chosen, draw.one(64, 2048)),
        "sorted_indices": draw.order(tokens * chosen).int(),
        "probs": torch.rand(tokens, chosen, generator=draw.generator).to(draw.dtype),
    }


def products(draw: RandomInputs) -> dict[str, Any]:
    """Draw rows of experts, some of which have none; some draws have biases, some have 4-bit weights."""
    counts = torch.tensor([draw.one(0, draw.number(1, 40)) for _ in range(draw.one(8, 64))] + [1])
    inputs, width = draw.one(64, 512), draw.one(64, 256)
    weight, more = draw.tensor(len(counts), inputs, width), {}
    if draw.one(True, False):
        bias = draw.tensor(len(counts), width)
        more["bias"] = [bias if draw.dtype == torch.float16 else bias.float()]
    if draw.one(True, False) and draw.product is not A5:  # no operator here packs 4-bit weights on the 950
        groups = draw.one((), (inputs // 32,))
        weight = draw.int4(len(counts), inputs, width)
        more["antiquant_scale"] = [draw.scale(len(counts), *groups, width).to(draw.dtype)]
        more["antiquant_offset"] = [draw.int4(len(counts), *groups, width).to(draw.dtype)]
    return more | {
        "x": [draw.tensor(int(counts.sum()), inputs)],
        "weight": [weight],
        "split_item": 2,
        "group_type": 0,
        "group_list": counts,
        "group_list_type": 1,
    }
