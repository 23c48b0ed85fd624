"""Multiply float32 rows by weights that stay in the type in which they are stored.

The products of few rows, which decodes are, wait for weights to be read. oneDNN reads float32 wherever the
processor does not multiply bfloat16 itself; `products.cpp` reads bfloat16 and widens it in registers,
exactly. It also sums every row in the same order whatever the row is batched with, so a row's result is the
same, bit by bit, for any number of rows and threads.

The source is compiled by the host's C++ compiler at first use, in two or three seconds, and kept in a folder
of the user's for the next start.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from devices.compiled import processor
from devices.cpu_threads import loaded_library

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("products.cpp")
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the source's enum Kind
COMPILE_S = 120.0  # limit of the compiler, which takes 3 s where it is alone
PROBE = 1 << 16  # numbers that are looked at before a whole weight is narrowed


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight [out, in] as the source reads it, and its bias in float32."""

    numbers: Tensor
    num_outputs: int
    num_inputs: int
    bias: Tensor | None


class Products:
    """The compiled source."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        self._pack, self._multiply = library.pack, library.multiply
        self._pack.argtypes = [pointer, pointer, integer, integer, number]
        self._multiply.argtypes = [
            *(pointer, integer, pointer, pointer, pointer, integer),
            *(integer, integer, integer, number, number),
        ]
        self._pack.restype = self._multiply.restype = None
        self._width = int(library.outputs_of_a_panel())

    def pack(self, weight: Tensor, bias: Tensor | None) -> Panels:
        """Pack a weight [out, in] in its own type, or in bfloat16 if that holds all of its numbers."""
        weight = narrowed(weight).contiguous()
        num_outputs, num_inputs = weight.shape
        rows = -(-num_outputs // self._width) * self._width
        numbers = torch.empty(rows * num_inputs, dtype=weight.dtype)
        kind = KINDS[weight.dtype]
        self._pack(weight.data_ptr(), numbers.data_ptr(), num_outputs, num_inputs, kind)
        return Panels(numbers, num_outputs, num_inputs, None if bias is None else bias.float().contiguous())

    def multiply(self, x: Tensor, panels: Panels) -> Tensor:
        """Map [T, in] to [T, out] in x's type, summed in float32."""
        rows = x.float()
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        y = torch.empty(len(rows), panels.num_outputs)
        self._multiply(
            *(rows.data_ptr(), rows.stride(0), panels.numbers.data_ptr()),
            None if panels.bias is None else panels.bias.data_ptr(),
            *(y.data_ptr(), panels.num_outputs, len(rows), panels.num_outputs, panels.num_inputs),
            *(KINDS[panels.numbers.dtype], torch.get_num_threads()),
        )
        return y.to(x.dtype)


def narrowed(weight: Tensor) -> Tensor:
    """Return float32 numbers in bfloat16 if that holds all of them, as where a checkpoint is widened."""
    if weight.dtype != torch.float32:
        return weight
    probe = weight.flatten()[:PROBE]
    if not torch.equal(probe.bfloat16().float(), probe):
        return weight
    half = weight.bfloat16()
    return half if torch.equal(half.float(), weight) else weight


def missing_for_products() -> str | None:
    """Describe what this machine lacks for the source; None if it has a compiler and a known processor."""
    if platform.system() != "Linux":
        return f"the system is {platform.system()}, not Linux"
    if platform.machine() not in ("aarch64", "x86_64"):
        return f"the processor is {platform.machine()}, neither x86_64 nor aarch64"
    if platform.machine() == "x86_64" and not torch.cpu._is_avx2_supported():
        return "the processor has no AVX2"
    compiler = os.environ.get("CXX", "g++")
    return f"there is no C++ compiler {compiler}" if shutil.which(compiler) is None else None


@cache
def products() -> Products | str:
    """Return the products of this machine, compiled if they are not kept, or why there are none."""
    missing = missing_for_products()
    if missing is not None:
        return missing
    openmp = loaded_library("libgomp")
    if openmp is not None:  # the library's own team computes, not a second one beside it
        ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
    try:
        return Products(ctypes.CDLL(str(_library())))
    except (OSError, subprocess.SubprocessError) as error:
        return f"products.cpp cannot be compiled: {_last_line(error)}"


def _library() -> Path:
    """Return the compiled source of this machine, kept in the user's folder under the name of its content."""
    compiler = os.environ.get("CXX", "g++")
    cpu = "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
    options = ["-O3", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=fast", cpu]
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=COMPILE_S
    ).stdout
    content = [SOURCE.read_bytes(), version, processor().encode(), *map(str.encode, options)]
    name = f"products-{hashlib.sha256(b'|'.join(content)).hexdigest()[:16]}.so"
    kept = _folder()
    if kept is not None and (kept / name).is_file():
        return kept / name
    made = Path(tempfile.mkdtemp(prefix="products-"))
    command = [compiler, *options, "-c", str(SOURCE), "-o", str(made / "products.o")]
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
    # Linked without OpenMP's library: the one that torch has loaded is meant
    command = [compiler, "-shared", str(made / "products.o"), "-o", str(made / name)]
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
    if kept is None:
        return made / name
    for_all = kept / f".{name}.{os.getpid()}"
    shutil.copyfile(made / name, for_all)
    for_all.replace(kept / name)  # at once, since other processes may compile it as well
    shutil.rmtree(made)
    return kept / name


def _folder() -> Path | None:
    """Return the folder in which libraries are kept, or None if it cannot be written."""
    cache_folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(cache_folder) / "continuous_batching" / "products"
    if folder.parts[0] == "~":  # a user without a home
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        log.info("products: %s cannot be written (%s), so they are compiled at each start", folder, error)
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def _last_line(error: Exception) -> str:
    said = getattr(error, "stderr", None) or b""
    lines = said.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else str(error)
