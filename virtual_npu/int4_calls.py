"""Draw sample calls of products with 4-bit weights; see `sample_calls`."""

from __future__ import annotations

from typing import Any

import torch

from virtual_npu.random_inputs import RandomInputs


def product(draw: RandomInputs) -> dict[str, Any]:
    """Draw scales by group or by column; the weight is drawn as numbers, which the device packs."""
    tokens, inputs, outputs = draw.number(1, 200), draw.one(64, 512, 4000), draw.one(32, 256)
    size = draw.one(0, 32, 128) if inputs > 128 else 0
    scale = draw.scale(-(-inputs // size) if size else 1, outputs).to(draw.dtype)
    bias = draw.one(None, draw.tensor(outputs))
    return {
        "x": draw.tensor(tokens, inputs),
        "weight": draw.int4(inputs, outputs),
        "antiquant_scale": scale,
        "antiquant_offset": draw.one(None, draw.int4(*scale.shape).to(draw.dtype)),
        "bias": bias if bias is None or draw.dtype == torch.float16 else bias.float(),
        "antiquant_group_size": size,
    }
