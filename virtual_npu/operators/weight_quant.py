"""Define the product with a weight in 4 bits or in int8, and the packing of 4 bits, with their rules.

On how an int32 holds eight numbers, the documents say only that they interleave; here the first number is in
the lowest bits. A call must therefore pass only a weight that npu_convert_weight_to_int4pack has made, which
cannot be checked.

Legend: M rows, K inner, N columns, G groups of inner.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, is_dtype, shape
from virtual_npu.simulated_products import A2, A3

PRODUCT = "op-plugin npu_weight_quant_batchmatmul"
PACK = "op-plugin npu_convert_weight_to_int4pack"
MOST = 65535
IN_A_WORD = 8
LEAST, GREATEST = -8, 7
GROUP_STEP = 32
BIAS = {torch.float16: torch.float16, torch.bfloat16: torch.float32, torch.float32: torch.float32}
LEFT_OUT = ("quant_scale", "quant_offset", "weight_dtype")


def _packed(call: Call) -> Tensor:
    apart = (call["weight"].long() & 15).unflatten(-1, (-1, IN_A_WORD))
    words = sum(apart[..., place] << (4 * place) for place in range(IN_A_WORD))
    assert isinstance(words, Tensor), "a word holds eight numbers"
    return (words - 2**32 * (words >= 2**31)).int()


def numbers(words: Tensor) -> Tensor:
    """Unpack the eight numbers of each word, side by side."""
    apart = torch.stack([(words >> (4 * place)) & 15 for place in range(IN_A_WORD)], -1).flatten(-2)
    return torch.where(apart > GREATEST, apart - 16, apart)


def _product(call: Call) -> Tensor:
    """Convert the weight to x's dtype by scales of one row for each group, then multiply."""
    x, scale, offset, bias = (call[name] for name in ("x", "antiquant_scale", "antiquant_offset", "bias"))
    weight = call["weight"]
    wide = (weight if weight.dtype == torch.int8 else numbers(weight)).to(torch.float32)
    if offset is not None:
        wide = wide + _by_row(offset, call)
    weight = (wide * _by_row(scale, call)).to(x.dtype)
    total: Tensor = x.float() @ weight.float()
    return (total if bias is None else total + bias.float()).to(x.dtype)


def _by_row(scale: Tensor, call: Call) -> Tensor:
    """Expand scales to each row [K, N]; without groups they stay [1, N] or [1, 1]."""
    wide = scale.float().reshape(-1, scale.shape[-1])
    if not call["antiquant_group_size"]:
        return wide
    return wide.repeat_interleave(call["antiquant_group_size"], 0)[: len(call["weight"])]


def _int32(call: Call) -> Iterator[Breach]:
    weight = call["weight"]
    if weight.dtype != torch.int32 or weight.dim() != 2 or weight.shape[-1] % IN_A_WORD or not weight.numel():
        yield "weight", shape(weight)


def _rows_contiguous(call: Call) -> Iterator[Breach]:
    weight = call["weight"]
    if not weight.is_contiguous():
        yield "weight", f"strided {tuple(weight.stride())} over {shape(weight)}"


def _four_bits(call: Call) -> Iterator[Breach]:
    least, most = call["weight"].aminmax()
    if least < LEAST or most > GREATEST:
        yield "weight", f"from {int(least)} to {int(most)}"


def _only_known(call: Call) -> Iterator[Breach]:
    if call["inner_k_tiles"]:
        yield "inner_k_tiles", call["inner_k_tiles"]


def _types(call: Call) -> Iterator[Breach]:
    if not is_dtype(call["x"], (torch.float16, torch.bfloat16), call.conditions):
        yield "x", shape(call["x"])
    if call["weight"].dtype not in (torch.int32, torch.int8):
        yield "weight", shape(call["weight"])


def _columns(weight: Tensor) -> int:
    return weight.shape[1] * (1 if weight.dtype == torch.int8 else IN_A_WORD)


def _sides(call: Call) -> Iterator[Breach]:
    x, weight = call["x"], call["weight"]
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[0] or not x.numel():
        yield "weight", f"{shape(weight)} for {shape(x)}"
    elif max(x.shape[1], _columns(weight)) > MOST or not weight.numel():
        yield "weight", shape(weight)


def _order(call: Call) -> Iterator[Breach]:
    for name in ("x", "weight", "antiquant_scale", "antiquant_offset", "bias"):
        if call[name] is not None and not call[name].is_contiguous():
            yield name, f"strided {tuple(call[name].stride())} over {shape(call[name])}"


