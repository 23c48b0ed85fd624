"""Describe the Ascend products and the limits of their operators.

Sources of attention's limits: op-plugin, torch_npu.npu_fused_infer_attention_score and its v2, and
npu_kv_rmsnorm_rope_cache and npu_mla_prolog_v3 for latents; vllm-ascend, attention_v1.py, mla_v1.py and
_310p/attention; CANN, PagedAttentionOperation; CANN's error messages where these say nothing.

Sources of experts' limits: op-plugin, npu_moe_distribute_dispatch_v2 and npu_moe_distribute_combine_v2; CANN,
HCCL_BUFFSIZE, the size of each of a communicator's two buffers; op-plugin,
npu_grouped_matmul_swiglu_quant_v2, whose int8 weight lies in tiles of 32 columns, and npu_moe_gating_top_k.

Sources of the limits of joined heads: CANN, aclnnQkvRmsNormRopeCache, and its tiling.

Legend: H hidden size.

Where no source says what a product does, probes of verify_npu.sh test it and write the answers to a file for
each product and version of CANN; the product's limits follow the file from then on.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from borders.files import whole_file
from borders.numbers import integers
from devices.shapes import AttentionShape, IndexShape, dtype_name
from kv_cache.pages import Index

if TYPE_CHECKING:
    import torch


LATENT, LATENT_ROPE, LATENT_HEAD = 512, 64, 128
MOST_LATENT_HEADS = 128
MOST_LATENT_QUERIES = 16  # most tokens of a span in the space of latents
# npu_mla_prolog_v3: the hidden sizes, the widths of compressed queries, and those of a head without rope
PROLOG_HIDDEN = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)
PROLOG_QUERIES = (1536, 2048)
PROLOG_NOPE = (128, 192)


def check_latent(shape: AttentionShape, plain: str) -> None:
    """Raise ValueError for latents or heads that the operators do not take; `plain` is the fix."""
    latent, heads = shape.latent, shape.num_heads
    assert latent is not None, "other attention has other limits"
    sizes = shape.head_dim, latent.rope_dim, latent.nope_dim, latent.value_dim
    if latent.index is not None:
        _check_index(shape, latent.index, plain)
    elif sizes != (LATENT, LATENT_ROPE, LATENT_HEAD, LATENT_HEAD):
        raise ValueError(
            f"the model's kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim and v_head_dim are"
            f" {', '.join(map(str, sizes))}; fused attention takes {LATENT}, {LATENT_ROPE}, {LATENT_HEAD}"
            f" and {LATENT_HEAD}: choose another model, {plain}"
        )
    if heads > MOST_LATENT_HEADS or heads & (heads - 1):
        raise ValueError(
            f"each device has {heads} heads of the model; fused attention by latents takes a power of two"
            f" up to {MOST_LATENT_HEADS}: choose another parallel.tensor, {plain}"
        )


MOST_INDEX_HEADS, INDEX_HEAD = 64, 128
# npu_lightning_indexer: how many tokens a query may choose
CHOSEN = (range(1, 2048 + 1), range(3072, 8192 + 1, 1024))
MOST_INT8_CHOSEN = 2048  # npu_quant_lightning_indexer


def _check_index(shape: AttentionShape, index: IndexShape, plain: str) -> None:
    """Raise ValueError for latents or an indexer that sparse attention does not take.

    Queries lie in the space of latents, so that the other widths of a head are free.
    """
    assert shape.latent is not None, "an indexer chooses for latent attention"
    sizes = shape.head_dim, shape.latent.rope_dim
    if sizes != (LATENT, LATENT_ROPE):
        raise ValueError(
            f"the model's kv_lora_rank and qk_rope_head_dim are {sizes[0]} and {sizes[1]}; sparse attention"
            f" takes {LATENT} and {LATENT_ROPE}: choose another model, {plain}"
        )
    if index.head_dim != INDEX_HEAD or index.num_heads > MOST_INDEX_HEADS:
        raise ValueError(
            f"the model's index_n_heads and index_head_dim are {index.num_heads} and {index.head_dim}; the"
            f" indexer takes up to {MOST_INDEX_HEADS} of {INDEX_HEAD}: choose another model, {plain}"
        )
    if not any(index.top_k in each for each in CHOSEN):
        raise ValueError(
            f"the model's index_topk is {index.top_k}; the indexer chooses up to 2048, or 3072 to 8192 by"
            f" 1024: choose another model, {plain}"
        )
    if shape.int8_pages and index.top_k > MOST_INT8_CHOSEN:
        raise ValueError(
            f"the model's index_topk is {index.top_k}, and cache.dtype is int8, for which the indexer chooses"
            f" up to {MOST_INT8_CHOSEN}: set cache.dtype to auto, {plain}"
        )


def takes_prolog(
    dtype: torch.dtype,
    hidden_size: int,
    query_rank: int | None,
    nope_dim: int,
    *,
    takes_float32: bool = False,
) -> bool:
    """Whether one operator computes what precedes attention, for a shape that passes `check_latent`.

    That leaves `nope_dim` free where an indexer chooses what is read.
    """
    is_type = dtype_name(dtype) in ("bfloat16", *(["float32"] if takes_float32 else []))
    is_wide = hidden_size in PROLOG_HIDDEN and query_rank in PROLOG_QUERIES
    return is_type and is_wide and nope_dim in PROLOG_NOPE


MOST_GATED = 10240  # columns of gate and up together
GATED_STEP = 32  # these are a multiple of this


def fuses_gate(inner_size: int) -> bool:
    """Whether one launch multiplies, gates and quantises the rows of experts of this width on a rank."""
    columns = 2 * inner_size
    return columns <= MOST_GATED and columns % GATED_STEP == 0


# npu_qkv_rms_norm_rope_cache: the head dim, and what the places of a block are a multiple of
JOINED_HEAD, JOINED_BLOCK_STEP = 128, 32


MOST_GATING = 2048  # experts, of which each group's are rounded up to a multiple of 32
LEAST_IN_A_GROUP, IN_A_GROUP_STEP = 3, 32


def chooses_in_groups(num_experts: int, num_groups: int) -> bool:
    """Whether one launch chooses among experts of so many groups; without groups there is one of them."""
    held = num_experts // num_groups
    return held >= LEAST_IN_A_GROUP and _up(held, IN_A_GROUP_STEP) * num_groups <= MOST_GATING


BUFFER_NAME, BUFFER_MIB = "HCCL_BUFFSIZE", 200  # an environment variable, and its default
MOST_TOKENS = 64  # tokens of each rank; the probe times so many, and the operators take 256
HIDDEN_STEP = 32
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class _Limits:
    ranks: Set[int]
    hidden: range
    most_chosen: int
    most_experts: int
    most_held: int


_LIMITS: Mapping[str, _Limits] = {
    "910B": _Limits({*range(2, 9), 16, 32, 64, 128, 256}, range(32, 7168 + 1, HIDDEN_STEP), 16, 512, 24),
    "910C": _Limits(set(range(2, 768 + 1)), range(1024, 8192 + 1, HIDDEN_STEP), 12, 1024, 1024),
}
DISPATCHING = tuple(_LIMITS)  # names of products


def most_dispatched(
    product: str, ranks: int, num_experts: int, num_chosen: int, hidden: int, buffer_mib: int
) -> int:
    """Return the tokens that each rank may send in one launch; 0 if the operators do not take the model.

    `num_experts` counts the experts of all ranks, of which a token chooses `num_chosen`. The communicator's
    buffers hold the worst case: all tokens of all ranks on one of them, in 16 bits even if int8 is sent. On a
    910C they also hold what comes back, of a shared expert too, whether or not there is one.
    """
    limits, (held, rest) = _LIMITS.get(product), divmod(num_experts, ranks)
    if limits is None or ranks not in limits.ranks or rest:
        return 0
    if held > limits.most_held or num_experts > limits.most_experts:
        return 0
    if hidden not in limits.hidden or num_chosen > limits.most_chosen:
        return 0
    room = buffer_mib * _MIB // 2
    if product == "910B":
        most = (room - 2 * _MIB) // (ranks * min(held, num_chosen) * hidden * 2)
    else:
        arriving = _up(_up(2 * hidden, 32) + 64, 512) * held * ranks
        most = room // (arriving + (num_chosen + 1) * _up(2 * hidden, 512))
    return max(0, min(most, MOST_TOKENS))


def buffer_mib(environment: Mapping[str, str]) -> int:
    """Return HCCL's buffer size in MiB. Raises ValueError if the variable is no number of MiB."""
    said = environment.get(BUFFER_NAME, str(BUFFER_MIB))
    allowed = integers(1, 2**31 - 1, "MiB")
    if (size_mib := allowed.parse(said)) is None:
        raise ValueError(f"{BUFFER_NAME} is {said!r}; it must be {allowed}: unset it for {BUFFER_MIB}")
    return size_mib


