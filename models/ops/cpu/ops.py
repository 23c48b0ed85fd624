"""Override the decoder's operators that a CPU computes faster in its own way.

Linears are packed for `products` or, where there is no compiler or oneDNN is far ahead in the model's type,
for oneDNN. `rowwise` computes the small operators.

Legend: T tokens of the step, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.latent import LatentUp
from attention.reference import Attention
from devices.cpp_sources import KINDS
from devices.onednn import product_dtype
from kv_cache.device.transfer import Tensors
from models.ops.cpu.layers import CompiledLayers, compiled_layers
from models.ops.cpu.products import Panels, Products
from models.ops.cpu.rowwise import Rowwise
from models.ops.operands import PlainLayer
from models.ops.reference import Ops, Packed

log = logging.getLogger(__name__)

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_FEW_ROWS, _MANY_ROWS = 8, 64  # multiples to which the number of rows is rounded up, below 64 and above
# oneDNN is used if it multiplies a prompt's rows more than so many times as fast as `products`. It may have
# instructions that `products` does not use.
FAR_AHEAD = 2.0


def keep_memory() -> None:
    """Let this process's allocator keep memory from step to step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        log.info("this C library has no mallopt: memory goes back and forth between process and kernel")
        return
    # Otherwise each step's large tensors are mapped, cleared and unmapped again; brought 764 -> 838 tokens/s
    mallopt(_MMAP_THRESHOLD, 32 * 2**20)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class PanelsUp(LatentUp):
    """`LatentUp` with panels for each head, whose products give a row the same bits in any batch."""

    products: Products
    of_keys: tuple[Panels, ...]
    of_values: tuple[Panels, ...]

    @classmethod
    def packed(cls, keys: Tensor, values: Tensor, products: Products) -> PanelsUp:
        """Pack keys [H, N, L] and values [H, L, V]."""
        packed = (tuple(products.pack(head.t(), None) for head in part) for part in (keys, values))
        return cls(keys, values, products, *packed)

    def absorbed(self, query: Tensor) -> Tensor:
        """Project queries [T, H, N] of expanded keys to queries of latents [T, H, L]."""
        return self._multiplied(query, self.of_keys)

    def raised(self, x: Tensor) -> Tensor:
        """Project weighted sums of latents [T, H, L] to those of values [T, H, V]."""
        return self._multiplied(x, self.of_values)

    def _multiplied(self, x: Tensor, panels: tuple[Panels, ...]) -> Tensor:
        return torch.stack([self.products.multiply(x[:, head], each) for head, each in enumerate(panels)], 1)


