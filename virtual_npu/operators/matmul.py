"""Define the quantised matrix product, quantisation by token, and the cast to tiles, with their rules.

Legend: M rows, K inner, N columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, is_dtype, shape
from virtual_npu.simulated_products import A2, A3, A5, P310

QUANT = "op-plugin npu_dynamic_quant"
STATIC_QUANT = "op-plugin npu_quantize"
PRODUCT = "op-plugin npu_quant_matmul"
FORMAT = "op-plugin npu_format_cast"
MOST = 65535
EXACT_IN_FLOAT = 1024  # a sum of so many int8 products is exact in float32
FORMATS = {2: "ND", 29: "FRACTAL_NZ"}
# A schema's `int?` carries a dtype as one of these numbers.
DTYPES = {1: torch.int8, 3: torch.int32, 5: torch.float16, 15: torch.bfloat16}
QINT8 = 12  # torch.qint8, likewise
FLOATS = (torch.float32, torch.bfloat16, torch.int32)
ALL_FLOATS = (torch.float16, torch.float32, torch.bfloat16)
# Dtypes of scale, offset, bias and scale by token (None: absent), by dtype of the output.
COMBINATIONS: dict[torch.dtype, tuple[tuple[tuple[object, ...], ...], ...]] = {
    torch.int8: (((torch.float32,), (None, torch.float32), (None, torch.int32), (None,)),),
    torch.int32: (((torch.float32, torch.bfloat16), (None,), (None, torch.int32), (None,)),),
    torch.bfloat16: (((torch.float32, torch.bfloat16), (None,), (None, *FLOATS), (None, torch.float32)),),
    torch.float16: (
        ((torch.float32, torch.int64), (None,), (None, torch.int32), (None,)),
        ((torch.float32,), (None,), (None, *FLOATS), (torch.float32,)),
    ),
}


def output_dtype(call: Call) -> torch.dtype | None:
    """Return the dtype of the product; None for a number that is not known here."""
    given = call["output_dtype"]
    if given is None:
        return torch.int8
    return given if isinstance(given, torch.dtype) else DTYPES.get(given)


def scale_of(given: Tensor) -> Tensor:
    """Return float32 scales, whose bits an int64 has in its low half."""
    return given.int().view(torch.float32) if given.dtype == torch.int64 else given.float()


def unwritten_beyond(rows: Tensor, num_rows: int) -> Tensor:
    """Append rows that were never written: NaN, or the least integer, so that a read of them shows."""
    found = torch.nan if rows.is_floating_point() else torch.iinfo(rows.dtype).min
    return torch.cat((rows, rows.new_full((num_rows - len(rows), *rows.shape[1:]), found)))


def _product(call: Call) -> Tensor:
    wide = torch.float32 if call["x1"].shape[-1] <= EXACT_IN_FLOAT else torch.float64
    total: Tensor = call["x1"].to(wide) @ call["x2"].to(wide)
    bias, dtype = call["bias"], output_dtype(call)
    if bias is not None and bias.dtype == torch.int32:
        total, bias = total + bias.to(wide), None
    if dtype == torch.int32:
        return total.to(torch.int32)
    result: Tensor = total.float() * scale_of(call["scale"])
    if call["pertoken_scale"] is not None:
        result *= call["pertoken_scale"][:, None]
    for more in (bias, call["offset"]):
        result = result if more is None else result + more.float()
    return result.round().clamp(-128, 127).to(torch.int8) if dtype == torch.int8 else result.to(dtype)


def _quantise(call: Call) -> tuple[Tensor, Tensor]:
    wide = call["input"].float()
    if call["smooth_scales"] is not None:
        wide = wide * call["smooth_scales"].float()
    return by_rows(wide)


def by_rows(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise float32 rows to int8; returns them and the factor of each row."""
    scale = wide.abs().amax(-1) / 127
    rows = wide / scale.where(scale > 0, 1)[..., None]
    return rows.round().clamp(-128, 127).to(torch.int8), scale


