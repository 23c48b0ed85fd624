"""Move small arrays between the host and a device without blocking either.

A copy is only queued. Off the CPU it goes through pinned memory, and the user of the result waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Arrays = dict[str, NDArray[Any]]
Tensors = dict[str, Tensor]


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array on the device; on the CPU this is the array itself.

    The allocator of pinned memory waits for the copy before it reuses the memory. The array's own memory may
    be gone by then, because torch_npu issues copies in a thread of its own.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def all_to_device(arrays: Arrays, device: torch.device) -> Tensors:
    """Copy arrays of small integers (int64 on the device) and of float32 to the device in one transfer.

    On the CPU they are the arrays themselves where these have the type, and must not be changed meanwhile.
    """
    if device.type == "cpu":
        return {
            name: torch.from_numpy(a if a.dtype == np.float32 else a.astype(np.int64, copy=False))
            for name, a in arrays.items()
        }
    parts = [a.view(np.int32) if a.dtype == np.float32 else a.astype(np.int32) for a in arrays.values()]
    whole = to_device(np.concatenate(parts), device)
    pieces = torch.split_with_sizes(whole, [len(part) for part in parts])
    return {
        name: piece.view(torch.float32) if array.dtype == np.float32 else piece.long()
        for (name, array), piece in zip(arrays.items(), pieces)
    }


def queued(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for all work queued on the device so far."""
    if device.type == "cpu":
        return lambda: None
    event = torch.get_device_module(device).Event()
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


def to_host(tensor: Tensor) -> Callable[[], NDArray[Any]]:
    """Start to copy a tensor to the host; the function returned waits for the copy."""
    if tensor.device.type == "cpu":
        return tensor.numpy
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    done = queued(tensor.device)

    def wait() -> NDArray[Any]:
        done()
        return host.numpy()

    return wait


def all_to_host(tensors: Tensors) -> Callable[[], Arrays]:
    """Start to copy tensors to the host in one transfer: small integers (int64 there) and float32."""
    flat = [each.view(torch.int32) if each.is_floating_point() else each.int() for each in tensors.values()]
    arrival = to_host(torch.cat([each.flatten() for each in flat]))
    ends = np.cumsum([each.numel() for each in flat])

    def wait() -> Arrays:
        return {
            name: (piece.view(np.float32) if tensor.is_floating_point() else piece.astype(np.int64)).reshape(
                tensor.shape
            )
            for (name, tensor), piece in zip(tensors.items(), np.split(arrival(), ends[:-1]))
        }

    return wait
