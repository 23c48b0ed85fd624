"""Hold the linears of all experts for an NPU, and multiply the rows of all experts in one launch.

See virtual_npu/operators/grouped_matmul.py.

Legend: T tokens of the step, E experts, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch_npu
from torch import Tensor

from devices.ascend_limits import FRACTAL_NZ, fuses_gate
from models.ops.npu.static_ops import bits_in_int64
from models.ops.operands import Int4Weight, PairedInt4, UnpackedLinear


@dataclass(frozen=True, slots=True)
class JoinedLinear:
    """One linear of all experts."""

    weight: Tensor  # [E, in, out], or int32 [E, in, out / 8] in 4 bits
    scale: Tensor | None = None  # [E, out], if rows are in int8
    is_gated: bool = False  # the launch of its products also gates and quantises them
    # Further tensors that the operator takes with it
    beside: dict[str, list[Tensor]] = field(default_factory=dict)

    def product(self, rows: Tensor, counts: Tensor, **more: Any) -> Tensor:
        """Multiply each expert's rows, which follow those of the expert before, with its own weight."""
        made: Tensor
        (made,) = torch_npu.npu_grouped_matmul(
            [rows],
            [self.weight],
            split_item=2,
            group_type=0,
            group_list=counts,
            group_list_type=_kind(counts),
            **self.beside,
            **more,
        )
        return made

    def scaled_product(self, rows: Tensor, row_scale: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the product of int8 rows in `dtype`, scaled by columns and rows."""
        scales = {"scale": [self.scale], "per_token_scale": [row_scale]}
        return self.product(rows, counts, output_dtype=dtype, **scales)

    def gated_product(self, rows: Tensor, row_scale: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gated product of int8 rows, in int8 with a scale for each row."""
        made: Tensor
        made, scale = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
            rows, [self.weight], [self.scale], row_scale, counts, group_list_type=_kind(counts)
        )
        return made, scale


def _kind(counts: Tensor) -> int:
    """Return what `counts` are to the operators: counts, or one running sum.

    A single count is its own running sum, and is passed as one: op-plugin's page of npu_grouped_matmul of
    2026-08 accepts no list of one count.
    """
    return int(len(counts) > 1)


def joined(
    experts: Sequence[UnpackedLinear],
    pack: Callable[[Tensor, None], Any],
    pack_int4: Callable[[Int4Weight, None], Any],
    no_offsets: dict[tuple[int, ...], Tensor],
    *,
    is_last: bool,
) -> JoinedLinear:
    """Join the linears of the experts, each packed as a single one is.

    `no_offsets` are shared by all layers, by shape. Scales of the last linear may have another shape.
    """
    beside = {}
    if biases := [each.bias for each in experts if each.bias is not None]:
        bias = torch.stack(biases)
        beside["bias"] = [bias if bias.dtype == torch.float16 else bias.float()]
    if paired := [each.weight for each in experts if isinstance(each.weight, PairedInt4)]:
        return _paired(paired, is_last=is_last)
    if in_4_bits := [each.weight for each in experts if isinstance(each.weight, Int4Weight)]:
        packed = [pack_int4(weight, None) for weight in in_4_bits]
        words, scales, offsets = zip(*(each[:3] for each in packed))
        scale = _by_groups(scales)
        beside["antiquant_scale"] = [scale]
        if offsets[0] is None:  # the operator takes a scale only together with an offset
            shared = no_offsets.setdefault(tuple(scale.shape), torch.zeros_like(scale))
            beside["antiquant_offset"] = [shared]
        else:
            beside["antiquant_offset"] = [_by_groups(offsets)]
        return JoinedLinear(torch.stack(words), beside=beside)
    plain = [each.weight.t() for each in experts if isinstance(each.weight, Tensor)]
    weight = torch.stack(plain).contiguous()
    if weight.dtype != torch.int8:
        return JoinedLinear(pack(weight, None)[0], beside=beside)
    scale = torch.stack([each.scale for each in experts if each.scale is not None])
    return JoinedLinear(torch_npu.npu_format_cast(weight, FRACTAL_NZ), scale, beside=beside)