def _quantise_statically(call: Call) -> Tensor:
    """Multiply or divide by the scales and add the offsets in float32; ties go to the even integer."""
    wide, scales = call["input"].float(), call["scales"].float()
    wide = wide / scales if call["div_mode"] else wide * scales
    if call["zero_points"] is not None:
        wide = wide + call["zero_points"].float()
    rows: Tensor = wide.round().clamp(-128, 127).to(torch.int8)
    return rows


def _cast(call: Call) -> Tensor:
    """Return the same elements: tiles are a layout of the device's memory, which the shape does not show."""
    tensor: Tensor = call["input"]
    return tensor.clone()


def _int8(call: Call) -> Iterator[Breach]:
    for name in ("x1", "x2"):
        if call[name].dtype != torch.int8:
            yield name, shape(call[name])


def _sides(call: Call) -> Iterator[Breach]:
    x1, x2 = call["x1"], call["x2"]
    if not 2 <= x1.dim() <= 6 or x2.dim() != 2 or x1.shape[-1] != x2.shape[0] or not x1.numel():
        yield "x2", f"{shape(x2)} for {shape(x1)}"
    elif max(x1.shape[-1], x2.shape[-1]) > MOST:
        yield "x2", shape(x2)


def _product_contiguous(call: Call) -> Iterator[Breach]:
    x1, x2 = call["x1"], call["x2"]
    if not x1.is_contiguous():
        yield "x1", f"strided {tuple(x1.stride())} over {shape(x1)}"
    if not x2.is_contiguous() and not x2.t().is_contiguous():
        yield "x2", f"strided {tuple(x2.stride())} over {shape(x2)}"


def _turned(call: Call) -> Iterator[Breach]:
    x2 = call["x2"]
    if call.conditions.product is P310 and not x2.t().is_contiguous():
        yield "x2", f"{shape(x2)} that is no transposed view"


def _scales(call: Call) -> Iterator[Breach]:
    rows, columns = call["x1"].shape[-2], call["x2"].shape[-1]
    if call["scale"].shape not in ((1,), (columns,)):
        yield "scale", f"{shape(call['scale'])} for {columns} columns"
    for name, sizes in (
        ("pertoken_scale", ((rows,),)),
        ("bias", ((columns,),)),
        ("offset", ((1,), (columns,))),
    ):
        if call[name] is not None and call[name].shape not in sizes:
            yield name, f"{shape(call[name])} for {rows} rows and {columns} columns"


def _combination(call: Call) -> Iterator[Breach]:
    names = ("scale", "offset", "bias", "pertoken_scale")
    types = [None if call[name] is None else call[name].dtype for name in names]
    dtype = output_dtype(call)
    rows = () if dtype is None else COMBINATIONS.get(dtype, ())
    on_310p = call.conditions.product is P310
    if on_310p and (dtype not in (torch.int8, torch.float16) or types[3] is not None):
        rows = ()
    if not any(all(one in some for one, some in zip(types, row)) for row in rows):
        said = ", ".join(f"{name} {str(each).removeprefix('torch.')}" for name, each in zip(names, types))
        yield "output_dtype", f"{call['output_dtype']} with {said}"


def _product_known(call: Call) -> Iterator[Breach]:
    for name in ("x1_dtype", "x2_dtype", "pertoken_scale_dtype", "scale_dtype", "group_sizes", "y_scale"):
        if call[name] is not None:
            yield name, shape(call[name]) if isinstance(call[name], Tensor) else call[name]


def _quant_dtype(call: Call) -> Iterator[Breach]:
    x = call["input"]
    if not is_dtype(x, (torch.float16, torch.bfloat16), call.conditions) or x.dim() < 2:
        yield "input", shape(x)


