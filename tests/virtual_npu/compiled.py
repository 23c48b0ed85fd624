"""Compile C programs of this folder together with the virtual device."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from virtual_npu import libraries

HERE = Path(__file__).resolve().parent


def compiler() -> list[str]:
    """Return the compiler and the options of all programs; skips where the machine has none."""
    name = os.environ.get("CC", "cc")
    if shutil.which(name) is None:
        pytest.skip(f"there is no compiler '{name}'")
    return [name, "-std=gnu11", "-O1", "-g"]


def compiled(name: str, folder: Path, *options: str) -> Path:
    """Return the program of `name`.c, in this folder; skips where torch_npu is missing."""
    try:
        include = libraries.wheel() / "torch_npu" / "include"
    except FileNotFoundError as error:
        pytest.skip(str(error))
    program = folder / name
    code = [path for path in [*libraries.SOURCES, HERE / f"{name}.c"] if path.suffix == ".c"]
    # With -rdynamic the device finds PyGILState_Check, which a program may have instead of Python.
    flags = [f"-I{include}", f"-I{libraries.SOURCES[0].parent}", "-rdynamic", *options]
    command = [*compiler(), *flags, *map(str, code), "-o", str(program), "-lpthread", "-ldl", "-lrt", "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program
