"""The libraries hold what the wheel asks for, and a device starts only where it may."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from tests.serving.warm import CODE, completed
from virtual_npu import libraries

pytestmark = pytest.mark.npu

SMALL = """
import logging, torch
logging.basicConfig()
import virtual_npu
virtual_npu.start("Ascend310P3", 64 << 20)
assert torch.npu.mem_get_info() == (64 << 20, 64 << 20), torch.npu.mem_get_info()
held = torch.ones(40 << 20, dtype=torch.uint8, device="npu")
assert torch.npu.mem_get_info()[0] < 24 << 20
try:
    torch.ones(40 << 20, dtype=torch.uint8, device="npu")
except torch.OutOfMemoryError as error:
    print("out of memory")
del held
torch.npu.empty_cache()
assert torch.npu.mem_get_info()[0] == 64 << 20
print(torch.npu.get_device_name())
"""


@pytest.fixture(scope="module")
def site() -> Path:
    try:
        return libraries.wheel()
    except FileNotFoundError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def test_every_symbol_that_the_wheel_lacks_is_there(site):
    names, symbols = libraries.survey(site)
    folder = libraries.build()
    main = ctypes.CDLL(str(folder / libraries.MAIN))
    assert len(symbols) > 100
    assert not [symbol for symbol in symbols if not hasattr(main, symbol)]
    assert {path.name for path in folder.glob("lib*.so")} == set(names)
    assert all(
        libraries.MAIN in libraries.read_elf(folder / name).needed for name in names if name != libraries.MAIN
    )
    assert libraries.build() == folder


@pytest.mark.usefixtures("site")
def test_a_missing_compiler_is_one_line(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(libraries, "_fingerprint", lambda _: "new")
    with pytest.raises(FileNotFoundError, match="no 'no-such-compiler': install gcc or set CC"):
        libraries.build()


def test_a_missing_wheel_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(libraries, "find_spec", lambda _: None)
    with pytest.raises(FileNotFoundError, match=r"`bash scripts/setup.sh npu` installs it"):
        libraries.wheel()


def test_what_is_no_library_is_told(tmp_path):
    path = tmp_path / "text.so"
    path.write_text("no library")
    with pytest.raises(ValueError, match=r"text.so is no 64-bit little-endian ELF library"):
        libraries.read_elf(path)


@pytest.mark.slow
@pytest.mark.usefixtures("site")
def test_a_small_device_runs_out_of_memory_as_a_device_does():
    done = completed(CODE, SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["out of memory", "Ascend310P3"]
    assert "VIRTUAL" in done.stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import virtual_npu; virtual_npu.start()", "says that a real NPU or CANN is here"),
        (
            "import sys, virtual_npu; sys.modules['torch_npu'] = sys; virtual_npu.start()",
            "torch_npu is imported already",
        ),
    ],
)
def test_it_starts_beside_nothing_real(code, said, tmp_path, monkeypatch):
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    done = completed(CODE, code)
    assert done.returncode == 1
    assert said in done.stderr
