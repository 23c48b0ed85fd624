"""How does an operator reach the communicators of this process, which torch_npu has made?"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from virtual_npu.contract import Summing

# As cann/communicator.h numbers them
TYPES = {torch.float16: 3, torch.float32: 4, torch.bfloat16: 11}
OPERATIONS: dict[Summing, int] = {"mm_all_reduce": 11, "dispatch": 12, "combine": 13}


@dataclass(frozen=True, slots=True)
class JoinedRanks:
    """The communicators that `library` holds."""

    library: ctypes.CDLL

    def size(self, name: str) -> int:
        """How many ranks it has; 0 where there is none of that name."""
        return int(self.library.virtual_npu_ranks(name.encode()))

    def rank(self, name: str) -> int:
        """Which of its ranks this process is; -1 where there is none of that name."""
        return int(self.library.virtual_npu_rank(name.encode()))

    def add_up(self, name: str, tensor: Tensor, operation: Summing) -> Tensor:
        """The sum of its ranks' tensors; waits for all of them. Raises RuntimeError where one is lost, or
        calls something else.
        """
        summed = tensor.contiguous()
        place, count = ctypes.c_void_p(summed.data_ptr()), ctypes.c_uint64(summed.numel())
        kind, which = TYPES[summed.dtype], OPERATIONS[operation]
        if self.library.virtual_npu_add_up(name.encode(), place, count, kind, which):
            raise RuntimeError(self.library.aclGetRecentErrMsg().decode())
        return summed
