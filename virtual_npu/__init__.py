"""Run the NPU path on a machine without an NPU.

    import virtual_npu
    virtual_npu.start()  # from here on, torch has npu:0

The real torch_npu is imported over stand-ins for CANN's libraries (`libraries`, `cann/`). The stand-ins
implement memory, streams, events and graphs; operators run as CPU kernels over the same bytes (`kernels`),
and those of torch_npu only after their contract lets the call through (`operators`). A run therefore proves
where tensors lie, what is called with what, in which order and at which addresses, and the numbers up to
rounding. It cannot prove what only hardware shows: speed, races within a stream's own work, what CANN's
tiling refuses beyond the contract, and collective communication over a real interconnect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from virtual_npu.device import VirtualDevice, start

__all__ = ["VirtualDevice", "start"]


def __getattr__(name: str) -> Any:
    """Import the device, and with it torch, on first use: set-up scripts need neither."""
    if name in __all__:
        from virtual_npu import device

        return getattr(device, name)
    raise AttributeError(f"module 'virtual_npu' has no attribute {name!r}")
