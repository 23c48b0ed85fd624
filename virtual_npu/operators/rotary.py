"""Define the fused rotary embeddings, with the rules of a correct call.

Legend: T tokens, Q sequences, S tokens a sequence, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, shape
from virtual_npu.simulated_products import A2, A3, A5, P310

APPLY = "CANN aclnnApplyRotaryPosEmbV2"
FIELD = "vllm-ascend _310p/ops/rotary_embedding.py"
MULTIPLY = "op-plugin npu_rotary_mul"
TYPES = (torch.float32, torch.float16, torch.bfloat16)
HEADS_AXIS = {"BSND": 2, "SBND": 2, "BNSD": 1, "TND": 1}
# Shapes that r1 and r2 may have for each layout: 1 is an axis of size 1, a letter the input's size.
SHAPES = {
    "BNSD": ("11SD", "B1SD", "BNSD"),
    "BSND": ("1S1D", "BS1D", "BSND"),
    "SBND": ("S11D", "SB1D", "SBND"),
    "TND": ("T1D", "TND"),
}


def rotate(x: Tensor, mode: str) -> Tensor:
    """Rotate each pair by a right angle; a pair is of the head's halves, its quarters, or neighbours."""
    if mode == "interleave":
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((-odd, even), -1).flatten(-2)
    parts = x.chunk(4 if mode == "quarter" else 2, -1)
    return torch.cat([each for a, b in zip(parts[::2], parts[1::2]) for each in (-b, a)], -1)


