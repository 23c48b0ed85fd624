"""Define two operators of latent attention, with the rules of a correct call.

One norms a latent, rotates its rope key and writes both to their caches; the other is a product by heads that
accepts and returns the axes in attention's order.

Legend: S sequences, T tokens of each, N heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, is_dtype, shape
from virtual_npu.operators.norm import rms_norm
from virtual_npu.operators.paging import NULL_PAGE, holding_rules
from virtual_npu.simulated_products import A2, A3, A5

CACHE = "op-plugin npu_kv_rmsnorm_rope_cache"
PRODUCT = "op-plugin npu_transpose_batchmatmul; CANN aclnnTransposeBatchMatMul"
LATENT, ROPE = 512, 64
MOST_ROW, MOST_BATCH = 65535, 65535
PRODUCT_STEP = 16  # inner sizes and columns of a product are a multiple of this
HALVES = (torch.bfloat16, torch.float16)


def _write(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the caches, and the rows written to them, which are NaN where they are not requested."""
    latent, pairs = call["kv"].flatten(0, 2).split((LATENT, ROPE), -1)
    halves = torch.cat((pairs[:, ::2], pairs[:, 1::2]), -1).float()
    turned = torch.cat((-halves[:, ROPE // 2 :], halves[:, : ROPE // 2]), -1)
    cos, sin = (call[name].flatten(0, 2).float() for name in ("cos", "sin"))
    made = (
        (halves * cos + turned * sin).to(latent.dtype),
        rms_norm(latent, call["gamma"], call["epsilon"])[0],
    )
    caches = call["k_cache"], call["ckv_cache"]
    for cache, rows in zip(caches, made):
        cache.flatten(0, 2)[call["index"]] = rows
    rope, written = (rows.view(*call["kv"].shape[:3], -1) for rows in made)
    if not call["is_output_kv"]:
        rope, written = torch.full_like(rope, torch.nan), torch.full_like(written, torch.nan)
    return *caches, rope, written


def _multiply(call: Call) -> Tensor:
    x: Tensor = call["input"].permute(tuple(call["perm_x1"] or (0, 1, 2)))
    return torch.bmm(x.float(), call["weight"].float()).transpose(0, 1).to(x.dtype).contiguous()


def _mode(call: Call) -> Iterator[Breach]:
    if call["cache_mode"] != "PA":
        yield "cache_mode", call["cache_mode"]
    for name in ("k_rope_scale", "c_kv_scale", "k_rope_offset", "c_kv_offset", "v"):
        if call[name] is not None:
            yield name, shape(call[name])


def _cache_types(call: Call) -> Iterator[Breach]:
    kv = call["kv"]
    for name in ("kv", "gamma", "cos", "sin", "k_cache", "ckv_cache"):
        if not is_dtype(call[name], HALVES, call.conditions) or call[name].dtype != kv.dtype:
            yield name, shape(call[name])
    if call["index"].dtype != torch.int64:
        yield "index", shape(call["index"])


def _cache_axes(call: Call) -> Iterator[Breach]:
    kv = call["kv"]
    if kv.dim() != 4 or not kv.numel() or (kv.shape[1], kv.shape[3]) != (1, LATENT + ROPE):
        yield "kv", shape(kv)
        return
    rows = kv.shape[0] * kv.shape[2]
    if call["gamma"].shape != (LATENT,):
        yield "gamma", shape(call["gamma"])
    for name in ("cos", "sin"):
        if call[name].shape != (*kv.shape[:3], ROPE):
            yield name, f"{shape(call[name])} for {rows} rows"
    pages = call["k_cache"].shape[:2]
    for name, width in (("k_cache", ROPE), ("ckv_cache", LATENT)):
        if call[name].dim() != 4 or call[name].shape != (*pages, 1, width):
            yield name, shape(call[name])
    if call["index"].shape != (rows,):
        yield "index", f"{shape(call['index'])} for {rows} rows"


def _enough_pages(call: Call) -> Iterator[Breach]:
    (batch, _, tokens, _), (pages, page_size) = call["kv"].shape, call["k_cache"].shape[:2]
    if pages < math.ceil(tokens / page_size) * batch:
        yield "k_cache", f"of {pages} pages of {page_size} for {batch} times {tokens} tokens"


def _contiguous(call: Call) -> Iterator[Breach]:
    for name in ("kv", "gamma", "cos", "sin", "k_cache", "ckv_cache", "index"):
        if not call[name].is_contiguous():
            yield name, f"strided {tuple(call[name].stride())} over {shape(call[name])}"


def _in_range(call: Call) -> Iterator[Breach]:
    places = call["k_cache"].shape[0] * call["k_cache"].shape[1]
    wrong = call["index"][(call["index"] < 0) | (call["index"] >= places)]
    if len(wrong):
        yield "index", f"one with place {int(wrong[0])} of {places}"


def _unique(call: Call) -> Iterator[Breach]:
    index = call["index"][_pages(call)[0] != NULL_PAGE]
    places, counts = torch.unique(index, return_counts=True)
    if len(places) != len(index):
        yield "index", f"one with place {int(places[counts > 1][0])} more than once"


def _pages(call: Call) -> list[Tensor]:
    return [call["index"].div(call["k_cache"].shape[1], rounding_mode="floor")]


def _sides(call: Call) -> Iterator[Breach]:
    x, weight = call["input"], call["weight"]
    if x.dim() != 3 or weight.dim() != 3:
        yield "weight", f"{shape(weight)} for {shape(x)}"
        return
    if list(call["perm_x1"] or (0, 1, 2)) not in ([0, 1, 2], [1, 0, 2]):
        yield "perm_x1", call["perm_x1"]
        return
    batch = x.shape[1 if _swaps(call) else 0]
    if weight.shape[:2] != (batch, x.shape[2]):
        yield "weight", f"{shape(weight)} for {shape(x)}"


def _swaps(call: Call) -> bool:
    return list(call["perm_x1"] or ()) == [1, 0, 2]


def _orders(call: Call) -> Iterator[Breach]:
    if call["perm_x2"] is not None and list(call["perm_x2"]) != [0, 1, 2]:
        yield "perm_x2", call["perm_x2"]
    if list(call["perm_y"] or ()) != [1, 0, 2]:
        yield "perm_y", call["perm_y"]


def _plain(call: Call) -> Iterator[Breach]:
    for name in ("bias", "scale"):
        if call[name] is not None:
            yield name, shape(call[name])
    if call["batch_split_factor"] not in (None, 1):
        yield "batch_split_factor", call["batch_split_factor"]


def _product_types(call: Call) -> Iterator[Breach]:
    for name in ("input", "weight"):
        if call[name].dtype not in (*HALVES, torch.float32) or call[name].dtype != call["input"].dtype:
            yield name, shape(call[name])


def _sizes(call: Call) -> Iterator[Breach]:
    x, weight = call["input"], call["weight"]
    row = x.shape[1] * x.shape[2] if _swaps(call) else x.shape[2]
    if row > MOST_ROW:
        yield "input", f"{shape(x)}, rows of {row}"
    if weight.shape[0] > MOST_BATCH or weight.shape[2] > MOST_ROW:
        yield "weight", shape(weight)


def _by_sixteens(call: Call) -> Iterator[Breach]:
    weight = call["weight"]
    if weight.shape[1] % PRODUCT_STEP or weight.shape[2] % PRODUCT_STEP:
        yield "weight", shape(weight)


OPERATORS = (
    Operator(
        schema="npu::npu_kv_rmsnorm_rope_cache(Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index,"
        " Tensor k_cache, Tensor ckv_cache, *, Tensor? k_rope_scale=None, Tensor? c_kv_scale=None,"
        " Tensor? k_rope_offset=None, Tensor? c_kv_offset=None, Tensor? v=None,"
        ' float epsilon=1.0000000000000001e-05, str cache_mode="Norm", bool is_output_kv=False)'
        " -> (Tensor, Tensor, Tensor, Tensor)",
        products=(A2, A3),
        source=CACHE,
        first=(
            Rule(
                "mode",
                'cache_mode is "PA", without scales: what lies in tiles, or in int8, is not checked here',
                CACHE,
                'pass cache_mode="PA", which is not the default',
                _mode,
            ),
            Rule(
                "dtype",
                "all are float16 or all bfloat16, and the index is int64",
                CACHE,
                "cast the places to int64",
                _cache_types,
            ),
            Rule(
                "axes",
                "kv is [S, 1, T, 576], gamma [512], cos and sin [S, 1, T, 64]; the caches are [pages, page,"
                " 1, 64] and [pages, page, 1, 512], and there is a place for each row",
                CACHE + "; vllm-ascend attention/mla_v1.py",
                "view the rows so; other sizes are for plain torch",
                _cache_axes,
            ),
            Rule(
                "enough-pages",
                "the cache has the pages of S sequences of T tokens, which share none",
                CACHE + ": block_num",
                "pass more rows than there are pages as one sequence",
                _enough_pages,
            ),
            Rule("contiguous", "tensors are contiguous", CACHE, "call contiguous() first", _contiguous),
        ),
        rules=(
            Rule(
                "slots-in-range",
                "places are from 0 to pages * page - 1 (-1 is skipped, which nothing here needs)",
                CACHE,
                "cut rows and places to the step's real tokens",
                _in_range,
            ),
            Rule(
                "slots-unique",
                "each place is written once, but for padding on page 0",
                CACHE,
                "drop all but one",
                _unique,
            ),
            *holding_rules("index", _pages),
        ),
        reference=_write,
    ),
    Operator(
        schema="npu::npu_transpose_batchmatmul(Tensor input, Tensor weight, *, Tensor? bias=None,"
        " Tensor? scale=None, int[]? perm_x1=None, int[]? perm_x2=None, int[]? perm_y=None,"
        " int? batch_split_factor=1) -> Tensor",
        products=(A2, A3, A5),
        source=PRODUCT,
        rules=(
            Rule(
                "sides",
                "the input is [N, T, K], or [T, N, K] with perm_x1 (1, 0, 2), and the weight [N, K, M]",
                PRODUCT,
                "transpose the weight once, when it is loaded",
                _sides,
            ),
            Rule(
                "orders",
                "perm_x2 is (0, 1, 2) and perm_y (1, 0, 2)",
                PRODUCT,
                "pass perm_y=(1, 0, 2)",
                _orders,
            ),
            Rule(
                "plain",
                "bias is reserved; int8 results are not checked here",
                PRODUCT,
                "leave it out",
                _plain,
            ),
            Rule(
                "dtype",
                "both are of one type: float32, float16 or bfloat16",
                PRODUCT,
                "cast the weight once, when it is loaded",
                _product_types,
            ),
            Rule(
                "sizes",
                "K is at most 65535, and so is N * K of an input [T, N, K]; so are N and M",
                PRODUCT,
                "call torch.bmm on transposed views",
                _sizes,
            ),
            Rule(
                "by-sixteens",
                f"K and M are multiples of {PRODUCT_STEP}",
                PRODUCT,
                "call torch.bmm on transposed views",
                _by_sixteens,
            ),
        ),
        reference=_multiply,
    ),
)
