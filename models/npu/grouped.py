"""How are all experts' rows multiplied in one launch on an NPU?"""

from __future__ import annotations

from typing import Any

import torch_npu
from torch import Tensor


def by_expert(rows: Tensor, weight: Tensor, counts: Tensor, **more: Any) -> Tensor:
    """The product of each expert's rows, which follow those of the one before, with its own weight."""
    (made,) = torch_npu.npu_grouped_matmul(
        [rows], [weight], split_item=2, group_type=0, group_list=counts, group_list_type=1, **more
    )
    return made
