"""Define the fused norms, with the rules of a correct call.

Legend: N the axes that are not normed, D those that are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, is_dtype, shape
from virtual_npu.simulated_products import A2, A3, A5, P310

RMS = "op-plugin npu_rms_norm"
ADD = "op-plugin npu_add_rms_norm"
# The operator's page of op-plugin names the 950 alone; CANN's names the 910B and 910C too
CAST = "CANN aclnnAddRmsNormCast"
TYPES = (torch.float32, torch.float16, torch.bfloat16)
ROW_BYTES = 32  # least bytes of a normed row on the 310P


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the normed input in its dtype, and the reciprocal of the root mean square, float32 [N, 1]."""
    axes = tuple(range(-gamma.dim(), 0))
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(axes, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


def _rms(call: Call) -> tuple[Tensor, Tensor]:
    return rms_norm(call["x1"], call["gamma"], call["epsilon"])


def _add_rms(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    total = call["x1"] + call["x2"]
    return *rms_norm(total, call["gamma"], call["epsilon"]), total


def _add_rms_cast(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the norm in float32, which is rounded to the type of x1 before, and then in that type."""
    normed, rstd, total = _add_rms(call)
    return normed.float(), normed, rstd, total


def _halves(call: Call) -> Iterator[Breach]:
    if not is_dtype(call["x1"], (torch.float16, torch.bfloat16), call.conditions):
        yield "x1", shape(call["x1"])


def _contiguous(call: Call) -> Iterator[Breach]:
    for name in ("x1", "x2", "gamma"):
        if not call[name].is_contiguous():
            yield name, f"strided {tuple(call[name].stride())} over {shape(call[name])}"


def _dtype(call: Call) -> Iterator[Breach]:
    x: Tensor = call["x1"]
    if x.dtype not in TYPES or (x.dtype == torch.bfloat16 and call.conditions.product is P310):
        yield "x1", shape(x)


def _gamma_dtype(call: Call) -> Iterator[Breach]:
    gamma, x = call["gamma"], call["x1"]
    wide = gamma.dtype == torch.float32 and call["x2"] is None and call.conditions.product in (A2, A3)
    if gamma.dtype != x.dtype and not wide:
        yield "gamma", f"{shape(gamma)} for {shape(x)}"


def _gamma_shape(call: Call) -> Iterator[Breach]:
    gamma, x = call["gamma"], call["x1"]
    if not 1 <= gamma.dim() <= x.dim() or x.shape[-gamma.dim() :] != gamma.shape:
        yield "gamma", f"{shape(gamma)} for {shape(x)}"


def _alike(call: Call) -> Iterator[Breach]:
    first, second = call["x1"], call["x2"]
    if second is not None and (first.shape, first.dtype) != (second.shape, second.dtype):
        yield "x2", f"{shape(second)} beside {shape(first)}"


def _filled(call: Call) -> Iterator[Breach]:
    if not call["x1"].numel():
        yield "x1", shape(call["x1"])


def _row(call: Call) -> Iterator[Breach]:
    x: Tensor = call["x1"]
    if call.conditions.product is P310 and x.shape[-1] * x.element_size() < ROW_BYTES:
        yield "x1", shape(x)


def _epsilon(call: Call) -> Iterator[Breach]:
    if not 0 < call["epsilon"] < math.inf:
        yield "epsilon", call["epsilon"]


def _rules(source: str, gamma: str) -> tuple[Rule, ...]:
    return (
        Rule("dtype", "it takes float32, float16, and bfloat16 off the 310P", source, "cast it", _dtype),
        *_rules_of_gamma(source, gamma),
        Rule("row", "on the 310P the last axis is of 32 bytes at least", source, "norm in plain torch", _row),
    )


def _rules_of_gamma(source: str, gamma: str) -> tuple[Rule, ...]:
    return (
        Rule("gamma-dtype", gamma, source, "cast gamma once, when weights are loaded", _gamma_dtype),
        Rule(
            "gamma-shape",
            "gamma has the shape of the normed axes",
            source,
            "norm the last axis",
            _gamma_shape,
        ),
        Rule("epsilon", "epsilon is above 0 and finite", source, "pass the model's rms_norm_eps", _epsilon),
    )


OPERATORS = (
    Operator(
        schema="npu::npu_rms_norm(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) "
        "-> (Tensor, Tensor)",
        products=(P310, A2, A3, A5),
        source=RMS,
        rules=_rules(RMS, "gamma is of the input's type, or float32 on the 910B and 910C"),
        reference=_rms,
        names={"x1": "input"},
    ),
    Operator(
        schema="npu::npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, "
        "float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor, Tensor)",
        products=(P310, A2, A3, A5),
        source=ADD,
        rules=(
            *_rules(ADD, "gamma is of the type of x1"),
            Rule("alike", "x1 and x2 are of one shape and type", ADD, "cast the residual", _alike),
            Rule(
                "filled",
                "there are elements",
                ADD + " of 2026-08, whose later versions accept empty tensors",
                "leave the call out",
                _filled,
            ),
        ),
        reference=_add_rms,
    ),
    Operator(
        schema="npu::npu_add_rms_norm_cast(Tensor x1, Tensor x2, Tensor gamma, "
        "float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor, Tensor, Tensor)",
        products=(A2, A3, A5),
        source=CAST,
        rules=(
            Rule("halves", "x1 is float16 or bfloat16", CAST, "call npu_add_rms_norm", _halves),
            *_rules_of_gamma(CAST, "gamma is of the type of x1"),
            Rule("alike", "x1 and x2 are of one shape and type", CAST, "cast the residual", _alike),
            Rule("contiguous", "tensors are contiguous", CAST, "call contiguous() first", _contiguous),
        ),
        reference=_add_rms_cast,
    ),
)
