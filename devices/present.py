"""Find the device that this machine computes with: an Ascend NPU, a CUDA device, or else its processor.

NPUs are looked for by the driver's own tool, npu-smi, because torch_npu can be imported only after CANN's
environment has been set, and the choice of a recipe comes before that. CUDA devices are asked by a process
of its own, because each keeps memory for a process that has asked what it has free until that process ends.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from devices.ascend_limits import PRODUCTS
from devices.host_limits import host_memory_bytes, usable_cores

MIB = 2**20
SMI_LIMIT_S = 60
CUDA_LIMIT_S = 120  # it imports torch and starts every device
# npu-smi calls a die of the 910C by this name alone; a 910 of the first generation is 910A, 910B or 910ProB.
BARE_910C = "Ascend910"
VISIBLE_NPUS = "ASCEND_RT_VISIBLE_DEVICES"
VISIBLE_CUDA = "CUDA_VISIBLE_DEVICES"
FUSED_CAPABILITY = (8, 0)  # the least of a CUDA device that fused attention takes
DEVICES = Path("/dev")
# Prints the name, the free bytes and the compute capability of each CUDA device.
ASK_CUDA = """
import json, torch

cuda = torch.cuda
print(json.dumps([
    (cuda.get_device_name(each), cuda.mem_get_info(each)[0], cuda.get_device_capability(each))
    for each in range(cuda.device_count())
]))
"""


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
    capability: tuple[int, int] | None = None  # the least compute capability of CUDA devices


def present(environment: Mapping[str, str] = os.environ) -> Present:
    """Return the devices of this machine: its NPUs, else its CUDA devices, else its processor.

    Raises ValueError for an NPU of which npu-smi does not say what it is, and for CUDA devices that do not
    answer.
    """
    if num_npus():
        return npus(_npu_smi(), environment)
    return cuda_devices(_cuda(), environment) if _has_cuda() else processor()


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
    busy = _busy({str(number): mib for number, mib in free.items()}, "NPU", VISIBLE_NPUS)
    return Present("npu", name, product, len(chips), min(free.values()) * MIB, busy)


def cuda_devices(printed: str, environment: Mapping[str, str]) -> Present:
    """Return the CUDA devices that ASK_CUDA prints, which are those that the environment leaves visible."""
    shown = json.loads(printed)
    said = [each.strip() for each in environment.get(VISIBLE_CUDA, "").split(",") if each.strip()]
    names = said or [str(number) for number in range(len(shown))]
    free = {name: num_bytes // MIB for name, (_, num_bytes, _) in zip(names, shown)}
    return Present(
        "cuda",
        shown[0][0],
        count=len(shown),
        memory_bytes=min(num_bytes for _, num_bytes, _ in shown),
        busy=_busy(free, "CUDA device", VISIBLE_CUDA),
        capability=min((major, minor) for _, _, (major, minor) in shown),
    )


def _busy(free_mib: Mapping[str, int], kind: str, variable: str) -> str:
    """Return words for devices, by their names in the variable, of which one has far less free; or none."""
    least, most = min(free_mib.values()), max(free_mib.values())
    if 2 * least >= most:
        return ""
    idle = ",".join(name for name, mib in free_mib.items() if 2 * mib >= most)
    full = next(name for name, mib in free_mib.items() if mib == least)
    return (
        f"{kind} {full} has {least / 1024:.2f} GiB free, another {most / 1024:.2f}; to leave out what others"
        f" use, export {variable}={idle}"
    )


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


def _has_cuda() -> bool:
    """Whether this torch can use a CUDA device, which starts none of them."""
    import torch  # imported here because an NPU is found without it, and it takes a second

    return torch.cuda.is_available()


def _cuda() -> str:
    """Return what ASK_CUDA prints; raises ValueError where it fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_CUDA],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CUDA_LIMIT_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        why = f"they did not answer in {CUDA_LIMIT_S} s"
    except subprocess.CalledProcessError as error:
        # The error itself comes first behind the frames, which are indented; torch writes advice after it
        said = error.stderr.rpartition("Traceback (most recent call last):")[2].splitlines()
        whys = (each for each in said if each and not each.startswith(" "))
        why = next(whys, f"status {error.returncode}")
    else:
        return done.stdout.strip().splitlines()[-1]
    raise ValueError(
        f"this torch finds CUDA devices, and what they have free is not known: {why}; see nvidia-smi, name"
        f" those to use in {VISIBLE_CUDA}, or set device.kind=cpu"
    )