def turn(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """Rotate x by the angles in float32; returns it in its own dtype."""
    wide = x.float()
    return (wide * cos.float() + rotate(wide, mode) * sin.float()).to(x.dtype)


def _apply(call: Call) -> tuple[Tensor, Tensor]:
    """Return the rotated query and key; the operator also writes them into its inputs."""
    query, key = (
        turn(call[name], call["cos"], call["sin"], call["rotary_mode"]) for name in ("query", "key")
    )
    call["query"].copy_(query)
    call["key"].copy_(key)
    return query, key


def _multiply(call: Call) -> Tensor:
    return turn(call["input"], call["r1"], call["r2"], call["rotary_mode"])


def _layout(call: Call) -> Iterator[Breach]:
    if call["layout"] not in HEADS_AXIS:
        yield "layout", call["layout"]


def _mode(call: Call) -> Iterator[Breach]:
    if call["rotary_mode"] not in ("half", "interleave", "quarter"):
        yield "rotary_mode", call["rotary_mode"]


def _taken(call: Call) -> tuple[torch.dtype, ...]:
    return TYPES if call.conditions.product is not P310 else (torch.float32, torch.float16)


def _dtype(call: Call) -> Iterator[Breach]:
    query, taken = call["query"].dtype, _taken(call)
    for name in ("query", "key", "cos", "sin"):
        if call[name].dtype not in taken or call[name].dtype != query:
            yield name, shape(call[name])


def _axes(call: Call) -> Iterator[Breach]:
    axes, heads = len(call["layout"]), HEADS_AXIS[call["layout"]]
    want = _without(call["query"], heads)
    for name in ("query", "key", "cos", "sin"):
        tensor: Tensor = call[name]
        if tensor.dim() != axes or not tensor.numel() or _without(tensor, heads) != want:
            yield name, f"{shape(tensor)} beside query {shape(call['query'])}"
        elif name in ("cos", "sin") and tensor.shape[heads] != 1:
            yield name, shape(tensor)


def _without(tensor: Tensor, axis: int) -> list[int]:
    sizes = list(tensor.shape)
    return sizes[:axis] + sizes[axis + 1 :]


def _head_dim(call: Call) -> Iterator[Breach]:
    if call["query"].shape[-1] not in (64, 128):
        yield "query", shape(call["query"])


def _buffer(call: Call) -> Iterator[Breach]:
    axis, query = HEADS_AXIS[call["layout"]], call["query"]
    heads, dim, size = query.shape[axis] + call["key"].shape[axis], query.shape[-1], query.element_size()
    cast = query.dtype == torch.bfloat16
    needed = heads * dim * (4 if cast else size) * 5 + dim * size * 4 + cast * dim * 8
    if needed > call.conditions.product.unified_buffer_bytes:
        yield "query", f"of {heads} heads with the key's, {needed} bytes"


def _apply_contiguous(call: Call) -> Iterator[Breach]:
    for name in ("query", "key"):
        if not call[name].is_contiguous():
            yield name, f"strided {tuple(call[name].stride())} over {shape(call[name])}"


def _modes(call: Call) -> Iterator[Breach]:
    if call["rotary_mode"] not in (("half",) if call.conditions.product is P310 else ("half", "interleave")):
        yield "rotary_mode", call["rotary_mode"]
    if call["rotate"] is not None:
        yield "rotate", shape(call["rotate"])


def _multiply_dtype(call: Call) -> Iterator[Breach]:
    taken = _taken(call)
    for name in ("input", "r1", "r2"):
        if call[name].dtype not in taken or call[name].dtype != call["input"].dtype:
            yield name, shape(call[name])


def _sizes(call: Call) -> Iterator[Breach]:
    x: Tensor = call["input"]
    fits = (
        x.shape[-1] == 128 if call.conditions.product is P310 else x.shape[-1] % 2 == 0 and x.shape[-1] < 896
    )
    axes = (4,) if call.conditions.product is P310 else (3, 4)
    if x.dim() not in axes or not fits:
        yield "input", shape(x)


def _angles(call: Call) -> Iterator[Breach]:
    x, cos, sin = call["input"], call["r1"], call["r2"]
    if cos.shape != sin.shape:
        yield "r2", f"{shape(sin)} beside r1 {shape(cos)}"
    elif not any(_is_layout(x, cos, layout, call["rotary_mode"]) for layout in SHAPES):
        yield "r1", f"{shape(cos)} for input {shape(x)}"


def _is_layout(x: Tensor, cos: Tensor, layout: str, mode: str) -> bool:
    """Return whether input and angles fit a layout, within its limits on sequences and heads."""
    if x.dim() != len(layout):
        return False
    sizes = dict(zip(layout, x.shape))
    batch, heads = sizes.get("B", 1), sizes["N"]
    within = batch * heads < 1000 if mode == "interleave" else batch < 1000 and heads < 1000
    shapes = SHAPES[layout][:1] if mode == "interleave" else SHAPES[layout]
    return within and any([sizes.get(axis, 1) for axis in each] == list(cos.shape) for each in shapes)


def _unscaled(call: Call) -> Iterator[Breach]:
    for name in ("r1", "r2") if call.conditions.product in (A2, A3) else ():
        furthest = float(call[name].abs().max()) if call[name].numel() else 0.0
        if furthest > 1:
            yield name, f"of up to {furthest:g}"


OPERATORS = (
    Operator(
        schema="npu::npu_apply_rotary_pos_emb(Tensor query, Tensor key, Tensor cos, Tensor sin, "
        'str layout="BSND", str rotary_mode="half") -> (Tensor, Tensor)',
        products=(P310, A2, A3, A5),
        source=APPLY + "; " + FIELD,
        rules=(
            Rule(
                "layout",
                f"the layouts are {', '.join(HEADS_AXIS)}",
                "torch_npu 2.8 has BSH for a default, 2.13 BSND",
                "always pass layout, TND for a packed batch",
                _layout,
            ),
            Rule("mode", "the modes are half, interleave and quarter", APPLY, "pass half", _mode),
            Rule(
                "dtype",
                "query, key, cos and sin are of one type, which the product takes",
                APPLY,
                "cast the table of cos and sin when it is made",
                _dtype,
            ),
            Rule(
                "axes",
                "query, key, cos and sin differ in their heads alone, of which cos and sin have one",
                APPLY,
                "gather cos and sin as [T, 1, dim]",
                _axes,
            ),
            Rule("head-dim", "a head is of 64 or 128", FIELD, "use npu_rotary_mul", _head_dim),
            Rule(
                "buffer", "the heads of a token fit the unified buffer", APPLY, "use npu_rotary_mul", _buffer
            ),
            Rule(
                "contiguous",
                "query and key are contiguous, since they are turned in place",
                APPLY + "; " + FIELD,
                "call contiguous() first",
                _apply_contiguous,
            ),
        ),
        reference=_apply,
    ),
    Operator(
        schema='npu::npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", '
        "Tensor? rotate=None) -> Tensor",
        products=(P310, A2, A3, A5),
        source=MULTIPLY,
        rules=(
            Rule(
                "mode",
                "the modes are half, and interleave off the 310P; a rotation matrix is not checked here",
                MULTIPLY,
                "pass half and no matrix",
                _modes,
            ),
            Rule(
                "dtype",
                "all are float32, float16, or bfloat16 off the 310P",
                MULTIPLY,
                "cast them alike",
                _multiply_dtype,
            ),
            Rule(
                "sizes",
                "it has 3 or 4 axes and an even head below 896; on the 310P 4 axes and a head of 128",
                MULTIPLY,
                "rotate in plain torch",
                _sizes,
            ),
            Rule(
                "angles",
                "r1 and r2 are the input's, with one head or sequence; sequences and heads are below 1000",
                MULTIPLY,
                "pass [T, 1, dim] for [T, heads, dim]",
                _angles,
            ),
            Rule(
                "unscaled",
                "cosines and sines are from -1 to 1 on the 910B and 910C",
                MULTIPLY + ": jit_compile False",
                "rotate in plain torch where a model scales them",
                _unscaled,
            ),
        ),
        reference=_multiply,
    ),
)
