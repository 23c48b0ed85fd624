"""Connect the operators of the contract to the communicators that torch_npu has made in this process."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from virtual_npu.contract import Summing

# These are the numbers of cann/communicator.h.
TYPES = {torch.float16: 3, torch.float32: 4, torch.bfloat16: 11}
OPERATIONS: dict[Summing, int] = {"mm_all_reduce": 11, "dispatch": 12, "combine": 13}


@dataclass(frozen=True, slots=True)
class JoinedRanks:
    """The communicators that `library` holds."""

    library: ctypes.CDLL

    def size(self, name: str) -> int:
        """Return the number of its ranks; 0 where no communicator has that name."""
        return int(self.library.virtual_npu_ranks(name.encode()))

    def rank(self, name: str) -> int:
        """Return the rank of this process in it; -1 where no communicator has that name."""
        return int(self.library.virtual_npu_rank(name.encode()))

    def add_up(self, name: str, tensor: Tensor, operation: Summing) -> Tensor:
        """Return the sum of its ranks' tensors, after waiting for all of them.

        Raises RuntimeError where a rank is lost or calls another operator.
        """
        summed = tensor.contiguous()
        place, count = ctypes.c_void_p(summed.data_ptr()), ctypes.c_uint64(summed.numel())
        kind, which = TYPES[summed.dtype], OPERATIONS[operation]
        if self.library.virtual_npu_add_up(name.encode(), place, count, kind, which):
            raise RuntimeError(self.library.aclGetRecentErrMsg().decode())
        return summed
