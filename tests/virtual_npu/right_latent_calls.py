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
    lead = (1, 1, tokens) if tokens > num_pages or rng.integers(2) else (tokens, 1, 1)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes).to(dtype)

    made: dict[str, Any] = {
        "kv": random(*lead, 576),
        "gamma": random(512),
        "cos": random(*lead, 64),
        "sin": random(*lead, 64),
        "index": torch.from_numpy(page_size + rng.permutation((num_pages - 1) * page_size)[:tokens]),
        "k_cache": random(num_pages, page_size, 1, 64),
        "ckv_cache": random(num_pages, page_size, 1, 512),
        "epsilon": 1e-6,
        "cache_mode": "PA",
        "is_output_kv": bool(rng.integers(2)),
    }
    return made, Conditions(product=pick(rng, A2, A3))


def product(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    tokens, heads = rng.integers(1, 30, 2).tolist()
    inner, width = (16 * rng.integers(1, 4, 2)).tolist()
    dtype, swaps = pick(rng, torch.float32, *HALVES), bool(rng.integers(2))
    made: dict[str, Any] = {
        "input": torch.randn(*((tokens, heads) if swaps else (heads, tokens)), inner).to(dtype),
        "weight": torch.randn(heads, inner, width).to(dtype),
        "perm_y": [1, 0, 2],
    }
    if swaps:
        made["perm_x1"] = [1, 0, 2]
    return made, Conditions(product=pick(rng, A2, A3, A5))


def prolog(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    """The smallest sizes that the page lists, in bfloat16 and in int8."""
    tokens, heads, page_size = int(rng.integers(1, 6)), pick(rng, 1, 2, 4), pick(rng, 16, 48)
    hidden, compressed, nope, num_pages = 1024, pick(rng, 1536, 2048), pick(rng, 128, 192), 3

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes).bfloat16()

    made: dict[str, Any] = {
        "token_x": random(tokens, hidden),
        "weight_dq": random(hidden, compressed) / 32,
        "weight_uq_qr": random(compressed, heads * (nope + 64)) / 32,
        "weight_uk": random(heads, nope, 512) / 16,
        "weight_dkv_kr": random(hidden, 576) / 32,
        "rmsnorm_gamma_cq": random(compressed),
        "rmsnorm_gamma_ckv": random(512),
        "rope_sin": random(tokens, 64),
        "rope_cos": random(tokens, 64),
        "kv_cache": random(num_pages, page_size, 1, 512),
        "kr_cache": random(num_pages, page_size, 1, 64),
        "cache_index": torch.from_numpy(page_size + rng.permutation((num_pages - 1) * page_size)[:tokens]),
        "rmsnorm_epsilon_cq": 1e-6,
        "rmsnorm_epsilon_ckv": 1e-6,
        "weight_quant_mode": pick(rng, 0, 2),
        "query_norm_flag": pick(rng, False, True),
    }
    if made["weight_quant_mode"] == 2:
        for name in ("token_x", "weight_dq", "weight_uq_qr", "weight_dkv_kr"):
            rows, width = made[name].shape
            made[name] = torch.from_numpy(rng.integers(-127, 128, (rows, width), dtype=np.int8))
            scale = f"dequant_scale_{name.removeprefix('token_').replace('weight', 'w')}"
            made[scale] = torch.rand(*((rows, 1) if name == "token_x" else (1, width))) / 4096
    return made, Conditions(product=pick(rng, A2, A3, A5))
