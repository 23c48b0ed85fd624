"""Define the fused activations, with the rules of a correct call and their sources."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from virtual_npu.contract import Breach, Call, Operator, Rule, shape
from virtual_npu.simulated_products import A2, A3, A5, P310

SWIGLU = "op-plugin npu_swiglu"
ON_310P = "CANN aclnnSwiGlu: the 310P; vllm-ascend _310p/ops/linear.py: _MLP_ALIGN"
CLIPPED = "op-plugin npu_clipped_swiglu"
LIMIT = "CANN aclnnClippedSwigluV2: limit"
TYPES = (torch.float32, torch.float16, torch.bfloat16)
HALF_BYTES = 64  # the 310P requires a multiple of this


def _swiglu(call: Call) -> Tensor:
    x: Tensor = call["input"]
    gate, up = x.float().chunk(2, call["dim"])
    return (functional.silu(gate) * up).to(x.dtype)


def _clipped(call: Call) -> Tensor:
    x: Tensor = call["x"]
    dim = call["dim"] % x.dim()
    # The axis and those after it are flattened into one.
    rows = x.float().flatten(dim).reshape(-1, x.shape[dim:].numel())
    gate, up = (rows[:, ::2], rows[:, 1::2]) if call["interleaved"] else rows.chunk(2, 1)
    gate, up = gate.clamp(max=call["limit"]), up.clamp(-call["limit"], call["limit"])
    made = gate * torch.sigmoid(call["alpha"] * gate) * (up + call["bias"])
    return made.to(x.dtype).reshape(*x.shape[:dim], x.shape[dim] // 2, *x.shape[dim + 1 :])


def _clipped_dtype(call: Call) -> Iterator[Breach]:
    if call["x"].dtype not in TYPES:
        yield "x", shape(call["x"])


def _clipped_axis(call: Call) -> Iterator[Breach]:
    axes = call["x"].dim()
    if not 2 <= axes <= 8 or not -axes <= call["dim"] < axes:
        yield "dim", f"{call['dim']} of {shape(call['x'])}"


def _clipped_even(call: Call) -> Iterator[Breach]:
    if not call["x"].numel() or call["x"].shape[call["dim"]] % 2:
        yield "x", shape(call["x"])


def _clipped_contiguous(call: Call) -> Iterator[Breach]:
    if not call["x"].is_contiguous():
        yield "x", f"strided {tuple(call['x'].stride())} over {shape(call['x'])}"


def _limit(call: Call) -> Iterator[Breach]:
    if call["limit"] <= 0:
        yield "limit", f"{call['limit']:g}"


def _ungrouped(call: Call) -> Iterator[Breach]:
    if call["group_index"] is not None:
        yield "group_index", shape(call["group_index"])


def _dtype(call: Call) -> Iterator[Breach]:
    x: Tensor = call["input"]
    if x.dtype not in TYPES or (call.conditions.product is P310 and x.dtype == torch.bfloat16):
        yield "input", shape(x)


def _axis(call: Call) -> Iterator[Breach]:
    axes = call["input"].dim()
    if not 1 <= axes <= 8 or not -axes <= call["dim"] < axes:
        yield "dim", f"{call['dim']} of {shape(call['input'])}"


def _even(call: Call) -> Iterator[Breach]:
    x: Tensor = call["input"]
    if not x.numel() or x.shape[call["dim"]] % 2:
        yield "input", shape(x)


def _aligned(call: Call) -> Iterator[Breach]:
    x: Tensor = call["input"]
    half_bytes = x.shape[call["dim"]] // 2 * x.element_size()
    if call.conditions.product is P310 and half_bytes % HALF_BYTES:
        yield "input", f"{shape(x)}, in halves of {half_bytes} bytes"


def _contiguous(call: Call) -> Iterator[Breach]:
    if not call["input"].is_contiguous():
        yield "input", f"strided {tuple(call['input'].stride())} over {shape(call['input'])}"


OPERATORS = (
    Operator(
        schema="npu::npu_swiglu(Tensor input, int dim=-1) -> Tensor",
        products=(P310, A2, A3, A5),
        source=f"{SWIGLU}; {ON_310P}",
        rules=(
            Rule("dtype", "it takes float32, float16 and, off the 310P, bfloat16", SWIGLU, "cast it", _dtype),
            Rule("axis", "it is one of 1 to 8 axes", SWIGLU, "leave dim at -1", _axis),
            Rule(
                "even",
                "the axis splits into two halves, gate first, and nothing is empty",
                SWIGLU,
                "join gate and up into one matrix",
                _even,
            ),
            Rule(
                "aligned",
                f"on the 310P, a half is a multiple of {HALF_BYTES} bytes",
                ON_310P,
                "compute it in plain torch, or pad the matrix before it",
                _aligned,
            ),
            Rule("contiguous", "it is contiguous", SWIGLU, "call contiguous() first", _contiguous),
        ),
        reference=_swiglu,
    ),
    Operator(
        schema="npu::npu_clipped_swiglu(Tensor x, *, Tensor? group_index=None, int dim=-1, "
        "float alpha=1.702, float limit=7., float bias=1., bool interleaved=True) -> Tensor",
        products=(A2, A3),
        source=f"{CLIPPED}; {LIMIT}",
        rules=(
            Rule("dtype", "it takes float32, float16 and bfloat16", CLIPPED, "cast it", _clipped_dtype),
            Rule("axis", "it is one of 2 to 8 axes", CLIPPED, "leave dim at -1", _clipped_axis),
            Rule(
                "even",
                "the axis splits into gate and up, and nothing is empty",
                CLIPPED,
                "join gate and up into one matrix",
                _clipped_even,
            ),
            Rule("contiguous", "it is contiguous", CLIPPED, "call contiguous() first", _clipped_contiguous),
            Rule("limit", "the limit is above zero", LIMIT, "give the model's swiglu_limit", _limit),
            Rule(
                "modelled",
                "all rows are computed: no page says what is in those behind the groups",
                CLIPPED,
                "leave group_index out",
                _ungrouped,
            ),
        ),
        reference=_clipped,
    ),
)
