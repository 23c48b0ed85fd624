"""Write page bytes through Mooncake's transfer engine, whose Python package is an optional requirement.

It writes from registered memory of one process into registered memory of another by TCP, RDMA or, on Ascend,
HCCS. TCP was measured; the others go through the same calls and were not. It listens at all addresses of the
machine, asks nobody who it is, and says with a negative number that it failed.

Each window and each reach has a transfer engine of its own, which ends with the connection. That engine's end
is what makes it safe to free the memory: a write that was begun before, and is late because a process was
stopped, can then neither arrive in memory that is used for something else nor be read from such memory.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np

from borders.numbers import PORTS
from kv_cache.exchange.transports import Bytes

Protocol = Literal["tcp", "rdma", "ascend"]
_INFINIBAND, _DAVINCI = Path("/sys/class/infiniband"), Path("/dev/davinci_manager")
_METADATA = "P2PHANDSHAKE"  # peers ask each other about their memory, and no server
_TIMEOUT_S = 5  # the shortest limit of a write that the engine takes; its default is 30
_ALIGNMENT = 2**21  # bytes, which HCCS asks of the addresses of memory
_MOST_REACHED = 2**32  # bytes registered for a peer's window, whose size the peer says
_DESCRIPTION = re.compile(r"([^\s/@]{1,255}):(\d{1,5})@(\d{1,20})")


class Mooncake:
    """Writes bytes by Mooncake's transfer engine; others find this machine's at `host`.

    Raises OSError if the machine has no device for the protocol, since the engine would use TCP instead and
    say nothing, and ImportError if the package or a library of it is missing.
    """

    def __init__(self, host: str, protocol: Protocol) -> None:
        if protocol == "rdma" and not (_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())):
            raise OSError(f"{_INFINIBAND} lists no device for RDMA")
        if protocol == "ascend" and not _DAVINCI.exists():
            raise OSError(f"there is no {_DAVINCI}, and so no NPU")
        os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(_TIMEOUT_S))
        from mooncake.engine import TransferEngine

        self._make, self._host, self._protocol = TransferEngine, host, protocol

    def expose(self, num_bytes: int) -> MooncakeWindow:
        """Register memory of this process with an engine of its own."""
        return MooncakeWindow(self._started(), num_bytes, self._host)

    def reach(self, description: bytes, num_bytes: int) -> MooncakeReach:
        """Start an engine that writes to the peer's window."""
        match = _DESCRIPTION.fullmatch(description.decode("ascii", "replace"))
        if match is None or PORTS.parse(match[2]) is None:
            raise ValueError("its window has no HOST:PORT@ADDRESS of Mooncake's")
        if num_bytes > _MOST_REACHED:
            raise ValueError(
                f"its window has {num_bytes} bytes, and as many are registered here, {_MOST_REACHED} at most;"
                " lower server.page_window_mib there"
            )
        if int(match[3]) + num_bytes > 2**64:
            raise ValueError("its window ends behind the last address of 64 bits")
        return MooncakeReach(self._started(), f"{match[1]}:{match[2]}", int(match[3]), num_bytes)

    def _started(self) -> Any:
        engine = self._make()
        if code := engine.initialize(self._host, _METADATA, self._protocol, ""):
            raise OSError(f"Mooncake's transfer engine does not start at {self._host} (code {code})")
        return engine


class _Registered:
    """Memory that an engine may read or write until `close`."""

    def __init__(self, engine: Any, num_bytes: int) -> None:
        whole = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
        first = -whole.ctypes.data % _ALIGNMENT
        self.memory: Bytes = whole[first : first + num_bytes]
        self._engine = engine
        if code := engine.register_memory(self.memory.ctypes.data, num_bytes):
            raise OSError(f"Mooncake's transfer engine does not register {num_bytes} bytes (code {code})")

    def close(self) -> None:
        """End the engine: its threads and sockets, and all access to the memory."""
        self._engine = None

    def __del__(self) -> None:
        self._engine = None


class MooncakeWindow(_Registered):
    """Registered memory of the engine that answers."""

    def __init__(self, engine: Any, num_bytes: int, host: str) -> None:
        super().__init__(engine, num_bytes)
        self.description = f"{host}:{engine.get_rpc_port()}@{self.memory.ctypes.data}".encode()

    def reached(self) -> None:
        """Do nothing: the peer finds the window by its address for as long as it is registered."""


class MooncakeReach:
    """A peer's window, written from memory that is registered once."""

    def __init__(self, engine: Any, peer: str, address: int, num_bytes: int) -> None:
        self._peer, self._address = peer, address
        self._source = _Registered(engine, num_bytes)

    def put(self, offset: int, data: Bytes) -> None:
        """Copy bytes to the registered memory and write them from there; raises OSError."""
        source = self._source
        engine, memory = source._engine, source.memory
        if engine is None:
            raise OSError("the link has ended")
        memory[offset : offset + len(data)] = data
        at = memory.ctypes.data + offset
        if code := engine.transfer_sync_write(self._peer, at, self._address + offset, len(data)):
            raise OSError(f"Mooncake's transfer engine wrote nothing to {self._peer} (code {code})")

    def close(self) -> None:
        """End the engine, once a write that it makes has ended."""
        self._source.close()
