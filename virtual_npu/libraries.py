"""Build stand-ins for the CANN libraries that the torch_npu wheel needs."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

DYNAMIC, DYNSYM = 6, 11  # kinds of section
NEEDED = 1  # kind of entry in the dynamic section
WEAK = 2  # binding of a symbol


@dataclass(frozen=True, slots=True)
class Library:
    """The dynamic section of an ELF file: libraries by soname, symbols by name."""

    needed: frozenset[str]
    undefined: frozenset[str]
    defined: frozenset[str]


def read_elf(path: Path) -> Library:
    """Read a 64-bit little-endian ELF file; weak symbols, which may stay unresolved, are left out.

    The layout is that of the ELF-64 Object File Format, version 1.5. Raises ValueError for any other file.
    """
    with path.open("rb") as file:
        head = file.read(64)
        if head[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is no 64-bit little-endian ELF library")
        (table,) = struct.unpack_from("<Q", head, 0x28)
        size, count = struct.unpack_from("<HH", head, 0x3A)
        file.seek(table)
        raw = file.read(size * count)
        sections = [struct.unpack_from("<IIQQQQIIQQ", raw, index * size) for index in range(count)]

        def data(section: tuple[int, ...]) -> bytes:
            file.seek(section[4])
            return file.read(section[5])

        needed: set[str] = set()
        undefined: set[str] = set()
        defined: set[str] = set()
        for section in sections:
            if section[1] == DYNAMIC:
                names = data(sections[section[6]])
                entries = struct.iter_unpack("<qQ", data(section))
                needed |= {_name(names, value) for kind, value in entries if kind == NEEDED}
            elif section[1] == DYNSYM:
                names = data(sections[section[6]])
                for name, info, _, place, _, _ in struct.iter_unpack("<IBBHQQ", data(section)):
                    if name and place:
                        defined.add(_name(names, name))
                    elif name and info >> 4 != WEAK:
                        undefined.add(_name(names, name))
    return Library(frozenset(needed), frozenset(undefined), frozenset(defined))


def _name(names: bytes, start: int) -> str:
    return names[start : names.index(b"\0", start)].decode()


log = logging.getLogger(__name__)

FIX = "`bash scripts/setup.sh npu` installs it"
SOURCES = sorted((Path(__file__).parent / "cann").glob("*.[ch]"))
MAIN = "libascendcl.so"  # holds every symbol; the other libraries are names that lead to it
# torch_npu opens them by name, for operators and for groups of collectives.
OPENED = ("libopapi.so", "libhcomm.so")
STALE_S = 86400
SYSTEM = [
    *("libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libgcc_s.so.1"),
    *("libstdc++.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"),
]
# Functions that may report "nothing" or "done" on a device without graph engine, dump, profiler and operator
# library.
NOTHING = re.compile(
    r"Msprof|aclAppLog|HcclSetConfig|aclmdl\w*Dump|aclop(Create|Destroy|SetAttr|StopDump)|acl(Create|Destroy)"
    r"|acltdt(Create|Destroy|Get)|aclGetTensorDescNumDims"
)


def wheel() -> Path:
    """Return the folder that holds the torch_npu package: beside `.venv`'s own packages, or among them."""
    beside = Path(sys.prefix) / "virtual_npu"
    if (beside / "torch_npu").is_dir():
        return beside
    found = find_spec("torch_npu")
    if found is None or found.origin is None:
        raise FileNotFoundError(f"torch_npu is not installed in {sys.prefix}: {FIX}")
    return Path(found.origin).parents[1]


def build() -> Path:
    """Return the stand-in libraries' folder, built anew where wheel, torch, sources or machine changed."""
    site = wheel()
    folder = site / f"cann-{_fingerprint(site)}"
    if folder.is_dir():
        return folder
    log.info("compiling the virtual NPU's libraries: %s", folder)
    for old in site.glob("cann-*"):
        if time.time() - old.stat().st_mtime > STALE_S:  # a recent folder may be in use by another checkout
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=site) as made:
        _compile(site, Path(made))
        Path(made).chmod(0o755)
        try:
            Path(made).rename(folder)
        except OSError:  # another process has built it meanwhile
            if not folder.is_dir():
                raise
        else:
            Path(made).mkdir()  # the context manager expects a folder to remove
    return folder