def _up(size: int, step: int) -> int:
    return math.ceil(size / step) * step


FRACTAL_NZ = 29  # the format that the matrix unit reads: tiles of 16 x 16, columns of tiles first
MOST_SPANS = 4096  # spans in one call of a packed batch
MOST_HEADS, MOST_GROUP = 256, 64
PAGE_STEP, MOST_PAGE = 16, 1024
WIDE_PAGES = (128, 256, 384, 512)  # tokens of a page that a span of several such heads' queries reads
WIDE_HEAD = 256  # Qwen3-Next's and Qwen3.5's: single queries read them, and no packed batch does
MOST_ROW = 65535  # kv heads x head dim
MOST_KEYS = 262144  # keys that one query may read
ATB_PAGES = (128, 64)  # the first that fits is the best
ATB_DIM_STEP, ATB_MOST_DIM = 16, 256
ATB_MOST_PAGE = 128 * 128  # tokens x head dim
INT8_PAGE_STEP, MOST_INT8_PAGE = 32, 512  # tokens of a page in int8, which single queries read
# Longer spans gather keys and values: those of several requests, up to so many tokens at a time
MOST_GATHERED = 8192
INT4_GROUP = 32  # step of a group's size (npu_weight_quant_batchmatmul)
MOST_SIDE = 65535  # inputs or outputs of a product of weights in 4 or 8 bits
# Streams of captured graphs, one for each layer and one more for each graph: vllm-ascend's bound
MOST_STREAMS = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class AscendProduct:
    """One line of Ascend products, by its name in a recipe."""

    name: str
    chip: str  # device name of one of its chips
    chips: str  # pattern of the device names of all its chips
    dtypes: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16", "float16")
    head_dims: tuple[int, ...] = (64, 128)
    is_fused: bool = True  # it has npu_fused_infer_attention_score
    is_atb: bool = False  # it has ATB's paged attention instead
    swiglu_bytes: int = 1  # half a row of swiglu is a multiple of this (CANN, aclnnSwiGlu)
    clips_swiglu: bool = False  # it has npu_clipped_swiglu
    adds_to_tiles: bool = True  # addmm takes a weight in FRACTAL_NZ (op-plugin, AddmmKernelNpuOpApi.cpp)
    most_spans: int = MOST_SPANS  # most spans in one call
    takes_any_pages: bool = True  # packed spans of several queries read pages of any multiple of 16 to 1024
    is_mixed: bool = True  # one call takes single tokens and longer spans together
    has_int8: bool = True  # it multiplies int8 with a scale for each token
    has_static_int8: bool = True  # it multiplies int8 with one scale for all tokens
    turns_tiles: bool = False  # a weight in int8 in FRACTAL_NZ is one of [out, in], read transposed
    # Fused attention of single queries multiplies keys and values in int8 by a scale for each channel
    has_int8_pages: bool = False
    # Fused attention of single queries, and of one longer span, takes heads of 256; whether it is right is
    # answered by a probe, since no other engine calls it so
    reads_wide_heads: bool = False
    advances_states: bool = False  # it has the operators of the gated delta rule, for states in bfloat16
    has_int4: bool = False  # it multiplies weights of 4 bits by groups (npu_weight_quant_batchmatmul)
    has_latents: bool = False  # fused attention takes latents, and one operator writes them
    has_joined_heads: bool = False  # it has npu_qkv_rms_norm_rope_cache
    has_mixtures: bool = True  # it routes tokens to experts and multiplies each expert's rows in one launch
    gates_by_softmax: bool = True  # it has npu_moe_gating_top_k_softmax, whose experts lie in no groups
    # 16-bit weights are kept in FRACTAL_NZ (vllm-ascend #4960: graphs failed with them)
    tiles_weights: bool = False
    # No source states the following; the probes of verify_npu.sh answer them (devices/ascend_limits.py)
    keeps_nan: bool = True  # the maximum of a row with a NaN is NaN
    packs_float16: bool = True  # fused attention takes float16 in TND; vllm-ascend's mla_v1.py casts it
    # Fused attention of decodes is right without a mask, in captured steps too. vllm-ascend #12605 restored
    # the mask, because graphs of a model on a 910B gave wrong answers without it
    unmasks_decodes: bool = False
    # A band's pre_tokens counts a query's own key, as vllm-ascend passes windows; by the page it does not
    counts_own_key: bool = False
    # One launch of the products of queries, keys and values is right and faster than one product of all three
    # and copies of its parts. No other engine has it for attention
    groups_products: bool = False
    # npu_moe_gating_top_k_softmax_v2, which no other engine calls and no page describes, is right and faster
    # than npu_moe_gating_top_k_softmax and a division
    divides_gates: bool = False
    slices_tiles: bool = True  # slices of a cache in FRACTAL_NZ are views (vllm-ascend _310p/kv_block_zeroer)
    captures_draws: bool = False  # graphs capture the operators of a draw by top-k and top-p
    prefetches: bool = (
        False  # fetching a weight while attention runs is faster (off by default in vllm-ascend too)
    )
    # Captured steps are faster with a shared expert on a second stream (off by default in vllm-ascend, too)
    overlaps_experts: bool = False
    # One launch of a prompt's product and the ranks' sum of it is faster
    sums_products: bool = False
    # Attention to latents returns right sums of exponents, which its page excludes. The layouts in which they
    # are asked for are BNSD and BSND in vllm-ascend (context_parallel/mla_cp.py), and TND here, for which no
    # other engine vouches: run verify_npu.sh before serving latents with parallel.context above 1.
    sums_latents: bool = True
    joins_latents: bool = False  # one launch of everything before latent attention is right, and faster
    # One launch that splits the product of queries, keys and values, and norms and rotates their heads, is
    # right and faster than one for each. No other engine calls npu_qkv_rms_norm_rope_cache
    joins_heads: bool = False
    dispatches: bool = False  # sending tokens to the ranks of their experts is faster
    dispatches_beside_shared: bool = False  # also where parts of a shared expert are added up beside
    exact_angles: bool = True  # cosines of angles of 100,000 radians are right
    most_graphs: int | None = None  # sizes that may be captured; None: as many as its streams allow

    def check(self, shape: AttentionShape, *, takes_float32: bool = False) -> None:
        """Raise ValueError for a shape that this product's fused attention does not support."""
        self.check_dtype(shape.dtype)
        plain = "or set device.attention to reference"
        if not (self.is_fused or self.is_atb):
            fused = ", ".join(each.name for each in PRODUCTS if each.is_fused or each.is_atb)
            raise ValueError(
                f"device.product is {self.name}, for which there is no fused attention here, but for {fused}:"
                f" use one of these, {plain}"
            )
        if not (self.has_dtype(shape.dtype) or takes_float32):
            raise ValueError(
                f"model.dtype is {dtype_name(shape.dtype)}; fused attention of the {self.name} takes"
                f" {' or '.join(self.dtypes)}: set model.dtype to {self.dtypes[0]}, {plain}"
            )
        if self.is_fused and dtype_name(shape.dtype) == "float16" and not self.packs_float16:
            raise ValueError(
                "model.dtype is float16; verify_npu.sh found that fused attention of this"
                f" {self.name} is wrong in it: set model.dtype to bfloat16, {plain}"
            )
        if shape.score_cap is not None:
            raise ValueError(
                f"the model's attn_logit_softcapping is {shape.score_cap:g}; attention of the {self.name} has"
                f" no cap of scores: choose another model, {plain}"
            )
        if shape.has_sinks and self.is_atb:
            raise ValueError(
                f"the model has attention sinks; attention of the {self.name} takes none: choose another"
                f" model, {plain}"
            )
        if shape.int8_pages:
            self._check_int8_pages(shape, plain, takes_float32=takes_float32)
        if shape.latent is not None:
            self._check_latent(shape, plain)
        elif self.is_atb:
            self._check_atb(shape, plain)
        else:
            self._check_fused(shape, plain)

    def _check_int8_pages(self, shape: AttentionShape, plain: str, *, takes_float32: bool) -> None:
        if not self.has_int8_pages:
            some = ", ".join(each.name for each in PRODUCTS if each.has_int8_pages)
            raise ValueError(
                f"cache.dtype is int8; attention of the {self.name} reads no keys and values in int8, and"
                f" that of {some} does: use one of these, {plain}"
            )
        windows = [each for each in shape.windows if each is not None]
        for has, what in (
            (windows, f"a sliding window of {windows[0]}" if windows else ""),
            (shape.has_sinks, "attention sinks"),
        ):
            if has:
                raise ValueError(
                    f"the model has {what}, and cache.dtype is int8; attention of the {self.name} does not"
                    f" take both: set cache.dtype to auto, {plain}"
                )
        name = dtype_name(shape.dtype)
        if name != "bfloat16" and not (takes_float32 and name == "float32"):
            raise ValueError(
                f"model.dtype is {name}, and cache.dtype is int8; attention of the {self.name} reads int8"
                f" only for queries in bfloat16: set model.dtype to bfloat16, {plain}"
            )
        if shape.latent is not None:
            return  # Operators of latents have limits of their own.
        if shape.page_size % INT8_PAGE_STEP or not 0 < shape.page_size <= MOST_INT8_PAGE:
            raise ValueError(
                f"cache.page_size is {shape.page_size}, and cache.dtype is int8; attention of the {self.name}"
                f" takes a multiple of {INT8_PAGE_STEP} to {MOST_INT8_PAGE}: set 128, {plain}"
            )

    def has_dtype(self, dtype: torch.dtype) -> bool:
        """Whether the operators of this product take 16-bit numbers of this type."""
        return dtype_name(dtype) in self.dtypes

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise ValueError for a type in which this product cannot compute, whatever the attention."""
        name = dtype_name(dtype)
        if name not in (*self.dtypes, "float32"):
            raise ValueError(
                f"model.dtype is {name}; the {self.name} computes in {', '.join(self.dtypes)} or float32:"
                f" set model.dtype to {self.dtypes[0]}"
            )

    def _check_atb(self, shape: AttentionShape, plain: str) -> None:
        dim, size = shape.head_dim, shape.page_size
        if dim % ATB_DIM_STEP or not 0 < dim <= ATB_MOST_DIM:
            raise ValueError(
                f"the model's head_dim is {dim}; attention of the {self.name} takes a multiple of"
                f" {ATB_DIM_STEP} to {ATB_MOST_DIM}: choose another model, {plain}"
            )
        sizes = [each for each in ATB_PAGES if each * dim <= ATB_MOST_PAGE]
        if size not in sizes:
            raise ValueError(
                f"cache.page_size is {size}; attention of the {self.name} takes"
                f" {' or '.join(map(str, sizes))} with heads of {dim}: set {sizes[0]}, {plain}"
            )
        for layer, window in enumerate(shape.windows):
            if window is not None:
                raise ValueError(
                    f"layer {layer} of the model has a sliding window of {window}; attention of the"
                    f" {self.name} has none: choose another model, {plain}"
                )

    def _check_latent(self, shape: AttentionShape, plain: str) -> None:
        if not self.has_latents:
            some = ", ".join(each.name for each in PRODUCTS if each.has_latents)
            raise ValueError(
                f"the model has latent attention, whose operators the {self.name} lacks, and {some} have: use"
                f" one of these, {plain}"
            )
        check_latent(shape, plain)
        self._check_page_size(shape, plain)

    def _check_fused(self, shape: AttentionShape, plain: str) -> None:
        if shape.head_dim == WIDE_HEAD and self.reads_wide_heads:
            self._check_wide(shape, plain)
        elif shape.head_dim not in self.head_dims:
            allowed = " or ".join(map(str, self.head_dims))
            raise ValueError(
                f"the model's head_dim is {shape.head_dim}; fused attention of the {self.name} takes"
                f" {allowed}: choose another model, {plain}"
            )
        group = shape.num_heads // shape.num_kv_heads
        if shape.num_heads > MOST_HEADS or group > MOST_GROUP:
            raise ValueError(
                f"the model has {shape.num_heads} query heads over {shape.num_kv_heads}; fused attention"
                f" takes {MOST_HEADS}, and {MOST_GROUP} a key and value head: choose another model, {plain}"
            )
        if shape.num_kv_heads * shape.head_dim > MOST_ROW:
            raise ValueError(
                f"the model's key and value heads are {shape.num_kv_heads} x {shape.head_dim} wide; fused"
                f" attention takes {MOST_ROW} together: choose another model, {plain}"
            )
        self._check_page_size(shape, plain)

    def _check_wide(self, shape: AttentionShape, plain: str) -> None:
        windows = [each for each in shape.windows if each is not None]
        for has, what in (
            (windows, f"a sliding window of {windows[0]}" if windows else ""),
            (shape.has_sinks, "attention sinks"),
            (shape.int8_pages, "a cache in int8"),
        ):
            if has:
                raise ValueError(
                    f"the model's head_dim is {WIDE_HEAD}, and it has {what}; fused attention of the"
                    f" {self.name} does not take both: choose another model, {plain}"
                )
        if shape.page_size not in WIDE_PAGES:
            raise ValueError(
                f"cache.page_size is {shape.page_size}; fused attention of the {self.name} takes"
                f" {', '.join(map(str, WIDE_PAGES))} with heads of {WIDE_HEAD}: set 128, {plain}"
            )

    def _check_page_size(self, shape: AttentionShape, plain: str) -> None:
        if not self.takes_any_pages and shape.page_size not in WIDE_PAGES:
            raise ValueError(
                f"cache.page_size is {shape.page_size}; fused attention of the {self.name} takes"
                f" {', '.join(map(str, WIDE_PAGES))}, for each rank's part where pages are divided: set 128,"
                f" {plain}"
            )
        if shape.page_size % PAGE_STEP or not PAGE_STEP <= shape.page_size <= MOST_PAGE:
            raise ValueError(
                f"cache.page_size is {shape.page_size}; fused attention takes a multiple of {PAGE_STEP} to"
                f" {MOST_PAGE}: set 128, {plain}"
            )

    def check_longest(self, num_tokens: int) -> None:
        """Raise ValueError for requests with more keys than a decode may read; the last token is no key."""
        if self.is_fused and num_tokens > MOST_KEYS + 1:
            raise ValueError(
                f"a request may have {num_tokens} tokens; fused attention of the {self.name} reads"
                f" {MOST_KEYS} keys: set scheduler.max_request_tokens to {MOST_KEYS + 1}, or set"
                " device.attention to reference"
            )

    def check_int8(self, dtype: torch.dtype, forms: Collection[str], largest: int) -> None:
        """Raise ValueError if a model of this type cannot run in W8A8 (op-plugin, npu_quant_matmul).

        `forms` are those of its linears in int8; a "static" one has one scale for all of its inputs, and of a
        "w8a16" one, which npu_weight_quant_batchmatmul multiplies where there is one, the weight alone is in
        int8. They have at most `largest` inputs or outputs.
        """
        multiplied = set(forms) - {"w8a16"}
        by_token = multiplied - {"static"}
        if by_token and not self.has_int8:
            some = ", ".join(each.name for each in PRODUCTS if each.has_int8)
            static = ", a checkpoint of msModelSlim in static W8A8," if self.has_static_int8 else ""
            raise ValueError(
                f"the model is in W8A8; the {self.name} takes no scale for each token, {some} do: use one of"
                f" these,{static} or the original checkpoint with model.quantization: auto"
            )
        if multiplied and not self.has_static_int8:
            some = ", ".join(each.name for each in PRODUCTS if each.has_static_int8)
            raise ValueError(
                f"the model is in static W8A8; the {self.name} has no products in int8, {some} do: use one of"
                " these, or the original checkpoint"
            )
        if not multiplied and not self.has_int4:  # weights are widened for plain products
            return
        if not self.has_dtype(dtype):
            some = " or ".join(self.dtypes)
            raise ValueError(
                f"model.dtype is {dtype_name(dtype)}; products of int8 give {some}: set model.dtype to"
                f" {self.dtypes[0]}"
            )
        if largest > MOST_SIDE:
            raise ValueError(
                f"a linear has a side of {largest}; products of int8 of the {self.name} take up to"
                f" {MOST_SIDE}: use more tensor ranks, or the original checkpoint with model.quantization:"
                " auto"
            )

    def check_int4(
        self, dtype: torch.dtype, group_size: int | None, largest: int, of_experts: Sequence[int] = ()
    ) -> None:
        """Raise ValueError if a model of this type cannot run in W4A16.

        Its linears have at most `largest` inputs or outputs (op-plugin, npu_weight_quant_batchmatmul), and
        those of experts have the inputs `of_experts`, which groups must divide (npu_grouped_matmul).
        """
        fix = "leave model.quantization out, and the weights are read into the model's type"
        if not self.has_int4:
            some = ", ".join(each.name for each in PRODUCTS if each.has_int4)
            raise ValueError(
                f"model.quantization is w4a16; the {self.name} multiplies no weights of 4 bits, {some} do:"
                f" use one of these, or {fix}"
            )
        if not self.has_dtype(dtype):
            raise ValueError(
                f"model.dtype is {dtype_name(dtype)}; products in 4 bits take bfloat16 or float16: set"
                " model.dtype to float16"
            )
        if group_size is not None and group_size % INT4_GROUP:
            raise ValueError(
                f"{group_size} inputs of a linear share a scale; products in 4 bits of the {self.name} take a"
                f" multiple of {INT4_GROUP}: {fix}"
            )
        for inputs in of_experts:
            if group_size is not None and inputs % group_size:
                raise ValueError(
                    f"experts have linears of {inputs} inputs, of which {group_size} share a scale; their"
                    f" products in 4 bits on the {self.name} take whole groups alone: {fix}"
                )
        if largest > MOST_SIDE:
            raise ValueError(
                f"a linear has a side of {largest}; products in 4 bits of the {self.name} take up to"
                f" {MOST_SIDE}: use more tensor ranks, or {fix}"
            )

    def graph_sizes(
        self, sizes: Sequence[int], num_layers: int, page_size: int, beside: int = 0, *, joins: bool = False
    ) -> list[int]:
        """Return which of these numbers of rows are captured, if the device may hold fewer graphs.

        Every layer of every graph takes a stream, and so does each of the graphs that are held `beside` them,
        and the one that `joins` the logits of several ranks. As vllm-ascend's update_aclgraph_sizes does,
        this takes an even sample, but only of the sizes up to a page: larger ones are all needed, since a
        step is padded by at most a page. Raises ValueError if these are too many.
        """
        beside_layers = 1 + self.captures_draws + self.prefetches + self.overlaps_experts + joins
        most = MOST_STREAMS // (num_layers + beside_layers)
        if self.most_graphs is not None:
            # The join of each size is a graph of its own, and so are its draws
            most = min(most, self.most_graphs // (1 + joins + self.captures_draws))
        most -= beside
        if len(sizes) <= most:
            return list(sizes)
        small = [size for size in sizes if size <= page_size]
        large = [size for size in sizes if size > page_size]
        if len(large) >= most:
            raise ValueError(
                f"device.graphs asks for {len(sizes)} graphs of {num_layers} layers; the {self.name} holds"
                f" {most}: set it to at most {most * page_size}, or raise cache.page_size"
            )
        chosen = np.linspace(len(small) - 1, 0, most - len(large)).round().astype(int)
        return sorted({small[at] for at in chosen}) + large

    def cuts(self, lens: Index) -> Iterator[tuple[int, int]]:
        """Yield the spans [first, last) of each call, in as few calls as the product allows."""
        edges = {0, len(lens), *range(0, len(lens), self.most_spans)}
        if not self.is_mixed:
            edges |= set((np.flatnonzero(np.diff(lens == 1)) + 1).tolist())
        ordered = sorted(edges)
        yield from pairwise(ordered)


PRODUCTS = (
    AscendProduct(
        name="310P",
        chip="Ascend310P3",
        chips=r"Ascend310P\d",
        dtypes=("float16",),
        is_fused=False,
        is_atb=True,
        swiglu_bytes=64,
        adds_to_tiles=False,
        tiles_weights=True,  # vllm-ascend utils.py: maybe_trans_nz
        has_int8=False,
        turns_tiles=True,  # op-plugin, npu_quant_matmul: x2 is transposed, and then cast
        has_mixtures=False,
        most_spans=2000,
    ),
    AscendProduct(
        name="910B",
        chip="Ascend910B1",
        chips=r"Ascend910B\d",
        clips_swiglu=True,
        captures_draws=True,
        has_latents=True,
        has_int8_pages=True,
        reads_wide_heads=True,
        advances_states=True,
        has_joined_heads=True,
        has_int4=True,
    ),
    AscendProduct(
        name="910C",
        chip="Ascend910_9391",
        chips=r"Ascend910_93\d\d",
        clips_swiglu=True,
        captures_draws=True,
        has_latents=True,
        has_int8_pages=True,
        reads_wide_heads=True,
        advances_states=True,
        has_joined_heads=True,
        has_int4=True,
    ),
    AscendProduct(
        name="950",
        chip="Ascend950",
        chips=r"Ascend950",
        is_mixed=False,
        # The page of npu_fused_infer_attention_score allows other pages of packed queries for A2 and A3 alone
        takes_any_pages=False,
        # The page of npu_moe_gating_top_k_softmax does not list it. vllm-ascend's adaptor for it (A5, in
        # device_op.py) calls npu_moe_gating_top_k, npu_moe_init_routing_v2 and npu_moe_token_unpermute
        gates_by_softmax=False,
        has_int8=False,  # the pages of npu_quant_matmul and npu_dynamic_quant do not list it
        has_static_int8=False,
        most_graphs=4,  # vllm-ascend #10567: its driver holds no more
    ),
    AscendProduct(
        name="910",
        chip="Ascend910A",
        chips=r"Ascend910(A|B|ProA|ProB|PremiumA)?$",
        dtypes=("float16",),
        is_fused=False,
        has_int8=False,
        has_static_int8=False,
        has_mixtures=False,
    ),
)


def product(name: str | None, chip: str) -> AscendProduct:
    """Return the product that a recipe names, or otherwise the one of this chip."""
    for each in PRODUCTS:
        if each.name == name or (name is None and re.match(each.chips, chip)):
            return each
    known = ", ".join(each.name for each in PRODUCTS)
    raise ValueError(
        f"the device calls itself {chip!r}, which is no product known here: set device.product to the nearest"
        f" of {known}"
    )


log = logging.getLogger(__name__)

PROBED = (
    *(
        "keeps_nan",
        "packs_float16",
        "reads_wide_heads",
        "tiles_weights",
        "slices_tiles",
        "captures_draws",
        "prefetches",
    ),
    *("overlaps_experts", "exact_angles", "groups_products", "divides_gates", "joins_heads"),
    *("unmasks_decodes", "counts_own_key", "sums_latents", "joins_latents", "sums_products", "dispatches"),
    "dispatches_beside_shared",
)
assert {each.name for each in fields(AscendProduct)} >= set(PROBED), "the answers are facts of a product"
ASKED_OF = ("torch_npu", "chip", "driver")  # what a file of answers says of the device beside them
# Answers in files of earlier versions that no longer count, each with the reason
WITHDRAWN = {"bares_decodes": "it was asked outside of graphs alone, where wrong answers were not seen"}


def answers_file(folder: Path, name: str, cann: str, *, virtual: bool) -> Path:
    """Return the path of the answers for a product and a version of CANN.

    Those of a stand-in are kept apart.
    """
    return folder / f"{'virtual-' * virtual}{name}-cann-{cann or 'unknown'}.json"


def write_answers(path: Path, found: Mapping[str, bool], **asked_of: str) -> None:
    """Write the answers of the probes, and of what they were asked, by the names of ASKED_OF."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(json.dumps({**asked_of, **found}, indent=2) + "\n")


