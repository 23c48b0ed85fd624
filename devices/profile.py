"""Load device profiles, and compute the least time in which a device reads its memory."""

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
