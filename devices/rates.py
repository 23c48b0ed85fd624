"""Load device profiles: how fast a device reads memory, multiplies, sends messages and launches operators."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).with_name("profiles")


@dataclass(frozen=True, slots=True)
class Profile:
    """One device, from a file of `devices/profiles`.

    `efficiency` is the share of the bandwidth that a step can reach, and `basis` says how it is known.
    `cache_mib` may stay on the chip from one step to the next, so a step need not read it from memory.
    `matches` holds parts of the names by which the device reports itself.
    """

    name: str
    matches: list[str]
    memory_gb_per_s: float
    cache_mib: float
    efficiency: float
    basis: Literal["assumed", "measured"]
    source: str

    def read_ms(self, num_bytes: float, num_devices: float) -> float:
        """Return the least time in which `num_devices` devices together read so many bytes."""
        from_memory = max(0.0, num_bytes - num_devices * self.cache_mib * 2**20)
        return from_memory / (num_devices * self.memory_gb_per_s * 1e9 * self.efficiency) * 1e3


def load(name: str) -> Profile:
    """Read a profile by its name; raises ValueError if there is none."""
    path = FOLDER / f"{name}.json"
    if path.parent != FOLDER or not path.exists():
        raise ValueError(f"{name!r} is no device profile; there are {', '.join(names())}")
    facts = json.loads(path.read_text(encoding="utf-8"))
    del facts["step"]  # this part is read by `devices.rates`
    return Profile(name=name, **facts)


def names() -> list[str]:
    """Return the names of all profiles, in order."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def named(device: str) -> str | None:
    """Return the profile that matches a device's reported name, or None; the longest match counts."""
    profiles = [load(each) for each in names()]
    found = [(len(part), each.name) for each in profiles for part in each.matches if part in device]
    return max(found)[1] if found else None


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """One device, from the `step` of a file of `devices/profiles`.

    The speed of a step is a rate times its efficiency; `basis` says how these are known. A matrix product
    computes whole tiles of [rows, columns]; without `reads_ahead`, as on the cores of a CPU, it reads its
    weights before it multiplies. `link_gb_per_s` is the rate of one device in one direction over links that
    join `linked_devices` (0: any number), and more are taken as joined, too; `link_us` is the least time of a
    message. `launch_us` is the host's time to launch one operator, `graph_us` that of a captured graph,
    `kernel_us` the least time of an operator on the device, and `host_us` the host's time between steps, with
    `row_us` more for each row that is sampled.
    """

    name: str
    memory_gb_per_s: float
    memory_gib: float
    tflop_per_s: dict[str, float]  # keyed by dtype
    tile: tuple[int, int]
    reads_ahead: bool
    link_gb_per_s: float
    link_us: float
    linked_devices: int
    launch_us: float
    kernel_us: float
    graph_us: float
    host_us: float
    row_us: float
    matrix_efficiency: float
    memory_efficiency: float
    link_efficiency: float
    basis: Literal["assumed", "measured"]
    source: str

    @classmethod
    def load(cls, name: str) -> DeviceRates:
        """Read the device of a profile; raises ValueError if there is no such profile."""
        profile = load(name)
        facts = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["step"]
        tile = tuple(facts.pop("tile"))
        return cls(name=name, memory_gb_per_s=profile.memory_gb_per_s, tile=tile, **facts)

    def flop_per_s(self, dtype: str) -> float:
        """Return the rate of matrix products in a dtype; raises ValueError for a dtype without a rate."""
        if dtype not in self.tflop_per_s:
            raise ValueError(
                f"{self.name} has no rate for {dtype}, but for {', '.join(self.tflop_per_s)}; set model.dtype"
            )
        return self.tflop_per_s[dtype] * 1e12 * self.matrix_efficiency

    @property
    def bytes_per_s(self) -> float:
        return self.memory_gb_per_s * 1e9 * self.memory_efficiency

    def operator_s(self, operations: float, dtype: str, num_bytes: float) -> float:
        """Return the seconds of an operator with so many operations, which reads and writes so many bytes."""
        computing_s, moving_s = operations / self.flop_per_s(dtype), num_bytes / self.bytes_per_s
        return max(computing_s, moving_s) if self.reads_ahead else computing_s + moving_s

    def send_s(self, num_bytes: float) -> float:
        """Return the seconds for a message to reach another device."""
        return self.link_us * 1e-6 + num_bytes / (self.link_gb_per_s * 1e9 * self.link_efficiency)

    def exchange_s(self, num_bytes: float, num_devices: int) -> float:
        """Return the seconds in which each device sends an equal part of `num_bytes` to every other one.

        A ring's sum moves twice as much.
        """
        return self.all_reduce_s(num_bytes, num_devices) / 2

    def all_reduce_s(self, num_bytes: float, num_devices: int) -> float:
        """Return the seconds of a sum over devices, with a ring's traffic and a tree's number of hops."""
        if num_devices == 1:
            return 0.0
        moved = 2 * (num_devices - 1) / num_devices * num_bytes
        hops = (num_devices - 1).bit_length()
        return 2 * hops * self.link_us * 1e-6 + moved / (self.link_gb_per_s * 1e9 * self.link_efficiency)
