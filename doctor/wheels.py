"""Read which operators releases of torch_npu register, with which arguments, out of their wheels.

Nothing of a wheel is imported, and no CANN is needed: the schemas are text in its libraries, but for some of
ATB's operators, whose text the compiler took apart. Of these the library names the type of the C++ function.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from devices.torch_npu_calls import ALL, PYTHON_NAMES
from devices.torch_npu_releases import Release

_NAMES = "|".join(re.escape(call.operator) for call in ALL).encode()
_SCHEMA = re.compile(rb"\0(?:\w+::)?(" + _NAMES + rb")(\((?:[^()\0]|\([^()\0]*\))*\) -> [^>\0]+)(?=\0)")
_FUNCTION = re.compile(rb"\0N3c104impl6detail24WrapFunctionIntoFunctor_INS_26CompileTimeFunctionPointerI"
                       rb"(F[^\0]*)EXadL_ZN3atb\d+(" + _NAMES + rb")E")  # fmt: skip
_LIBRARIES = ("torch_npu/lib/libtorch_npu.so", "torch_npu/lib/libop_plugin_atb.so")
_MODULES = ("torch_npu/npu/__init__.py", "torch_npu/npu/utils.py")
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux_2_17_x86_64")
PYTHON = "3.11"  # a release has the same operators for every Python


def release_of(wheel: Path) -> Release:
    """Return what a wheel says of the operators that are called here. Raises BadZipFile for another file."""
    schemas: dict[str, set[str]] = {}
    functions: dict[str, str] = {}
    with zipfile.ZipFile(wheel) as archive:
        members = set(archive.namelist())
        for library in members.intersection(_LIBRARIES):
            binary = archive.read(library)
            for name, rest in _SCHEMA.findall(binary):
                schemas.setdefault(name.decode(), set()).add(" ".join((name + rest).decode().split()))
            functions |= {name.decode(): kind.decode() for kind, name in _FUNCTION.findall(binary)}
        python = b"".join(archive.read(each) for each in sorted(members.intersection(_MODULES))).decode()
    return Release(
        {name: tuple(sorted(texts)) for name, texts in sorted(schemas.items())},
        dict(sorted(functions.items())),
        tuple(name for name in PYTHON_NAMES if not re.search(rf"\b{name}\b", python)),
    )


def releases_of(versions: Iterable[str]) -> Mapping[str, Release]:
    """Download the wheels of these versions one after the other, and return what each of them says.

    Raises RuntimeError where pip does not bring one.
    """
    found = {}
    for version in sorted(versions, key=order):
        with tempfile.TemporaryDirectory() as folder:
            found[version] = release_of(_downloaded(version, Path(folder)))
    return found


def order(version: str) -> tuple[int, ...]:
    """Return what sorts versions: 2.9.0.post8 before 2.9.1 before 2.10.0."""
    return tuple(map(int, re.findall(r"\d+", version)))


def _downloaded(version: str, folder: Path) -> Path:
    platforms = [word for each in _PLATFORMS for word in ("--platform", each)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", f"--python-version={PYTHON}", *platforms, f"--dest={folder}"]
    done = subprocess.run([*command, f"torch-npu=={version}"], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise RuntimeError(f"pip brings no wheel of torch-npu {version} for Python {PYTHON}: {said[0]}")
    return wheels[0]
