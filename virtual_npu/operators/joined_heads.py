"""Define the operator that splits a product into queries, keys and values, and norms and rotates its heads.

It also writes keys and values to caches in columns of 16 (PA_NZ). Fused attention reads no such cache in 16
bits, so that an engine may tell it to skip every token, and take the rows that it would have written. CANN's
page describes these rows (is_output_qkv) and says that they are not given in the case that it supports, while
the kernel of ops-transformer gives them: this follows the kernel.

Legend: S sequences, T tokens of each, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, is_dtype, shape
from virtual_npu.operators.norm import rms_norm
from virtual_npu.simulated_products import A2, A3

SOURCE = "CANN aclnnQkvRmsNormRopeCache"
TILING = SOURCE + "; ops-transformer qkv_rms_norm_rope_cache_ds_tiling.cpp"
HALVES = (torch.float16, torch.bfloat16)
DIM, TILE, BLOCK_STEP = 128, 16, 32
SKIPPED = -1
CACHES = ("k_cache", "v_cache")


def _heads(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Fill q_out and the caches, and return the same rows, or NaN where they are not requested."""
    queries, keys, values = call["qkv"].unflatten(-1, (-1, DIM)).split(list(call["head_nums"]), 1)
    cos, sin = call["cos"].float()[:, None], call["sin"].float()[:, None]

    def turned(heads: Tensor, gamma: Tensor) -> Tensor:
        wide = rms_norm(heads.float(), gamma, call["epsilon"])[0]
        first, second = wide.chunk(2, -1)
        made: Tensor = wide * cos + torch.cat((-second, first), -1) * sin
        return made.to(heads.dtype)

    rows = [
        each.flatten(1) for each in (turned(queries, call["q_gamma"]), turned(keys, call["k_gamma"]), values)
    ]
    call["q_out"].copy_(rows[0])
    kept = call["index"] != SKIPPED
    places = call["index"][kept]
    for name, each in zip(CACHES, rows[1:]):
        cache, size = call[name], call[name].shape[2]
        cache[places // size, :, places % size] = each[kept].unflatten(-1, (-1, TILE))
    if not call["is_output_qkv"]:
        rows = [each.new_full((), torch.nan) for each in rows]
    return rows[0], rows[1], rows[2].clone()


def _mode(call: Call) -> Iterator[Breach]:
    if call["cache_mode"] != "PA_NZ":
        yield "cache_mode", call["cache_mode"]
    for name in ("k_scale", "v_scale", "k_offset", "v_offset"):
        if call[name] is not None:
            yield name, shape(call[name])


def _types(call: Call) -> Iterator[Breach]:
    qkv = call["qkv"]
    for name in ("qkv", "q_gamma", "k_gamma", "cos", "sin", "q_out", *CACHES):
        if not is_dtype(call[name], HALVES, call.conditions) or call[name].dtype != qkv.dtype:
            yield name, shape(call[name])
    if call["index"].dtype != torch.int64:
        yield "index", shape(call["index"])


def _sizes(call: Call) -> Iterator[Breach]:
    heads, size = list(call["head_nums"]), list(call["qkv_size"])
    if len(heads) != 3 or min(heads) < 1 or heads[1] != heads[2]:
        yield "head_nums", heads
    elif len(size) != 4 or min(size) < 1 or size[2:] != [sum(heads), DIM]:
        yield "qkv_size", f"{size} for heads {heads}"


def _axes(call: Call) -> Iterator[Breach]:
    sequences, tokens, heads, dim = call["qkv_size"]
    rows = sequences * tokens
    wanted = {
        "qkv": (rows, heads * dim),
        "q_gamma": (dim,),
        "k_gamma": (dim,),
        "cos": (rows, dim),
        "sin": (rows, dim),
        "index": (rows,),
        "q_out": (rows, call["head_nums"][0] * dim),
    }
    for name, sizes in wanted.items():
        if call[name].shape != sizes:
            yield name, f"{shape(call[name])} for {rows} rows of {heads} heads"


def _blocks(call: Call) -> Iterator[Breach]:
    sequences, tokens, _, dim = call["qkv_size"]
    columns, first = call["head_nums"][1] * dim // TILE, call["k_cache"]
    for name in CACHES:
        sizes = call[name].shape
        if len(sizes) != 4 or (sizes[1], sizes[3]) != (columns, TILE) or sizes != first.shape:
            yield name, f"{shape(call[name])} for {columns} columns"
        elif sizes[2] % BLOCK_STEP or sizes[0] < math.ceil(tokens / sizes[2]) * sequences:
            yield name, f"{sizes[0]} blocks of {sizes[2]} for {sequences} times {tokens} tokens"


def _contiguous(call: Call) -> Iterator[Breach]:
    for name in ("qkv", "q_gamma", "k_gamma", "cos", "sin", "index", "q_out", *CACHES):
        if not call[name].is_contiguous():
            yield name, f"strided {tuple(call[name].stride())} over {shape(call[name])}"


def _places(call: Call) -> Iterator[Breach]:
    index, count = call["index"], call["k_cache"].shape[0] * call["k_cache"].shape[2]
    outside = index[(index < SKIPPED) | (index >= count)]
    if len(outside):
        yield "index", f"one with place {int(outside[0])} of {count}"
    kept = index[index != SKIPPED]
    if len(torch.unique(kept)) != len(kept):
        yield "index", "one with a place more than once"


OPERATORS = (
    Operator(
        schema="npu::npu_qkv_rms_norm_rope_cache(Tensor qkv, Tensor q_gamma, Tensor k_gamma, Tensor cos,"
        " Tensor sin, Tensor index, Tensor(a!) q_out, Tensor(b!) k_cache, Tensor(c!) v_cache,"
        " int[4] qkv_size, int[3] head_nums, *, Tensor? k_scale=None, Tensor? v_scale=None,"
        " Tensor? k_offset=None, Tensor? v_offset=None, float epsilon=9.9999999999999995e-07,"
        ' str cache_mode="PA_NZ", bool is_output_qkv=False) -> (Tensor, Tensor, Tensor)',
        products=(A2, A3),
        source=SOURCE,
        first=(
            Rule(
                "mode",
                'cache_mode is "PA_NZ", without scales: caches in int8 are not checked here',
                SOURCE,
                "leave it out",
                _mode,
            ),
            Rule(
                "dtype",
                "all are float16 or all bfloat16, and the index is int64",
                SOURCE,
                "cast the places to int64, and norms once, when weights are loaded",
                _types,
            ),
            Rule(
                "sizes",
                f"head_nums is [H, K, K] and qkv_size [S, T, H + 2 * K, {DIM}]",
                SOURCE,
                "norm and rotate heads of other sizes in a launch each",
                _sizes,
            ),
            Rule(
                "axes",
                "qkv is [S * T, (H + 2 * K) * D], q_out [S * T, H * D], the norms are [D], cos and sin"
                " [S * T, D], and there is a place for each row",
                TILING,
                "flatten the axes of tokens, and of heads",
                _axes,
            ),
            Rule(
                "blocks",
                f"both caches are [blocks, K * D / {TILE}, block, {TILE}], with the blocks of S sequences of"
                f" T tokens, and a block has a multiple of {BLOCK_STEP} places",
                TILING,
                "pass all rows as one sequence",
                _blocks,
            ),
            Rule("contiguous", "tensors are contiguous", SOURCE, "call contiguous() first", _contiguous),
        ),
        rules=(
            Rule(
                "places",
                "a place is in the cache and is written once, or is -1, which skips the token",
                SOURCE,
                "cut rows and places to the step's real tokens",
                _places,
            ),
        ),
        reference=_heads,
    ),
)
