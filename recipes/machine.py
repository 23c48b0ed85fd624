"""Provide the operators, the memory and the name of each kind of machine.

The libraries of a kind are imported only where a recipe asks for that kind.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import platform
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attention.cpu.compiled import attention_source, stored_dtype
from attention.int8_sparse import latent_attention
from attention.latent import LatentAttention
from attention.recurrent import Recurrence
from attention.reference import Attention
from devices.ascend_limits import PROBED, PRODUCTS, WIDE_HEAD, answered, answers_file, buffer_mib, product
from devices.cpp_sources import NO_COMPILER
from devices.cpu_threads import Threads, Way, barriers, forget_registration
from devices.host_limits import host_memory_bytes
from devices.shapes import AttentionShape
from devices.torch_npu_calls import ALL
from devices.torch_npu_releases import releases
from kv_cache.groups import DType
from models.config import RecurrentConfig
from models.ops.cpu.products import Products, products
from models.ops.cpu.rowwise import Rowwise, rowwise
from models.ops.reference import Ops
from models.parallel.group import Group
from models.step.runner import ModelRunner
from models.step.warm_up import decode_step
from recipes.schema.recipe import ROOT, DeviceSection
from recipes.schema.recipe_error import RecipeError, in_yaml

if TYPE_CHECKING:
    from attention.npu.ascend_attention import AscendAttention
    from virtual_npu import VirtualDevice
    from virtual_npu.launch_log import LaunchLog
    from virtual_npu.other_release import OtherRelease

log = logging.getLogger(__name__)

ANSWERS = ROOT / "out" / "ascend"  # answers of the probes of verify_npu.sh


class Machine(ABC):
    """A machine that is ready to compute on `device`."""

    device: torch.device
    tiles_weights = False  # whether weights in 16 bits are kept in an order of the device's own

    def __init__(self, asked: DeviceSection) -> None:
        self.asked = asked

    @property
    def learned(self) -> str:
        """What an engine that takes this one's place need not measure again; empty if there is nothing."""
        return ""

    @property
    @abstractmethod
    def name(self) -> str:
        """The machine's name for the log and for result files."""

    @abstractmethod
    def operators(self, shape: AttentionShape) -> tuple[Ops, Attention]:
        """Return the device's operators and attention.

        The attention is plain torch where the recipe asks for it.
        """

    def recurrence(self, sizes: RecurrentConfig, dtype: DType) -> Recurrence:
        """Return what advances the states of a model of type `dtype`.

        This is the definition, or what the device does faster.
        """
        return Recurrence(self.device)

    def join(self, world: Group, group: Group, dtype: torch.dtype) -> None:
        """Do what the ranks of an engine of this type do together before its memory is measured.

        `group` are those of `world` that share layers. Raises ValueError where they must not differ, and do.
        """
        return

    @abstractmethod
    def memory_bytes(self, ranks_here: int = 1) -> int:
        """The bytes of the device's memory that this process may use, one of so many ranks of the machine."""

    @abstractmethod
    def settle(self, runner: ModelRunner) -> None:
        """Choose what only the model's own steps can show; its slots must be free."""


