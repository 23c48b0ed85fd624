"""The loaded OpenMP library is found, and its threads sleep and spin when asked."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from devices import cpu_threads
from devices.cpu_threads import (
    Barriers,
    GnuBarriers,
    IdleTeam,
    IntelBarriers,
    barriers,
    forget_registration,
    loaded_library,
)
from recipes.schema.recipe import ROOT

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="libraries are found in /proc")


@pytest.mark.parametrize("name", cpu_threads.SAID_BY)
def test_a_way_of_waiting_that_the_environment_says_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert type(barriers()) is Barriers
    assert not barriers().may_sleep


@LINUX
def test_an_idle_team_is_kept_while_threads_sleep_and_by_one_engine_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in cpu_threads.SAID_BY:
        monkeypatch.delenv(name, raising=False)
    first, second = barriers(), barriers()
    if not isinstance(first, GnuBarriers):
        pytest.skip("this process has another OpenMP library than GNU's")

    def teams() -> int:
        return sum(isinstance(each, IdleTeam) for each in threading.enumerate())

    first.sleep(False)  # an engine before may have left a team
    before = {*os.listdir("/proc/self/task")}  # any of them may end meanwhile
    first.sleep(True)
    first.sleep(True)
    assert teams() == 1
    assert len({*os.listdir("/proc/self/task")} - before) > len(os.sched_getaffinity(0))
    second.sleep(False)
    second.sleep(False)
    assert teams() == 0


@pytest.mark.parametrize("own", ["torch/lib/libgomp-1.so.1", "torch.libs/libgomp-2.so.1.0.0"])
def test_of_two_loaded_libraries_torch_uses_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    monkeypatch.setattr("torch.__file__", str(tmp_path / "torch/__init__.py"))
    maps, others = tmp_path / "maps", [f"{tmp_path}/sk learn.libs/libgomp-0.so.1", "/usr/lib/libgomp.so.1"]

    def found(*paths: str) -> str | None:
        lines = [f"7f00-7f01 r-xp 00000000 fe:01 42{' ' * 20}{path}\n" for path in ("[heap]", *paths)]
        maps.write_text("".join(lines))
        return loaded_library("libgomp", maps)

    assert found(*others, f"{tmp_path}/{own}") == f"{tmp_path}/{own}"
    assert found(*others, f"{tmp_path}/torch/lib/libtorch.so") == others[0]
    assert found() is None


@pytest.mark.parametrize("error", [None, PermissionError(13, "no")])
def test_a_library_that_is_not_where_the_system_says_waits_as_it_does(
    error: OSError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(name: str) -> str:
        if error is not None:
            raise error
        return str(tmp_path / f"{name}.so.1 (deleted)")

    for name in cpu_threads.SAID_BY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu_threads, "loaded_library", loaded)
    found = barriers()
    assert type(found) is Barriers or isinstance(found, IntelBarriers)  # the latter where it is preloaded


@pytest.mark.slow
@LINUX
def test_a_preloaded_library_of_intel_is_asked_by_its_own_function() -> None:
    library = Path(sys.prefix) / "lib/libiomp5.so"
    if not library.exists():
        pytest.skip("intel-openmp is not installed")
    code = (
        "import torch; from devices.cpu_threads import barriers, IntelBarriers; own = barriers();"
        "assert type(own) is IntelBarriers; usual = own._library.kmp_get_blocktime(); own.sleep(True);"
        "assert own._library.kmp_get_blocktime() == 0; own.sleep(False);"
        "assert own._library.kmp_get_blocktime() == usual > 0"
    )
    kept = {name: value for name, value in os.environ.items() if name not in cpu_threads.SAID_BY}
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, env=kept | {"LD_PRELOAD": str(library)}
    )
    assert IntelBarriers.may_sleep


def test_a_process_forgets_its_own_registration_alone(tmp_path: Path) -> None:
    own, other = (tmp_path / f"__KMP_REGISTERED_LIB_{each}_{os.getuid()}" for each in (os.getpid(), 1))
    own.touch()
    other.touch()
    forget_registration(tmp_path)
    forget_registration(tmp_path)  # there is none any more
    assert [*tmp_path.iterdir()] == [other]


@pytest.mark.slow
@LINUX
def test_a_preloaded_library_leaves_no_shared_memory_however_its_process_ends() -> None:
    library = Path(sys.prefix) / "lib/libiomp5.so"
    if not (library.exists() and os.access("/dev/shm", os.W_OK)):
        pytest.skip("intel-openmp is not installed, or there is no shared memory")
    code = (
        "import os, torch; from pathlib import Path; from devices.cpu_threads import forget_registration;"
        "torch.get_num_threads();"
        "name = f'/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}';"
        "was = Path(name).exists(); forget_registration(); print(was, Path(name).exists())"
    )
    environment = os.environ | {"LD_PRELOAD": str(library), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("True False\n", ""), "and it ends as it did with it"
