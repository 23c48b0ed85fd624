"""Compiling ends when its time is over or no compiler works, and its results serve the next start."""

from __future__ import annotations

import fcntl
import logging
import os
import pwd
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from devices.compiled import (
    Compiled,
    CompileLimit,
    NoCompiler,
    compiling_once,
    drop_torn,
    keep_results,
    missing_for_compiling,
    processor,
)
from recipes.machine import Cpu, decided
from recipes.schema.recipe import ROOT, DeviceSection
from tests.thorough import THOROUGH

X = torch.ones(4, 8)
GCC = shutil.which("g++")


def plus_one(x: Tensor) -> Tensor:
    return x + 1


class Clock:
    """One that a compilation moves on."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_what_is_not_compiled_in_time_is_done_plainly_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, compiled = Clock(), []

    def compile_slowly(self: Compiled, args: tuple[Tensor, ...]) -> object:
        clock.now_s += 40
        compiled.append(self)
        return lambda x: x + 2

    monkeypatch.setattr(Compiled, "_compile", compile_slowly)
    limit = CompileLimit(60.0, clock)
    functions = [Compiled(plus_one, ((0,),), limit=limit, plain=lambda x: x + 3) for _ in range(4)]
    assert [float(function(X)[0, 0]) for function in functions] == [3, 3, 4, 4]
    assert compiled == functions[:2]
    assert [line.partition(";")[0] for line in caplog.messages] == [
        "compile: compiling took 80 s of at most 60"
    ]


def test_where_no_compiler_works_nothing_more_is_tried_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def fail(self: Compiled, args: tuple[Tensor, ...]) -> object:
        tries.append(self)
        raise NoCompiler("plus_one cannot be compiled")

    monkeypatch.setattr(Compiled, "_compile", fail)
    limit = CompileLimit()
    functions = [Compiled(plus_one, ((0,),), limit=limit) for _ in range(3)]
    assert [float(function(X)[0, 0]) for function in functions] == [2, 2, 2]
    assert len(tries) == 1
    assert caplog.messages == ["compile: plus_one cannot be compiled; going on without"]
    with pytest.raises(NoCompiler):
        Compiled(plus_one, ((0,),))(X)


def test_other_arguments_than_tensors_reach_the_plain_function() -> None:
    limit = CompileLimit(0.0)
    function = Compiled(lambda x, y, scale: x + y * scale, ((0,), (0,), None), limit=limit)
    assert float(function(X, X, 3.0)[0, 0]) == 4
    assert float(function(X, X, 4.0)[0, 0]) == 5


def test_auto_does_not_compile_where_the_path_has_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert missing_for_compiling() == "there is no C++ compiler g++"
    said = dict(decided(DeviceSection(kind="cpu")))
    assert said["device.compile"] == "false, since there is no C++ compiler g++"


def test_auto_compiles_where_there_is_a_compiler_and_attention_is_the_devices_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("recipes.machine.missing_for_compiling", lambda: None)
    assert Cpu(DeviceSection(kind="cpu"))._compiles() == (True, "there is a C++ compiler")
    assert not Cpu(DeviceSection(kind="cpu", attention="reference"))._compiles()[0]
    assert not Cpu(DeviceSection(kind="cpu", compile=False))._compiles()[0]
    assert "device.compile" not in dict(decided(DeviceSection(kind="cpu", compile=True)))
    assert decided(DeviceSection(kind="npu")) == []


def test_results_are_kept_in_the_users_cache_unless_another_folder_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert keep_results() == tmp_path / "elsewhere" / processor()
    assert keep_results() == tmp_path / "elsewhere" / processor(), (
        "as a process finds it that this one starts"
    )
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = keep_results()
    assert folder == tmp_path / "continuous_batching/compiled" / processor()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO, "devices.compiled"):
        assert keep_results() is None
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert "cannot be written" in caplog.messages[0]


def test_a_user_without_a_home_has_an_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container that is run for a user whom its system does not know."""

    def unknown(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level(logging.INFO, "devices.compiled"):
        assert keep_results() is None
    assert "there is no home folder" in caplog.messages[0]
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_processors_that_share_a_folder_share_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was compiled for vectors of 512 bits leaves out half of the numbers with those of 256."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = set()
    for capability in ("AVX512", "AVX2", "DEFAULT"):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda each=capability: each)
        found.add(keep_results())
    assert len(found) == 3