def _groups(call: Call) -> Iterator[Breach]:
    size, inner = call["antiquant_group_size"], call["x"].shape[1]
    if size and (size % GROUP_STEP or not GROUP_STEP <= size < inner):
        yield "antiquant_group_size", f"{size} of {inner} rows"


def _scales(call: Call) -> Iterator[Breach]:
    size, inner, columns = call["antiquant_group_size"], len(call["weight"]), _columns(call["weight"])
    right = [(-(-inner // size), columns)] if size else [(columns,), (1, columns), (1,), (1, 1)]
    scale, offset = call["antiquant_scale"], call["antiquant_offset"]
    if tuple(scale.shape) not in right or scale.dtype != call["x"].dtype:
        yield "antiquant_scale", f"{shape(scale)} for {shape(call['x'])} and {columns} columns"
    if offset is not None and (offset.shape != scale.shape or offset.dtype != scale.dtype):
        yield "antiquant_offset", f"{shape(offset)} beside {shape(scale)}"


def _bias(call: Call) -> Iterator[Breach]:
    bias, columns = call["bias"], _columns(call["weight"])
    if bias is not None and (
        bias.dtype != BIAS[call["x"].dtype] or tuple(bias.shape) not in ((columns,), (1, columns))
    ):
        yield "bias", f"{shape(bias)} for {shape(call['x'])} and {columns} columns"


def _modelled(call: Call) -> Iterator[Breach]:
    yield from ((name, "given") for name in LEFT_OUT if call[name] is not None)
    if call["inner_precise"]:
        yield "inner_precise", call["inner_precise"]


OPERATORS = (
    Operator(
        schema="npu::npu_convert_weight_to_int4pack(Tensor weight, int inner_k_tiles=0) -> Tensor",
        products=(A2, A3),
        source=PACK,
        rules=(
            Rule(
                "int32",
                f"it is int32 of two axes, the last of which is a multiple of {IN_A_WORD}",
                PACK,
                "cast it, one number to each int32",
                _int32,
            ),
            Rule("contiguous", "it is contiguous", PACK, "call contiguous() first", _rows_contiguous),
            Rule(
                "four-bits",
                f"its numbers are from {LEAST} to {GREATEST}",
                PACK,
                "take 8 from numbers without a sign",
                _four_bits,
            ),
            Rule("reserved", "inner_k_tiles is 0", PACK + ": reserved", "leave it out", _only_known),
        ),
        reference=_packed,
    ),
    Operator(
        schema="npu::npu_weight_quant_batchmatmul(Tensor x, Tensor weight, Tensor antiquant_scale, "
        "Tensor? antiquant_offset=None, Tensor? quant_scale=None, Tensor? quant_offset=None, "
        "Tensor? bias=None, int antiquant_group_size=0, int inner_precise=0, int? weight_dtype=None) "
        "-> Tensor",
        products=(A2, A3),
        source=PRODUCT + ": products; the 310P takes int8 alone, which is not checked here",
        rules=(
            Rule(
                "matched",
                "x is float16 or bfloat16, and the weight int4 in int32, or int8",
                PRODUCT,
                "cast x, and pack the weight by npu_convert_weight_to_int4pack",
                _types,
            ),
            Rule(
                "sides",
                f"x is [M, K] and the weight [K, N / {IN_A_WORD}], in int8 [K, N], neither is empty, and K"
                f" and N are at most {MOST}",
                PRODUCT,
                "flatten x, turn the weight before it is packed, and split it",
                _sides,
            ),
            Rule(
                "order",
                "all are contiguous; what is turned is not checked here",
                PRODUCT,
                "call contiguous() when it is made",
                _order,
            ),
            Rule(
                "groups",
                f"a group is a multiple of {GROUP_STEP} rows, fewer than all; 0 where all rows are one",
                PRODUCT + "; CANN aclnnWeightQuantBatchMatmulV2",
                "pass 0 for one group",
                _groups,
            ),
            Rule(
                "scales",
                "antiquant_scale has x's type, one row for each group, rounded up, or one for all, or one"
                " number; antiquant_offset is as it is",
                PRODUCT,
                "turn the scales to [G, N], in x's type",
                _scales,
            ),
            Rule(
                "bias",
                "the bias is [N] or [1, N], in float32 beside bfloat16, else in x's type",
                PRODUCT,
                "cast the bias when weights are loaded",
                _bias,
            ),
            Rule(
                "modelled",
                "results in int8, other types and the fast mode are not checked here",
                "virtual_npu/operators/weight_quant.py",
                "leave the argument out",
                _modelled,
            ),
        ),
        reference=_product,
    ),
)
