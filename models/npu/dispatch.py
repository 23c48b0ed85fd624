"""How do the tokens of a step get to the ranks that hold their experts, and what these made of them back?

All ranks have all tokens. Each takes an equal share of them, sends these to their experts, gets back the
weighted sums, and gives them to all. See virtual_npu/operators/dispatch.py.

Legend: T tokens of the step, C experts that a token chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch_npu
from torch import Tensor

from devices.ascend_limits import AscendProduct
from models.group import Group
from models.npu.grouped import JoinedLinear, of_experts


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The ways of a group's tokens to its experts, equally many on each rank, in the order of the ranks."""

    group: Group
    tokens: Group  # the same ranks, in a communicator of its own
    num_experts: int
    most_tokens: int  # of each rank
    product: AscendProduct

    def takes(self, x: Tensor) -> bool:
        """Whether these tokens go this way: one for each rank at least."""
        is_known = x.dtype in self.product.dtypes
        return is_known and self.group.size <= len(x) <= self.most_tokens * self.group.size

    def mixture(
        self,
        x: Tensor,
        weights: Tensor,
        places: Tensor,
        packed: tuple[JoinedLinear, JoinedLinear],
        gated: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """[T, hidden] -> [T, hidden] of all experts; `places` int32 [T, C] are theirs among all ranks'."""
        x_own, weights_own, places_own = self._own(x, weights.float(), places)
        group, (gate_up, down) = self._of_group(), packed
        is_int8 = gate_up.scale is not None
        rows, row_scale, notes, counts, arrived, of_tp, scales = torch_npu.npu_moe_distribute_dispatch_v2(
            x_own, places_own, **group, quant_mode=2 if is_int8 else 0
        )
        made = of_experts(rows, row_scale if is_int8 else None, counts, gate_up, down, gated, x.dtype)
        beside = {"expand_scales": scales} | ({"tp_send_counts": of_tp} if self._is_910c else {})
        summed = torch_npu.npu_moe_distribute_combine_v2(
            made, places_own, notes, arrived, weights_own, **group, **beside
        )
        return self.group.all_gather(summed).flatten(0, 1)[: len(x)]

    def _own(self, *parts: Tensor) -> list[Tensor]:
        """This rank's rows of each; where they are not equally many, the last is there again."""
        total, (size, rank) = len(parts[0]), (self.group.size, self.group.rank)
        count = -(-total // size)
        if count * size == total:
            return [each[rank * count : (rank + 1) * count].contiguous() for each in parts]
        first = torch.arange(rank * count, (rank + 1) * count, device=parts[0].device)
        return [each.index_select(0, first.clamp_(max=total - 1)) for each in parts]

    @property
    def _is_910c(self) -> bool:
        return self.product.name == "910C"

    def _of_group(self) -> dict[str, Any]:
        """On a 910C as vllm-ascend calls it; on a 910B variables of the environment choose another way of
        communication where none is named, which has other arguments.
        """
        name = self.tokens.hccl_name
        of_tp = {"group_tp": name, "tp_world_size": 1} if self._is_910c else {"comm_alg": "fullmesh"}
        of_ep = {"ep_world_size": self.group.size, "ep_rank_id": self.group.rank}
        return {"group_ep": name, **of_ep, "moe_expert_num": self.num_experts, **of_tp}
