"""Draw sample calls of the operators of latent attention; see `sample_calls`."""

from __future__ import annotations

from typing import Any

import torch

from virtual_npu.random_inputs import RandomInputs

LATENT, ROPE, HEAD = 512, 64, 128


def attention(draw: RandomInputs) -> dict[str, Any]:
    """Draw short spans on latents over shuffled pages, or long spans with separate keys for each head."""
    return draw.one(_absorbed, _expanded)(draw)


def _absorbed(draw: RandomInputs) -> dict[str, Any]:
    heads, page_size = draw.one(1, 4, 16, 128), draw.one(16, 128)
    most = draw.one(1, 16)
    lens = [(draw.number(1, most), draw.number(0, 700)) for _ in range(draw.number(1, 6))]
    kv_lens = [count + before for count, before in lens]
    counts = [-(-length // page_size) for length in kv_lens]
    ends = torch.tensor([count for count, _ in lens]).cumsum(0).tolist()
    latents = draw.tensor(1 + sum(counts), page_size, LATENT)
    return _shared(draw, ends, kv_lens, heads, most == 1) | {
        "query": draw.tensor(ends[-1], heads, LATENT),
        "key": latents,
        "value": latents,
        "query_rope": draw.tensor(ends[-1], heads, ROPE),
        "key_rope": draw.tensor(1 + sum(counts), page_size, ROPE),
        "block_table": draw.page_table(counts),
        "num_key_value_heads": 1,
        "block_size": page_size,
        # Scores of 512 random numbers would be too large without the factor.
        "scale": (HEAD + ROPE) ** -0.5 / 4,
    }


def _expanded(draw: RandomInputs) -> dict[str, Any]:
    heads, lens = draw.one(1, 4, 16), [draw.number(17, 200) for _ in range(draw.number(1, 4))]
    kv_lens = [count + draw.one(0, draw.number(1, 300)) for count in lens]
    ends, kv_ends = (torch.tensor(each).cumsum(0).tolist() for each in (lens, kv_lens))
    return _shared(draw, ends, kv_ends, heads, False) | {
        "query": draw.tensor(ends[-1], heads, HEAD),
        "key": draw.tensor(kv_ends[-1], heads, HEAD),
        "value": draw.tensor(kv_ends[-1], heads, HEAD),
        "query_rope": draw.tensor(ends[-1], heads, ROPE),
        "key_rope": draw.tensor(kv_ends[-1], heads, ROPE),
        "num_key_value_heads": heads,
        "scale": (HEAD + ROPE) ** -0.5,
    }


def _shared(
    draw: RandomInputs, ends: list[int], kv_lens: list[int], heads: int, is_decodes: bool
) -> dict[str, Any]:
    mask = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
    seen = {"sparse_mode": 0} if is_decodes else {"sparse_mode": 3, "atten_mask": mask}
    return seen | {
        "actual_seq_lengths": ends,
        "actual_seq_lengths_kv": kv_lens,
        "num_heads": heads,
        "input_layout": "TND",
    }


def write(draw: RandomInputs) -> dict[str, Any]:
    """Draw latents to be normed and rope keys to be rotated, for cache places in any order."""
    tokens, page_size = draw.number(1, 300), draw.one(16, 128)
    num_pages = 2 + tokens // page_size
    angles = 10 * torch.rand(tokens, ROPE // 2, generator=draw.generator)
    both = torch.cat([angles, angles], -1)[:, None, None]
    return {
        "kv": draw.tensor(tokens, 1, 1, LATENT + ROPE),
        "gamma": draw.tensor(LATENT),
        "cos": both.cos().to(draw.dtype),
        "sin": both.sin().to(draw.dtype),
        "index": draw.order(num_pages * page_size)[:tokens],
        "k_cache": draw.tensor(num_pages, page_size, 1, ROPE),
        "ckv_cache": draw.tensor(num_pages, page_size, 1, LATENT),
        "epsilon": 1e-6,
        "cache_mode": "PA",
    }


def product(draw: RandomInputs) -> dict[str, Any]:
    """Draw a product that maps queries into the latent space, or results out of it."""
    heads, (inputs, outputs) = draw.one(1, 4, 16, 64), draw.one((HEAD, LATENT), (LATENT, HEAD))
    return {
        "input": draw.tensor(draw.number(1, 200), heads, inputs),
        "weight": (draw.tensor(heads, inputs, outputs).float() / 16).to(draw.dtype),
        "perm_x1": [1, 0, 2],
        "perm_y": [1, 0, 2],
    }


def prolog(draw: RandomInputs) -> dict[str, Any]:
    """Draw the fused prolog of one device's heads, in bfloat16 only, with bfloat16 or int8 weights."""
    draw.dtype = torch.bfloat16
    tokens, heads, page_size = draw.number(1, 40), draw.one(1, 4, 8), draw.one(16, 128)
    hidden, compressed, in_int8 = draw.one(1024, 2048), 1536, draw.one(False, True)
    num_pages = 2 + tokens // page_size
    angles = 10 * torch.rand(tokens, ROPE // 2, generator=draw.generator)
    both = torch.cat([angles, angles], -1)
    made: dict[str, Any] = {
        "token_x": draw.int8(tokens, hidden) if in_int8 else draw.tensor(tokens, hidden),
        "weight_uk": draw.tensor(heads, HEAD, LATENT) / HEAD**0.5,
        "rmsnorm_gamma_cq": draw.tensor(compressed),
        "rmsnorm_gamma_ckv": draw.tensor(LATENT),
        "rope_sin": both.sin().bfloat16(),
        "rope_cos": both.cos().bfloat16(),
        "kv_cache": draw.tensor(num_pages, page_size, 1, LATENT),
        "kr_cache": draw.tensor(num_pages, page_size, 1, ROPE),
        "cache_index": draw.order(num_pages * page_size)[:tokens],
        "rmsnorm_epsilon_cq": 1e-6,
        "rmsnorm_epsilon_ckv": 1e-6,
        "weight_quant_mode": 2 if in_int8 else 0,
    }
    sides = {
        "dq": (hidden, compressed),
        "uq_qr": (compressed, heads * (HEAD + ROPE)),
        "dkv_kr": (hidden, LATENT + ROPE),
    }
    for name, (inputs, outputs) in sides.items():
        made[f"weight_{name}"] = draw.int8(inputs, outputs)
        if in_int8:
            made[f"dequant_scale_w_{name}"] = draw.scale(1, outputs) / inputs**0.5
        else:
            made[f"weight_{name}"] = draw.tensor(inputs, outputs) / inputs**0.5
    return made | ({"dequant_scale_x": draw.scale(tokens, 1)} if in_int8 else {})
