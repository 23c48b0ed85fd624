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
from models.ops.operands import Int4Weight, UnpackedLinear


@dataclass(frozen=True, slots=True)
class JoinedLinear:
    """One linear of all experts."""

    weight: Tensor  # [E, in, out], or int32 [E, in, out / 8] in 4 bits
    scale: Tensor | None = None  # [E, out], in int8
    keeps_int32: bool = False  # its products are scaled by the operator after it
    # Further tensors that the operator takes with it
    beside: dict[str, list[Tensor]] = field(default_factory=dict)

    def product(self, rows: Tensor, counts: Tensor, **more: Any) -> Tensor:
        """Multiply each expert's rows, which follow those of the expert before, with its own weight.

        A single count is its own running sum, and is passed as one: op-plugin's page of 2026-08 accepts no
        list of one count.
        """
        made: Tensor
        (made,) = torch_npu.npu_grouped_matmul(
            [rows],
            [self.weight],
            split_item=2,
            group_type=0,
            group_list=counts,
            group_list_type=int(len(counts) > 1),
            **self.beside,
            **more,
        )
        return made

    def scaled_product(self, rows: Tensor, row_scale: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the product of int8 rows in `dtype`, scaled by columns and rows."""
        scales = {"scale": [self.scale], "per_token_scale": [row_scale]}
        return self.product(rows, counts, output_dtype=dtype, **scales)


def joined(
    experts: Sequence[UnpackedLinear],
    pack: Callable[[Tensor, None], Any],
    pack_int4: Callable[[Int4Weight, None], Any],
    no_offsets: dict[tuple[int, ...], Tensor],
) -> JoinedLinear:
    """Join the linears of the experts, each packed as a single one is.

    `no_offsets` are shared by all layers, by shape.
    """
    beside = {}
    if biases := [each.bias for each in experts if each.bias is not None]:
        bias = torch.stack(biases)
        beside["bias"] = [bias if bias.dtype == torch.float16 else bias.float()]
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


def gated_by_width(gate_up: JoinedLinear, down: JoinedLinear) -> JoinedLinear:
    """Choose the form of the first int8 linear by its width: int32 products if one launch gates them.

    Others are scaled by npu_grouped_matmul, which takes the scales in the type of those of `down`.
    """
    assert gate_up.scale is not None, "both linears are in int8"
    assert down.scale is not None, "both linears are in int8"
    if fuses_gate(gate_up.scale.shape[1] // 2):
        return replace(gate_up, keeps_int32=True)
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
    if gate_up.keeps_int32:
        inner, inner_scale = torch_npu.npu_dequant_swiglu_quant(
            gate_up.product(rows, counts, output_dtype=torch.int32),
            weight_scale=gate_up.scale,
            activation_scale=row_scale,
            group_index=counts,
            activate_left=True,
            quant_mode=1,
        )
    else:
        wide = gate_up.scaled_product(rows, row_scale, counts, dtype)
        inner, inner_scale = torch_npu.npu_dynamic_quant(gated(wide))
    return down.scaled_product(inner, inner_scale, counts, dtype)