class Cpu(Machine):
    """The host's processor; `operators` sets the number of its threads and its allocator."""

    device = torch.device("cpu")

    def __init__(self, asked: DeviceSection, learned: str = "", *, replaces_weights: bool = False) -> None:
        super().__init__(asked)
        self._replaces_weights = replaces_weights
        forget_registration()
        self.threads = Threads(asked.threads, barriers(), Way.of(learned) if learned else None)
        self._others_compile = True
        self._onednn_dtype: torch.dtype | None = None  # oneDNN multiplies it far faster than `products`
        self._must_compile = asked.compile is True and asked.attention != "reference"

    @property
    def name(self) -> str:
        return platform.machine()

    @property
    def learned(self) -> str:
        return "" if self.threads.learned is None else self.threads.learned.word

    def join(self, world: Group, group: Group, dtype: torch.dtype) -> None:
        """Compile on all ranks that share layers or on none of them, and choose one way of products for all.

        What every rank computes for itself, as a router's choice of experts, must come out alike.
        """
        from models.ops.cpu.ops import is_onednn_ahead

        if group.size > 1:
            compiles = isinstance(self._sources(), Sources)
            self._others_compile = bool(group.least(int(compiles), self.device))
            self._must_compile |= compiles and self._others_compile
        if dtype == torch.float32 or self.asked.batch_invariant:
            return
        found = self._sources(dtype)
        if isinstance(found, Sources):
            self.threads.use(self.threads.patient)
            is_ahead = is_onednn_ahead(found.products, dtype)
            self._onednn_dtype = dtype if group.least(int(is_ahead), self.device) else None

    def operators(self, shape: AttentionShape) -> tuple[Ops, Attention]:
        from attention.cpu.attention import CpuAttention
        from models.ops.cpu.ops import CpuOps, keep_memory

        keep_memory()
        self.threads.use(self.threads.patient)
        found, invariant = self._sources(stored_dtype(shape)), self.asked.batch_invariant
        if isinstance(found, str):
            log.info("compile: no, since %s; products are oneDNN's, and the rest is plain torch", found)
            if invariant or self._must_compile:
                raise self._not_compiled(found, "batch_invariant" if invariant else "compile")
            ops, library = CpuOps(), None
        else:
            found.products.narrows = not self._replaces_weights
            ops = CpuOps(
                products=found.products,
                rowwise=found.rowwise,
                batch_invariant=invariant,
                onednn_dtype=self._onednn_dtype,
            )
            library = found.attention
        if shape.latent is not None:
            return ops, self._latent_attention(shape)
        if self.asked.attention == "reference":
            return ops, Attention(shape)
        attention = CpuAttention(shape, library=library, batch_invariant=invariant)
        if library is not None and attention.compiled is None:
            log.warning(
                "compile: attention is plain torch's, since the source reads multiples of 16, not heads of %d"
                " in pages of %d tokens of %s",
                *(shape.head_dim, shape.page_size, stored_dtype(shape)),
            )
        return ops, attention

    def _latent_attention(self, shape: AttentionShape) -> LatentAttention:
        from attention.cpu.latent import CpuLatentAttention, compiled_latents

        if not self.asked.batch_invariant:
            return latent_attention(shape)
        found = compiled_latents()
        if isinstance(found, str):
            raise self._not_compiled(found, "batch_invariant")
        return CpuLatentAttention(shape, found)

    def recurrence(self, sizes: RecurrentConfig, dtype: DType) -> Recurrence:
        from attention.cpu.recurrent import CpuRecurrence, compiled_recurrence

        if self.asked.attention == "reference":
            return super().recurrence(sizes, dtype)
        sources, invariant = self._sources(), self.asked.batch_invariant
        found = sources if isinstance(sources, str) else compiled_recurrence()
        if not isinstance(found, str):
            return CpuRecurrence(found, batch_invariant=invariant)
        if invariant or self._must_compile:
            raise self._not_compiled(found, "batch_invariant" if invariant else "compile")
        log.info("recurrent states are advanced by plain torch, since %s", found)
        return CpuRecurrence()

    def settle(self, runner: ModelRunner) -> None:
        self.threads.settle(decode_step(runner), runner.decoder)
        runner.cache.clear_null_page()

    def decided(self) -> Iterator[tuple[str, str]]:
        """Yield the keys that are left to the machine, with the value chosen here and the reason."""
        if self.asked.compile == "auto":
            found = self._sources()
            why = found if isinstance(found, str) else "there is a C++ compiler"
            yield "device.compile", f"{in_yaml(isinstance(found, Sources))}, since {why}"
        candidates = [str(way) for way in self.threads.candidates]
        if len(candidates) > 1:
            yield "device.threads", f"{' or '.join(candidates)}, whichever is measured faster at start-up"

    def memory_bytes(self, ranks_here: int = 1) -> int:
        return host_memory_bytes() // ranks_here

    def _not_compiled(self, why: str, key: str) -> RecipeError:
        fix = "install g++, or " if why.startswith(NO_COMPILER) else ""
        if self.asked.compile is False:
            fix = "set device.compile to auto, or "
        return RecipeError(
            f"device.{key}",
            f"products, attention and norms are compiled for it, and {why}",
            f"{fix}set device.{key} to false",
            value=True,
        )

    def _sources(self, pages: torch.dtype | None = None) -> Sources | str:
        """Return what is compiled for this machine and pages of a type, if any, or why nothing is."""
        if self.asked.compile is False:
            return "device.compile is false"
        if self.asked.attention == "reference":
            return "device.attention is reference, the plain torch"
        if not self._others_compile:
            return "another rank compiles nothing"
        with ThreadPoolExecutor() as pool:  # the first start runs a compiler for each, on a core of its own
            attention = None if pages is None else pool.submit(attention_source, pages)
            ahead = pool.submit(rowwise)
            own, rows = products(), ahead.result()
            library = None if attention is None else attention.result()
        if isinstance(own, str):
            return own
        if isinstance(rows, str):
            return rows
        return library if isinstance(library, str) else Sources(own, rows, library)


