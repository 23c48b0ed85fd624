"""Define the operator that computes several matrix products in one launch, with the rules of a correct call.

With `group_type` -1 the products are independent: there are as many left and right sides as results. With
`group_type` 0 they are products of experts: there is one left side, and a list on the device says how many of
its rows each expert has.

Two sentences of op-plugin's page of 2026-08 are not rules here. Its counts add up to the rows of x, while
vllm-ascend multiplies what experts of this rank have, and leaves the rows behind these alone. Its biases have
one axis; later versions of the page allow two.

Legend: T rows, K inner, N columns, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, is_dtype, shape
from virtual_npu.operators.matmul import output_dtype, scale_of, unwritten_beyond
from virtual_npu.operators.weight_quant import IN_A_WORD, numbers
from virtual_npu.simulated_products import A2, A3, A5

SOURCE = "op-plugin npu_grouped_matmul"
MOST_GROUPS = 128
MOST_EXPERTS = 1024
INNER_LIMIT = 65536  # the last axis of either side is smaller
BIAS = {torch.float16: torch.float16, torch.bfloat16: torch.float32, torch.float32: torch.float32}
# Dtype of the columns' scales, by dtype of the result.
SCALES = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
SPLIT = 8  # what is taken from the low half of an int8 row, so that it has a sign as a weight in 4 bits
LEFT_OUT = (
    *("offset", "activation_input"),
    *("activation_quant_scale", "activation_quant_offset", "tuning_config", "x_dtype", "weight_dtype"),
    *("scale_dtype", "per_token_scale_dtype"),
)
OF_4_BITS = ("antiquant_scale", "antiquant_offset")
OF_EXPERTS = ("scale", "per_token_scale", "output_dtype", *OF_4_BITS)


def _is_of_experts(call: Call) -> bool:
    return bool(call["group_type"] == 0)


def _products(call: Call) -> list[Tensor]:
    if _is_of_experts(call):
        return [_product_of_experts(call)]
    biases = call["bias"] or [None] * len(call["x"])
    results = []
    for x, weight, bias in zip(call["x"], call["weight"], biases):
        total = x.float() @ weight.float()
        results.append((total if bias is None else total + bias.float()).to(x.dtype))
    return results


def _product_of_experts(call: Call) -> Tensor:
    """Multiply the experts' rows; rows beyond those of all experts are never written."""
    (x,), (weight,) = call["x"], call["weight"]
    if x.dtype == torch.int8 and weight.dtype == torch.int32:
        return _product_of_4_and_8_bits(call)
    weight = _widened(call) if weight.dtype == torch.int32 else weight
    counts = counts_of(call["group_list"], call["group_list_type"])
    wide = torch.float64 if x.dtype == torch.int8 else torch.float32  # sums of int8 stay exact
    parts = x[: sum(counts)].to(wide).split(counts)
    total = torch.cat([part @ each for part, each in zip(parts, weight.to(wide))])
    if call["scale"] is not None:
        rows = call["per_token_scale"][0][: len(total), None]
        total = total.float() * call["scale"][0].float().repeat_interleave(torch.tensor(counts), 0) * rows
    if call["bias"] is not None:
        total = total + call["bias"][0].float().repeat_interleave(torch.tensor(counts), 0)
    made = x.dtype if x.dtype != torch.int8 else output_dtype(call)
    return unwritten_beyond(total.to(made), len(x))


def _product_of_4_and_8_bits(call: Call) -> Tensor:
    """Multiply int8 rows with weights in 4 bits: their high halves, and their low halves less 8.

    What the 8 takes away is not added back: the bias has it, as 8 times the scaled sums of the columns.
    """
    (x,), (weight,) = call["x"], call["weight"]
    counts = counts_of(call["group_list"], call["group_list_type"])
    rows, scale = x[: sum(counts)].double() - SPLIT, scale_of(call["scale"][0])
    parts = [
        (part @ each.double()) * column.double() + bias.double()
        for part, each, column, bias in zip(
            rows.split(counts), numbers(weight), scale.flatten(1), call["bias"][0]
        )
    ]
    total = torch.cat(parts) * call["per_token_scale"][0][: sum(counts), None]
    return unwritten_beyond(total.to(output_dtype(call)), len(x))


def _widened(call: Call) -> Tensor:
    """Return the 4-bit weight [E, K, N] in the dtype of x: each group of rows has a scale and an offset."""
    wide = numbers(call["weight"][0]).float()
    scale, offset = (_by_row(call[name][0], wide.shape[1]) for name in OF_4_BITS)
    made: Tensor = ((wide + offset) * scale).to(call["x"][0].dtype)
    return made


