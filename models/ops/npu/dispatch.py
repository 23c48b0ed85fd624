"""Send the tokens of a step to the ranks that hold their experts, and combine the results.

Each rank has an equal share of the tokens, sends these to their experts, and receives the weighted sums. See
virtual_npu/operators/dispatch.py.

Legend: t tokens of this rank, C experts that a token chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch_npu
from torch import Tensor

from devices.ascend_limits import AscendProduct
from models.ops.npu.grouped import JoinedLinear, of_experts
from models.parallel.group import Group


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The exchange between a group's tokens and its experts.

    The ranks hold equally many experts, in the order of the ranks.
    """

    group: Group
    tokens: Group  # the same ranks, with a communicator of their own
    num_experts: int
    most_tokens: int  # most tokens of each rank
    product: AscendProduct

    def takes(self, num_tokens: int, dtype: torch.dtype) -> bool:
        """Whether so many tokens of a step are exchanged: there must be at least one for each rank."""
        is_known = self.product.has_dtype(dtype)
        return is_known and self.group.size <= num_tokens <= self.most_tokens * self.group.size

    def own(self, *parts: Tensor) -> list[Tensor]:
        """Return this rank's rows of each tensor; the last row is repeated to divide them equally.

        A row of zeros would choose an expert twice, which the operator does not take.
        """
        total, (size, rank) = len(parts[0]), (self.group.size, self.group.rank)
        count = -(-total // size)
        if count * size == total:
            return [each[rank * count : (rank + 1) * count].contiguous() for each in parts]
        first = torch.arange(rank * count, (rank + 1) * count, device=parts[0].device)
        return [each.index_select(0, first.clamp_(max=total - 1)) for each in parts]

    def mixture(
        self,
        own: Tensor,
        weights: Tensor,
        places: Tensor,
        packed: tuple[JoinedLinear, JoinedLinear],
        gated: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Compute all experts of this rank's rows: [t, hidden] to [t, hidden].

        All ranks must call it together, with equally many rows. `places` int32 [t, C] are their places over
        all ranks.
        """
        own, weights, places = own.contiguous(), weights.float().contiguous(), places.contiguous()
        group, (gate_up, down) = self._of_group(), packed
        is_int8 = gate_up.scale is not None
        rows, row_scale, notes, counts, arrived, of_tp, scales = torch_npu.npu_moe_distribute_dispatch_v2(
            own, places, **group, quant_mode=2 if is_int8 else 0
        )
        made = of_experts(rows, row_scale if is_int8 else None, counts, gate_up, down, gated, own.dtype)
        beside = {"expand_scales": scales} | ({"tp_send_counts": of_tp} if self._is_910c else {})
        summed: Tensor = torch_npu.npu_moe_distribute_combine_v2(
            made, places, notes, arrived, weights, **group, **beside
        )
        return summed

    @property
    def _is_910c(self) -> bool:
        return self.product.name == "910C"

    def _of_group(self) -> dict[str, Any]:
        """Return the arguments that describe the group.

        On a 910C they are those of vllm-ascend. On a 910B environment variables select another way of
        communication, which has other arguments, unless one is named.
        """
        name = self.tokens.hccl_name
        of_tp = {"group_tp": name, "tp_world_size": 1} if self._is_910c else {"comm_alg": "fullmesh"}
        of_ep = {"ep_world_size": self.group.size, "ep_rank_id": self.group.rank}
        return {"group_ep": name, **of_ep, "moe_expert_num": self.num_experts, **of_tp}
