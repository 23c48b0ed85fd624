"""Start the virtual NPU of a process; refuse to start beside a real NPU or another accelerator.

The operators of the contract are connected to the communicators that torch_npu has made in this process.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from virtual_npu import libraries
from virtual_npu.contract import Capture, Conditions, Summing
from virtual_npu.deferred_calls import CAPTURED, DeferredCalls
from virtual_npu.host_call import Memory
from virtual_npu.kernels import Kernels, find
from virtual_npu.launch_log import LaunchLog
from virtual_npu.operators import OPERATORS
from virtual_npu.other_release import OtherRelease, enforce
from virtual_npu.simulated_products import PRODUCTS

# These are the numbers of cann/communicator.h.
TYPES = {torch.float16: 3, torch.float32: 4, torch.bfloat16: 11}
OPERATIONS: dict[Summing, int] = {"mm_all_reduce": 11, "dispatch": 12, "combine": 13}


@dataclass(frozen=True, slots=True)
class JoinedRanks:
    """The communicators that `library` holds."""

    library: ctypes.CDLL

    def size(self, name: str) -> int:
        """Return the number of its ranks; 0 where no communicator has that name."""
        return int(self.library.virtual_npu_ranks(name.encode()))

    def rank(self, name: str) -> int:
        """Return the rank of this process in it; -1 where no communicator has that name."""
        return int(self.library.virtual_npu_rank(name.encode()))

    def add_up(self, name: str, tensor: Tensor, operation: Summing) -> Tensor:
        """Return the sum of its ranks' tensors, after waiting for all of them.

        Raises RuntimeError where a rank is lost or calls another operator.
        """
        summed = tensor.contiguous()
        place, count = ctypes.c_void_p(summed.data_ptr()), ctypes.c_uint64(summed.numel())
        kind, which = TYPES[summed.dtype], OPERATIONS[operation]
        if self.library.virtual_npu_add_up(name.encode(), place, count, kind, which):
            raise RuntimeError(self.library.aclGetRecentErrMsg().decode())
        return summed


log = logging.getLogger(__name__)

TOOLKIT = Path("/usr/local/Ascend/ascend-toolkit")
CHIPS = {chip: each for each in PRODUCTS.values() for chip in each.chips}


class VirtualDevice:
    """The virtual NPU of this process."""

    def __init__(self, chip: str, memory_bytes: int | None, library: ctypes.CDLL) -> None:
        self.chip, self.memory_bytes, self.library = chip, memory_bytes, library
        self.memory = Memory(library.virtual_npu_base(), library.virtual_npu_span())
        self.log = LaunchLog(library)
        self.deferred_calls = DeferredCalls(library, self.log)
        self.kernels = Kernels(self.memory, self.deferred_calls, self.log)
        self.num_kernels = self.kernels.register()
        self.num_operators = len(OPERATORS)
        self.conditions: Conditions | None = None
        self._release: OtherRelease | None = None
        self._restore: Callable[[], None] = lambda: None

    def implement(
        self, name: str, function: Callable[..., Any], captured: Callable[..., Any] | None = None
    ) -> None:
        """Implement an operator of torch_npu by a Python function of CPU tensors; see `Kernels.implement`."""
        self.kernels.implement(name, function, captured)

    def capture(self) -> Capture:
        """Return whether the current stream is captured, and whether a task group of the capture is open."""
        if not self.deferred_calls.busy.value or self.deferred_calls.state() != CAPTURED:
            return "none"
        return "group" if self.deferred_calls.in_group() else "stream"

    def abandon(self) -> int:
        """Drop work that waits for an event, and open updates; returns how many streams had any.

        Without this, a test that fails between a replay and its updates would make every later test fail.
        """
        return int(self.library.virtual_npu_abandon())

    def contract(self, conditions: Conditions) -> None:
        """Check and compute the operators of `virtual_npu.operators` under these conditions from now on."""
        if conditions == self.conditions:
            return
        self.conditions = conditions
        for each in OPERATORS:
            if find(each.qualified) is None:  # torch_npu 2.10 lacks one that 2.13 calls inside of another
                continue
            self.implement(each.qualified, partial(each, conditions), partial(each.check_capture, conditions))

    def take(self, release: OtherRelease | None) -> None:
        """Take only the calls that a release of torch_npu takes; None: those of the installed one."""
        if release == self._release:
            return
        self._restore()
        self._release, self._restore = release, lambda: None
        if release is not None:
            import torch_npu

            self._restore = enforce(torch_npu, release)


_started: list[VirtualDevice] = []  # a process has one torch, and torch one accelerator


def start(
    chip: str = "Ascend910B1",
    memory_bytes: int | None = None,
    *,
    fp32: bool = False,
    held: Callable[[], Any] | None = None,
    release: OtherRelease | None = None,
) -> VirtualDevice:
    """Give this process one virtual NPU; torch then has `npu:0`, whose memory is the host's.

    `chip` is the device's name; `memory_bytes` is its memory, None for as much as the host has. `fp32` and
    `held` are conditions of the operators' contract, `release` is another torch_npu whose calls alone are
    taken; a later start may change these three. Raises ValueError for an unknown chip or a second, different
    device; OSError where the wheel or a C compiler is missing; RuntimeError beside a real NPU, CANN, another
    accelerator, or a torch_npu that was imported before.
    """
    if chip not in CHIPS:
        raise ValueError(f"chip {chip!r} is not known; choose one of {', '.join(CHIPS)}")
    if _started:
        device = _started[0]
        if (chip, memory_bytes) != (device.chip, device.memory_bytes):
            raise ValueError(
                f"this process has a virtual {device.chip} of {device.memory_bytes or 'the host'} bytes: "
                "start another process for another device"
            )
    else:
        _refuse_beside_others()
        device = _boot(chip, memory_bytes)
        _started.append(device)
    device.contract(
        Conditions(
            product=CHIPS[chip],
            fp32=fp32,
            held=held,
            capture=device.capture,
            on_device=device.memory.holds,
            communicators=JoinedRanks(device.library),
        )
    )
    device.take(release)
    log.warning(
        "VIRTUAL NPU: npu:0 is a stand-in for an %s in this host's memory; its speed means nothing", chip
    )
    return device


def _refuse_beside_others() -> None:
    if "torch_npu" in sys.modules:
        raise RuntimeError("torch_npu is imported already: start the virtual NPU before it")
    toolkit = next(
        (os.environ[name] for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME") if os.environ.get(name)),
        None,
    )
    if toolkit is None and TOOLKIT.exists():
        toolkit = str(TOOLKIT)
    real = toolkit or next(map(str, Path("/dev").glob("davinci[0-9]*")), None)
    if real is not None:
        raise RuntimeError(f"{real} says that a real NPU or CANN is here: set device.virtual to false")
    other = torch._C._get_accelerator().type
    if other != "cpu":
        raise RuntimeError(
            f"this torch has the accelerator {other}, and torch takes one alone: use a CPU build of torch"
        )


def _boot(chip: str, memory_bytes: int | None) -> VirtualDevice:
    library = libraries.load(libraries.build())
    library.virtual_npu_base.restype = ctypes.c_void_p
    library.virtual_npu_span.restype = ctypes.c_size_t
    library.virtual_npu_memory.argtypes = [ctypes.c_size_t]
    library.virtual_npu_replaced.restype = ctypes.c_uint64
    library.virtual_npu_submit.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    for name in ("state", "settle", "replaced", "in_group", "holds"):
        getattr(library, f"virtual_npu_{name}").argtypes = [ctypes.c_void_p]
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    product = CHIPS[chip]
    library.virtual_npu_product(chip.encode(), product.compiles_online, product.captured_sizes or 0)
    if library.virtual_npu_memory(memory_bytes or 0):
        raise MemoryError(library.aclGetRecentErrMsg().decode())
    os.environ["TASK_QUEUE_ENABLE"] = "0"  # calls reach the device in the calling thread, in order
    site = str(libraries.wheel())
    sys.path.append(site)
    try:
        with redirect_stdout(StringIO()) as said:
            import torch_npu  # its import is its start
    finally:
        sys.path.remove(
            site
        )  # a child process that inherited this path would load torch_npu without the stand-ins
    for line in said.getvalue().splitlines():
        if "ASCEND_HOME_PATH" not in line:  # torch_npu reports that CANN is missing, which is intended here
            log.warning("torch_npu: %s", line)
    torch_npu.npu.set_device(0)
    return VirtualDevice(chip, memory_bytes, library)