class CpuOps(Ops):
    """Linears packed for `products` or oneDNN, and small operators in one pass each by `rowwise`.

    Both are compiled for this machine, or None. With `batch_invariant`, a row of a plain linear, norm or
    gate has the same bits in any batch; it needs both. Weights of `onednn_dtype` are oneDNN's all the same.
    """

    skips_rows = True

    def __init__(
        self,
        *,
        products: Products | None = None,
        rowwise: Rowwise | None = None,
        batch_invariant: bool = False,
        onednn_dtype: torch.dtype | None = None,
    ) -> None:
        is_own = products and rowwise and onednn_dtype is None
        assert not batch_invariant or is_own, "sums of oneDNN and of torch depend on rows"
        self.products, self.batch_invariant = products, batch_invariant
        self._onednn_dtype = onednn_dtype
        self._rows: Rowwise | Ops = rowwise or Ops()
        # oneDNN compiles its code (2 ms a layer) for each new number of rows
        self._rounds_rows = products is None
        self._has_logged = False

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise over the last dimension, in float32; `weight` [x.shape[-1]]. Any leading dimensions."""
        return self._rows.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual)."""
        return self._rows.add_rms_norm(x, residual, weight, eps)

    def gated_rms_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, kind: Literal["silu", "sigmoid"]
    ) -> Tensor:
        """Return `rms_norm` of x, multiplied by what the function of this kind makes of the gate, like x."""
        return self._rows.gated_rms_norm(x, gate, weight, eps, kind)

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query [T, H, D] and key [T, K, D]; cos and sin [T, D] have two equal halves."""
        return self._rows.rotary(query, key, cos, sin)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Map [T, 2 * intermediate], the gate in the first half, to silu(gate) * up."""
        return self._rows.swiglu(gate_up)

    def geglu(self, gate_up: Tensor) -> Tensor:
        """Compute `swiglu` with the tanh form of gelu in place of silu: gelu(gate) * up."""
        return self._rows.geglu(gate_up)

    def clamped_swiglu(self, gate_up: Tensor, slope: float, limit: float) -> Tensor:
        """Compute `swiglu` on clipped numbers; see Ops.clamped_swiglu."""
        return self._rows.clamped_swiglu(gate_up, slope, limit)

    def sigmoid(self, x: Tensor) -> Tensor:
        """Return numbers from 0 to 1, like x: 1 / (1 + exp(-x))."""
        return self._rows.sigmoid(x)

    def softplus(self, x: Tensor) -> Tensor:
        """Return log(1 + exp(x)), like x."""
        return self._rows.softplus(x)

    def scores(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map [T, in] to [T, out] by a weight that is not packed; torch is faster, and depends on rows."""
        return self._rows.scores(x, weight, bias) if self.batch_invariant else super().scores(x, weight, bias)

    def softmax(self, x: Tensor) -> Tensor:
        """Return the shares of exp(x) in the sum of its row, of float32 [T, E]."""
        return self._rows.softmax(x)

    def sum_of_shares(self, weights: Tensor) -> Tensor:
        """Return the sum of each row of float32 [T, C], column by column: no order depends on the rows."""
        total: Tensor = reduce(torch.add, weights.split(1, -1))
        return total

    def pack_up(self, keys: Tensor, values: Tensor) -> LatentUp:
        """Return the projection of latents to keys [H, N, L] and values [H, L, V], once, at load."""
        if not self.batch_invariant or self.products is None:
            return super().pack_up(keys, values)
        return PanelsUp.packed(keys, values, self.products)

    def join_layers(self, layers: Sequence[PlainLayer], attention: Attention) -> CompiledLayers | None:
        """Return what computes these layers in one call into C++, if it computes all that they have."""
        return compiled_layers(self.products, self._rows, layers, attention)

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best token of each row of logits [R, V], int64 [R], and whether its logit is finite."""
        return self._rows.greedy(logits)

    def draw(self, logits: Tensor, best: Tensor, otherwise: Tensor, limits: Tensors) -> Tensor:
        """Return a drawn token [R] of each row of logits [R, V]; see Ops.draw."""
        return self._rows.draw(logits, best, otherwise, limits)

    def mixture(
        self, x: Tensor, weights: Tensor, chosen: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]
    ) -> Tensor:
        """Compute Ops.mixture, where an expert computes only the tokens that chose it."""
        numbers, order = chosen.flatten().sort(stable=True)
        counts = numbers.bincount(minlength=len(experts)).tolist()
        tokens, shares = order // chosen.shape[1], weights.flatten()[order, None]
        total = torch.zeros_like(x, dtype=torch.float32)
        first = 0
        for expert, count in zip(experts, counts):
            if count:
                rows = slice(first, first + count)
                total.index_add_(0, tokens[rows], expert(x[tokens[rows]]).float() * shares[rows])
                first += count
        return total.to(x.dtype)

    def padded(self, num_tokens: int) -> int:
        """Return the number of rows to compute, rounded up if oneDNN computes any linear."""
        if not self._rounds_rows:
            return num_tokens
        if num_tokens <= _FEW_ROWS:
            return max(2, 1 << (num_tokens - 1).bit_length())
        step = _FEW_ROWS if num_tokens <= _MANY_ROWS else _MANY_ROWS
        return -(-num_tokens // step) * step

    def pack(self, weight: Tensor, bias: Tensor | None) -> Packed:
        """Pack the weight in its own type for `products`, unless oneDNN is to multiply that type."""
        own = self.products
        if own is None or weight.dtype not in KINDS or weight.dtype == self._onednn_dtype:
            return self._pack_onednn(weight, bias)
        return own.pack(weight, bias, is_widened=not own.multiplies(weight)), None

    def _pack_onednn(self, weight: Tensor, bias: Tensor | None) -> Packed:
        """Convert the weight to the type that is multiplied fastest, in the order in which oneDNN reads it.

        That order makes 32 rows 1.7 times as fast.
        """
        self._rounds_rows = True
        dtype = product_dtype(weight.dtype)
        if dtype != weight.dtype and not self._has_logged:
            self._has_logged = True
            log.info(
                "weights of linears are kept in float32: this processor cannot multiply %s", weight.dtype
            )
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        if not torch.backends.mkldnn.is_available():
            return weight, bias
        return torch.ops.mkldnn._reorder_linear_weight(weight), bias

    def pack_low_rank(self, weight: Tensor) -> Tensor:
        """Pack for oneDNN, whose order can be undone, because no step is captured here."""
        packed: Tensor = self._pack_onednn(weight, None)[0]
        return packed

    def plain_low_rank(self, packed: Tensor) -> Tensor:
        """Return a packed weight in its original order."""
        return packed.to_dense() if packed.is_mkldnn else packed

    def pack_int8(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Packed:
        """Transpose the weight to [in, out], which is read 1.3 times as fast at 17 rows."""
        self._rounds_rows = True
        if _has_vnni():
            weight = weight.t().clone(memory_format=torch.contiguous_format)
        return weight, scale, bias

    def int8_product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply int8 [T, in] by the packed weight, exactly, to int32 [T, out].

        Without VNNI instructions oneDNN adds pairs of products in 16 bits, which overflow.
        """
        return torch._int_mm(rows, weight) if _has_vnni() else super().int8_product(rows, weight)

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """Map [T, in] to [T, out]."""
        weight, bias = packed
        if isinstance(weight, Panels):
            assert self.products is not None, "it has packed the weight"
            return self.products.multiply(x, weight)
        num_rows = self.padded(len(x))
        if num_rows > len(x):
            return self.linear(F.pad(x, (0, 0, 0, num_rows - len(x))), packed)[: len(x)]
        rows = x.to(weight.dtype)
        if not weight.is_mkldnn:
            return F.linear(rows, weight, bias).to(x.dtype)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return y.to(x.dtype)


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies a type of 16 bits itself, twice as fast as float32."""
    return dtype != torch.float32 and product_dtype(dtype) == dtype


@cache
def is_onednn_ahead(own: Products, dtype: torch.dtype) -> bool:
    """Measure whether oneDNN multiplies a prompt's rows of a type at `FAR_AHEAD` times the speed of `own`.

    This takes some hundredths of a second, once in a process. Only types of 16 bits that the processor
    multiplies itself are measured; for others oneDNN is not ahead. Few rows are not measured, because their
    products take as long as the weights take to be read, and `own` reads these faster.
    """
    if not _multiplies(dtype):
        return False
    weight, rows = torch.ones(2048, 1024, dtype=dtype), torch.ones(256, 1024, dtype=dtype)
    packed = own.pack(weight, None, is_widened=not own.multiplies(weight))
    ordered = torch.ops.mkldnn._reorder_linear_weight(weight)
    ways: tuple[Callable[[], Tensor], ...] = (
        lambda: own.multiply(rows, packed),
        lambda: torch.ops.mkldnn._linear_pointwise(rows, ordered, None, "none", [], ""),
    )
    best_s = [float("inf"), float("inf")]
    for _ in range(6):  # They take turns, so that other load of the machine slows both
        for way, multiply in enumerate(ways):
            began_s = time.perf_counter()
            multiply()
            best_s[way] = min(best_s[way], time.perf_counter() - began_s)
    lead = best_s[0] / best_s[1]
    log.info("oneDNN multiplies %s at %.2f times the speed of this project's products", dtype, lead)
    return lead > FAR_AHEAD


def _has_vnni() -> bool:
    return bool(torch.cpu._is_vnni_supported())
