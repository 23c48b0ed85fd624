"""Record what a piece of work asks of the device: launches, copies, replays, updates, and waits of the host.

A launch is one operator of torch or torch_npu that computes on the device; views and empty tensors are not
launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Kind = Literal["launch", "prefetch", "to device", "to host", "wait", "replay", "update"]

# The device counts these itself, in the order of `enum counted` in cann/device.h.
COUNTED: tuple[tuple[Kind, str], ...] = (
    ("wait", "stream"),
    ("wait", "event"),
    ("wait", "device"),
    ("replay", "graph"),
)


def call_kind(name: str) -> Kind:
    """Return the kind under which a call of this operator is recorded; a prefetch computes nothing."""
    return "prefetch" if name == "npu::npu_prefetch" else "launch"


@dataclass(frozen=True, slots=True)
class Asked:
    """One thing that the device or the host was asked to do.

    `place` is the value of `LaunchLog.place` when it was asked or captured; `in_graph` says that a replay did
    it.
    """

    kind: Kind
    name: str
    place: str = ""
    in_graph: bool = False


class LaunchLog:
    """The record of what was asked while a reader was open; `place` names the part of the work that asks."""

    def __init__(self, device: ctypes.CDLL) -> None:
        self.place = ""
        self._counts = (ctypes.c_uint64 * len(COUNTED)).in_dll(device, "virtual_npu_counts")
        self._asked: list[Asked] | None = None

    @contextmanager
    def reading(self) -> Iterator[list[Asked]]:
        """Yield a list that is filled while the context is open, with the device's own counts at the end."""
        assert self._asked is None, "one reads at a time"
        self._asked = asked = []
        before = list(self._counts)
        try:
            yield asked
        finally:
            self._asked = None
            for (kind, name), first, last in zip(COUNTED, before, self._counts):
                asked += [Asked(kind, name)] * (last - first)

    def note(self, kind: Kind, name: str, place: str | None = None, *, in_graph: bool = False) -> None:
        """Record one thing, if a reader is open."""
        if self._asked is not None:
            self._asked.append(Asked(kind, name, self.place if place is None else place, in_graph))
