"""State the limits of Ascend's operators on the rows of experts, by which W8A8 mixtures choose launches.

Sources: op-plugin, npu_dequant_swiglu_quant, which limits a call with group_index alone; vllm-ascend 182b75e,
csrc/moe/dequant_swiglu_quant/op_host/dequant_swiglu_quant_tiling.cpp (CountMaxDim): a row of gate and up, H
columns each, its scales and its result lie in the unified buffer of 192 KiB together.
"""

from __future__ import annotations

MOST_GATED = 10496  # columns of gate and up together
GATED_STEP = 64  # the columns of each are a multiple of this


def fuses_gate(inner_size: int) -> bool:
    """Whether one launch scales, gates and quantises the rows of experts of this width on a rank."""
    return 2 * inner_size <= MOST_GATED and inner_size % GATED_STEP == 0
