"""Override the decoder's operators that a CUDA device computes in Triton kernels of this project.

Matrix products are torch's (cuBLAS) unless they must be batch-invariant; the greedy choice is the
reference's.

Legend: T tokens of the step, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from devices.triton_types import kernel_dtype, stored_dtype
from models.ops.cuda.triton_kernels import multiply_rows, norm_rows, turn_heads, weigh_by_gate
from models.ops.operands import ExpertKind, UnpackedLinear
from models.ops.reference import Ops, Packed

GROUPED_STEP = 8  # 16-bit elements: rows of grouped products begin at multiples of 16 bytes
HEADS, COLUMNS = 8, 1024  # heads that one program rotates, and columns that it gates
TILE = (64, 64, 64)  # rows, columns and depth of a product's tile
SMALL_TILE = (32, 32, 32)  # used for float32, which no tensor core multiplies


class CudaOps(Ops):
    """Norms, rotary and SwiGLU as Triton kernels.

    With `batch_invariant` linears too, always in tiles of one size: cuBLAS chooses its kernel by the number
    of rows, so other requests would change the order in which a row's products are summed. A device that
    `groups_products` multiplies the rows of all experts of a mixture in one launch.
    """

    def __init__(self, *, batch_invariant: bool = False, groups_products: bool = False) -> None:
        self.batch_invariant, self.groups_products = batch_invariant, groups_products

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """Map [T, in] to [T, out]."""
        if not self.batch_invariant:
            return super().linear(x, packed)
        weight, bias = packed
        (num_rows, inner), outer = x.shape, len(weight)
        rows, columns, depth = SMALL_TILE if x.dtype == torch.float32 else TILE
        assert x.stride(1) == 1, "rows must be contiguous"
        assert weight.is_contiguous(), "a packed weight is contiguous"
        y = x.new_empty(num_rows, outer, dtype=stored_dtype(x.dtype))
        multiply_rows[(triton.cdiv(num_rows, rows) * triton.cdiv(outer, columns),)](
            x, weight, weight if bias is None else bias, y, num_rows, x.stride(0),
            INNER=inner, OUTER=outer, ROWS=rows, COLUMNS=columns, DEPTH=depth,
            OPERAND=kernel_dtype(x.dtype), HAS_BIAS=bias is not None, num_warps=4, num_stages=4,
        )  # fmt: skip
        return y.to(x.dtype)

    def widened_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply as `linear` does, which may be batch-invariant."""
        return self.linear(x, (weight, None))

    def joins_experts(self, kind: ExpertKind) -> bool:
        """Whether experts of this kind are in the model's type, without biases, and aligned."""
        are_aligned = kind.hidden % GROUPED_STEP == kind.inner % GROUPED_STEP == 0
        takes = kind.form == "plain" and kind.is_swiglu and not kind.has_bias
        return self.groups_products and are_aligned and takes and not self.batch_invariant

    def pack_experts(self, gate_ups: Sequence[UnpackedLinear], downs: Sequence[UnpackedLinear]) -> Packed:
        """Return the weights [experts, in, out] of both products."""
        both = [_stacked(each) for each in (gate_ups, downs)]
        return tuple(each.transpose(1, 2) for each in both)

    def joined_mixture(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        packed: Packed,
        num_experts: int,
        gated: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Compute Ops.mixture by rows sorted by expert, two grouped products, and a sum for each token.

        The sum is in the order of the token's choice. Shapes are fixed and nothing waits for the device; rows
        of other ranks' experts come last, where no product writes.
        """
        gate_up, down = packed
        num_chosen, flat = chosen.shape[1], chosen.flatten()
        order = flat.argsort(stable=True)
        numbers = torch.arange(len(gate_up), device=x.device, dtype=flat.dtype)
        ends = torch.searchsorted(flat[order], numbers, right=True, out_int32=True)
        rows = x.index_select(0, order // num_chosen)
        is_elsewhere = None
        if len(gate_up) < num_experts:
            is_elsewhere = (torch.arange(len(rows), device=x.device) >= ends[-1])[:, None]

        def product(rows: Tensor, weight: Tensor) -> Tensor:
            made = F.grouped_mm(rows, weight, offs=ends)
            return made if is_elsewhere is None else made.masked_fill(is_elsewhere, 0)

        made = product(gated(product(rows, gate_up)), down)
        parts = made.index_select(0, order.argsort()).view(*chosen.shape, -1).float()
        return (parts * weights[..., None]).sum(1).to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise over the last dimension, in float32.

        `weight` [x.shape[-1]]. Up to two leading dimensions.
        """
        return self._norm(x, None, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual)."""
        return self._norm(x, residual.contiguous(), weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        heads = x if x.ndim == 3 else x.unsqueeze(1)
        num_tokens, num_heads, size = heads.shape
        assert heads.stride(2) == 1, "a row must be contiguous"
        normed = torch.empty(x.shape, dtype=stored_dtype(x.dtype), device=x.device)
        total = normed if residual is None else torch.empty_like(normed)
        norm_rows[(num_tokens * num_heads,)](
            x, x if residual is None else residual, weight, normed, total,
            heads.stride(0), heads.stride(1), num_heads, eps,
            SIZE=size, PADDED=triton.next_power_of_2(size), ADD=residual is not None,
            num_warps=1 if size <= 256 else 8,
        )  # fmt: skip
        return normed.to(x.dtype), total.to(x.dtype)

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query [T, H, D] and key [T, K, D]; cos and sin [T, D] have two equal halves."""
        num_tokens, num_heads, dim = query.shape
        num_kv_heads = key.shape[1]
        assert query.stride(2) == key.stride(2) == 1, "heads must be contiguous"
        turned = [torch.empty(x.shape, dtype=stored_dtype(x.dtype), device=x.device) for x in (query, key)]
        groups = triton.cdiv(num_heads, HEADS) + triton.cdiv(num_kv_heads, HEADS)
        turn_heads[(num_tokens, groups)](
            query, key, cos.contiguous(), sin.contiguous(), *turned, *query.stride()[:2], *key.stride()[:2],
            NUM_HEADS=num_heads, NUM_KV=num_kv_heads, HEAD_DIM=dim,
            PADDED_HALF=triton.next_power_of_2(dim // 2), HEADS=HEADS,
        )  # fmt: skip
        return turned[0].to(query.dtype), turned[1].to(key.dtype)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Map [T, 2 * intermediate], the gate in the first half, to silu(gate) * up."""
        num_tokens, size = len(gate_up), gate_up.shape[1] // 2
        product = gate_up.new_empty(num_tokens, size, dtype=stored_dtype(gate_up.dtype))
        weigh_by_gate[(num_tokens, triton.cdiv(size, COLUMNS))](
            gate_up.contiguous(), product, SIZE=size, COLUMNS=COLUMNS
        )
        return product.to(gate_up.dtype)


def _stacked(experts: Sequence[UnpackedLinear]) -> Tensor:
    """Return the weights [experts, out, in], none of which is in 4 bits."""
    return torch.stack([each.weight for each in experts if isinstance(each.weight, Tensor)])
