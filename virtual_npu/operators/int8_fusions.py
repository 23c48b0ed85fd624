"""Define the fused operators whose results are int8 rows, with the rules of a correct call.

Legend: T tokens, H columns, K inner, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from virtual_npu.contract import Breach, Call, Operator, Rule, is_dtype, shape
from virtual_npu.operators.grouped_matmul import INNER_LIMIT, MOST_EXPERTS, counts_of
from virtual_npu.operators.matmul import by_rows, unwritten_beyond
from virtual_npu.operators.norm import rms_norm
from virtual_npu.simulated_products import A2, A3, A5

NORM = "op-plugin npu_add_rms_norm_dynamic_quant"
SWIGLU = "op-plugin npu_dequant_swiglu_quant"
GATED = "op-plugin npu_grouped_matmul_swiglu_quant_v2"
HALVES = (torch.float16, torch.bfloat16)
# Most columns of x in groups, and what half of the columns must be a multiple of.
MOST_GROUPED, GROUPED_STEP = 10496, 64
MOST_GATED = 10240  # columns of an expert's gate and up in one launch
TILE = (32, 16)  # columns and rows of a tile of int8


def _norm(call: Call) -> tuple[Tensor, ...]:
    """Return two forms of the quantised rows, the second possibly empty, the sum, and the rows' scales."""
    total: Tensor = call["x1"] + call["x2"]
    normed = rms_norm(total.float(), call["gamma"].float(), call["epsilon"])[0]
    if call["beta"] is not None:
        normed = normed + call["beta"].float()
    outputs = []
    for smooth, wanted in zip((call["smooth_scale1"], call["smooth_scale2"]), _wanted(call)):
        wide = normed if smooth is None else normed * smooth.float()
        empty = torch.empty(0, dtype=torch.int8), torch.empty(0)
        outputs.append(by_rows(wide) if wanted else empty)
    (rows, scale), (more, more_scale) = outputs
    return rows, more, total, scale, more_scale


def _wanted(call: Call) -> tuple[bool, bool]:
    mask = call["output_mask"]
    return (True, call["smooth_scale2"] is not None) if mask is None else tuple(mask)


def _halves(call: Call) -> Iterator[Breach]:
    x1, x2 = call["x1"], call["x2"]
    if not is_dtype(x1, HALVES, call.conditions) or x1.dim() < 2 or not x1.numel():
        yield "x1", shape(x1)
    if (x2.shape, x2.dtype) != (x1.shape, x1.dtype):
        yield "x2", f"{shape(x2)} beside {shape(x1)}"


def _columns(call: Call) -> Iterator[Breach]:
    x: Tensor = call["x1"]
    for name in ("gamma", "smooth_scale1", "smooth_scale2", "beta"):
        each = call[name]
        if each is not None and (each.dtype != x.dtype or each.shape != x.shape[-1:]):
            yield name, f"{shape(each)} for {shape(x)}"


def _outputs(call: Call) -> Iterator[Breach]:
    mask, smooth = call["output_mask"], (call["smooth_scale1"], call["smooth_scale2"])
    if mask is None:
        if smooth[0] is None and smooth[1] is not None:
            yield "smooth_scale2", "given without smooth_scale1"
    elif not any(mask) or any(each is not None and not on for each, on in zip(smooth, mask)):
        yield "output_mask", mask


def _int8(call: Call) -> Iterator[Breach]:
    if call["y_dtype"] not in (None, 1, torch.int8):
        yield "y_dtype", call["y_dtype"]


def _swiglu(call: Call) -> tuple[Tensor, Tensor]:
    """Compute the activation; rows beyond those of all groups are never written."""
    x, counts = call["x"], call["group_index"]
    num_rows = len(x) if counts is None else int(counts.sum())
    wide: Tensor = x[:num_rows].float()
    for name in ("weight_scale", "activation_scale"):
        scale = call[name]
        if scale is not None:
            if name == "activation_scale":
                scale = scale.view(-1, 1)[:num_rows]
            elif counts is not None:
                scale = scale.repeat_interleave(counts, 0)
            wide = wide * scale
    first, second = wide.chunk(2, -1)
    gate, up = (first, second) if call["activate_left"] else (second, first)
    rows, scales = by_rows(functional.silu(gate) * up)
    return unwritten_beyond(rows, len(x)), unwritten_beyond(scales, len(x))


