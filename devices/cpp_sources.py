"""Compile C++ sources of this project for the machine that they run on.

A source is compiled by the host's C++ compiler at first use, in two or three seconds, with the flags of its
processor, and kept in a folder of the user's for the next start.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from devices.cpu_threads import loaded_library

log = logging.getLogger(__name__)

HEADERS = tuple(Path(__file__).parent.glob("*.h"))  # The sources include them.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum Kind of the sources
NO_COMPILER = "there is no C++ compiler"
# Of an ELF header: its kind, and where the table of sections begins, the bytes of an entry, and their number
SECTIONS = struct.Struct("<6s34xQ10xHH2x")
COMPILE_S = 120.0  # limit of the compiler, which takes 3 s where it is alone


def missing_for_sources() -> str | None:
    """Describe what this machine lacks for the sources; None if it has a compiler and a known processor."""
    if platform.system() != "Linux":
        return f"the system is {platform.system()}, not Linux"
    if platform.machine() not in ("aarch64", "x86_64"):
        return f"the processor is {platform.machine()}, neither x86_64 nor aarch64"
    if platform.machine() == "x86_64" and not torch.cpu._is_avx2_supported():
        return "the processor has no AVX2"
    name = compiler()[0]
    return f"{NO_COMPILER} {name}" if shutil.which(name) is None else None


def compiler() -> list[str]:
    """Return the words of the command that compiles: those of CXX, as build tools read it, or g++."""
    said = os.environ.get("CXX", "")
    try:
        return shlex.split(said) or ["g++"]
    except ValueError:  # a quotation without an end
        return [said]


def processor() -> str:
    """Return a name for this processor's abilities, as torch uses them, to keep compilations apart.

    Machines of several kinds may share a home folder, and a library for one of them may end on another.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    flags = sorted({line for line in lines if line.lower().startswith(("flags", "features", "cpu part"))})
    digest = hashlib.sha256("\n".join([platform.processor(), *flags]).encode()).hexdigest()[:8]
    return f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability().lower()}-{digest}"


def compiled_source(source: Path, *options: str) -> ctypes.CDLL | str:
    """Return the library of a source, compiled if it is not kept, or why there is none.

    The options are the source's own.
    """
    missing = missing_for_sources()
    if missing is not None:
        return missing
    try:
        openmp = loaded_library("libgomp")
        if openmp is not None:  # the library's own team computes, not a second one beside it
            ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
        return _library(source, options)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{source.name} cannot be compiled: {_reason(error)}"


def _library(source: Path, own: Sequence[str]) -> ctypes.CDLL:
    """Return a source compiled for this machine, kept in the user's folder under the name of its content."""
    command = compiler()
    cpu = "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
    options = ["-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-strict-aliasing", "-ffp-contract=fast", cpu]
    options += [*own, "-Wno-psabi", f"-I{Path(__file__).parent}"]
    texts = [each.read_bytes() for each in (source, *HEADERS)]
    version, words = _run([*command, "--version"]), [*options[:-1], *command[1:]]
    content = [*texts, version, processor().encode(), *map(os.fsencode, words)]
    name = f"{source.stem}-{hashlib.sha256(b'|'.join(content)).hexdigest()[:16]}.so"
    folder = _folder_of(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if folder is not None and (folder / name).is_file():
        try:
            _check_whole(folder / name)
            return ctypes.CDLL(str(folder / name))
        except OSError as error:  # it is not removed, because another process may be replacing it
            log.warning("a library that was kept is compiled again, since it cannot be loaded: %s", error)
    # What is loaded stays so when its file is gone; in some shared folders it cannot go before
    with tempfile.TemporaryDirectory(prefix=f"{source.stem}-", ignore_cleanup_errors=True) as made:
        library = Path(made) / name
        _run([*command, *options, "-c", str(source), "-o", f"{made}/source.o"])
        # Linked without OpenMP's library: the one that torch has loaded is meant
        _run([*command, "-shared", f"{made}/source.o", "-o", str(library)])
        kept = _kept(library, folder) if folder is not None and os.access(folder, os.W_OK) else None
        try:
            return ctypes.CDLL(str(kept or library))
        except OSError:  # one of the two folders may forbid it
            if kept is None:
                raise
            return ctypes.CDLL(str(library))


def _check_whole(library: Path) -> None:
    """Raise OSError for a library that lacks its end: loading it would end this process by SIGBUS.

    The linker writes the table of sections last. Only the header of 64 bits of a little-endian processor is
    read; whatever else the file is, the loader refuses it.
    """
    with open(library, "rb") as file:
        header, size = file.read(SECTIONS.size), os.fstat(file.fileno()).st_size
    if len(header) < SECTIONS.size:
        raise OSError(f"{library} ends in its header")
    kind, at, entry_bytes, count = SECTIONS.unpack(header)
    if kind == b"\x7fELF\2\1" and at + count * entry_bytes > size:
        raise OSError(f"{library} lacks its end: it has {size} bytes of {at + count * entry_bytes}")


def _kept(library: Path, folder: Path) -> Path | None:
    """Keep a library for other starts, which may be doing the same; return where, or None if that fails."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{library.name}.", dir=folder)
        try:
            with open(handle, "wb") as file:
                file.write(library.read_bytes())
                file.flush()
                os.fsync(file.fileno())  # a part of it behind a whole name would end every start
            return Path(name).replace(folder / library.name)
        except OSError:
            Path(name).unlink()
            raise
    except OSError as error:
        log.warning("%s cannot be kept for the next start: %s", folder / library.name, error)
        return None


@cache
def _folder_of(cache_folder: str) -> Path | None:
    """Return where libraries are kept below a folder; None if it cannot be read, or if strangers could write.

    One that cannot be written, as in a container's image, may have what is needed.
    """
    parent = Path(cache_folder) / "continuous_batching"
    folder = parent / "products"
    if folder.parts[0] == "~":  # a user without a home
        return None
    try:
        for each in (parent, folder):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = each.stat()
            # Those of its group may write to it, because a volume's driver may have set that
            if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o002:
                log.warning(
                    "products: others can write to %s, so no library in it is loaded, and all are compiled at"
                    " each start; make it yours, and writable by nobody else",
                    each,
                )
                return None
    except OSError as error:
        log.info("products: %s cannot be written (%s), so they are compiled at each start", folder, error)
        return None
    if not os.access(folder, os.R_OK | os.X_OK):
        log.info("products: %s cannot be read, so they are compiled at each start", folder)
        return None
    if not os.access(folder, os.W_OK):
        log.info("products: %s cannot be written, so what it lacks is compiled at each start", folder)
    return folder


def _run(command: Sequence[str]) -> bytes:
    """Run the compiler, and return what it prints; it names its errors in English."""
    environment = os.environ | {"LC_ALL": "C"}
    return subprocess.run(command, capture_output=True, check=True, timeout=COMPILE_S, env=environment).stdout


def _reason(error: Exception) -> str:
    """Return the compiler's first error, which others follow from, or else its last line."""
    said = getattr(error, "stderr", None) or b""
    lines = [line for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
    # That the linker has failed, which has said why before
    lines = [line for line in lines if not line.startswith("collect2: error:")] or lines
    first = next((line for line in lines if "error:" in line), None)
    return (first or lines[-1]).strip() if lines else str(error)