def survey(site: Path) -> tuple[list[str], list[str]]:
    """Return the libraries that torch_npu needs and this machine lacks, and the symbols expected of them."""
    own = sorted((site / "torch_npu").rglob("*.so"))
    others = [*(_torch() / "lib").glob("*.so*"), *_system()]
    read_own, read_others = [read_elf(path) for path in own], [read_elf(path) for path in others]
    defined = frozenset().union(*(each.defined for each in read_own + read_others))
    undefined = frozenset().union(*(each.undefined for each in read_own)) - defined
    present = {path.name for path in own + others} | set(SYSTEM)
    needed = frozenset().union(*(each.needed for each in read_own)) - present
    libraries = {name for name in needed if not name.startswith("libpython")} | {MAIN, *OPENED}
    return sorted(libraries), sorted(name for name in undefined if not name.startswith(("Py", "_Py")))


def load(folder: Path) -> ctypes.CDLL:
    """Map the libraries into this process, so that the loader finds them by soname; returns the main one."""
    main = ctypes.CDLL(str(folder / MAIN), mode=ctypes.RTLD_GLOBAL)
    for path in sorted(folder.glob("lib*.so")):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return main


def _fingerprint(site: Path) -> str:
    record = next(site.glob("torch_npu-*.dist-info")) / "RECORD"
    parts = [path.read_bytes() for path in [*SOURCES, Path(__file__), record]]
    parts += [(_torch() / "version.py").read_bytes(), " ".join(os.uname()[::4]).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _torch() -> Path:
    found = find_spec("torch")
    assert found is not None, "torch is not installed"
    return Path(str(found.origin)).parent


def _system() -> list[Path]:
    """Return the paths of the system's libraries as this process maps them."""
    for name in SYSTEM:
        try:
            ctypes.CDLL(name)
        except OSError:  # the name belongs to another architecture
            continue
    stems = (*(name.split(".so")[0] for name in SYSTEM), "libpython")
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = {Path(line.split()[-1]) for line in maps if ".so" in line}
    return sorted(path for path in paths if path.name.startswith(stems))


def _stub(symbol: str) -> str:
    if symbol.startswith("_Z"):  # C++ of the graph engine and of ATB, which no kernel here calls
        return f'void {symbol}(void) {{ virtual_npu_missing("{symbol}"); abort(); }}'
    if NOTHING.match(symbol):
        return f"long {symbol}(void) {{ return 0; }}"
    return f'long {symbol}(void) {{ return virtual_npu_missing("{symbol}"); }}'


def _compile(site: Path, folder: Path) -> None:
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        raise FileNotFoundError(
            f"the virtual NPU needs a C compiler, and there is no '{compiler}': install gcc or set CC"
        )
    libraries, symbols = survey(site)
    ours = {
        name
        for path in SOURCES
        for name in re.findall(r"^\w[\w *]*?\b\*?(\w+)\(", path.read_text(), re.MULTILINE)
    }
    stubs = [_stub(symbol) for symbol in symbols if symbol not in ours]
    source = ["#include <stdlib.h>", "int virtual_npu_missing(const char *name);", *stubs, ""]
    (folder / "stubs.c").write_text("\n".join(source))
    (folder / "empty.c").write_text("")
    include = site / "torch_npu" / "include"
    flags = ["-shared", "-fPIC", "-O1", "-std=gnu11", "-Wno-builtin-declaration-mismatch"]
    code = [str(path) for path in SOURCES if path.suffix == ".c"] + [str(folder / "stubs.c")]
    _run(
        [
            compiler,
            *flags,
            f"-I{include}",
            f"-I{include / 'third_party/acl/inc'}",  # torch_npu 2.10 has CANN's headers there
            f"-Wl,-soname,{MAIN}",
            *code,
            "-o",
            str(folder / MAIN),
            *("-lpthread", "-lrt", "-lm"),
        ]
    )
    for name in libraries:
        if name != MAIN:
            names = [f"-Wl,-soname,{name}", "-Wl,--no-as-needed", f"-L{folder}", f"-l:{MAIN}"]
            _run([compiler, *flags, str(folder / "empty.c"), *names, "-o", str(folder / name)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise OSError(
            f"the virtual NPU's libraries do not compile: {first.strip()} (`{' '.join(command[:1])}`)"
        )


if __name__ == "__main__":
    try:
        build()
    except OSError as error:
        sys.exit(str(error))
