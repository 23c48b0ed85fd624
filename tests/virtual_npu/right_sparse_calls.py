"""Random right calls of the operators of sparse attention, the indexer's and its own; see right_calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.virtual_npu.right_mixture_calls import HALVES, Arguments, pick
from virtual_npu.contract import Conditions
from virtual_npu.operators.sparse import packed
from virtual_npu.simulated_products import A2, A3, A5


def spans(rng: np.random.Generator, keys: str) -> tuple[list[int], tuple[int, int], Arguments]:
    """The keys that each query token sees, the sizes of the pages, and what all four operators take."""
    page_size = pick(rng, 16, 48)
    lens = [(int(rng.integers(1, 6)), int(rng.integers(60))) for _ in range(rng.integers(1, 5))]
    kv_lens = [count + before for count, before in lens]
    most = -(-max(kv_lens) // page_size)
    pages = 1 + rng.permutation(len(lens) * most)
    seen = [before + at + 1 for count, before in lens for at in range(count)]
    made: dict[str, Any] = {
        "actual_seq_lengths_query": torch.tensor(np.cumsum([each for each, _ in lens]), dtype=torch.int32),
        f"actual_seq_lengths_{keys}": torch.tensor(kv_lens, dtype=torch.int32),
        "block_table": torch.from_numpy(pages.reshape(len(lens), most)).int(),
        "layout_query": "TND",
        f"layout_{keys}": "PA_BSND",
    }
    return seen, (1 + len(pages), page_size), made


def indexer(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    seen, pages, made = spans(rng, "key")
    dtype, heads = pick(rng, *HALVES), pick(rng, 8, 16, 64)
    return made | {
        "query": torch.randn(len(seen), heads, 128).to(dtype),
        "key": torch.randn(*pages, 1, 128).to(dtype),
        "weights": torch.randn(len(seen), heads).to(pick(rng, dtype, torch.float32)),
        "sparse_count": pick(rng, 1, 20, 2048, 3072),
    }, Conditions(product=pick(rng, A2, A3, A5))


def int8_indexer(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    seen, pages, made = spans(rng, "key")
    heads = pick(rng, 1, 16, 64)
    return made | {
        "query": torch.randint(-127, 128, (len(seen), heads, 128), dtype=torch.int8),
        "key": torch.randint(-127, 128, (*pages, 1, 128), dtype=torch.int8),
        "weights": torch.randn(len(seen), heads).half(),
        "query_dequant_scale": torch.rand(len(seen), heads).half(),
        "key_dequant_scale": torch.rand(*pages, 1).half(),
        "query_quant_mode": 0,
        "key_quant_mode": 0,
        "sparse_count": pick(rng, 1, 20, 2048),
    }, Conditions(product=pick(rng, A2, A3))


def attention(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    """Some rows read all that they may, in any order, others a part."""
    seen, pages, made = spans(rng, "kv")
    dtype, heads = pick(rng, *HALVES), pick(rng, 1, 2, 16)
    indices = torch.full((len(seen), 1, pick(rng, 8, 100)), -1, dtype=torch.int32)
    for row, keys in zip(indices[:, 0], seen):
        chosen = torch.from_numpy(rng.permutation(keys)[: len(row)]).int()
        row[: len(chosen)] = chosen
    latents = torch.randn(*pages, 1, 512).to(dtype)
    return made | {
        "query": torch.randn(len(seen), heads, 512).to(dtype),
        "key": latents,
        "value": latents,
        "sparse_indices": indices,
        "scale_value": 0.05,
        "query_rope": torch.randn(len(seen), heads, 64).to(dtype),
        "key_rope": torch.randn(*pages, 1, 64).to(dtype),
        "attention_mode": 2,
    }, Conditions(product=pick(rng, A2, A3, A5))


def int8_attention(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    """Only in bfloat16, in which the rope keys lie within the rows."""
    made, _ = attention(rng)
    query, rope = (made.pop(name).bfloat16() for name in ("query", "query_rope"))
    rows = packed(made["key"], made.pop("key_rope"))
    modes = {"key_quant_mode": 2, "value_quant_mode": 2}
    made |= modes | {"query": torch.cat((query, rope), -1), "key": rows, "value": rows}
    return made, Conditions(product=pick(rng, A2, A3))