def _by_row(groups: Tensor, count: int) -> Tensor:
    """Expand [E, N] or [E, G, N] to float32 [E, K, N], or to [E, 1, N] where there are no groups."""
    if groups.dim() == 2:
        return groups.float()[:, None]
    return groups.float().repeat_interleave(count // groups.shape[1], 1)


def counts_of(listed: Tensor, kind: int) -> list[int]:
    """Return the rows of each expert, of a list of these, or of their running sum."""
    return (listed if kind else listed.diff(prepend=listed.new_zeros(1))).tolist()


def _groups(call: Call) -> Iterator[Breach]:
    counts = [len(call[name]) for name in ("x", "weight", "bias") if call[name] is not None]
    if len(set(counts)) > 1 or not 1 <= counts[0] <= MOST_GROUPS:
        yield "weight", f"a list of {len(call['weight'])} beside {counts}"


def _types(call: Call) -> Iterator[Breach]:
    first: Tensor = call["x"][0]
    if _is_of_experts(call) and first.dtype == torch.int8:
        if call["weight"][0].dtype not in (torch.int8, torch.int32):
            yield "weight", f"{shape(call['weight'][0])} for {shape(first)}"
        return
    has_words = _is_of_experts(call) and call["weight"][0].dtype == torch.int32
    for name in ("x",) if has_words else ("x", "weight"):
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
    if _is_of_experts(call):
        x, weight = call["x"][0], call["weight"][0]
        if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1] or not x.numel():
            yield "weight", f"{shape(weight)} for {shape(x)}"
        elif max(weight.shape[1], _columns(weight)) >= INNER_LIMIT:
            yield "weight", shape(weight)
        for bias in call["bias"] or ():
            if tuple(bias.shape) != (weight.shape[0], _columns(weight)):
                yield "bias", f"{shape(bias)} for {shape(weight)}"
        return
    for x, weight in zip(call["x"], call["weight"]):
        if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[0] or not x.numel():
            yield "weight", f"{shape(weight)} for {shape(x)}"
        elif max(x.shape[1], weight.shape[1]) >= INNER_LIMIT:
            yield "weight", shape(weight)
    for weight, bias in zip(call["weight"], call["bias"] or ()):
        if bias.shape != weight.shape[1:]:
            yield "bias", f"{shape(bias)} for {shape(weight)}"


def _columns(weight: Tensor) -> int:
    """Return the number of columns of the experts' matrices."""
    return weight.shape[2] * (IN_A_WORD if weight.dtype == torch.int32 else 1)


def _antiquant(call: Call) -> Iterator[Breach]:
    """Check the scales of a 4-bit weight, whose transpose is not accepted here; other weights have none."""
    if not _is_of_experts(call):
        return
    x, weight = call["x"][0], call["weight"][0]
    if weight.dtype != torch.int32 or x.dtype == torch.int8:
        yield from ((name, f"given for {shape(weight)}") for name in OF_4_BITS if call[name] is not None)
        return
    if not weight.is_contiguous():
        yield "weight", f"strided {tuple(weight.stride())} over {shape(weight)}"
    if call["antiquant_scale"] is None or call["antiquant_offset"] is None:
        yield "antiquant_offset", f"not both are given for {shape(weight)}"
        return
    (scale,), (offset,) = call["antiquant_scale"], call["antiquant_offset"]
    experts, inner, columns = weight.shape[0], weight.shape[1], _columns(weight)
    groups = scale.shape[1] if scale.dim() == 3 else 1
    wanted = (experts, groups, columns) if scale.dim() == 3 else (experts, columns)
    if tuple(scale.shape) != wanted or scale.dtype != x.dtype or inner % max(1, groups):
        yield "antiquant_scale", f"{shape(scale)} for {shape(x)} and {shape(weight)}"
    if offset.shape != scale.shape or offset.dtype != scale.dtype:
        yield "antiquant_offset", f"{shape(offset)} beside {shape(scale)}"


def _order(call: Call) -> Iterator[Breach]:
    for each in call["x"]:
        if not each.is_contiguous():
            yield "x", f"strided {tuple(each.stride())} over {shape(each)}"
    ways = [(each.is_contiguous(), each.mT.is_contiguous()) for each in call["weight"]]
    if not any(all(way) for way in zip(*ways)):
        yield "weight", f"strided {[tuple(each.stride()) for each in call['weight']]}"


def _experts(call: Call) -> Iterator[Breach]:
    if not _is_of_experts(call):
        return
    in_int8 = call["x"][0].dtype == torch.int8
    if len(call["x"]) != 1:
        yield "x", f"a list of {len(call['x'])}"
    elif in_int8 and (call["bias"] is not None) != (call["weight"][0].dtype == torch.int32):
        yield "bias", f"{'None' if call['bias'] is None else 'given'} for {shape(call['weight'][0])}"
    elif call["split_item"] not in (2, 3) or call["act_type"] not in (None, 0):
        yield "split_item", f"{call['split_item']} with act_type {call['act_type']}"


