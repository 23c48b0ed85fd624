"""Override the decoder's operators that Ascend's fused operators compute.

npu_top_k_top_p is not used: it drops some of several equal logits, takes at most 1024 for k and has no min_p.
models/ops/drawing.py keeps all equal logits, so that a draw does not depend on how a device sorts;
one sort serves both of its thresholds.

Legend: T tokens of the step, H query heads, K kv heads, D head dim; of latent attention, L latent, N the
  part of a head's query without position (nope), V value of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional as F

from attention.latent import LatentLinears, LatentUp
from devices.ascend_limits import (
    FRACTAL_NZ,
    JOINED_HEAD,
    AscendProduct,
    chooses_in_groups,
    most_dispatched,
)
from devices.torch_npu_releases import public
from kv_cache.device.transfer import Tensors
from models.config import MixtureConfig
from models.ops.npu.dispatch import Dispatch
from models.ops.npu.grouped import joined, mixture, scaled_by_width
from models.ops.npu.int4_ops import Int4Check, Int4Ops
from models.ops.npu.joined_heads import JoinedHeads
from models.ops.npu.static_ops import StaticOps
from models.ops.operands import ExpertKind, Int8Rows, UnpackedLinear
from models.ops.reference import Ops, Packed, Widths
from models.packing import IN_A_WORD
from models.parallel.group import Group
from models.quantization import Stored

FUSED_ROTARY_DIMS = (64, 128)  # head dims that npu_apply_rotary_pos_emb takes
# Most bytes of a weight to prefetch, as in vllm-ascend's weight_prefetch: more would evict other data from
# the cache
PREFETCHED_BYTES = 18 * 2**20
# npu_mm_all_reduce_base is documented for prompts, not for decodes, on the fully linked devices of a machine
SUMMED_RANKS, LEAST_SUMMED_ROWS = (2, 4, 8), 256
FUSED_ROTARY_BYTES = 180 * 1024  # its vector cores hold a token's heads in float32, five times
# Limits of npu_transpose_batchmatmul: the most heads x width of a row, the step of a weight's two sides
MOST_PRODUCT_ROW, PRODUCT_STEP = 65535, 16


def chip() -> str:
    """Return the name of the first NPU, such as Ascend910B3. Raises ValueError if torch_npu finds none."""
    if not torch_npu.npu.is_available():
        raise ValueError(
            "torch_npu finds no NPU; see `npu-smi info`, and whether CANN's set_env.sh has been sourced"
        )
    return str(torch_npu.npu.get_device_name(0))


def num_npus() -> int:
    """Return the number of NPUs that this process sees."""
    return int(torch_npu.npu.device_count())


def cann() -> str:
    """Return the version of CANN, such as 9.0.0."""
    return str(torch_npu.npu.utils.get_cann_version())


def release() -> str:
    """Return the version of torch_npu, such as 2.10.0.post4."""
    return public(torch_npu.__version__)


def use_compiled_kernels() -> None:
    """Run CANN's precompiled kernels.

    Before the 910B, torch_npu otherwise compiles operators when they are called, which no graph can capture
    (torch_npu, framework/interface/EnvVariables.cpp).
    """
    torch_npu.npu.set_compile_mode(jit_compile=False)


class NpuLatentUp(LatentUp):
    """The projection by heads, without copies, for queries and results with the axes of attention."""

    def absorbed(self, query: Tensor) -> Tensor:
        """Project queries [T, H, N] of expanded keys to queries of latents [T, H, L]."""
        return self._by_heads(query, self.keys)

    def raised(self, x: Tensor) -> Tensor:
        """Project weighted sums of latents [T, H, L] to those of values [T, H, V]."""
        return self._by_heads(x, self.values)

    def _by_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        is_even = not any(size % PRODUCT_STEP for size in weight.shape[1:])
        if x.shape[1] * x.shape[2] > MOST_PRODUCT_ROW or not is_even:
            return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
        made: Tensor = torch_npu.npu_transpose_batchmatmul(x, weight, perm_x1=(1, 0, 2), perm_y=(1, 0, 2))
        return made


class PlainNpuOps(Int4Check, Ops):
    """Plain torch on an NPU, within the limits of its product: all that the first 910 has."""

    def __init__(self, product: AscendProduct) -> None:
        self.product, self.captures_draws = product, product.captures_draws

    def check_int8(self, dtype: torch.dtype, forms: Collection[Stored], largest: int) -> None:
        """Raise ValueError if this product cannot multiply linears of these forms; see Ops.check_int8."""
        self.product.check_int8(dtype, forms, largest)

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Compute Ops.greedy; if the maximum does not keep a NaN, each logit is checked."""
        tokens, is_finite = super().greedy(logits)
        return tokens, is_finite if self.product.keeps_nan else is_finite & ~logits.isnan().any(-1)

    def draw(self, logits: Tensor, best: Tensor, otherwise: Tensor, limits: Tensors) -> Tensor:
        """Compute Ops.draw; if `best` may hide a NaN, a row that has been given no token stays without."""
        drawn = super().draw(logits, best, otherwise, limits)
        return drawn if self.product.keeps_nan else torch.where(otherwise < 0, otherwise, drawn)


