"""Which calls does an engine make, at which sizes?

To be tried on a device, each drawn from a seed: the operator, its arguments on the CPU, and how near its
results must come to the contract's.

Legend: T tokens, S sequences, H query heads, K kv heads, D head dim, P pages, B tokens a page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MASK = torch.ones(2048, 2048, dtype=torch.int8).triu(1)  # which sparse_mode 3 and 4 take
FRACTAL_NZ = 29  # the format in which the matrix unit reads a weight
NEAR = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-3, torch.int8: 1.0}
SAME = {torch.int32: 0.0, torch.int64: 0.0, torch.bool: 0.0}


@dataclass(frozen=True, slots=True)
class RightCall:
    """A call that the contract lets through, on its 910B."""

    operator: str  # as torch_npu has it
    arguments: Mapping[str, Any]
    results: tuple[int, ...] | None  # those that an engine looks at; None: all
    written: tuple[str, ...]  # arguments that it fills
    may_move: bool  # results may differ in their last bits; else they are bits that are only copied

    def near(self, dtype: torch.dtype) -> float:
        """How far a result of this type may be from the reference, and by which part of it."""
        return (NEAR | SAME)[dtype] if self.may_move else 0.0


class Draw:
    """Random numbers and tensors of one call."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def number(self, least: int, most: int) -> int:
        """Both ends may come."""
        return int(torch.randint(least, most + 1, (), generator=self.generator))

    def one(self, *values: Any) -> Any:
        """One of these."""
        return values[self.number(0, len(values) - 1)]

    def tensor(self, *shape: int) -> Tensor:
        """Normal numbers in the call's type."""
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def int8(self, *shape: int) -> Tensor:
        """Every value but -128."""
        return torch.randint(-127, 128, shape, generator=self.generator, dtype=torch.int8)

    def scale(self, *shape: int) -> Tensor:
        """Positive float32."""
        return 0.001 + 0.01 * torch.rand(*shape, generator=self.generator)

    def order(self, count: int) -> Tensor:
        """The numbers below `count`, shuffled."""
        return torch.randperm(count, generator=self.generator)


