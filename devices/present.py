"""Find the device that this machine computes with: an Ascend NPU, a CUDA device, or else its processor.

NPUs are looked for by the driver's own tool, npu-smi, because torch_npu can be imported only after CANN's
environment has been set, and the choice of a recipe comes before that.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from devices.ascend_limits import PRODUCTS
from devices.host_limits import host_memory_bytes, usable_cores

MIB = 2**20
SMI_LIMIT_S = 60
# npu-smi calls a die of the 910C by this name alone; a 910 of the first generation is 910A, 910B or 910ProB.
BARE_910C = "Ascend910"
VISIBLE_NPUS = "ASCEND_RT_VISIBLE_DEVICES"
DEVICES = Path("/dev")


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip as npu-smi shows it, by the id of its NPU, and of itself there; memory in MiB."""

    name: str
    health: str
    used_mib: int
    total_mib: int
    npu: int = 0
    chip: int = 0


@dataclass(frozen=True, slots=True)
class Present:
    """The devices of one kind that this process may use, of which each has `memory_bytes` free."""

    kind: Literal["cpu", "cuda", "npu"]
    name: str
    product: str | None = None  # the Ascend product's name in a recipe
    count: int = 1
    memory_bytes: int = 0
    busy: str = ""  # words for devices with far less free than another has, and how to leave them out


def present(environment: Mapping[str, str] = os.environ) -> Present:
    """Return the devices of this machine: its NPUs, else its CUDA devices, else its processor.

    Raises ValueError for an NPU of which npu-smi does not say what it is.
    """
    if num_npus():
        return npus(_npu_smi(), environment)
    return _cuda() or processor()


def npus(printed: str, environment: Mapping[str, str]) -> Present:
    """Return the NPUs that `npu-smi info` shows and the environment leaves visible."""
    shown = chips_of(printed)
    chips = {number: shown[number] for number in visible_npus(len(shown), environment)}
    fix = "say which one it is: device.kind=npu device.product=910B device.memory_gib=60, as it may be"
    if not chips:
        seen = environment.get(VISIBLE_NPUS)
        hidden = "" if seen is None else f" that {VISIBLE_NPUS}={seen} leaves visible"
        raise ValueError(f"/dev has an NPU, and `npu-smi info` shows none{hidden}; {fix}")
    name = next(iter(chips.values())).name
    product = product_of(name)
    if product is None:
        known = ", ".join(each.name for each in PRODUCTS)
        raise ValueError(f"the NPU calls itself {name}, which is no product known here ({known}); {fix}")
    free = {number: chip.total_mib - chip.used_mib for number, chip in chips.items()}
    least, most = min(free.values()), max(free.values())
    busy = ""
    if 2 * least < most:
        idle = ",".join(str(number) for number, mib in free.items() if 2 * mib >= most)
        full = next(number for number, mib in free.items() if mib == least)
        busy = (
            f"NPU {full} has {least / 1024:.2f} GiB free, another {most / 1024:.2f}; to leave out what others"
            f" use, export {VISIBLE_NPUS}={idle}"
        )
    return Present("npu", name, product, len(chips), least * MIB, busy)


def num_npus() -> int:
    """Return how many NPUs the driver shows."""
    return len(list(DEVICES.glob("davinci[0-9]*")))


def visible_npus(count: int, environment: Mapping[str, str]) -> list[int]:
    """Return those of so many NPUs that the environment leaves visible: all where it says no numbers."""
    said = environment.get(VISIBLE_NPUS, "").split(",")
    numbers = [int(each) for each in said if each.strip().isdecimal()]
    return [each for each in range(count) if len(numbers) < len(said) or each in numbers]


def product_of(chip: str) -> str | None:
    """Return the product of a chip by its name in npu-smi or torch_npu; None for an unknown one."""
    if chip == BARE_910C:
        return "910C"
    full = chip if chip.startswith("Ascend") else f"Ascend{chip}"
    return next((each.name for each in PRODUCTS if re.match(each.chips, full)), None)


def processor() -> Present:
    """Return this machine's processor."""
    return Present("cpu", f"{usable_cores()} cores", memory_bytes=host_memory_bytes())


def chips_of(printed: str) -> tuple[Chip, ...]:
    """Parse the output of `npu-smi info`: two lines for each chip, one of name and health, one of memory."""
    found, npu, name, health = [], 0, None, "?"
    for line in printed.splitlines():
        cells = [cell.split() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3 or not cells[0] or not cells[0][0].isdecimal():
            continue
        memory = re.search(r"(\d+)\s*/\s*(\d+)\s*\|?\s*$", line.strip())
        if len(cells[0]) == 2 and not (cells[1] and ":" in cells[1][0]):
            npu, name, health = int(cells[0][0]), cells[0][1], cells[1][0] if cells[1] else "?"
        elif name is not None and memory:
            found.append(Chip(name, health, int(memory[1]), int(memory[2]), npu, int(cells[0][0])))
    return tuple(found)


def _npu_smi() -> str:
    """Return what `npu-smi info` prints; empty where it is not there or fails."""
    if shutil.which("npu-smi") is None:
        return ""
    try:
        done = subprocess.run(
            ["npu-smi", "info"], capture_output=True, text=True, errors="replace", timeout=SMI_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):  # the driver is not usable, and the caller says what to do
        return ""
    return done.stdout


def _cuda() -> Present | None:
    """Return the CUDA devices that this torch can use, or None."""
    import torch  # imported here because an NPU is found without it, and it takes a second

    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    free = min(torch.cuda.mem_get_info(number)[0] for number in range(count))
    return Present("cuda", torch.cuda.get_device_name(0), count=count, memory_bytes=free)