class NpuOps(Int4Ops, StaticOps, PlainNpuOps):
    """Linear, also in int8, norm, rotary and swiglu on an NPU."""

    def __init__(self, product: AscendProduct, *, takes_float32: bool = False) -> None:
        super().__init__(product)
        self._takes_float32 = takes_float32
        self.divides_rows = not product.sums_products  # which is faster, as a device has said
        torch_npu.npu.config.allow_internal_format = True  # otherwise a format cast has no effect
        self._no_offsets: dict[tuple[int, ...], Tensor] = {}  # shared by all layers of experts in 4 bits
        self._joined_heads: dict[tuple[Any, ...], JoinedHeads] = {}  # shared by all layers of the same heads
        self._prefetches = torch_npu.npu.Stream() if product.prefetches else None
        self._beside = torch_npu.npu.Stream() if product.overlaps_experts else None

    def _takes(self, dtype: torch.dtype) -> bool:
        """Whether operators that are for 16 bits alone take numbers of this type."""
        return self._takes_float32 or self.product.has_dtype(dtype)

    @property
    def _groups_products(self) -> bool:
        return self.product.is_fused and self.product.groups_products

    def pack(self, weight: Tensor, bias: Tensor | None) -> Packed:
        """Convert the weight to the format of the matrix unit, if that is faster on this product."""
        return in_tiles(weight) if self.product.tiles_weights else weight, bias

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """Map [T, in] to [T, out]."""
        weight, bias = packed
        if bias is None or self.product.adds_to_tiles:
            return super().linear(x, packed)
        return super().linear(x, (weight, None)).add_(bias)

    def linear_summed(self, x: Tensor, packed: Packed, group: Group) -> Tensor:
        """Compute Ops.linear_summed; a prompt's rows take one launch, if that is faster."""
        weight, bias = packed
        takes = self.product.has_dtype(x.dtype) and bias is None and group.size in SUMMED_RANKS
        takes = takes and self.product.sums_products and len(x) >= LEAST_SUMMED_ROWS
        if not takes or not group.is_on_one_machine:
            return super().linear_summed(x, packed, group)
        y: Tensor = torch_npu.npu_mm_all_reduce_base(x.contiguous(), weight.t(), group.hccl_name)
        return y

    def pack_split(
        self, weight: Tensor, bias: Tensor | None, widths: Widths, in_parts: bool = False
    ) -> Packed:
        """Return a weight [in, width] for each width, if npu_grouped_matmul or `join_latents` takes them."""
        if not (in_parts or self._groups_products):
            return super().pack_split(weight, bias, widths)
        wide = weight.dtype in (torch.bfloat16, torch.float32)
        biases = None if bias is None else [each.float() if wide else each for each in bias.split(widths)]
        parts = [self.pack(each.t().contiguous(), None)[0] for each in weight.split(widths)]
        return parts, biases

    def linear_split(self, x: Tensor, packed: Packed, widths: Widths) -> tuple[Tensor, ...]:
        """Multiply in one launch, and split the product in another unless the product groups them."""
        weights, biases = packed
        if isinstance(weights, Tensor):
            return self.split(self.linear(x, packed), widths)
        if not self._groups_products:
            assert biases is None, "the linears before latent attention have none"
            return tuple(torch.mm(x, weight) for weight in weights)
        sides = [x] * len(weights)
        return tuple(torch_npu.npu_grouped_matmul(sides, weights, bias=biases, split_item=0, group_type=-1))

    def split(self, y: Tensor, widths: Widths) -> tuple[Tensor, ...]:
        """Split in one launch into contiguous parts, which the operators read; parts of one row are views.

        By CANN's page (aclnnSplitWithSize) the 310P has no operator for it.
        """
        if len(y) == 1 or not self.product.is_fused:
            return super().split(y, widths)
        parts = [y.new_empty(len(y), width) for width in widths]
        torch.split_with_sizes_copy(y, widths, dim=-1, out=parts)
        return tuple(parts)

    def join_heads(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> JoinedHeads | None:
        """Return what splits, norms and rotates in one launch, if that is right and faster here."""
        joins = self.product.has_joined_heads and self.product.joins_heads
        if not joins or head_dim != JOINED_HEAD or not self._takes(dtype):
            return None
        heads = num_heads, num_kv_heads, head_dim, dtype, device
        if heads not in self._joined_heads:
            self._joined_heads[heads] = JoinedHeads(*heads)
        return self._joined_heads[heads]

    def pack_int8(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Packed:
        """Pack an int8 weight [out, in] with its scale [out], transposed to [in, out]."""
        turned = weight.t().contiguous()
        bias = None if bias is None else bias.float()
        return torch_npu.npu_format_cast(turned, FRACTAL_NZ), scale.contiguous(), bias

    def quantized(self, x: Tensor | Int8Rows) -> Int8Rows:
        """Return the rows [T, n] that linears in int8 multiply."""
        if isinstance(x, Int8Rows):
            return x
        rows, scale = torch_npu.npu_dynamic_quant(x)
        return Int8Rows(rows, scale, x.dtype)

    def linear_int8(self, x: Tensor | Int8Rows, packed: Packed) -> Tensor:
        """Map [T, in] to [T, out]; the operators take only bfloat16 and float16."""
        weight, scale, bias = packed
        x = self.quantized(x)
        y: Tensor = torch_npu.npu_quant_matmul(
            x.rows, weight, scale, pertoken_scale=x.scale, bias=bias, output_dtype=x.dtype
        )
        return y

    def pack_int8_split(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, widths: Widths, in_parts: bool = False
    ) -> Packed:
        """Return one packed weight, or one for each width if `join_latents` reads them or there are two.

        Two products are as many launches as one and a split.
        """
        if not in_parts and len(widths) > 2:
            return self.pack_int8(weight, scale, bias)
        biases = [None] * len(widths) if bias is None else bias.split(widths)
        return [self.pack_int8(*part) for part in zip(weight.split(widths), scale.split(widths), biases)]

    def linear_int8_split(self, x: Tensor | Int8Rows, packed: Packed, widths: Widths) -> tuple[Tensor, ...]:
        """Return a tensor for each width, of one product or of one for each.

        npu_grouped_matmul, which could make them all, gives bfloat16 only with scales in bfloat16.
        """
        x = self.quantized(x)
        if isinstance(packed, list):
            return tuple(self.linear_int8(x, part) for part in packed)
        return self.split(self.linear_int8(x, packed), widths)

    def pack_w8a16(self, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Packed:
        """Return the weight [in, out], with scales in the type of the rows, as the operator takes them."""
        if not self.product.has_int4:
            return super().pack_w8a16(weight, scale, bias, dtype)
        bias = bias.float() if bias is not None and dtype == torch.bfloat16 else bias
        return weight.t().contiguous(), scale.to(dtype).contiguous(), bias

    def linear_w8a16(self, x: Tensor, packed: Packed) -> Tensor:
        """Map [T, in] to [T, out] in one launch, if the product has the operator."""
        if not self.product.has_int4:
            return super().linear_w8a16(x, packed)
        weight, scale, bias = packed
        y: Tensor = torch_npu.npu_weight_quant_batchmatmul(x, weight, scale, bias=bias)
        return y

    def add_rms_norm_int8(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Int8Rows, Tensor]:
        """Return (rms_norm(x + residual) in int8, x + residual)."""
        rows, _, total, scale, _ = torch_npu.npu_add_rms_norm_dynamic_quant(
            x, residual, weight, epsilon=eps, output_mask=[True, False]
        )
        return Int8Rows(rows, scale, x.dtype), total

    def mlp_int8(self, x: Tensor | Int8Rows, gate_up: Packed, down: Packed) -> Tensor:
        """Map [T, hidden] to [T, hidden]; the first product stays in int32 and is scaled after it."""
        weight, scale, bias = gate_up
        if bias is not None:
            return super().mlp_int8(x, gate_up, down)
        x = self.quantized(x)
        product = torch_npu.npu_quant_matmul(x.rows, weight, scale, output_dtype=torch.int32)
        rows, row_scale = torch_npu.npu_dequant_swiglu_quant(
            product,
            weight_scale=scale[None],
            activation_scale=x.scale[:, None],
            activate_left=True,
            quant_mode=1,
        )
        return self.linear_int8(Int8Rows(rows, row_scale, x.dtype), down)

    def prefetch(self, packed: Packed, after: Tensor) -> None:
        """Prefetch in captured steps, on a stream beside the one that computes, as sglang's cmo.py does."""
        if self._prefetches is not None and torch_npu.npu.is_current_stream_capturing():
            prefetch(packed[0], after, self._prefetches)

    def await_prefetch(self) -> None:
        """Wait for the prefetch, because a capture ends only when each of its streams has been waited for."""
        if self._prefetches is not None and torch_npu.npu.is_current_stream_capturing():
            torch_npu.npu.current_stream().wait_stream(self._prefetches)

    def begin_beside(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Begin in captured steps, on a second stream, after the work queued on the current one.

        The current stream waits for it when the result is asked for, while all that it reads is still held.
        """
        if self._beside is None or not torch_npu.npu.is_current_stream_capturing():
            return compute
        current = torch_npu.npu.current_stream()
        self._beside.wait_stream(current)
        with torch_npu.npu.stream(self._beside):
            made = compute()

        def awaited() -> Tensor:
            current.wait_stream(self._beside)
            return made

        return awaited

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise over the last dimension, in float32; `weight` [x.shape[-1]]. Any leading dimensions."""
        normed: Tensor = torch_npu.npu_rms_norm(x.contiguous(), weight, eps)[0]
        return normed

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual)."""
        normed, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, eps)
        return normed, total

    def add_rms_norm_wide(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute Ops.add_rms_norm_wide; where mixtures are fused, one launch gives both types."""
        if not (self.product.has_mixtures and self._takes(x.dtype)):
            return super().add_rms_norm_wide(x, residual, weight, eps)
        wide, normed, _, total = torch_npu.npu_add_rms_norm_cast(x, residual, weight, eps)
        return normed, wide, total

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query [T, H, D] and key [T, K, D], in place if contiguous; cos and sin [T, D]."""
        (_, heads, dim), kv_heads = query.shape, key.shape[1]
        turned = dim in FUSED_ROTARY_DIMS and 5 * 4 * dim * (heads + kv_heads) <= FUSED_ROTARY_BYTES
        if not (turned or self._multiplies_angles):
            return super().rotary(query, key, cos, sin)
        cos, sin = cos[:, None], sin[:, None]
        if turned:
            query, key = torch_npu.npu_apply_rotary_pos_emb(
                query.contiguous(), key.contiguous(), cos, sin, layout="TND", rotary_mode="half"
            )
            return query, key
        return torch_npu.npu_rotary_mul(query, cos, sin), torch_npu.npu_rotary_mul(key, cos, sin)

    def route(
        self,
        x: Tensor,
        router: Tensor,
        correction: Tensor | None,
        config: MixtureConfig,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute Ops.route, with int32 experts."""
        if not self.product.has_mixtures:
            return super().route(x, router, correction, config, bias)
        by_softmax = config.is_plain and self.product.gates_by_softmax
        if not (by_softmax or chooses_in_groups(config.num_experts, config.num_groups)):
            weights, chosen = super().route(x, router, correction, config, bias)
            return weights, chosen.int()
        scores = F.linear(x.float(), router, bias)
        if by_softmax and self.product.divides_gates:
            # A softmax over the best alone gives weights that add up to one
            weights, chosen, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(
                scores, k=config.num_chosen, renorm=int(config.normalizes)
            )
            return weights if config.scale == 1 else weights * config.scale, chosen
        if config.is_plain:
            if by_softmax:
                weights, chosen, _ = torch_npu.npu_moe_gating_top_k_softmax(scores, k=config.num_chosen)
            else:
                weights, chosen, _ = torch_npu.npu_moe_gating_top_k(scores, config.num_chosen)
            return self._shares(weights, config), chosen
        # The operator divides by the sum of the weights for these scores, and only then
        divides = config.scores == "sigmoid"
        weights, chosen, _ = torch_npu.npu_moe_gating_top_k(
            scores,
            config.num_chosen,
            bias=correction,
            k_group=config.num_chosen_groups,
            group_count=config.num_groups,
            group_select_mode=config.group_best - 1,
            norm_type=int(divides),
            routed_scaling_factor=config.scale,
        )
        if divides == config.normalizes:
            return weights, chosen
        scores = scores.sigmoid() if divides else scores.softmax(-1)
        return self._shares(scores.gather(-1, chosen.long()), config), chosen

    def joins_experts(self, kind: ExpertKind) -> bool:
        """Whether this product routes tokens to experts and multiplies them in groups.

        In int8 this holds only for experts that its fused gate takes.
        """
        if kind.form in ("static", "w8a16") or (
            kind.form == "w4a8" and (kind.hidden % IN_A_WORD or kind.inner % IN_A_WORD)
        ):
            return False
        return self.product.has_mixtures and (kind.form != "int8" or (kind.is_swiglu and not kind.has_bias))

    def pack_experts(self, gate_ups: Sequence[UnpackedLinear], downs: Sequence[UnpackedLinear]) -> Packed:
        """Pack both linears.

        In int8, scales of the second have the type that it needs for results in bfloat16.
        """
        gate_up, down = (
            joined(some, self.pack, self.pack_int4, self._no_offsets, is_last=some is downs)
            for some in (gate_ups, downs)
        )
        return (gate_up if gate_up.scale is None else scaled_by_width(gate_up, down)), down

    def joined_mixture(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        packed: Packed,
        num_experts: int,
        gated: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Compute Ops.joined_mixture in five launches and those of a gate, whatever the number of experts."""
        gate_up, down = packed
        return mixture(x, weights, chosen, gate_up, down, num_experts, gated)

    def dispatch_of(self, hidden: int, config: MixtureConfig, group: Group) -> Dispatch | None:
        """Return the dispatch, if tokens have a communicator and the operators take the model.

        Machine.join creates the communicator, if a device has said that sending is faster for mixtures with a
        shared expert or for those without.
        """
        if group.tokens is None or not group.tokens.buffer_mib:
            return None
        has_shared = config.shared_size > 0
        if not (self.product.dispatches_beside_shared if has_shared else self.product.dispatches):
            return None
        sizes, product = (group.size, config.num_experts, config.num_chosen, hidden), self.product
        most = most_dispatched(product.name, *sizes, group.tokens.buffer_mib)
        return Dispatch(group, group.tokens, config.num_experts, most, product) if most else None

    def tile_size(self, vocab_size: int) -> int:
        """Return the whole row, whose running sum is one launch while tiles take ten."""
        return vocab_size

    @property
    def _multiplies_angles(self) -> bool:
        """Whether npu_rotary_mul takes the rows: the 310P's has four axes, and by its page none is scaled."""
        return self.product.is_fused and not self.scales_angles

    def rotary_of_one(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [T, H, D]; cos and sin [T, D]."""
        if not self._multiplies_angles:
            return super().rotary_of_one(x, cos, sin)
        turned: Tensor = torch_npu.npu_rotary_mul(x.contiguous(), cos[:, None], sin[:, None])
        return turned

    def join_latents(self, qkv: Packed, query_up: Packed, in_int8: bool) -> LatentLinears:
        """Join the linears in the format of the matrix unit, which npu_mla_prolog_v3 requires."""
        if in_int8:
            weights, scales, _ = zip(qkv[0], query_up[0], qkv[1])
            return LatentLinears(weights, scales)
        for parts, _ in (qkv, query_up):
            parts[:] = [in_tiles(each) for each in parts]
        return LatentLinears((qkv[0][0], query_up[0][0], qkv[0][1]), None)

    def pack_up(self, keys: Tensor, values: Tensor) -> LatentUp:
        """Return the projection of latents to keys [H, N, L] and values [H, L, V]."""
        return NpuLatentUp(keys, values) if self.product.has_latents else super().pack_up(keys, values)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Map [T, 2 * intermediate], the gate in the first half, to silu(gate) * up."""
        if gate_up.shape[-1] // 2 * gate_up.itemsize % self.product.swiglu_bytes:
            return super().swiglu(gate_up)
        gated: Tensor = torch_npu.npu_swiglu(gate_up, dim=-1)
        return gated

    def clamped_swiglu(self, gate_up: Tensor, slope: float, limit: float) -> Tensor:
        """Compute Ops.clamped_swiglu, in one launch if the product has it."""
        if not self.product.clips_swiglu:
            return super().clamped_swiglu(gate_up, slope, limit)
        how = {"alpha": slope, "limit": limit, "bias": 1.0}
        gated: Tensor = torch_npu.npu_clipped_swiglu(gate_up.contiguous(), interleaved=False, **how)
        return gated


def in_tiles(weight: Tensor) -> Tensor:
    """Return the weight in the format of the matrix unit, which has none for float32."""
    return weight if weight.dtype == torch.float32 else torch_npu.npu_format_cast(weight, FRACTAL_NZ)


def prefetch(weight: Tensor, after: Tensor, stream: Any) -> None:
    """Fetch the weight into the L2 cache on this stream, after the work queued on the current one."""
    stream.wait_stream(torch_npu.npu.current_stream())
    with torch_npu.npu.stream(stream):
        torch_npu.npu_prefetch(weight, after, min(weight.nbytes, PREFETCHED_BYTES))