def _smooth(call: Call) -> Iterator[Breach]:
    x, smooth = call["input"], call["smooth_scales"]
    if smooth is not None and (smooth.dtype != x.dtype or smooth.shape != x.shape[-1:]):
        yield "smooth_scales", f"{shape(smooth)} for {shape(x)}"


def _by_token(call: Call) -> Iterator[Breach]:
    if call["quant_mode"] != "pertoken":
        yield "quant_mode", call["quant_mode"]
    if call["dst_type"] not in (None, torch.int8, 1):
        yield "dst_type", call["dst_type"]
    if call["dst_type_max"] or call["group_index"] is not None:
        yield "dst_type_max", f"{call['dst_type_max']} with group_index {call['group_index']}"


def _static_types(call: Call) -> Iterator[Breach]:
    x = call["input"]
    taken = (torch.float16, torch.float32) if call.conditions.product is P310 else ALL_FLOATS
    if x.dtype not in taken or not x.dim():
        yield "input", shape(x)
    if call["scales"].dtype != x.dtype:
        yield "scales", f"{shape(call['scales'])} for {shape(x)}"


def _divisors(call: Call) -> Iterator[Breach]:
    if call["div_mode"] and call["scales"].dtype == torch.float16:
        yield "scales", f"{shape(call['scales'])} with div_mode True"


def _of_columns(call: Call) -> Iterator[Breach]:
    x, scales, offsets = call["input"], call["scales"], call["zero_points"]
    if scales.shape not in ((1,), x.shape[-1:]):
        yield "scales", f"{shape(scales)} for {shape(x)}"
    if offsets is None:
        return
    integers = (torch.int8, torch.uint8, torch.int32)
    taken = integers if call["div_mode"] else (scales.dtype,)
    if offsets.shape != scales.shape or offsets.dtype not in taken:
        yield "zero_points", f"{shape(offsets)} beside {shape(scales)}"


def _last_axis(call: Call) -> Iterator[Breach]:
    if call["dtype"] not in (torch.qint8, QINT8):
        yield "dtype", call["dtype"]
    if call["axis"] != -1:
        yield "axis", call["axis"]


def _format(call: Call) -> Iterator[Breach]:
    if call["acl_format"] not in FORMATS:
        yield "acl_format", call["acl_format"]
    for name in ("customize_dtype", "input_dtype"):
        if call[name] is not None:
            yield name, call[name]


def _tiles(call: Call) -> Iterator[Breach]:
    x: Tensor = call["input"]
    taken = (
        (torch.float16, torch.int8)
        if call.conditions.product is P310
        else (
            torch.float16,
            torch.bfloat16,
            torch.int8,
        )
    )
    if call["acl_format"] == 29 and (x.dim() < 2 or not is_dtype(x, taken, call.conditions)):
        yield "input", shape(x)


def _cast_contiguous(call: Call) -> Iterator[Breach]:
    if not call["input"].is_contiguous():
        yield "input", f"strided {tuple(call['input'].stride())} over {shape(call['input'])}"


