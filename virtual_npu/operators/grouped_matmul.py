"""What are several products in one launch, and when is the call right?

Products of their own alone (`group_type` -1): as many left and right sides as results. Products of experts,
whose rows a list divides, are not checked here.

Legend: T rows, K inner, N columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, is_dtype, shape
from virtual_npu.simulated_products import A2, A3, A5

SOURCE = "op-plugin npu_grouped_matmul"
MOST_GROUPS = 128
INNER_LIMIT = 65536  # the last axis of either side is below it
BIAS = {torch.float16: torch.float16, torch.bfloat16: torch.float32, torch.float32: torch.float32}
LEFT_OUT = (
    *("scale", "offset", "antiquant_scale", "antiquant_offset", "per_token_scale", "activation_input"),
    *("activation_quant_scale", "activation_quant_offset", "tuning_config", "x_dtype", "weight_dtype"),
    *("scale_dtype", "per_token_scale_dtype", "output_dtype"),
)


def _products(call: Call) -> list[Tensor]:
    biases = call["bias"] or [None] * len(call["x"])
    results = []
    for x, weight, bias in zip(call["x"], call["weight"], biases):
        total = x.float() @ weight.float()
        results.append((total if bias is None else total + bias.float()).to(x.dtype))
    return results


def _groups(call: Call) -> Iterator[Breach]:
    counts = [len(call[name]) for name in ("x", "weight", "bias") if call[name] is not None]
    if len(set(counts)) > 1 or not 1 <= counts[0] <= MOST_GROUPS:
        yield "weight", f"a list of {len(call['weight'])} beside {counts}"


def _types(call: Call) -> Iterator[Breach]:
    first: Tensor = call["x"][0]
    for name in ("x", "weight"):
        for each in call[name]:
            if (
                not is_dtype(each, (torch.float16, torch.bfloat16), call.conditions)
                or each.dtype != first.dtype
            ):
                yield name, shape(each)
    for each in call["bias"] or ():
        if each.dtype != BIAS.get(first.dtype):
            yield "bias", f"{shape(each)} for {shape(first)}"


def _sides(call: Call) -> Iterator[Breach]:
    for x, weight in zip(call["x"], call["weight"]):
        if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[0] or not x.numel():
            yield "weight", f"{shape(weight)} for {shape(x)}"
        elif max(x.shape[1], weight.shape[1]) >= INNER_LIMIT:
            yield "weight", shape(weight)
    for weight, bias in zip(call["weight"], call["bias"] or ()):
        if bias.shape != weight.shape[1:]:
            yield "bias", f"{shape(bias)} for {shape(weight)}"


def _order(call: Call) -> Iterator[Breach]:
    for each in call["x"]:
        if not each.is_contiguous():
            yield "x", f"strided {tuple(each.stride())} over {shape(each)}"
    ways = [(each.is_contiguous(), each.t().is_contiguous()) for each in call["weight"]]
    if not any(all(way) for way in zip(*ways)):
        yield "weight", f"strided {[tuple(each.stride()) for each in call['weight']]}"


def _alone(call: Call) -> Iterator[Breach]:
    for name, taken in (("group_type", (-1,)), ("split_item", (None, 0, 1)), ("act_type", (None, 0))):
        if call[name] not in taken:
            yield name, call[name]
    if call["group_list"] is not None:
        yield "group_list", shape(call["group_list"])


def _modelled(call: Call) -> Iterator[Breach]:
    yield from ((name, "given") for name in LEFT_OUT if call[name] is not None)


OPERATORS = (
    Operator(
        schema="npu::npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, "
        "Tensor[]? scale=None, Tensor[]? offset=None, Tensor[]? antiquant_scale=None, "
        "Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, Tensor? group_list=None, "
        "Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, "
        "Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type=None, "
        "int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, int? output_dtype=None, "
        "int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, int? per_token_scale_dtype=None) "
        "-> Tensor[]",
        products=(A2, A3, A5),
        source=SOURCE,
        rules=(
            Rule(
                "groups",
                f"x, weight and bias are lists of one length, {MOST_GROUPS} at most",
                SOURCE,
                "pass the same x for each weight",
                _groups,
            ),
            Rule(
                "matched",
                "both sides are float16 or bfloat16; the bias is float32 beside bfloat16, else of their type",
                SOURCE + ": table 2",
                "cast the bias when weights are loaded",
                _types,
            ),
            Rule(
                "sides",
                f"each weight is [K, N] for its [T, K], with K and N below {INNER_LIMIT}, and a bias is [N]",
                SOURCE,
                "turn the weight",
                _sides,
            ),
            Rule(
                "order",
                "each x is contiguous, and all weights or all their transposes are",
                SOURCE + ": group_type -1",
                "call contiguous() when weights are loaded",
                _order,
            ),
            Rule(
                "alone",
                "products of their own have group_type -1, split_item 0 or 1, no group_list, no activation",
                SOURCE + ": group_type -1",
                "pass group_type -1 and split_item 0",
                _alone,
            ),
            Rule(
                "modelled",
                "quantised products and other types are not checked here",
                "virtual_npu/operators/grouped_matmul.py",
                "leave the argument out",
                _modelled,
            ),
        ),
        reference=_products,
    ),
)
