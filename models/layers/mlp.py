"""Define the MLP of a layer, or of an expert.

Legend: T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from models.config import DecoderConfig, Gate
from models.layers.dtypes import TORCH_DTYPES
from models.layers.linear import Linear, SummedLinear
from models.ops.divided_rows import DividedRows
from models.ops.operands import Int8Rows
from models.ops.reference import Ops
from models.parallel.group import Group


class MLP(nn.Module):
    """SwiGLU, its clamped form, or GeGLU, with one product for gate and up."""

    def __init__(
        self,
        config: DecoderConfig,
        names: tuple[str, str, str],
        inner: int,
        ops: Ops,
        device: torch.device,
        group: Group,
    ) -> None:
        super().__init__()
        hidden, dtype = config.hidden_size, TORCH_DTYPES[config.dtype]
        form = [config.form(name) for name in names[::2]]  # forms of gate and down
        self.ops, self.group = ops, group
        clamped = partial(ops.clamped_swiglu, slope=config.gate_slope, limit=config.gate_limit)
        gates: dict[Gate, Callable[[Tensor], Tensor]]
        gates = {"silu": ops.swiglu, "gelu_tanh": ops.geglu, "clamped": clamped}
        self.gated = gates[config.gate]
        self.gate_up = Linear(ops, hidden, 2 * inner, config.mlp_bias, dtype, device, form[0])
        self.down = SummedLinear(ops, inner, hidden, config.mlp_bias, dtype, device, form[1], group)
        self.is_swiglu = config.gate == "silu"  # this is one operator in int8

    @property
    def joins_int8(self) -> bool:
        """Whether all of it is one operator."""
        return self.is_swiglu and self.gate_up.takes_int8 and self.down.takes_int8

    def forward(self, x: Tensor | Int8Rows, divided: DividedRows | None = None) -> Tensor:
        """Map [T, hidden] to [T, hidden], or to this rank's rows if they are divided; `x` as for a linear."""
        if divided is not None:
            return divided.summed(self.part(x))
        if self.joins_int8:
            return self.group.all_reduce(self.part(x))
        y: Tensor = self.down(self.gated(self.gate_up(x)))
        return y

    def part(self, x: Tensor | Int8Rows) -> Tensor:
        """Return this rank's summand of the output."""
        if self.joins_int8:
            return self.ops.mlp_int8(x, self.gate_up.packed, self.down.packed)
        return self.down.part(self.gated(self.gate_up(x)))
