"""Compile a function once for all sizes of a batch, and call it at little cost.

torch.compile checks at each call whether its code still fits, which takes 19 us; here the caller declares in
advance what may vary, and a call takes 5. A decoder makes some 70 calls a step.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import struct
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

log = logging.getLogger(__name__)

# Set for each function and never process-wide, so that other users of torch's compiler keep their settings.
OPTIONS: dict[str, Any] = {
    "assert_indirect_indexing": False,  # the scheduler guarantees valid addresses
    "cpp.enable_floating_point_contract_flag": "fast",  # multiply and add in one instruction
    "size_asserts": False,
    "alignment_asserts": False,
    "compile_threads": 1,  # no pool of compiling processes, each with a torch of its own
}
# Errors that end a compilation if there is no compiler, or no Python headers
NO_COMPILER = ("InvalidCxxCompiler", "CppCompileError")

LIMIT_S = 60.0  # time that all functions of an engine may take to compile, if compilation was not requested
_LOOKS_S = 0.02  # interval at which the results of another process's compilation are checked for

Dimensions = tuple[int, ...] | None
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def missing_for_compiling() -> str | None:
    """Describe what this machine lacks for compiling; None if it has a compiler and Python's headers."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler}"
    headers = Path(sysconfig.get_path("include"))
    return None if (headers / "Python.h").is_file() else f"there is no Python.h in {headers}"