@dataclass(frozen=True, slots=True)
class Sources:
    """The C++ sources of a CPU, compiled for it: all of them, or none."""

    products: Products
    rowwise: Rowwise
    attention: ctypes.CDLL | None  # None: for no pages yet


class Accelerator(Machine):
    """A machine whose device has memory of its own."""

    def memory_bytes(self, ranks_here: int = 1) -> int:
        """Return the bytes that are free or held by this process's allocator already.

        Each rank has a device of its own.
        """
        memory = torch.get_device_module(self.device)
        num_bytes: int = memory.mem_get_info(self.device)[0] + memory.memory_reserved(self.device)
        return num_bytes

    def settle(self, runner: ModelRunner) -> None:
        """Do nothing, since nothing is left to choose."""


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
        from models.ops.cuda.ops import CudaOps

        # Other types and devices: torch's grouped product waits for the device to report where
        # groups end.
        is_grouped = shape.dtype == torch.bfloat16 and torch.cuda.get_device_capability(self.device) >= (9, 0)
        ops = CudaOps(
            batch_invariant=self.asked.batch_invariant,
            groups_products=is_grouped and hasattr(torch.nn.functional, "grouped_mm"),
        )
        if shape.latent is not None:
            return ops, latent_attention(shape, self.device)
        if self.asked.attention == "reference":
            return ops, Attention(shape, self.device)
        return ops, CudaAttention(shape, self.device, batch_invariant=self.asked.batch_invariant)


class Npu(Accelerator):
    """The first Ascend NPU that this process sees, or a stand-in for one."""

    def __init__(self, asked: DeviceSection) -> None:
        super().__init__(asked)
        self._stand_in = _stand_in(asked) if asked.virtual else None
        if self._stand_in is None and "virtual_npu" in sys.modules:
            raise RecipeError(
                "device.virtual",
                "this process has a stand-in already, and would take it for the NPU",
                "start another process",
                value=False,
            )
        try:
            from attention.npu.registered import check_release
            from models.ops.npu.ops import cann, chip, release, use_compiled_kernels

            self.chip = chip()
            named = product(asked.product, self.chip)
            check_release(named)
            use_compiled_kernels()
            self.cann, self.release = cann(), release()
            self._answers = answers_file(ANSWERS, named.name, self.cann, virtual=asked.virtual)
            self.product = answered(named, self._answers, torch_npu=self.release, virtual=asked.virtual)
            self.buffer_mib = buffer_mib(os.environ)
        except (ImportError, ValueError) as error:
            raise _no_npu(error) from error
        self.device = torch.device("npu", 0)
        self.tiles_weights = self.product.tiles_weights

    @property
    def name(self) -> str:
        kind = f"{self.chip} ({self.product.name})"
        if not self.asked.virtual:
            return kind
        wide = ", and takes float32 as no product does" if self.asked.virtual_fp32 else ""
        return f"VIRTUAL {kind}: a stand-in, whose figures say nothing{wide}"

    @property
    def launch_log(self) -> LaunchLog | None:
        """The log of launches, where the device is the stand-in, which records them."""
        return None if self._stand_in is None else self._stand_in.log

    def join(self, world: Group, group: Group, dtype: torch.dtype) -> None:
        """Compare what is known of all ranks' devices, and open the communicator for tokens of experts.

        Ranks would otherwise wait for each other in different collectives. The communicator is made where
        verify_npu.sh found that it gains time.
        """
        own = {"product": self.product.name, "cann": self.cann}
        own |= {name: getattr(self.product, name) for name in PROBED}
        leaders = json.loads(world.from_leader(lambda: json.dumps(own), "the leader's answers of probes"))
        if own["product"] != leaders["product"]:
            raise ValueError(
                f"the device is a {own['product']} here, and a {leaders['product']} on the leader: use"
                " machines of one product"
            )
        for name in (each for each in PROBED if own[each] != leaders[each]):
            raise ValueError(
                f"the answer {name} is {in_yaml(own[name])} here, with CANN {self.cann}, and"
                f" {in_yaml(leaders[name])} on the leader, with CANN {leaders['cann']}: use one version of"
                f" CANN, and give all machines the same {self._answers}"
            )
        sends = self.product.dispatches or self.product.dispatches_beside_shared
        group.open_for_tokens(self.buffer_mib if sends else 0, self.device)

    def operators(self, shape: AttentionShape) -> tuple[Ops, Attention]:
        from attention.npu.atb_attention import AtbAttention
        from attention.npu.fused_attention import FusedAttention
        from attention.npu.int8_attention import Int8FusedAttention
        from attention.npu.int8_sparse_attention import Int8FusedSparseAttention
        from attention.npu.latent_attention import FusedLatentAttention
        from attention.npu.single_queries import WideHeadAttention
        from attention.npu.sparse_attention import FusedSparseAttention
        from models.ops.npu.ops import NpuOps, PlainNpuOps

        has_none = not (self.product.is_fused or self.product.is_atb)  # true for the first 910
        wide = self.asked.virtual_fp32
        ops = PlainNpuOps(self.product) if has_none else NpuOps(self.product, takes_float32=wide)
        self.product.check_dtype(shape.dtype)
        if self.asked.attention == "reference":
            if shape.latent is not None:
                return ops, latent_attention(shape, self.device)
            return ops, Attention(shape, self.device)
        kind: type[AscendAttention] = AtbAttention if self.product.is_atb else FusedAttention
        if shape.latent is not None:
            of_index = Int8FusedSparseAttention if shape.int8_pages else FusedSparseAttention
            kind = FusedLatentAttention if shape.latent.index is None else of_index
        elif shape.int8_pages:
            kind = Int8FusedAttention
        elif self.product.is_fused and shape.head_dim == WIDE_HEAD:
            kind = WideHeadAttention
        return ops, kind(shape, self.device, self.product, takes_float32=wide)

    def recurrence(self, sizes: RecurrentConfig, dtype: DType) -> Recurrence:
        from attention.npu.recurrent import FusedRecurrence

        fuses = self.product.advances_states and self.asked.attention == "fused" and sizes.kind == "gated"
        wide = self.asked.virtual_fp32 and dtype == "float32"
        if fuses and sizes.state_dtype == "bfloat16" and (wide or dtype == "bfloat16"):
            return FusedRecurrence(self.device)
        return super().recurrence(sizes, dtype)