def _summed(call: Call) -> Iterator[Breach]:
    x: Tensor = call["x"]
    if x.dtype not in (torch.int32, torch.bfloat16) or x.dim() != 2 or x.shape[1] % 2 or not x.numel():
        yield "x", shape(x)


def _scales(call: Call) -> Iterator[Breach]:
    x, weight, rows = call["x"], call["weight_scale"], call["activation_scale"]
    if x.dtype == torch.int32:
        for name in ("weight_scale", "activation_scale"):
            if call[name] is None:
                yield name, f"None for {shape(x)}"
    elif rows is not None:
        yield "activation_scale", f"{shape(rows)} for {shape(x)}"
    groups = 1 if call["group_index"] is None else len(call["group_index"])
    if weight is not None and (weight.dtype != torch.float32 or weight.shape != (groups, x.shape[1])):
        yield "weight_scale", f"{shape(weight)} for {shape(x)} in {groups}"
    if rows is not None and (rows.dtype != torch.float32 or rows.shape not in ((len(x), 1), (len(x),))):
        yield "activation_scale", f"{shape(rows)} for {shape(x)}"


def _grouped(call: Call) -> Iterator[Breach]:
    counts = call["group_index"]
    if counts is not None and (counts.dtype != torch.int64 or counts.dim() != 1):
        yield "group_index", shape(counts)


