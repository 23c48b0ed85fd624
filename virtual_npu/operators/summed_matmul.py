"""Define the matrix product that the ranks of a communicator compute in parts and sum in the same launch.

Legend: M rows, K inner (of this rank), N columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, is_dtype, shape
from virtual_npu.simulated_products import A2

SOURCE = "op-plugin npu_mm_all_reduce_base"
HERE = "virtual_npu/operators/summed_matmul.py"
SIZES = (1, 2, 4, 8)  # sizes of communicators: the fully linked ranks of one machine
HALVES = (torch.float16, torch.bfloat16)
# Arguments of quantised products, and other parts of the schema that are not modelled.
OTHERS = (
    *("antiquant_scale", "antiquant_offset", "x3", "dequant_scale", "pertoken_scale"),
    *("comm_quant_scale_1", "comm_quant_scale_2", "group_sizes", "y_dtype", "x1_dtype", "x2_dtype"),
    *("dequant_scale_dtype", "pertoken_scale_dtype", "comm_mode"),
)
# Arguments that are 0 unless the feature is requested.
NUMBERS = ("antiquant_group_size", "comm_turn", "comm_quant_mode")


def _summed(call: Call) -> Tensor:
    """Sum the ranks' products; each is rounded to its dtype first, in which it is sent."""
    made: Tensor = (call["x1"].float() @ call["x2"].float()).to(call["x1"].dtype)
    communicators = call.conditions.communicators
    return made if communicators is None else communicators.add_up(call["hcom"], made, "mm_all_reduce")


def _dtype(call: Call) -> Iterator[Breach]:
    if not is_dtype(call["x1"], HALVES, call.conditions):
        yield "x1", shape(call["x1"])
    elif call["x2"].dtype != call["x1"].dtype:
        yield "x2", f"{shape(call['x2'])} for {shape(call['x1'])}"


def _sides(call: Call) -> Iterator[Breach]:
    x1, x2 = call["x1"], call["x2"]
    if x1.dim() not in (2, 3) or x2.dim() != 2 or x1.shape[-1] != x2.shape[0] or not x1.numel():
        yield "x2", f"{shape(x2)} for {shape(x1)}"


def _contiguous(call: Call) -> Iterator[Breach]:
    x1, x2 = call["x1"], call["x2"]
    if not x1.is_contiguous():
        yield "x1", f"strided {tuple(x1.stride())} over {shape(x1)}"
    if not x2.is_contiguous() and not x2.t().is_contiguous():
        yield "x2", f"strided {tuple(x2.stride())} over {shape(x2)}"


def _communicator(call: Call) -> Iterator[Breach]:
    communicators, name = call.conditions.communicators, call["hcom"]
    if communicators is None:
        return
    size = communicators.size(name)
    if size not in SIZES:
        yield "hcom", f"{name!r} of {size} ranks" if size else f"{name!r}, which is no communicator"


def _sum(call: Call) -> Iterator[Breach]:
    if call["reduce_op"] != "sum":
        yield "reduce_op", call["reduce_op"]


def _bias(call: Call) -> Iterator[Breach]:
    if call["bias"] is not None:
        yield "bias", shape(call["bias"])


def _modelled(call: Call) -> Iterator[Breach]:
    for name in (*OTHERS, *NUMBERS):
        if call[name] is not None and not (name in NUMBERS and call[name] == 0):
            yield name, shape(call[name]) if isinstance(call[name], Tensor) else call[name]


OPERATORS = (
    Operator(
        schema="npu::npu_mm_all_reduce_base(Tensor x1, Tensor x2, str hcom, *, "
        'str reduce_op="sum", Tensor? bias=None, Tensor? antiquant_scale=None, '
        "Tensor? antiquant_offset=None, Tensor? x3=None, Tensor? dequant_scale=None, "
        "Tensor? pertoken_scale=None, Tensor? comm_quant_scale_1=None, "
        "Tensor? comm_quant_scale_2=None, int antiquant_group_size=0, int comm_turn=0, "
        "int[]? group_sizes=None, int? y_dtype=None, int? x1_dtype=None, int? x2_dtype=None, "
        "int? dequant_scale_dtype=None, int? pertoken_scale_dtype=None, int comm_quant_mode=0, "
        "str? comm_mode=None) -> Tensor",
        products=(A2,),
        source=SOURCE + ": products",
        rules=(
            Rule(
                "modelled",
                "quantised products, a residual and other ways of communication are not checked here",
                HERE,
                "leave the argument out",
                _modelled,
            ),
            Rule("sum", "the ranks' products are added", SOURCE, "leave reduce_op out", _sum),
            Rule(
                "bias",
                "there is none: whether each rank adds its own, before or after the sum, is not said",
                SOURCE,
                "add it afterwards",
                _bias,
            ),
            Rule("dtype", "both sides are float16, or bfloat16", SOURCE, "cast them", _dtype),
            Rule(
                "sides",
                "x1 has 2 or 3 axes, x2 is [K, N], and neither is empty",
                SOURCE,
                "flatten x1",
                _sides,
            ),
            Rule(
                "contiguous",
                "x1 is contiguous, and x2 or its transpose",
                SOURCE,
                "call contiguous() when it is made",
                _contiguous,
            ),
            Rule(
                "communicator",
                "it is the name of a communicator of 1, 2, 4 or 8 ranks",
                SOURCE,
                "pass what get_hccl_comm_name says, and add up apart with other numbers of ranks",
                _communicator,
            ),
        ),
        reference=_summed,
    ),
)
