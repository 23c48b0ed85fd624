"""Define npu_mla_prolog_v3, which computes everything before latent attention (MLA) in one launch.

This is its schema, the rules of a correct call and a CPU reference. Queries are compressed, normed and
projected into the latent space; latents are normed, rope keys are rotated, and both are written to the
caches. The weights give rotary pairs as neighbours, and the operator returns them as halves, as
npu_kv_rmsnorm_rope_cache does; so both operators may fill the same pages.

Legend: T tokens, N heads, D width of a head without rope, P pages, B tokens a page, E hidden size, Q width of
compressed queries.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, is_dtype, shape
from virtual_npu.operators.latent import LATENT, ROPE
from virtual_npu.operators.matmul import by_rows
from virtual_npu.operators.norm import rms_norm
from virtual_npu.operators.paging import NULL_PAGE, holding_rules
from virtual_npu.simulated_products import A2, A3, A5

SOURCE = "op-plugin npu_mla_prolog_v3"
HIDDEN = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)
COMPRESSED = (1536, 2048)
NOPE = (128, 192)
MOST_HEADS = 128
PAGE_STEP, MOST_PAGE = 16, 1024
PLAIN, INT8 = 0, 2  # values of weight_quant_mode
WEIGHTS = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
OTHERS = (
    *("weight_uk", "rmsnorm_gamma_cq", "rmsnorm_gamma_ckv", "rope_sin", "rope_cos"),
    *("kv_cache", "kr_cache"),
)
SCALES = ("dequant_scale_x", *(f"dequant_scale_{name.replace('weight', 'w')}" for name in WEIGHTS))
# Features that are not checked here: int8 caches, and scales of queries and keys.
LEFT_OUT = {
    **dict.fromkeys(("quant_scale_ckv", "quant_scale_ckr", "smooth_scales_cq", "actual_seq_len")),
    **dict.fromkeys(("k_nope_clip_alpha", "token_x_dtype", "weight_dq_dtype", "weight_uq_qr_dtype")),
    **dict.fromkeys(("weight_dkv_kr_dtype", "kv_cache_dtype")),
    **dict.fromkeys(("kv_cache_quant_mode", "query_quant_mode", "ckvkr_repo_mode"), 0),
    "quant_scale_repo_mode": 0,
    "qc_qr_scale": 1.0,
    "kc_scale": 1.0,
}


def _prolog(call: Call) -> tuple[Tensor, ...]:
    """Return queries in the latent space and their rotated parts, a scale that is empty here, and two more.

    Those are the normed compressed queries, which an indexer reads, and their scales where these are in int8;
    without query_norm_flag both are empty.
    """
    x, gamma = call["token_x"], call["rmsnorm_gamma_cq"]
    dtype, nope = gamma.dtype, call["weight_uk"].shape[1]
    row_scale = call["dequant_scale_x"]
    compressed = _product(call, x, row_scale, "weight_dq", dtype)
    normed = rms_norm(compressed.float(), gamma.float(), call["rmsnorm_epsilon_cq"])[0]
    rows, scale = normed.to(dtype), None
    if call["weight_quant_mode"] == INT8:
        rows, scale = by_rows(normed)
        scale = scale[:, None]
    queries = _product(call, rows, scale, "weight_uq_qr", dtype)
    heads = queries.unflatten(-1, (-1, nope + ROPE))
    absorbed = torch.einsum("tnd,ndl->tnl", heads[..., :nope].float(), call["weight_uk"].float())
    cos, sin = call["rope_cos"], call["rope_sin"]
    rope = turned(heads[..., nope:], cos[:, None], sin[:, None])
    latent, pairs = _product(call, x, row_scale, "weight_dkv_kr", dtype).split((LATENT, ROPE), -1)
    made = (
        rms_norm(latent, call["rmsnorm_gamma_ckv"], call["rmsnorm_epsilon_ckv"])[0],
        turned(pairs, cos, sin),
    )
    for name, written in zip(("kv_cache", "kr_cache"), made):
        call[name].flatten(0, 2)[call["cache_index"]] = written
    if not call["query_norm_flag"]:
        rows, scale = rows.new_empty(0), None
    scales = torch.empty(0) if scale is None else scale
    return absorbed.to(dtype).contiguous(), rope, torch.empty(0), rows, scales


def turned(pairs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighbours and return them as halves; all [..., R]."""
    halves = torch.cat((pairs[..., ::2], pairs[..., 1::2]), -1).float()
    across = torch.cat((-halves[..., ROPE // 2 :], halves[..., : ROPE // 2]), -1)
    return (halves * cos.float() + across * sin.float()).to(pairs.dtype)


def _product(call: Call, x: Tensor, row_scale: Tensor | None, name: str, dtype: torch.dtype) -> Tensor:
    """Multiply by one of the weights; the sum of int8 products is exact."""
    if row_scale is None:
        plain: Tensor = x.float() @ call[name].float()
        return plain.to(dtype)
    total = (x.double() @ call[name].double()).float()
    scaled: Tensor = total * row_scale * call[f"dequant_scale_{name.replace('weight', 'w')}"]
    return scaled.to(dtype)


def _mode(call: Call) -> Iterator[Breach]:
    if call["cache_mode"] != "PA_BSND":
        yield "cache_mode", call["cache_mode"]
    for name, wanted in LEFT_OUT.items():
        if isinstance(call[name], Tensor) or call[name] != wanted:
            yield name, shape(call[name]) if isinstance(call[name], Tensor) else call[name]


def _quantised(call: Call) -> Iterator[Breach]:
    if call["weight_quant_mode"] not in (PLAIN, INT8):
        yield "weight_quant_mode", call["weight_quant_mode"]
        return
    in_int8 = call["weight_quant_mode"] == INT8
    outputs = [call[name].shape[-1] for name in WEIGHTS]
    for name, wanted in zip(SCALES, [(len(call["token_x"]), 1), *((1, width) for width in outputs)]):
        scale = call[name]
        if (scale is not None) != in_int8:
            yield name, f"{'None' if scale is None else shape(scale)} in mode {call['weight_quant_mode']}"
        elif scale is not None and (scale.dtype != torch.float32 or tuple(scale.shape) != wanted):
            yield name, f"{shape(scale)} for {wanted}"


def _types(call: Call) -> Iterator[Breach]:
    dtype = call["weight_uk"].dtype
    for name in OTHERS:
        if not is_dtype(call[name], (torch.bfloat16,), call.conditions) or call[name].dtype != dtype:
            yield name, shape(call[name])
    stored = torch.int8 if call["weight_quant_mode"] == INT8 else dtype
    for name in ("token_x", *WEIGHTS):
        if call[name].dtype != stored:
            yield name, f"{shape(call[name])} in mode {call['weight_quant_mode']}"
    if call["cache_index"] is None or call["cache_index"].dtype != torch.int64:
        yield "cache_index", None if call["cache_index"] is None else shape(call["cache_index"])


def _sizes(call: Call) -> Iterator[Breach]:
    dq, uk = call["weight_dq"], call["weight_uk"]
    if dq.dim() != 2 or dq.shape[0] not in HIDDEN or dq.shape[1] not in COMPRESSED:
        yield "weight_dq", shape(dq)
    heads = uk.shape[0]
    is_power = 0 < heads <= MOST_HEADS and not heads & (heads - 1)
    if uk.dim() != 3 or not is_power or uk.shape[1] not in NOPE or uk.shape[2] != LATENT:
        yield "weight_uk", shape(uk)


def _axes(call: Call) -> Iterator[Breach]:
    rows, (hidden, compressed) = len(call["token_x"]), call["weight_dq"].shape
    heads, nope = call["weight_uk"].shape[:2]
    pages = call["kv_cache"].shape[:2]
    wanted = {
        "token_x": (rows, hidden),
        "weight_uq_qr": (compressed, heads * (nope + ROPE)),
        "weight_dkv_kr": (hidden, LATENT + ROPE),
        "rmsnorm_gamma_cq": (compressed,),
        "rmsnorm_gamma_ckv": (LATENT,),
        "rope_sin": (rows, ROPE),
        "rope_cos": (rows, ROPE),
        "kv_cache": (*pages, 1, LATENT),
        "kr_cache": (*pages, 1, ROPE),
        "cache_index": (rows,),
    }
    for name, axes in wanted.items():
        if tuple(call[name].shape) != tuple(axes):
            yield name, f"{shape(call[name])} for {tuple(axes)}"


def _page_size(call: Call) -> Iterator[Breach]:
    size = call["kv_cache"].shape[1]
    if size % PAGE_STEP or not PAGE_STEP <= size <= MOST_PAGE:
        yield "kv_cache", f"{shape(call['kv_cache'])}, pages of {size}"


def _contiguous(call: Call) -> Iterator[Breach]:
    for name in ("token_x", *WEIGHTS, *OTHERS, "cache_index"):
        if not call[name].is_contiguous():
            yield name, f"strided {tuple(call[name].stride())} over {shape(call[name])}"


def _in_range(call: Call) -> Iterator[Breach]:
    index, places = call["cache_index"], call["kv_cache"].shape[0] * call["kv_cache"].shape[1]
    wrong = index[(index < 0) | (index >= places)]
    if len(wrong):
        yield "cache_index", f"one with place {int(wrong[0])} of {places}"


def _unique(call: Call) -> Iterator[Breach]:
    index = call["cache_index"][_pages(call)[0] != NULL_PAGE]
    places, counts = torch.unique(index, return_counts=True)
    if len(places) != len(index):
        yield "cache_index", f"one with place {int(places[counts > 1][0])} more than once"


def _pages(call: Call) -> list[Tensor]:
    return [call["cache_index"].div(call["kv_cache"].shape[1], rounding_mode="floor")]


OPERATORS = (
    Operator(
        schema="npu::npu_mla_prolog_v3(Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr, Tensor"
        " weight_uk, Tensor weight_dkv_kr, Tensor rmsnorm_gamma_cq, Tensor rmsnorm_gamma_ckv, Tensor"
        " rope_sin, Tensor rope_cos, Tensor(a!) kv_cache, Tensor(b!) kr_cache, *, Tensor? cache_index=None,"
        " Tensor? dequant_scale_x=None, Tensor? dequant_scale_w_dq=None, Tensor?"
        " dequant_scale_w_uq_qr=None, Tensor? dequant_scale_w_dkv_kr=None, Tensor? quant_scale_ckv=None,"
        " Tensor? quant_scale_ckr=None, Tensor? smooth_scales_cq=None, Tensor? actual_seq_len=None, Tensor?"
        " k_nope_clip_alpha=None, float rmsnorm_epsilon_cq=1.0000000000000001e-05, float"
        ' rmsnorm_epsilon_ckv=1.0000000000000001e-05, str cache_mode="PA_BSND", bool query_norm_flag=False,'
        " int weight_quant_mode=0, int kv_cache_quant_mode=0, int query_quant_mode=0, int ckvkr_repo_mode=0,"
        " int quant_scale_repo_mode=0, int tile_size=128, float qc_qr_scale=1., float kc_scale=1., int?"
        " token_x_dtype=None, int? weight_dq_dtype=None, int? weight_uq_qr_dtype=None, int?"
        " weight_dkv_kr_dtype=None, int? kv_cache_dtype=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        products=(A2, A3, A5),
        source=SOURCE,
        first=(
            Rule(
                "mode",
                'cache_mode is "PA_BSND"; caches in int8 or in tiles, further scales and the norm of queries'
                " are not checked here",
                SOURCE,
                "leave them out",
                _mode,
            ),
            Rule(
                "quantised",
                "weight_quant_mode is 0, without scales, or 2, with scales in float32: [T, 1] of token_x and"
                " [1, outputs] of each of the three weights",
                SOURCE,
                "pass weight_quant_mode=2 with all four scales, or none of them",
                _quantised,
            ),
            Rule(
                "dtype",
                "all are bfloat16, but token_x and the three weights int8 in mode 2; cache_index is int64",
                SOURCE,
                "cast weights once, when they are loaded; models in float16 take other operators",
                _types,
            ),
            Rule(
                "sizes",
                f"weight_dq has one of {HIDDEN} inputs and one of {COMPRESSED} outputs; weight_uk is [N, D,"
                f" {LATENT}], N a power of two up to {MOST_HEADS} and D one of {NOPE}",
                SOURCE,
                "call the operators that it joins",
                _sizes,
            ),
            Rule(
                "axes",
                "token_x is [T, E], weight_uq_qr [Q, N * (D + 64)], weight_dkv_kr [E, 576], the norms [Q] and"
                " [512], rope_sin and rope_cos [T, 64], the caches [P, B, 1, 512] and [P, B, 1, 64]; each row"
                " has a place",
                SOURCE,
                "transpose weights once, when they are loaded",
                _axes,
            ),
            Rule(
                "page-size",
                f"pages are a multiple of {PAGE_STEP} up to {MOST_PAGE} tokens",
                SOURCE,
                "set cache.page_size to 128",
                _page_size,
            ),
            Rule("contiguous", "tensors are contiguous", SOURCE, "call contiguous() first", _contiguous),
        ),
        rules=(
            Rule(
                "slots-in-range",
                "places are from 0 to P * B - 1, which it does not check",
                SOURCE,
                "cut rows and places to the step's real tokens",
                _in_range,
            ),
            Rule(
                "slots-unique",
                "each place is written once, but for padding on page 0",
                SOURCE,
                "drop all but one",
                _unique,
            ),
            *holding_rules("cache_index", _pages),
        ),
        reference=_prolog,
    ),
)
