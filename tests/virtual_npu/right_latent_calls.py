"""Random right calls of what latent attention asks for; see right_calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.virtual_npu.right_mixture_calls import HALVES, Arguments, pick
from virtual_npu.contract import Conditions
from virtual_npu.simulated_products import A2, A3, A5


def cache_write(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    tokens, page_size, dtype = int(rng.integers(1, 30)), pick(rng, 16, 48), pick(rng, *HALVES)
    num_pages = 3 + int(rng.integers(3))

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes).to(dtype)

    made: dict[str, Any] = {
        "kv": random(tokens, 1, 1, 576),
        "gamma": random(512),
        "cos": random(tokens, 1, 1, 64),
        "sin": random(tokens, 1, 1, 64),
        "index": torch.from_numpy(page_size + rng.permutation((num_pages - 1) * page_size)[:tokens]),
        "k_cache": random(num_pages, page_size, 1, 64),
        "ckv_cache": random(num_pages, page_size, 1, 512),
        "epsilon": 1e-6,
        "cache_mode": "PA",
        "is_output_kv": bool(rng.integers(2)),
    }
    return made, Conditions(product=pick(rng, A2, A3))


def product(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    tokens, heads, inner, width = rng.integers(1, 30, 4).tolist()
    dtype, swaps = pick(rng, torch.float32, *HALVES), bool(rng.integers(2))
    made: dict[str, Any] = {
        "input": torch.randn(*((tokens, heads) if swaps else (heads, tokens)), inner).to(dtype),
        "weight": torch.randn(heads, inner, width).to(dtype),
        "perm_y": [1, 0, 2],
    }
    if swaps:
        made["perm_x1"] = [1, 0, 2]
    return made, Conditions(product=pick(rng, A2, A3, A5))
