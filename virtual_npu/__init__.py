"""How does the NPU path run where there is no NPU?

    import virtual_npu
    virtual_npu.start()  # from here on, torch has npu:0

The real torch_npu is imported over stand-ins for CANN's libraries (`libraries`, `cann/`). Memory, streams,
events and graphs are the stand-ins' own; operators run as CPU kernels over the same bytes (`kernels`),
those of torch_npu after their contract let the call through (`operators`). So this proves where tensors
lie, what is called with what, in which order and at which addresses, and the numbers up to rounding. It
cannot prove what only hardware shows: speed, races within a stream's own work, what CANN's tiling refuses
beyond the contract, collective communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from virtual_npu.device import VirtualDevice, start

__all__ = ["VirtualDevice", "start"]


def __getattr__(name: str) -> Any:
    """Import the device, and with it torch, when it is first used: set-up needs neither."""
    if name in __all__:
        from virtual_npu import device

        return getattr(device, name)
    raise AttributeError(f"module 'virtual_npu' has no attribute {name!r}")
