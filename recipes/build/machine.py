"""Which operators, how much memory and which name does each kind of machine have?

The libraries of a kind are imported only where a recipe asks for it.
"""

from __future__ import annotations

import os
import platform
import sys
from abc import ABC, abstractmethod
from pathlib import Path

import torch

from attention.reference import Attention
from devices.products import PRODUCTS, product
from devices.shapes import AttentionShape
from models.ops.reference import Ops
from recipes.schema.recipe import DeviceSection
from recipes.schema.recipe_error import RecipeError

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Machine(ABC):
    """A machine that is ready to compute on `device`."""

    device: torch.device

    def __init__(self, asked: DeviceSection) -> None:
        self.asked = asked

    @property
    @abstractmethod
    def name(self) -> str:
        """The machine's name for the log and for result files."""

    @abstractmethod
    def operators(self, shape: AttentionShape) -> tuple[Ops, Attention]:
        """The device's own operators; the attention is the reference one where the recipe asks for it."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """The bytes of the device's memory that this process may use."""


class Cpu(Machine):
    """The host's processor. `operators` sets the number of its threads and its allocator."""

    device = torch.device("cpu")

    @property
    def name(self) -> str:
        return platform.machine()

    def operators(self, shape: AttentionShape) -> tuple[Ops, Attention]:
        from attention.cpu.attention import CpuAttention
        from models.ops.cpu import CpuOps, tune_process

        # torch's own number heeds OMP_NUM_THREADS
        tune_process(self.asked.threads or torch.get_num_threads())
        compiles = self.asked.compile
        plain = self.asked.attention == "reference"
        attention = Attention(shape) if plain else CpuAttention(shape, compile=compiles)
        return CpuOps(compile=compiles), attention

    def memory_bytes(self) -> int:
        return host_memory_bytes()


class Accelerator(Machine):
    """A machine with memory of its own."""

    def memory_bytes(self) -> int:
        """The bytes that are free or held by this process's allocator already."""
        memory = torch.get_device_module(self.device)
        return memory.mem_get_info(self.device)[0] + memory.memory_reserved(self.device)


class Cuda(Accelerator):
    """The first CUDA device that this process sees."""

    def __init__(self, asked: DeviceSection) -> None:
        super().__init__(asked)
        if not torch.cuda.is_available():
            raise RecipeError(
                "device.kind",
                f"torch {torch.__version__} finds no CUDA device",
                "see nvidia-smi, install a torch with CUDA, or set device.kind to cpu",
                value="cuda",
            )
        self.device = torch.device("cuda", 0)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def operators(self, shape: AttentionShape) -> tuple[Ops, Attention]:
        from attention.cuda.attention import CudaAttention
        from models.ops.cuda import CudaOps

        ops = CudaOps(batch_invariant=self.asked.batch_invariant)
        if self.asked.attention == "reference":
            return ops, Attention(shape, self.device)
        return ops, CudaAttention(shape, self.device, batch_invariant=self.asked.batch_invariant)


class Npu(Accelerator):
    """The first Ascend NPU that this process sees, or a stand-in for one."""

    def __init__(self, asked: DeviceSection) -> None:
        super().__init__(asked)
        if asked.virtual:
            _stand_in(asked)
        elif "virtual_npu" in sys.modules:
            raise RecipeError(
                "device.virtual",
                "this process has a stand-in already, and would take it for the NPU",
                "start another process",
                value=False,
            )
        try:
            from models.ops.npu import chip

            self.chip = chip()
            self.product = product(asked.product, self.chip)
        except (ImportError, ValueError) as error:
            raise RecipeError(
                "device.kind",
                f"no NPU can be used here ({one_line(error)})",
                "correct that, or set device.virtual to true, or device.kind to cpu",
                value="npu",
            ) from error
        self.device = torch.device("npu", 0)

    @property
    def name(self) -> str:
        kind = f"{self.chip} ({self.product.name})"
        if not self.asked.virtual:
            return kind
        wide = ", and takes float32 as no product does" if self.asked.virtual_fp32 else ""
        return f"VIRTUAL {kind}: a stand-in, whose figures say nothing{wide}"

    def operators(self, shape: AttentionShape) -> tuple[Ops, Attention]:
        from attention.npu.atb_attention import AtbAttention
        from attention.npu.fused_attention import FusedAttention
        from models.ops.npu import NpuOps

        has_none = not (self.product.is_fused or self.product.is_atb)  # the first 910
        ops = Ops() if has_none else NpuOps(self.product)
        self.product.check_dtype(shape.dtype)
        if self.asked.attention == "reference":
            return ops, Attention(shape, self.device)
        kind = AtbAttention if self.product.is_atb else FusedAttention
        return ops, kind(shape, self.device, self.product, takes_float32=self.asked.virtual_fp32)


def start(asked: DeviceSection) -> Machine:
    """The machine of a recipe, ready to be used; raises RecipeError where there is none."""
    kinds: dict[str, type[Machine]] = {"cpu": Cpu, "cuda": Cuda, "npu": Npu}
    return kinds[asked.kind](asked)


def _stand_in(asked: DeviceSection) -> None:
    import virtual_npu

    chip = next(each.chip for each in PRODUCTS if each.name == (asked.product or "910B"))
    try:
        virtual_npu.start(chip, fp32=asked.virtual_fp32)
    except (OSError, RuntimeError, ValueError) as error:
        raise RecipeError(
            "device.virtual", f"the stand-in does not start: {one_line(error)}", value=True
        ) from error


def one_line(error: Exception) -> str:
    """The text of an error on one line."""
    return " ".join(str(error).split())


def host_memory_bytes() -> int:
    """The bytes that this process may use: the host's memory, or less where a control group limits it."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [path.read_text().strip() for path in map(Path, CGROUP_LIMITS) if path.is_file()]
    return min([whole, *(int(limit) for limit in limits if limit.isdigit())])