OPERATORS = (
    Operator(
        schema="npu::npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, "
        "Tensor? pertoken_scale=None, Tensor? bias=None, int? output_dtype=None, int? x1_dtype=None, "
        "int? x2_dtype=None, int? pertoken_scale_dtype=None, int? scale_dtype=None, int[]? group_sizes=None, "
        "Tensor? y_scale=None) -> Tensor",
        products=(P310, A2, A3),
        source=PRODUCT + ": products; vllm-ascend computes in MXFP8 on the 950",
        rules=(
            Rule(
                "int8", "both sides are int8; int4 in int32 is not checked here", PRODUCT, "quantise", _int8
            ),
            Rule(
                "sides",
                f"x1 has 2 to 6 axes, x2 is [K, N], neither is empty, and K and N are at most {MOST}",
                PRODUCT,
                "flatten x1, and split x2",
                _sides,
            ),
            Rule(
                "contiguous",
                "x1 is contiguous, and x2 or its transpose",
                PRODUCT,
                "call contiguous() when it is made",
                _product_contiguous,
            ),
            Rule(
                "turned",
                "on the 310P x2 is a transposed view of [N, K], which alone is read in FRACTAL_NZ",
                PRODUCT + ": npu_format_cast",
                "cast the weight as the checkpoint has it, and pass its transpose",
                _turned,
            ),
            Rule(
                "scales",
                "scale and offset have one element or one a column, bias has one a column, and the "
                "scale by token one a row",
                PRODUCT,
                "reshape it to one axis",
                _scales,
            ),
            Rule(
                "combination",
                "the types of scale, offset, bias, scale by token and output stand in one row of the table; "
                "the 310P has no scale by token and no bfloat16",
                PRODUCT + ": tables 1 and 2",
                "for bfloat16 pass a float32 scale and a float32 pertoken_scale",
                _combination,
            ),
            Rule(
                "modelled",
                "types by number, groups and y_scale are outside what is checked here",
                "virtual_npu/operators/matmul.py",
                "leave the argument out",
                _product_known,
            ),
        ),
        reference=_product,
    ),
    Operator(
        schema="npu::npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, "
        'Tensor? group_index=None, int? dst_type=None, str quant_mode="pertoken", '
        "float dst_type_max=0.) -> (Tensor, Tensor)",
        products=(A2, A3),
        source=QUANT + ": products",
        rules=(
            Rule("dtype", "it is float16 or bfloat16, of 2 axes or more", QUANT, "cast it", _quant_dtype),
            Rule("smooth", "smooth_scales are of its type, one a column", QUANT, "cast them", _smooth),
            Rule(
                "by-token",
                "rows become int8; other types, groups, channels and whole tensors are not checked here",
                QUANT,
                "leave dst_type, group_index, quant_mode and dst_type_max out",
                _by_token,
            ),
        ),
        reference=_quantise,
    ),
    Operator(
        schema="npu::npu_quantize(Tensor input, Tensor scales, Tensor? zero_points, int dtype, int axis=1, "
        "bool div_mode=True) -> Tensor",
        products=(P310, A2, A3),
        source=STATIC_QUANT,
        rules=(
            Rule(
                "matched",
                "input is float32, float16, or bfloat16 off the 310P, and scales are of its type",
                STATIC_QUANT + ": div_mode false; CANN aclnnQuantize, which divides",
                "cast the scales when weights are loaded",
                _static_types,
            ),
            Rule(
                "divisors",
                "scales by which is divided are float32 or bfloat16",
                STATIC_QUANT + ": div_mode true",
                "pass div_mode False, with the inverse of the scale",
                _divisors,
            ),
            Rule(
                "columns",
                "scales have one element, or one a column; zero_points have their shape, and their type with "
                "div_mode False, but are int8, uint8 or int32 with div_mode True",
                STATIC_QUANT,
                "repeat the scale for each column",
                _of_columns,
            ),
            Rule(
                "last-axis",
                "rows become torch.qint8 along the last axis; other ways are not checked here",
                STATIC_QUANT,
                "pass torch.qint8 and axis -1",
                _last_axis,
            ),
        ),
        reference=_quantise_statically,
    ),
    Operator(
        schema="npu::npu_format_cast(Tensor input, int acl_format, *, int? customize_dtype=None, "
        "int? input_dtype=None) -> Tensor",
        products=(P310, A2, A3, A5),
        source=FORMAT,
        rules=(
            Rule("format", "the formats are 2, rows, and 29, tiles", FORMAT, "pass 29 for a weight", _format),
            Rule(
                "tiles",
                "tiles hold float16, int8, and bfloat16 off the 310P, of 2 axes or more",
                FORMAT,
                "leave it as it is",
                _tiles,
            ),
            Rule("contiguous", "it is contiguous", FORMAT, "call contiguous() first", _cast_contiguous),
        ),
        reference=_cast,
    ),
)
