"""Define the decoder's operators between attention: linear, norm, rotary, SwiGLU, routing, choice of tokens.

They are plain torch, the same on every device, and define what is correct. A device's file subclasses `Ops`
and overrides only what it does faster.

Legend: T tokens of the step, H query heads, K kv heads, D head dim, R sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.latent import LatentLinears, LatentUp
from attention.reference import Attention
from devices.int8 import quantize_rows
from kv_cache.device.transfer import Tensors
from models.config import MixtureConfig
from models.ops.drawing import draw
from models.ops.operands import (
    ExpertKind,
    Int4Weight,
    Int8Rows,
    PairedInt4,
    PlainLayer,
    StaticInt8,
    UnpackedLinear,
)
from models.packing import WIDENED_ROWS
from models.parallel.group import Group
from models.quantization import Stored

LEAST_SUM = 1e-20  # added to the sum of a token's independent scores, which may all be 0
EXACT_SUM = 1024  # products of two int8 that float32 sums exactly: 128 * 128 * 1024 = 2**24

Packed = Any  # a linear's weight and bias in the form that the device multiplies fastest
Widths = tuple[int, ...]  # widths of a linear's outputs that are read in parts, in order


class Ops:
    """Linear, norm, rotary, SwiGLU and greedy choice, as a decoder uses them."""

    captures_draws = False  # whether captured steps may end in a draw by top-k and top-p
    # A decoder multiplies cosines and sines by more than 1, which some operators do not take
    scales_angles = False
    skips_rows = False  # whether the last layer computes only rows that are read, see Decoder.skips_rows
    divides_rows = True  # whether large steps divide their rows between products, see DividedRows

    def padded(self, num_rows: int) -> int:
        """Return how many rows to compute for `num_rows`; more are computed if that is faster."""
        return num_rows

    def pack(self, weight: Tensor, bias: Tensor | None) -> Packed:
        """Convert a linear's weight [out, in] and bias [out] to this device's form, once, at load.

        The caller drops `weight` afterwards, unless it is tied to the embedding.
        """
        return weight, bias

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """Map [T, in] to [T, out]."""
        weight, bias = packed
        return F.linear(x, weight, bias)

    def linear_summed(self, x: Tensor, packed: Packed, group: Group) -> Tensor:
        """Map [T, in], divided among the ranks of the group, to the sum [T, out] of their products."""
        return group.all_reduce(self.linear(x, packed))

    def pack_split(
        self, weight: Tensor, bias: Tensor | None, widths: Widths, in_parts: bool = False
    ) -> Packed:
        """Pack a linear whose outputs are read in parts, the first of width widths[0], and so on.

        With `in_parts`, `join_latents` reads the weight of each part.
        """
        return self.pack(weight, bias)

    def linear_split(self, x: Tensor, packed: Packed, widths: Widths) -> tuple[Tensor, ...]:
        """Map [T, in] to a tensor [T, width] for each of `widths`."""
        return self.split(self.linear(x, packed), widths)

    def split(self, y: Tensor, widths: Widths) -> tuple[Tensor, ...]:
        """Return a tensor [T, width] for each of `widths`, of the product of them all."""
        parts: tuple[Tensor, ...] = y.split(widths, dim=-1)
        return parts

    def join_heads(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """Return what splits the product of queries, keys and values, and norms and rotates its heads.

        None means that they are split, normed and rotated one by one.
        """
        return None

    def join_layers(self, layers: Sequence[PlainLayer], attention: Attention) -> Any:
        """Return what computes these layers, all of a decoder's, in one call.

        None means that they are computed one by one.
        """
        return None

    def pack_low_rank(self, weight: Tensor) -> Tensor:
        """Return a weight [out, in] of adapters in this device's form for `linear`.

        Its numbers may be overwritten later, because captured steps read it where it is.
        """
        return weight

    def plain_low_rank(self, packed: Tensor) -> Tensor:
        """Return what `pack_low_rank` was given, to be changed and packed again."""
        return packed

    def check_int8(self, dtype: torch.dtype, forms: Collection[Stored], largest: int) -> None:
        """Raise ValueError if this device cannot multiply linears of these forms for a model of this type.

        They have at most `largest` inputs or outputs.
        """

    def pack_int8(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Packed:
        """Pack an int8 weight [out, in] with a float32 scale [out] for each output channel."""
        return weight, scale, bias

    def linear_int8(self, x: Tensor | Int8Rows, packed: Packed) -> Tensor:
        """Map [T, in] to [T, out] in x's type: x is quantised token by token and multiplied in int8.

        `x` may also be what this device's `add_rms_norm_int8` returned.
        """
        weight, scale, bias = packed
        x = self.quantized(x)
        y: Tensor = self.int8_product(x.rows, weight).float() * scale * x.scale[:, None]
        return (y if bias is None else y + bias.float()).to(x.dtype)

    def pack_int8_split(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, widths: Widths, in_parts: bool = False
    ) -> Packed:
        """Pack an int8 weight whose outputs are read in parts; `in_parts` as for `pack_split`."""
        return self.pack_int8(weight, scale, bias)

    def linear_int8_split(self, x: Tensor | Int8Rows, packed: Packed, widths: Widths) -> tuple[Tensor, ...]:
        """Map [T, in] to a tensor [T, width] for each of `widths`; `x` as for `linear_int8`."""
        return self.split(self.linear_int8(x, packed), widths)

    def pack_static(self, weight: StaticInt8, dtype: torch.dtype) -> Packed:
        """Pack an int8 weight whose rows are quantised alike, for results of this type."""
        return self.pack_int8(weight.weight, weight.scale, None)[0], weight.scale, weight.bias

    def pack_static_rows(self, weight: StaticInt8, dtype: torch.dtype) -> Packed:
        """Pack the scale and the offset by which `static_rows` quantises rows of this type."""
        return 1 / weight.input_scale[0], weight.input_offset[0]

    def static_rows(self, x: Tensor, packed: Packed) -> Tensor:
        """Quantise [T, in] to int8 by a scale and an offset that all rows share."""
        inverse, offset = packed
        rows: Tensor = x.float() * inverse + offset
        return rows.round_().clamp_(-128, 127).to(torch.int8)

    def linear_static(self, rows: Tensor, packed: Packed, dtype: torch.dtype) -> Tensor:
        """Map int8 [T, in] to [T, out] of this type."""
        weight, scale, bias = packed
        y: Tensor = (self.int8_product(rows, weight) + bias).float() * scale
        return y.to(dtype)

    def pack_w4a8(self, weight: PairedInt4, bias: Tensor | None) -> Packed:
        """Pack a weight in 4 bits that is multiplied with int8."""
        return weight.pairs, weight.scale, bias

    def linear_w4a8(self, x: Tensor, packed: Packed) -> Tensor:
        """Map [T, in] to [T, out]: x is quantised token by token, and the weight widened to int8 in parts."""
        pairs, scale, bias = packed
        rows = self.quantized(x)
        parts = [
            self.linear_int8(rows, self.pack_int8(part.numbers(), part.scale, None))
            for part in PairedInt4(pairs, scale).split(WIDENED_ROWS)
        ]
        y = torch.cat(parts, -1)
        return y if bias is None else y + bias

    def pack_w8a16(self, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Packed:
        """Pack an int8 weight [out, in], with a scale [out], that is multiplied in the model's type."""
        return weight, scale, bias

    def linear_w8a16(self, x: Tensor, packed: Packed) -> Tensor:
        """Map [T, in] to [T, out]; parts of the weight are widened to x's type as they are multiplied."""
        weight, scale, bias = packed
        parts = zip(weight.split(WIDENED_ROWS), scale.split(WIDENED_ROWS))
        rows = [self.widened_product(x, (part.float() * each[:, None]).to(x.dtype)) for part, each in parts]
        y = torch.cat(rows, -1)
        return y if bias is None else y + bias

    def check_int4(
        self, dtype: torch.dtype, group_size: int | None, largest: int, of_experts: Sequence[int] = ()
    ) -> None:
        """Raise ValueError if this device cannot multiply in 4 bits for a model of this type.

        Its linears have at most `largest` inputs and outputs, and those of experts the inputs `of_experts`.
        """

    def pack_int4(self, weight: Int4Weight, bias: Tensor | None) -> Packed:
        """Pack a weight in 4 bits."""
        return weight, bias

    def linear_int4(self, x: Tensor, packed: Packed) -> Tensor:
        """Map [T, in] to [T, out]; the weight is converted to x's type as it is multiplied."""
        weight, bias = packed
        count = len(weight.words)
        rows = [
            self.widened_product(x, weight.rows(first, first + WIDENED_ROWS).weight())
            for first in range(0, count, WIDENED_ROWS)
        ]
        y = torch.cat(rows, -1)
        return y if bias is None else y + bias

    def widened_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Map [T, in] to [T, out] by an unpacked weight [out, in] in x's type."""
        return F.linear(x, weight)

    def pack_int4_split(self, weight: Int4Weight, bias: Tensor | None, widths: Widths) -> Packed:
        """Pack a weight in 4 bits whose outputs are read in parts."""
        return self.pack_int4(weight, bias)

    def linear_int4_split(self, x: Tensor, packed: Packed, widths: Widths) -> tuple[Tensor, ...]:
        """Map [T, in] to a tensor [T, width] for each of `widths`."""
        return self.split(self.linear_int4(x, packed), widths)

    def quantized(self, x: Tensor | Int8Rows) -> Int8Rows:
        """Return the rows [T, n] that linears in int8 multiply."""
        if isinstance(x, Int8Rows):
            return x
        rows, scale = self.quantize(x)
        return Int8Rows(rows, scale[:, 0], x.dtype)

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise [T, n] to int8 [T, n] with float32 scales [T, 1]."""
        return quantize_rows(x)

    def int8_product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply int8 [T, in] by what `pack_int8` made of [out, in], exactly, to int32 [T, out]."""
        pairs = zip(rows.split(EXACT_SUM, dim=1), weight.split(EXACT_SUM, dim=1))
        products = [F.linear(some.float(), part.float()).int() for some, part in pairs]
        return reduce(torch.add, products)

    def prefetch(self, packed: Packed, after: Tensor) -> None:
        """Start to bring a linear's weight closer once `after` is computed; results do not change."""

    def await_prefetch(self) -> None:
        """Let what follows start only after the prefetch."""

    def begin_beside(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return what gives the result of `compute`, which may begin at once beside what is asked next.

        The result has to be asked for, once.
        """
        return compute

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise over the last dimension, in float32; `weight` [x.shape[-1]]. Any leading dimensions."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def gated_rms_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, kind: Literal["silu", "sigmoid"]
    ) -> Tensor:
        """Return `rms_norm` of x, multiplied by what the function of this kind makes of the gate, like x."""
        wide = x.float()
        wide = weight.float() * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))
        opened = F.silu(gate.float()) if kind == "silu" else gate.float().sigmoid()
        return (wide * opened).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual)."""
        residual = residual + x
        return self.rms_norm(residual, weight, eps), residual

    def add_rms_norm_wide(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (rms_norm(x + residual), the same in float32, x + residual): a router reads the second."""
        normed, total = self.add_rms_norm(x, residual, weight, eps)
        return normed, normed.float(), total

    def add_rms_norm_int8(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor | Int8Rows, Tensor]:
        """Compute `add_rms_norm` if only linears in int8 read the first of its results."""
        return self.add_rms_norm(x, residual, weight, eps)

    def mlp_int8(self, x: Tensor | Int8Rows, gate_up: Packed, down: Packed) -> Tensor:
        """Map [T, hidden] to [T, hidden]: SwiGLU between two linears in int8; `x` as for `linear_int8`."""
        return self.linear_int8(self.swiglu(self.linear_int8(x, gate_up)), down)

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query [T, H, D] and key [T, K, D]; cos and sin [T, D] have two equal halves."""
        cos, sin = cos[:, None], sin[:, None]
        return query * cos + _half_turn(query) * sin, key * cos + _half_turn(key) * sin

    def rotary_of_one(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [T, H, D], as `rotary` does."""
        cos, sin = cos[:, None], sin[:, None]
        return x * cos + _half_turn(x) * sin

    def pack_up(self, keys: Tensor, values: Tensor) -> LatentUp:
        """Return the projection of latents to keys [H, N, L] and values [H, L, V], once, at load."""
        return LatentUp(keys, values)

    def join_latents(self, qkv: Packed, query_up: Packed, in_int8: bool) -> LatentLinears:
        """Return the fused linears before latent attention, if the attention `joins` them.

        They are made from linears packed to be read in parts and share their memory; `linear_split` and
        `linear_int8_split` still work on these.
        """
        raise NotImplementedError

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Map [T, 2 * intermediate], the gate in the first half, to silu(gate) * up."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def geglu(self, gate_up: Tensor) -> Tensor:
        """Compute `swiglu` with the tanh form of gelu in place of silu: gelu(gate) * up."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def clamped_swiglu(self, gate_up: Tensor, slope: float, limit: float) -> Tensor:
        """Return gate * sigmoid(slope * gate) * (up + 1), on numbers clipped to the limit.

        The gate is clipped from above only.
        """
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * slope))

    def sigmoid(self, x: Tensor) -> Tensor:
        """Return numbers from 0 to 1, like x: 1 / (1 + exp(-x))."""
        return x.sigmoid()

    def softplus(self, x: Tensor) -> Tensor:
        """Return log(1 + exp(x)), like x."""
        return F.softplus(x)

    def scores(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map [T, in] to [T, out] by a weight [out, in] of few rows, which is not packed."""
        return F.linear(x, weight, bias)

    def softmax(self, x: Tensor) -> Tensor:
        """Return the shares of exp(x) in the sum of its row, of float32 [T, E]."""
        return x.softmax(-1)

    def route(
        self,
        x: Tensor,
        router: Tensor,
        correction: Tensor | None,
        config: MixtureConfig,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return float32 weights [T, C] of the chosen experts [T, C], for x [T, hidden], router [E, hidden].

        The router is float32, and `x` may be. `correction` [E] is given if the mixture `is_corrected`, `bias`
        [E] if it `is_biased`.
        """
        scores = self.scores(x.float(), router, bias)
        scores = self.softmax(scores) if config.scores == "softmax" else self.sigmoid(scores)
        ranked = scores if correction is None else scores + correction
        if config.num_groups > 1:
            groups = ranked.unflatten(-1, (config.num_groups, -1))
            worth = groups.topk(config.group_best, dim=-1).values.sum(-1)
            is_chosen = torch.zeros_like(worth).scatter(
                -1, worth.topk(config.num_chosen_groups, dim=-1).indices, 1.0
            )
            ranked = groups.masked_fill(is_chosen[..., None] == 0, -torch.inf).flatten(-2)
        chosen = ranked.topk(config.num_chosen, dim=-1).indices
        return self._shares(scores.gather(-1, chosen), config), chosen

    def _shares(self, weights: Tensor, config: MixtureConfig) -> Tensor:
        """Return the weights of chosen experts from their scores [T, C]."""
        if config.normalizes:
            total = self.sum_of_shares(weights)
            weights = weights / (total if config.scores == "softmax" else total + LEAST_SUM)
        return weights if config.scale == 1 else weights * config.scale

    def sum_of_shares(self, weights: Tensor) -> Tensor:
        """Return the sum of each row of float32 [T, C], of few columns, as [T, 1]."""
        return weights.sum(-1, keepdim=True)

    def joins_experts(self, kind: ExpertKind) -> bool:
        """Whether a mixture's experts of this kind are packed together."""
        return False

    def pack_experts(self, gate_ups: Sequence[UnpackedLinear], downs: Sequence[UnpackedLinear]) -> Packed:
        """Return the weights of all experts for `joined_mixture`, if the device `joins_experts`."""
        raise NotImplementedError

    def joined_mixture(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        packed: Packed,
        num_experts: int,
        gated: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Compute `mixture` by experts that were packed together and have the gate `gated`, such as `swiglu`.

        `num_experts` counts those of other ranks too.
        """
        raise NotImplementedError

    def dispatch_of(self, hidden: int, config: MixtureConfig, group: Group) -> Any:
        """Return what sends tokens to the experts of all ranks, whose own experts are joined.

        None means that tokens are not sent, and the results of each rank's experts for all tokens are summed.
        """
        return None

    def mixture(
        self, x: Tensor, weights: Tensor, chosen: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]
    ) -> Tensor:
        """Return the weighted sum [T, hidden] of the results of each token's experts, in the experts' order.

        `weights` float32 and `chosen` of an integer type are [T, C]; choices beyond `experts` are on other
        ranks. The sum is in float32. Every expert computes every row, so that shapes are fixed, nothing waits
        for the device, and the step can be captured.
        """
        total = torch.zeros_like(x, dtype=torch.float32)
        for number, expert in enumerate(experts):
            is_chosen = chosen == number
            weight = weights.where(is_chosen, 0).sum(-1, keepdim=True)
            part = expert(x).float() * weight
            # Its results for other tokens may be infinite
            total += part.where(is_chosen.any(-1, keepdim=True), 0)
        return total.to(x.dtype)

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best token of each row of logits [R, V], int64 [R], with whether it is finite [R].

        A row with a NaN anywhere is not finite.
        """
        best, tokens = logits.max(-1)
        return tokens, best.isfinite()

    def draw(self, logits: Tensor, best: Tensor, otherwise: Tensor, limits: Tensors) -> Tensor:
        """Return a token of each row of logits [R, V], int64 [R], drawn as models/ops/drawing.py says.

        `best` [R] are the tokens of the largest logits; a row that is not finite, or not `drawn`, gets its
        token of `otherwise` [R].
        """
        return draw(logits, best, otherwise, limits, self.tile_size(logits.shape[1]))

    def tile_size(self, vocab_size: int) -> int:
        """Return how many weights of a row the sampler sums one by one: a divisor of the vocabulary.

        Here it is at most 512, so that sums over a row take two short steps, each in the same order whatever
        the number of rows.
        """
        return next(size for size in range(512, 0, -1) if vocab_size % size == 0)


def _half_turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
