"""How does the host read and write the memory of the virtual device?"""

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
    """All of the device's addresses as one CPU tensor for each dtype; a tensor of npu:0 is a view of it.

    The storage of such a view is not the tensor's: it neither keeps the tensor alive nor may it be resized.
    """

    def __init__(self, base: int, num_bytes: int) -> None:
        self.base, self.stop = base, base + num_bytes
        everything = (ctypes.c_char * num_bytes).from_address(base)
        raw = torch.frombuffer(everything, dtype=torch.uint8)
        self.all = {dtype: raw.view(dtype) for dtype in DTYPES}

    def holds(self, view: Tensor) -> bool:
        """Whether a CPU tensor is a view of the device's memory."""
        return self.base <= view.data_ptr() < self.stop

    def view(self, tensor: Tensor) -> Tensor:
        """The same bytes, shape and strides on the CPU."""
        address = tensor.data_ptr()
        if address == 0:  # no element
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        assert self.base <= address < self.stop, f"{address:#x} is no address of the virtual NPU"
        place = (address - self.base) // tensor.element_size()
        return self.all[tensor.dtype].as_strided(tensor.shape, tensor.stride(), place)
