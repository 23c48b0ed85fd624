"""Random batches for attention, as the operator is asked and as plain tensors.

Legend: S sequences, H query heads, K kv heads, D head dim, P pages, B tokens a page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

MASK = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
V1_NAMES = {
    "actual_seq_qlen": "actual_seq_lengths",
    "actual_seq_kvlen": "actual_seq_lengths_kv",
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
    "return_softmax_lse": "softmax_lse_flag",
}


@dataclass
class Dense:
    """What a call asks for, sequence by sequence: queries [n, H, D], keys and values [m, K, D]."""

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    window: int | None = None  # how many keys a query sees at most, its own among them
    causal: bool = True
    sink: Tensor | None = None
    scale: float = field(default=1.0)


def oracle(dense: Dense) -> tuple[Tensor, Tensor]:
    """Attention in float64 by the definition of softmax: [T, H, D], and log of its denominator [T, H, 1]."""
    outs, logs = [], []
    for query, key, value in zip(dense.queries, dense.keys, dense.values):
        n, m, group = len(query), len(key), query.shape[1] // key.shape[1]
        key, value = (each.double().repeat_interleave(group, 1) for each in (key, value))
        scores = torch.einsum("nhd,mhd->hnm", query.double(), key) * dense.scale
        at, place = torch.arange(n)[:, None] + m - n, torch.arange(m)[None]
        if dense.causal:
            scores[:, place > at] = -torch.inf
        if dense.window is not None:
            scores[:, place <= at - dense.window] = -torch.inf
        exponents = torch.exp(scores)
        below = exponents.sum(-1, keepdim=True)
        if dense.sink is not None:
            below = below + torch.exp(dense.sink.double())[:, None, None]
        outs.append(torch.einsum("hnm,mhd->nhd", exponents / below, value))
        logs.append(below.log().transpose(0, 1))
    return torch.cat(outs), torch.cat(logs)


def paged(
    rng: np.random.Generator,
    dtype: torch.dtype = torch.float32,
    *,
    lens: list[tuple[int, int]] | None = None,
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    page_size: int = 16,
    by_heads: bool = False,
    window: int | None = None,
    sink: bool = False,
) -> tuple[dict[str, Any], Dense]:
    """A packed batch over shuffled pages, by the second version's names; `lens` are queries and keys."""
    if lens is None:
        lens = [_lens(rng) for _ in range(int(rng.integers(1, 6)))]
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    dense = Dense(
        [random(n, heads[0], dim) for n, _ in lens],
        [random(m, heads[1], dim) for _, m in lens],
        [random(m, heads[1], dim) for _, m in lens],
        window,
        sink=random(heads[0]) if sink else None,
        scale=dim**-0.5,
    )
    counts = [-(-m // page_size) for _, m in lens]
    num_pages = sum(counts) + int(rng.integers(1, 4))
    free = iter((1 + rng.permutation(num_pages - 1)).tolist() if num_pages > sum(counts) else [])
    table = torch.zeros(len(lens), max(counts) + int(rng.integers(2)), dtype=torch.int32)
    caches = [torch.full((num_pages, page_size, heads[1], dim), torch.nan, dtype=dtype) for _ in range(2)]
    for row, count in enumerate(counts):
        pages = [next(free) for _ in range(count)]
        table[row, :count] = torch.tensor(pages)
        for cache, whole in zip(caches, (dense.keys[row], dense.values[row])):
            cache[pages] = _padded(whole, count * page_size).view(count, page_size, heads[1], dim)
    caches = [each.transpose(1, 2).contiguous() if by_heads else each.flatten(2) for each in caches]
    arguments: dict[str, Any] = {
        "query": torch.cat(dense.queries),
        "key": caches[0],
        "value": caches[1],
        "atten_mask": MASK,
        "actual_seq_qlen": np.cumsum([n for n, _ in lens]).tolist(),
        "actual_seq_kvlen": [m for _, m in lens],
        "block_table": table,
        "num_query_heads": heads[0],
        "num_key_value_heads": heads[1],
        "softmax_scale": dense.scale,
        "input_layout": "TND",
        "sparse_mode": 3 if window is None else 4,
        "block_size": page_size,
        "return_softmax_lse": True,
    }
    if window is not None:
        arguments |= {"pre_tokens": window - 1, "next_tokens": 0}
    if sink:
        arguments["learnable_sink"] = dense.sink
    return arguments, dense


def int8_pages(
    rng: np.random.Generator,
    dtype: torch.dtype = torch.bfloat16,
    *,
    lens: list[tuple[int, int]],
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    page_size: int = 32,
) -> tuple[dict[str, Any], Dense]:
    """Single queries in BNSD over pages of int8, by the first version's names but for those of `paged`.

    The keys and values are those that the pages hold, times the scales of their channels.
    """
    arguments, dense = paged(rng, lens=lens, heads=heads, dim=dim, page_size=page_size)
    for name, told in (("key", dense.keys), ("value", dense.values)):
        scale = 0.02 + 0.02 * torch.from_numpy(rng.random((heads[1], dim))).to(dtype)
        cache = arguments[name].view(-1, page_size, *scale.shape) / scale
        arguments[name] = cache.nan_to_num().round().clamp(-128, 127).char().flatten(2)
        arguments[f"{name}_antiquant_scale"] = scale[None, :, None]
        told[:] = [((each / scale).round().clamp(-128, 127) * scale).to(dtype) for each in told]
    arguments["query"] = torch.cat(dense.queries).to(dtype)[:, :, None]
    dense.queries = [each.to(dtype) for each in dense.queries]
    for name in ("actual_seq_qlen", "atten_mask", "return_softmax_lse"):
        del arguments[name]
    return arguments | {"input_layout": "BNSD", "sparse_mode": 0}, dense


def first_version(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call by the names of the first version."""
    return {V1_NAMES.get(name, name): value for name, value in arguments.items()}


def _lens(rng: np.random.Generator) -> tuple[int, int]:
    """A decode, a prompt or a prompt's chunk."""
    kind, most = rng.integers(3), 80
    if kind == 0:
        return 1, int(rng.integers(1, most))
    start = 0 if kind == 1 else int(rng.integers(1, most))
    count = int(rng.integers(1, most))
    return count, start + count


def _padded(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows, rows.new_full((count - len(rows), *rows.shape[1:]), torch.nan)])