def _width(call: Call) -> Iterator[Breach]:
    columns = call["x"].shape[-1]
    if call["group_index"] is not None and (columns > MOST_GROUPED or columns // 2 % GROUPED_STEP):
        yield "x", f"{shape(call['x'])} with group_index"


def _whole(call: Call) -> Iterator[Breach]:
    counts, rows = call["group_index"], len(call["x"])
    if counts is not None and (int(counts.min()) < 0 or int(counts.sum()) > rows):
        yield "group_index", f"{int(counts.sum())} of {rows} rows"


def _modelled(call: Call) -> Iterator[Breach]:
    for name in (
        "bias",
        "quant_scale",
        "quant_offset",
        "dst_type",
        "round_mode",
        "activate_dim",
    ):
        if call[name] is not None:
            yield name, shape(call[name]) if isinstance(call[name], Tensor) else call[name]
    for name, value in (("quant_mode", 1), ("swiglu_mode", 0)):
        if call[name] != value:
            yield name, call[name]


def _gated_product(call: Call) -> tuple[Tensor, Tensor]:
    """Compute the gated products of experts; rows beyond those of all experts are never written."""
    x, (weight,), (scale,) = call["x"], call["weight"], call["weight_scale"]
    counts = counts_of(call["group_list"], call["group_list_type"])
    parts = x[: sum(counts)].double().split(counts)  # sums of int8 stay exact
    total = torch.cat([part @ each for part, each in zip(parts, weight.double())]).float()
    total = total * scale.repeat_interleave(torch.tensor(counts), 0)
    gate, up = (total * call["x_scale"][: len(total), None]).chunk(2, -1)
    rows, scales = by_rows(functional.silu(gate) * up)
    return unwritten_beyond(rows, len(x)), unwritten_beyond(scales, len(x))


def _lists(call: Call) -> Iterator[Breach]:
    for name in ("weight", "weight_scale"):
        if len(call[name]) != 1:
            yield name, f"a list of {len(call[name])}"


def _expert_types(call: Call) -> Iterator[Breach]:
    for name, each in (("x", call["x"]), ("weight", call["weight"][0])):
        if each.dtype != torch.int8:
            yield name, shape(each)
    for name, each in (("weight_scale", call["weight_scale"][0]), ("x_scale", call["x_scale"])):
        if each.dtype != torch.float32:
            yield name, shape(each)
    if call["group_list"].dtype != torch.int64:
        yield "group_list", shape(call["group_list"])


def _expert_axes(call: Call) -> Iterator[Breach]:
    x, weight = call["x"], call["weight"][0]
    if x.dim() != 2 or not x.numel() or weight.dim() != 3 or weight.shape[1] != x.shape[1]:
        yield "weight", f"{shape(weight)} for {shape(x)}"
        return
    experts, _, columns = weight.shape
    for name, each, sizes in (
        ("weight_scale", call["weight_scale"][0], (experts, columns)),
        ("x_scale", call["x_scale"], x.shape[:1]),
        ("group_list", call["group_list"], (experts,)),
    ):
        if each.shape != sizes:
            yield name, f"{shape(each)} for {shape(x)} and {shape(weight)}"


def _expert_sizes(call: Call) -> Iterator[Breach]:
    experts, inner, columns = call["weight"][0].shape
    if columns > MOST_GATED or inner >= INNER_LIMIT or experts > MOST_EXPERTS:
        yield "weight", shape(call["weight"][0])


def _expert_tiles(call: Call) -> Iterator[Breach]:
    weight = call["weight"][0]
    if weight.shape[2] % TILE[0] or weight.shape[1] % TILE[1]:
        yield "weight", shape(weight)


def _expert_counts(call: Call) -> Iterator[Breach]:
    if call["group_list_type"] not in (0, 1):
        yield "group_list_type", call["group_list_type"]
        return
    counts, rows = counts_of(call["group_list"], call["group_list_type"]), len(call["x"])
    if min(counts) < 0 or sum(counts) > rows:
        yield "group_list", f"{sum(counts)} of {rows} rows"


def _gating_modelled(call: Call) -> Iterator[Breach]:
    absent = ("smooth_scale", "weight_assist_matrix", "bias", "tuning_config")
    for name in (*absent, "x_dtype", "weight_dtype", "weight_scale_dtype", "x_scale_dtype"):
        if call[name] is not None:
            yield name, shape(call[name]) if isinstance(call[name], Tensor) else call[name]
    for name, values in (("dequant_mode", (0,)), ("quant_mode", (0,)), ("dequant_dtype", (0, 6)),
                         ("quant_dtype", (0, 1))):  # fmt: skip
        if call[name] not in values:
            yield name, call[name]


OPERATORS = (
    Operator(
        schema="npu::npu_add_rms_norm_dynamic_quant(Tensor x1, Tensor x2, Tensor gamma, *, "
        "Tensor? smooth_scale1=None, Tensor? smooth_scale2=None, Tensor? beta=None, "
        "float epsilon=9.9999999999999995e-07, bool[2]? output_mask=None, int? y_dtype=None) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        products=(A2, A3, A5),
        source=NORM,
        rules=(
            Rule(
                "halves", "x1 and x2 are float16 or bfloat16, alike, of 2 axes or more", NORM, "cast", _halves
            ),
            Rule(
                "columns",
                "gamma, beta and the smooth scales are of the type of x1, one a column",
                NORM,
                "cast them when weights are loaded",
                _columns,
            ),
            Rule(
                "outputs",
                "at least one output is wanted, and each smooth scale has its own",
                NORM,
                "pass output_mask [True, False] for one",
                _outputs,
            ),
            Rule(
                "int8", "rows become int8; other types are not checked here", NORM, "leave y_dtype out", _int8
            ),
        ),
        reference=_norm,
    ),
    Operator(
        schema="npu::npu_dequant_swiglu_quant(Tensor x, *, Tensor? weight_scale=None, "
        "Tensor? activation_scale=None, Tensor? bias=None, Tensor? quant_scale=None, "
        "Tensor? quant_offset=None, Tensor? group_index=None, bool activate_left=False, int quant_mode=0, "
        "int? dst_type=None, int? round_mode=None, int? activate_dim=None, int swiglu_mode=0, "
        "float clamp_limit=7., float glu_alpha=1.702, float glu_bias=1.) -> (Tensor, Tensor)",
        products=(A2, A3),
        source=SWIGLU,
        rules=(
            Rule(
                "summed",
                "x is the int32 of a product, or bfloat16, [T, 2 * H]",
                SWIGLU,
                "multiply with output_dtype int32",
                _summed,
            ),
            Rule("grouped", "group_index is int64 [E], if it is given", SWIGLU, "cast the counts", _grouped),
            Rule(
                "width",
                f"with group_index, H is a multiple of {GROUPED_STEP}, and 2 * H is at most {MOST_GROUPED}:"
                " the page says so of H, and the tiling checks a row of x",
                SWIGLU + ": group_index; vllm-ascend dequant_swiglu_quant_tiling.cpp: CountMaxDim",
                "scale the product, and call npu_swiglu and npu_dynamic_quant",
                _width,
            ),
            Rule(
                "scales",
                "int32 has float32 scales: of the weight [1, 2 * H], or [E, 2 * H] of groups, and "
                "of the rows [T, 1], or [T] as vllm-ascend has them; bfloat16 has none of the rows",
                SWIGLU + "; vllm-ascend ops/fused_moe/moe_mlp.py",
                "pass the scales of both sides of the product",
                _scales,
            ),
            Rule(
                "modelled",
                "static quantisation, bias, smooth scales and other activations are not checked here",
                "virtual_npu/operators/int8_fusions.py",
                "pass quant_mode 1, and leave the argument out",
                _modelled,
            ),
            Rule(
                "whole",
                "the groups have no more rows than there are; those that none has are never written",
                SWIGLU,
                "pass what npu_moe_init_routing_v2 counted",
                _whole,
            ),
        ),
        reference=_swiglu,
    ),
    Operator(
        schema="npu::npu_grouped_matmul_swiglu_quant_v2(Tensor x, Tensor[] weight, Tensor[] weight_scale, "
        "Tensor x_scale, Tensor group_list, *, Tensor? smooth_scale=None, "
        "Tensor[]? weight_assist_matrix=None, Tensor? bias=None, int? dequant_mode=0, int? dequant_dtype=6, "
        "int? quant_mode=0, int? quant_dtype=1, int? group_list_type=0, int[]? tuning_config=None, "
        "int? x_dtype=None, int? weight_dtype=None, int? weight_scale_dtype=None, int? x_scale_dtype=None) "
        "-> (Tensor, Tensor)",
        products=(A2, A3),
        source=GATED,
        rules=(
            Rule("lists", "weight and weight_scale are lists of one tensor", GATED, "stack them", _lists),
            Rule(
                "dtypes",
                "x and weight are int8, the scales of both float32, and group_list int64; weights in 4 bits,"
                " and the 950's types, are not checked here",
                GATED + ": weight_scale of A2 and A3",
                "pass what npu_moe_init_routing_v2 made",
                _expert_types,
            ),
            Rule(
                "axes",
                "x is [T, K], weight [E, K, 2 * H], with the gate in the first half, and their scales are [T]"
                " and [E, 2 * H]; group_list is [E]",
                GATED,
                "turn the weight",
                _expert_axes,
            ),
            Rule(
                "sizes",
                f"2 * H is at most {MOST_GATED}, K below {INNER_LIMIT}, and E at most {MOST_EXPERTS}",
                GATED,
                "scale the product, and call npu_swiglu and npu_dynamic_quant",
                _expert_sizes,
            ),
            Rule(
                "tiles",
                f"the weight lies in tiles, of which 2 * H has whole ones of {TILE[0]} and K of {TILE[1]}",
                GATED + ": A8W8",
                "scale the product, and call npu_swiglu and npu_dynamic_quant",
                _expert_tiles,
            ),
            Rule(
                "modelled",
                "smooth scales, biases, other types and other ways to quantise are not checked here",
                "virtual_npu/operators/int8_fusions.py",
                "leave the argument out",
                _gating_modelled,
            ),
            Rule(
                "counts",
                "group_list has counts, or with group_list_type 0 their running sum, of no more rows than"
                " there are; those that none has are never written",
                GATED,
                "pass what npu_moe_init_routing_v2 counted",
                _expert_counts,
            ),
        ),
        reference=_gated_product,
    ),
)