def answered(
    product: AscendProduct, path: Path, *, torch_npu: str = "", virtual: bool = False
) -> AscendProduct:
    """Return the product with the answers of the file, which are logged.

    It is unchanged if there is no such file, which is logged too, but for a stand-in. Answers that were asked
    of another version of torch_npu are followed with a warning.
    """
    if not path.is_file():
        if not virtual:
            log.info(
                "device: there are no answers of verify_npu.sh in %s: limits are those that are documented:"
                " run `bash scripts/verify_npu.sh`",
                path,
            )
        return product
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} holds no JSON ({error}): {AGAIN}") from error
    asked_of = {name: found.pop(name) for name in ASKED_OF if isinstance(found, dict) and name in found}
    if not isinstance(found, dict) or not all(isinstance(each, bool) for each in found.values()):
        raise ValueError(f"{path} holds no answers of yes and no by their names: {AGAIN}")
    if torch_npu and asked_of.get("torch_npu", torch_npu) != torch_npu:
        log.warning(
            "device: the answers in %s were asked of torch_npu %s, and this is %s: run"
            " `bash scripts/verify_npu.sh` again",
            *(path, asked_of["torch_npu"], torch_npu),
        )
    for name in sorted(WITHDRAWN.keys() & found.keys()):
        log.warning(
            "device: the answer %s in %s no longer counts, since %s: run `bash scripts/verify_npu.sh` again",
            name,
            path,
            WITHDRAWN[name],
        )
        del found[name]
    if unknown := sorted(set(found) - set(PROBED)):
        raise ValueError(f"{path} answers {', '.join(unknown)}, which nothing asks: {AGAIN}")
    changed = [
        f"{name} {'yes' if found[name] else 'no'} (was {'yes' if getattr(product, name) else 'no'})"
        for name in found
        if found[name] != getattr(product, name)
    ]
    log.info("device: follows the answers of verify_npu.sh in %s: %s", path, "; ".join(changed) or "as known")
    if not found.get("exact_angles", True):
        log.warning("device: cosines of large angles are not exact here, which dynamic rope computes")
    return replace(product, **found)


AGAIN = "remove it, or run `bash scripts/verify_npu.sh` again"