def processor() -> str:
    """Return a name for this processor's abilities, as torch uses them, to keep compilations apart.

    torch finds its results by the function alone. Loops compiled for vectors of 512 bits leave out half of
    what they should write if they are used with those of 256.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    flags = sorted({line for line in lines if line.lower().startswith(("flags", "features", "cpu part"))})
    digest = hashlib.sha256("\n".join([platform.processor(), *flags]).encode()).hexdigest()[:8]
    return f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability().lower()}-{digest}"


def keep_results() -> Path | None:
    """Keep compilation results for the next start; return their folder, or None for torch's temporary folder.

    The folder is the user's and survives a restart of the machine, unless TORCHINDUCTOR_CACHE_DIR names
    another; it has a subfolder for each kind of processor, since machines may share it.
    """
    said = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    # ~ remains for a user without a home, as in a container that knows no such user
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(said) if said else Path(cache) / "continuous_batching/compiled"
    if folder.parts[0] == "~":
        log.info("compile: there is no home folder, so results are kept in torch's temporary folder")
        return None
    if folder.name != processor():  # otherwise the process that started this one has set it
        folder /= processor()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_usable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        is_usable = False
    if not is_usable:
        log.info("compile: %s cannot be written, so results are kept in torch's temporary folder", folder)
        return None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    drop_torn(folder)
    return folder


def drop_torn(folder: Path) -> None:
    """Delete libraries that a killed process left half written, because torch would load them.

    A compilation holds the lock of its library's name, so one that is in progress is left alone.
    """
    for library in folder.glob("*/*.so") if sys.platform == "linux" else ():
        if _is_whole(library):
            continue
        lock = folder / "locks" / f"{library.name.partition('.')[0]}.lock"
        lock.parent.mkdir(exist_ok=True)
        with lock.open("a") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if not _is_whole(library):
                library.unlink(missing_ok=True)
                log.warning("compile: %s was left half written, and is compiled again", library)


def _is_whole(library: Path) -> bool:
    """Whether a 64-bit library is complete by its head; its section table is written last."""
    try:
        with library.open("rb") as file:
            head, size = file.read(64), os.fstat(file.fileno()).st_size
    except FileNotFoundError:  # another process has deleted it already
        return True
    if len(head) < 64 or not head.startswith(b"\x7fELF"):
        return False
    (table,) = struct.unpack_from("<Q", head, 40)
    entry_size, num_entries = struct.unpack_from("<HH", head, 58)
    return bool(0 < table <= size - entry_size * num_entries)


@contextmanager
def compiling_once(name: str, patience_s: float = LIMIT_S) -> Iterator[None]:
    """Hold the lock of this function's name among all processes that keep their results in one folder.

    The ranks of an engine compile the same functions at the same moment: one does it, and the others then
    read its results. A process that has waited for `patience_s` goes on without the lock, since its holder
    may have been stopped.
    """
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder is None or not os.access(folder, os.W_OK):
        yield
        return
    lock = Path(folder) / "locks" / f"{name}.lock"
    lock.parent.mkdir(exist_ok=True, parents=True)
    with lock.open("a") as held:
        until_s = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    log.warning("compile: %s is compiled here, too: another process still does", name)
                    break
                time.sleep(_LOOKS_S)
        yield


class CompileLimit:
    """Limits compilation to `limit_s` in total, and ends it when a function cannot be compiled.

    The limit is checked before each function, so the last one may exceed it.
    """

    def __init__(self, limit_s: float = LIMIT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s, self.clock = limit_s, clock
        self.spent_s = 0.0
        self.is_over = False

    def attempt(self, compiling: Callable[[], T], name: str) -> T | None:
        """Return what `compiling` returns, or None if there is no working compiler or the time is used up."""
        if self.is_over:
            return None
        if self.spent_s >= self.limit_s:
            self._give_up(
                f"compiling took {self.spent_s:.0f} s of at most {self.limit_s:.0f}; {name} and what follows"
                " run uncompiled, and the next start goes on from here; device.compile=true waits for all"
            )
            return None
        begin_s = self.clock()
        try:
            return compiling()
        except NoCompiler as error:
            self._give_up(f"{error}; going on without")
            return None
        finally:
            self.spent_s += self.clock() - begin_s

    def _give_up(self, why: str) -> None:
        self.is_over = True
        log.warning("compile: %s", why)


class NoCompiler(ValueError):
    """A function cannot be compiled, because there is no compiler that works."""


class Compiled(Generic[P, R]):
    """A `function` of tensors that is compiled at its first call.

    `dynamic` says for each argument which dimensions may vary; None stands for an argument that is no tensor,
    for whose every value the function is compiled. All other dimensions are constants, because with every
    dimension symbolic the code is half as fast. A new dtype, constant dimension or stride compiles anew.

    Dimensions that vary must be at least 2, because the code may take a 1 as a constant; if the first such
    dimension of the first argument is 1, the function itself is called.

    With a `limit`, a function that cannot be compiled within it is replaced by `plain`, or else called as it
    is; without one, a missing compiler is an error.
    """

    def __init__(
        self,
        function: Callable[P, R],
        dynamic: tuple[Dimensions, ...],
        *,
        limit: CompileLimit | None = None,
        plain: Callable[P, R] | None = None,
    ) -> None:
        assert dynamic[0], "the first argument is a tensor with a dimension that varies"
        self._function = function
        self._dynamic, self._first_dynamic = dynamic, dynamic[0][0]
        self._limit = limit
        self._plain = plain or function
        self._calls: dict[tuple[Any, ...], Callable[..., R]] = {}

    @property
    def num_graphs(self) -> int:
        """Number of variants that have been compiled."""
        return len(self._calls)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs, "arguments are given in their order"
        given: tuple[Any, ...] = args
        if given[0].shape[self._first_dynamic] == 1:
            return self._function(*args, **kwargs)
        kind: list[Any] = []
        for each, dimensions in zip(given, self._dynamic, strict=True):
            if dimensions is None:
                kind.append(each)
            elif dimensions == (0,):
                kind += (each.dtype, each.shape[1:], each.stride())
            elif dimensions:
                kind += (each.dtype, each.is_contiguous())
        call = self._calls.get(tuple(kind))
        if call is None:
            call = self._calls[tuple(kind)] = self._made(given)
        return call(*[each for each in given if isinstance(each, Tensor)])

    def _made(self, args: tuple[Any, ...]) -> Callable[..., R]:
        """Return a function of the tensors among `args`, compiled if the limit allows."""
        if self._limit is None:
            return self._compile(args)
        call = self._limit.attempt(lambda: self._compile(args), self._function.__name__)
        return call or _of_tensors(self._plain, args)

    def _compile(self, args: tuple[Any, ...]) -> Callable[..., R]:
        # Imported here, because it imports sympy, a fifth of the start of an engine that compiles nothing
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
        stand_ins = [
            each if dimensions is None else _stand_in(mode, each, dimensions)
            for each, dimensions in zip(args, self._dynamic, strict=True)
        ]
        tensors = [each for each in stand_ins if isinstance(each, Tensor)]

        with mode:
            graph = make_fx(_of_tensors(self._function, args))(*tensors)
        try:
            with compiling_once(self._function.__name__), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # torch's warnings about parts of its own
                from torch._inductor.compile_fx import compile_fx  # imported here, because it takes seconds

                # Annotated for all of compile_fx's modes; here it returns a function like the graph
                call: Any = compile_fx(graph, tensors, config_patches=OPTIONS)
        except Exception as error:
            if any(word in f"{type(error).__name__} {error}" for word in NO_COMPILER):
                raise NoCompiler(
                    f"{self._function.__name__} cannot be compiled ({str(error).splitlines()[0]}); install"
                    " g++ and Python's headers, or set device.compile=false"
                ) from error
            raise
        for stand_in, dimensions in zip(stand_ins, self._dynamic):
            fixed = [d for d in dimensions or () if _is_fixed(stand_in.shape[d])]
            assert not fixed, f"{self._function.__name__} makes constants of dimensions {fixed}"
        compiled: Callable[..., R] = call
        return compiled


def _of_tensors(function: Callable[..., T], args: tuple[Any, ...]) -> Callable[..., T]:
    """Return `function` as a function of the tensors alone, with every other argument as in `args`."""
    others = [None if isinstance(each, Tensor) else each for each in args]
    is_tensor = [isinstance(each, Tensor) for each in args]

    def of_tensors(*given: Tensor) -> T:
        rest = iter(given)
        return function(*[next(rest) if found else other for found, other in zip(is_tensor, others)])

    return of_tensors


def _stand_in(mode: FakeTensorMode, tensor: Tensor, dimensions: tuple[int, ...]) -> Tensor:
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    sizes = [DimDynamic.DYNAMIC if d in dimensions else DimDynamic.STATIC for d in range(tensor.ndim)]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def _is_fixed(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) or size.node.maybe_as_int() is not None