def start(asked: DeviceSection, learned: str = "", *, replaces_weights: bool = False) -> Machine:
    """Return the machine of a recipe, ready to be used; raises RecipeError where there is none.

    `learned` is from the machine of the engine whose place is taken, if there was one; `replaces_weights`
    says that the engine's weights may be replaced by others.
    """
    if asked.kind == "cpu":
        return Cpu(asked, learned, replaces_weights=replaces_weights)
    return {"cuda": Cuda, "npu": Npu}[asked.kind](asked)


def num_devices(kind: str) -> int:
    """Return the number of devices of a kind that this process sees; none is started for it.

    Raises RecipeError where the library of NPUs cannot be imported.
    """
    if kind == "npu":  # torch may not load its library by itself
        try:
            from models.ops.npu.ops import num_npus
        except ImportError as error:
            raise _no_npu(error) from error
        return num_npus()
    return int(torch.get_device_module(kind).device_count())


def decided(asked: DeviceSection) -> list[tuple[str, str]]:
    """Return the keys left to the machine, with value and reason; no device is started for it."""
    return list(Cpu(asked).decided()) if asked.kind == "cpu" else []


def _no_npu(error: Exception) -> RecipeError:
    return RecipeError(
        "device.kind",
        f"no NPU can be used here ({one_line(error)})",
        "correct that, or set device.virtual to true, or device.kind to cpu",
        value="npu",
    )


def _stand_in(asked: DeviceSection) -> VirtualDevice:
    import virtual_npu

    chip = next(each.chip for each in PRODUCTS if each.name == (asked.product or "910B"))
    try:
        return virtual_npu.start(chip, fp32=asked.virtual_fp32, release=_other_release(asked.virtual_release))
    except (OSError, RuntimeError, ValueError) as error:
        raise RecipeError(
            "device.virtual", f"the stand-in does not start: {one_line(error)}", value=True
        ) from error


def _other_release(version: str | None) -> OtherRelease | None:
    if version is None:
        return None
    from virtual_npu.other_release import OtherRelease

    known = releases()
    if version not in known:
        raise ValueError(
            f"there is no torch_npu {version} in the table of releases; it has {', '.join(known)}"
        )
    return OtherRelease(version, [call.operator for call in ALL], known[version].schemas)


def one_line(error: Exception) -> str:
    """Return the text of an error on one line."""
    return " ".join(str(error).split())