def _attention(draw: Draw) -> dict[str, Any]:
    """A packed batch of decodes, chunks and prompts over shuffled pages."""
    num_kv_heads, dim, page_size = draw.one(1, 2, 4), draw.one(64, 128), draw.one(16, 64, 128)
    num_heads = num_kv_heads * draw.one(1, 2, 4)
    lens = []
    for _ in range(draw.number(1, 6)):
        computed = draw.one(0, draw.number(1, 700))
        count = draw.one(1, 1, draw.number(1, 200))
        lens.append((count, computed + count))
    counts = [-(-kv // page_size) for _, kv in lens]
    pages = (1 + draw.order(sum(counts))).tolist()  # page 0 belongs to nobody
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([pages.pop() for _ in range(count)])
    ends = torch.tensor([count for count, _ in lens]).cumsum(0)
    window = draw.one(None, draw.number(1, 300))
    arguments = {
        "query": draw.tensor(int(ends[-1]), num_heads, dim),
        "key": draw.tensor(1 + sum(counts), page_size, num_kv_heads * dim),
        "value": draw.tensor(1 + sum(counts), page_size, num_kv_heads * dim),
        "atten_mask": MASK,
        "actual_seq_lengths": ends.tolist(),
        "actual_seq_lengths_kv": [kv for _, kv in lens],
        "block_table": table,
        "num_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "scale": dim**-0.5,
        "input_layout": "TND",
        "block_size": page_size,
        "sparse_mode": 3,
    }
    if window is not None:
        arguments |= {"sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0}
    return arguments


def _write(draw: Draw) -> dict[str, Any]:
    tokens, heads, dim, page_size = (
        draw.number(1, 300),
        draw.one(1, 2, 8),
        draw.one(64, 128),
        draw.one(16, 128),
    )
    num_pages = 2 + tokens // page_size
    return {
        "key": draw.tensor(tokens, heads, dim),
        "value": draw.tensor(tokens, heads, dim),
        "key_cache": draw.tensor(num_pages, page_size, heads, dim),
        "value_cache": draw.tensor(num_pages, page_size, heads, dim),
        "slot_mapping": draw.order(num_pages * page_size)[:tokens].int(),
        "cache_mode": "Norm",
    }


def _update(draw: Draw) -> dict[str, Any]:
    tokens, rows, width = draw.number(1, 200), 256, (draw.one(1, 4), draw.one(64, 128))
    return {
        "input": draw.tensor(rows, *width),
        "indices": draw.order(rows)[:tokens, None].int(),
        "updates": draw.tensor(tokens, *width),
    }


def _norm(draw: Draw) -> dict[str, Any]:
    width = draw.one(64, 128, 1024, 4096)
    return {"input": draw.tensor(draw.number(1, 200), width), "gamma": draw.tensor(width), "epsilon": 1e-6}


def _add_norm(draw: Draw) -> dict[str, Any]:
    width, tokens = draw.one(64, 1024, 4096), draw.number(1, 200)
    return {
        "x1": draw.tensor(tokens, width),
        "x2": draw.tensor(tokens, width),
        "gamma": draw.tensor(width),
        "epsilon": 1e-6,
    }


def _rotary(draw: Draw) -> dict[str, Any]:
    tokens, dim, kv_heads = draw.number(1, 200), draw.one(64, 128), draw.one(1, 2, 8)
    angles = 10 * torch.rand(tokens, dim // 2, generator=draw.generator)
    both = torch.cat([angles, angles], -1)[:, None]
    return {
        "query": draw.tensor(tokens, kv_heads * draw.one(1, 2, 4), dim),
        "key": draw.tensor(tokens, kv_heads, dim),
        "cos": both.cos().to(draw.dtype),
        "sin": both.sin().to(draw.dtype),
        "layout": "TND",
        "rotary_mode": "half",
    }


def _rotary_mul(draw: Draw) -> dict[str, Any]:
    made = _rotary(draw)
    return {"input": made["query"], "r1": made["cos"], "r2": made["sin"]}


def _swiglu(draw: Draw) -> dict[str, Any]:
    return {"input": draw.tensor(draw.number(1, 200), 2 * draw.one(96, 512, 11008)), "dim": -1}


def _dynamic_quant(draw: Draw) -> dict[str, Any]:
    return {"input": draw.tensor(draw.number(1, 200), draw.one(64, 512, 4096))}


def _quant_matmul(draw: Draw) -> dict[str, Any]:
    tokens, inputs, outputs = draw.number(1, 200), draw.one(64, 512, 4096), draw.one(32, 256)
    return {
        "x1": draw.int8(tokens, inputs),
        "x2": draw.int8(inputs, outputs),
        "scale": draw.scale(outputs),
        "pertoken_scale": draw.scale(tokens),
        "bias": draw.one(None, draw.tensor(outputs).float()),
        "output_dtype": draw.dtype,
    }


def _format_cast(draw: Draw) -> dict[str, Any]:
    weight = draw.one(draw.tensor, draw.int8)(draw.one(64, 512), draw.one(96, 1024))
    return {"input": weight, "acl_format": FRACTAL_NZ}


MAKERS: Mapping[str, Callable[[Draw], dict[str, Any]]] = {
    "npu_fused_infer_attention_score": _attention,
    "npu_scatter_pa_kv_cache": _write,
    "npu_scatter_nd_update_": _update,
    "npu_rms_norm": _norm,
    "npu_add_rms_norm": _add_norm,
    "npu_apply_rotary_pos_emb": _rotary,
    "npu_rotary_mul": _rotary_mul,
    "npu_swiglu": _swiglu,
    "npu_dynamic_quant": _dynamic_quant,
    "npu_quant_matmul": _quant_matmul,
    "npu_format_cast": _format_cast,
}
RESULTS = {"npu_fused_infer_attention_score": (0,), "npu_rms_norm": (0,), "npu_add_rms_norm": (0, 2)}
WRITTEN = {"npu_scatter_pa_kv_cache": ("key_cache", "value_cache"), "npu_scatter_nd_update_": ("input",)}
COPIES = ("npu_scatter_pa_kv_cache", "npu_scatter_nd_update_", "npu_format_cast")


def right_call(operator: str, seed: int) -> RightCall:
    """The call of this operator that the seed draws, in bfloat16 or float16 by turns."""
    draw = Draw(seed, (torch.bfloat16, torch.float16)[seed % 2])
    return RightCall(
        operator,
        MAKERS[operator](draw),
        RESULTS.get(operator),
        WRITTEN.get(operator, ()),
        operator not in COPIES,
    )