SMALLEST = """
import torch
from devices.compiled import Compiled, keep_results
from models.ops.cpu.ops import _greedy
keep_results()
greedy = Compiled(_greedy, ((0,),))
for seed in range(40):
    logits = torch.randn(64, 1024, generator=torch.Generator().manual_seed(seed))
    junk = [torch.full((64,), -1) for _ in range(64)]
    del junk
    assert torch.equal(greedy(logits)[0], logits.argmax(-1)), seed
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not THOROUGH, reason="THOROUGH=1 asks for it; each kind of processor has a folder of its own"
)
@pytest.mark.skipif(GCC is None, reason="there is no C++ compiler")
def test_a_change_of_vectors_between_starts_changes_no_result(tmp_path: Path) -> None:
    """As on two nodes of a cluster with one home folder. A processor without them passes as well."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    for capability in ("avx512", "avx2", "avx512"):
        asked = environment | {"XDG_CACHE_HOME": str(tmp_path), "ATEN_CPU_CAPABILITY": capability}
        subprocess.run([sys.executable, "-c", SMALLEST], cwd=ROOT, env=asked, check=True)


@dataclass(frozen=True, slots=True)
class Machine:
    """A user's folder for what is compiled, and a compiler in the PATH that writes down what it makes."""

    folder: Path

    def start(self, count: int = 1) -> subprocess.CompletedProcess[str]:
        """Let so many processes compile the same function at once."""
        own = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
        own |= {
            "XDG_CACHE_HOME": str(self.folder),
            "PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}",
            "TORCHINDUCTOR_VEC_ISA_OK": "1",  # else torch compiles as much again to see if it could
        }
        command = [sys.executable, "-m", "tests.devices.compiling_starts", str(count)]
        return subprocess.run(command, cwd=ROOT, env=own, check=True, capture_output=True, text=True)

    def num_made(self) -> int:
        """How often the compiler was called, but for headers that are only read."""
        return len((self.folder / "made").read_text().splitlines())

    @property
    def libraries(self) -> list[Path]:
        """The smallest first."""
        found = self.folder.glob("continuous_batching/compiled/*/*/*.so")
        return sorted(found, key=lambda each: each.stat().st_size)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    compiler = made.folder / "g++"
    noted = f'case "$*" in *" -E "*) ;; *" -o "*) echo "$*" >>{made.folder}/made;; esac'
    compiler.write_text(f'#!/bin/sh\n{noted}\nexec {GCC} "$@"\n')
    compiler.chmod(0o755)
    return made


@pytest.mark.slow
@pytest.mark.skipif(GCC is None, reason="there is no C++ compiler")
@pytest.mark.skipif(sys.platform != "linux", reason="the form of libraries is another one there")
def test_what_was_compiled_serves_the_starts_after_it_unless_it_is_torn(machine: Machine) -> None:
    """Of two ranks one compiles; the next start does only what a killed process left half written."""
    assert sorted(machine.start(count=2).stdout.splitlines()) == ["0 1", "1 0"]
    assert machine.libraries
    first = machine.num_made()
    assert first > 0

    # The function's own, and two by which torch tried the processor
    torn = [machine.libraries[at] for at in (-1, 0, 1)]
    for size, library in zip((40, 0, 3000), torn):
        os.truncate(library, size)
    assert machine.start().stderr.count("was left half written, and is compiled again") == len(torn)
    mended = machine.num_made()
    assert mended > first

    after = machine.start()
    assert after.stdout == "0 1\n"
    assert "half written" not in after.stderr
    assert machine.num_made() == mended


def test_who_waits_too_long_for_another_process_compiles_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with compiling_once("plus_one"):
        with compiling_once("another"):
            assert not caplog.messages
        with compiling_once("plus_one", patience_s=0.0):
            assert caplog.messages == ["compile: plus_one is compiled here, too: another process still does"]
    with compiling_once("plus_one", patience_s=0.0):
        assert len(caplog.messages) == 1


def test_what_another_process_is_compiling_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    (tmp_path / "locks").mkdir()
    library = tmp_path / "ab/abc.main.so"
    library.touch()
    with (tmp_path / "locks/abc.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        drop_torn(tmp_path)
        assert library.exists()
    drop_torn(tmp_path)
    assert library.exists() == (sys.platform != "linux")
