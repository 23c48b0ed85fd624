"""Give the host access to the memory of the virtual device."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


class Memory:
    """All of the device's addresses as one CPU tensor for each dtype, from which views are cut.

    The storage of such a view is not the tensor's own: it does not keep the tensor alive, and it may not be
    resized.
    """

    def __init__(self, base: int, num_bytes: int) -> None:
        self.base, self.stop = base, base + num_bytes
        everything = (ctypes.c_char * num_bytes).from_address(base)
        raw = torch.frombuffer(everything, dtype=torch.uint8)
        self.all = {dtype: raw.view(dtype) for dtype in DTYPES}

    def holds(self, view: Tensor) -> bool:
        """Return whether a CPU tensor is a view of the device's memory."""
        return self.base <= view.data_ptr() < self.stop

    def view(self, tensor: Tensor) -> Tensor:
        """Return a CPU tensor of the same bytes, shape and strides."""
        address = tensor.data_ptr()
        if address == 0:  # a tensor without elements has no address
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        assert self.base <= address < self.stop, f"{address:#x} is no address of the virtual NPU"
        place = (address - self.base) // tensor.element_size()
        return self.all[tensor.dtype].as_strided(tensor.shape, tensor.stride(), place)