def _paired(experts: Sequence[PairedInt4], *, is_last: bool) -> JoinedLinear:
    """Join weights in 4 bits that are multiplied with int8, as vllm-ascend's w4a8 does.

    The operator multiplies the high half of a row's byte, and its low half less 8: `bias` adds the rest.
    """
    turned = torch.stack([each.pairs.t() for each in experts]).contiguous()
    words = torch_npu.npu_format_cast(turned, FRACTAL_NZ).view(torch.int32)
    sums = [8 * each.numbers().sum(1, dtype=torch.int32) * each.scale.float() for each in experts]
    scale = bits_in_int64(torch.stack([each.scale for each in experts]))
    scale = scale[:, None] if is_last else scale
    return JoinedLinear(words, scale, beside={"bias": [torch.stack(sums)]})


def scaled_by_width(gate_up: JoinedLinear, down: JoinedLinear) -> JoinedLinear:
    """Choose the form of the first int8 linear by its width, of which one launch gates some.

    Products of others are scaled by npu_grouped_matmul, which takes the scales in the type of those of
    `down`.
    """
    if gate_up.weight.dtype == torch.int32:
        return gate_up
    assert gate_up.scale is not None, "both linears are in int8"
    assert down.scale is not None, "both linears are in int8"
    if fuses_gate(gate_up.scale.shape[1] // 2):
        return replace(gate_up, is_gated=True)
    return replace(gate_up, scale=gate_up.scale.to(down.scale.dtype))


def _by_groups(parts: Sequence[Tensor]) -> Tensor:
    """Stack [G, out] of each expert as [E, G, out], or as [E, out] if there is one group."""
    made = torch.stack(list(parts))
    return made[:, 0].contiguous() if made.shape[1] == 1 else made


def mixture(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: JoinedLinear,
    down: JoinedLinear,
    num_experts: int,
    gated: Callable[[Tensor], Tensor],
) -> Tensor:
    """Compute Ops.joined_mixture; weights are in the model's type, as npu_moe_token_unpermute takes them.

    Rows of other ranks' experts come last, and no product writes them: they are set to zero, and not left
    out, because npu_moe_token_unpermute takes no index twice.
    """
    num_held, is_int8 = len(gate_up.weight), gate_up.scale is not None
    rows, places, counts, row_scale = torch_npu.npu_moe_init_routing_v2(
        x,
        chosen,
        active_num=chosen.numel(),
        expert_num=num_experts,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, num_experts],
        quant_mode=1 if is_int8 else -1,
    )
    counts = counts[:num_held]
    made = of_experts(rows, row_scale if is_int8 else None, counts, gate_up, down, gated, x.dtype)
    if num_held < num_experts:
        row = torch.arange(len(made), device=made.device)
        made = made.masked_fill_((row >= counts.sum())[:, None], 0)
    combined: Tensor = torch_npu.npu_moe_token_unpermute(made, places, probs=weights.to(x.dtype))
    return combined


def of_experts(
    rows: Tensor,
    row_scale: Tensor | None,
    counts: Tensor,
    gate_up: JoinedLinear,
    down: JoinedLinear,
    gated: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Compute what each expert makes of its rows, which follow those of the expert before, in `dtype`.

    Rows in int8 have their scales. What follows the counted rows is not written.
    """
    if row_scale is None:
        return down.product(gated(gate_up.product(rows, counts)), counts)
    if gate_up.is_gated:
        inner, inner_scale = gate_up.gated_product(rows, row_scale, counts)
    else:
        wide = gate_up.scaled_product(rows, row_scale, counts, dtype)
        inner, inner_scale = torch_npu.npu_dynamic_quant(gated(wide))
    return down.scaled_product(inner, inner_scale, counts, dtype)
