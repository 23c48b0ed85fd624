"""What is the fused activation, and when is it called right?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from virtual_npu.contract import Breach, Call, Operator, Rule, shape
from virtual_npu.simulated_products import A2, A3, A5

SWIGLU = "op-plugin npu_swiglu"
TYPES = (torch.float32, torch.float16, torch.bfloat16)


def _swiglu(call: Call) -> Tensor:
    x: Tensor = call["input"]
    gate, up = x.float().chunk(2, call["dim"])
    return (functional.silu(gate) * up).to(x.dtype)


def _dtype(call: Call) -> Iterator[Breach]:
    if call["input"].dtype not in TYPES:
        yield "input", shape(call["input"])


def _axis(call: Call) -> Iterator[Breach]:
    axes = call["input"].dim()
    if not 1 <= axes <= 8 or not -axes <= call["dim"] < axes:
        yield "dim", f"{call['dim']} of {shape(call['input'])}"


def _even(call: Call) -> Iterator[Breach]:
    x: Tensor = call["input"]
    if not x.numel() or x.shape[call["dim"]] % 2:
        yield "input", shape(x)


def _contiguous(call: Call) -> Iterator[Breach]:
    if not call["input"].is_contiguous():
        yield "input", f"strided {tuple(call['input'].stride())} over {shape(call['input'])}"


OPERATORS = (
    Operator(
        schema="npu::npu_swiglu(Tensor input, int dim=-1) -> Tensor",
        products=(A2, A3, A5),
        source=SWIGLU + "; vllm-ascend _310p/ops/activation.py does without it",
        rules=(
            Rule("dtype", "it takes float32, float16 and bfloat16", SWIGLU, "cast it", _dtype),
            Rule("axis", "it is one of 1 to 8 axes", SWIGLU, "leave dim at -1", _axis),
            Rule(
                "even",
                "the axis splits into two halves, gate first, and nothing is empty",
                SWIGLU,
                "join gate and up into one matrix",
                _even,
            ),
            Rule("contiguous", "it is contiguous", SWIGLU, "call contiguous() first", _contiguous),
        ),
        reference=_swiglu,
    ),
)