def _scaled(call: Call) -> Iterator[Breach]:
    """Check an int8 product: its result stays in int32, or has scales by column and by row."""
    if not _is_of_experts(call):
        return
    x, weight = call["x"][0], call["weight"][0]
    given = call["scale"], call["per_token_scale"]
    made = None if call["output_dtype"] is None else output_dtype(call)
    if x.dtype != torch.int8:
        for name in ("scale", "per_token_scale", "output_dtype"):
            if call[name] is not None:
                yield name, f"given for {shape(x)}"
        return
    if made == torch.int32:
        if given != (None, None):
            yield "scale", "given, and the product stays in int32"
        return
    if made not in SCALES or None in given:
        yield "output_dtype", f"{made} with scales {[each is not None for each in given]}"
        return
    scale, rows = call["scale"][0], call["per_token_scale"][0]
    if rows.dtype != torch.float32 or rows.shape != x.shape[:1]:
        yield "per_token_scale", f"{shape(rows)} for {shape(x)}"
    if weight.dtype == torch.int32:
        yield from _scaled_in_4_bits(call)
        return
    if scale.dtype != SCALES[made] or scale.shape != (weight.shape[0], weight.shape[2]):
        yield "scale", f"{shape(scale)} for {shape(weight)} and a result in {made}"


def _scaled_in_4_bits(call: Call) -> Iterator[Breach]:
    """Check the scales of int8 rows and weights in 4 bits, beside which there is what their split takes away.

    The numbers of the bias are not checked, since a wrong one makes a wrong product.
    """
    (weight,), (scale,), (bias,) = call["weight"], call["scale"], call["bias"]
    experts, columns = weight.shape[0], _columns(weight)
    if scale.dtype != torch.int64 or tuple(scale.shape) not in ((experts, columns), (experts, 1, columns)):
        yield "scale", f"{shape(scale)} for {shape(weight)}"
    if not weight.is_contiguous():
        yield "weight", f"strided {tuple(weight.stride())} over {shape(weight)}"
    if bias.dtype != torch.float32:
        yield "bias", f"{shape(bias)} for {shape(weight)}"


def _divided(call: Call) -> Iterator[Breach]:
    if not _is_of_experts(call):
        return
    listed, num_experts = call["group_list"], call["weight"][0].shape[0]
    if listed is None or listed.dtype != torch.int64 or listed.shape != (num_experts,):
        yield "group_list", "None" if listed is None else f"{shape(listed)} for {num_experts} experts"
    elif num_experts > MOST_EXPERTS or call["group_list_type"] not in ((0, 1) if num_experts > 1 else (0,)):
        yield "group_list_type", f"{call['group_list_type']} of {num_experts}"


def _whole(call: Call) -> Iterator[Breach]:
    if _is_of_experts(call):
        counts, rows = counts_of(call["group_list"], call["group_list_type"]), len(call["x"][0])
        if min(counts) < 0 or sum(counts) > rows:
            yield "group_list", f"{sum(counts)} of {rows} rows"


def _alone(call: Call) -> Iterator[Breach]:
    if _is_of_experts(call):
        return
    for name, taken in (("group_type", (-1,)), ("split_item", (None, 0, 1)), ("act_type", (None, 0))):
        if call[name] not in taken:
            yield name, call[name]
    if call["group_list"] is not None:
        yield "group_list", shape(call["group_list"])


def _modelled(call: Call) -> Iterator[Breach]:
    names = LEFT_OUT if _is_of_experts(call) else LEFT_OUT + OF_EXPERTS
    yield from ((name, "given") for name in names if call[name] is not None)


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
                f"each weight is [K, N], or [E, K, N] of experts, for its [T, K], with K and N below"
                f" {INNER_LIMIT}, and a bias is [N], or [E, N]",
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
                "experts",
                "of experts there is one x and one weight, without activation, and in int8 with a bias if the"
                " weight is in 4 bits, and only then; split_item is 2 or 3",
                SOURCE + ": group_type 0",
                "stack the weights",
                _experts,
            ),
            Rule(
                "antiquant",
                "a weight of experts in 4 bits is contiguous int32 [E, K, N / 8]; beside it are"
                " antiquant_scale and antiquant_offset in x's type, [E, N], or [E, G, N] where G divides K",
                SOURCE + ": table 2 and its notes",
                "turn scales to [E, G, N], and pass zeros for offsets that are none",
                _antiquant,
            ),
            Rule(
                "scaled",
                "a product of experts in int8 stays in int32, or has scales [E, N] in bfloat16 for a result"
                " in bfloat16, in float32 for one in float16, and float32 [T] by token; with weights in 4"
                " bits the scales are int64, [E, N] or [E, 1, N], and the bias is float32: 8 times the"
                " scaled sums of the columns",
                SOURCE + ": table of per-token products",
                "round the scales of columns when weights are loaded",
                _scaled,
            ),
            Rule(
                "divided",
                f"of experts, group_list is int64 [E], of {MOST_EXPERTS} at most, and group_list_type 0 or 1,"
                " of one expert 0",
                SOURCE + ": group_type 0, and group_list, whose length with type 1 may not be 1",
                "pass what npu_moe_init_routing_v2 counted, which of one expert is the running sum, too",
                _divided,
            ),
            Rule(
                "whole",
                "the experts have no more rows than there are; those that none has are never written",
                SOURCE + ": group_list",
                "pass what npu_moe_init_routing_v2 counted",
                _whole,
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
