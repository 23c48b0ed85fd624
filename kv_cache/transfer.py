"""How does a small array of the host reach a device while both go on?"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, to which a copy is only asked for; on the CPU it is the array itself.

    It goes by pinned memory, whose allocator waits for the copy before it gives a place away again. The
    array's own memory may be gone by then: torch_npu asks for copies in a thread of its own.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
