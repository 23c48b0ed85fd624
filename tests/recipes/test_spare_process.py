"""A spare process yields the CPU while it imports, and no longer."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from continuous_batching.request import Request, SamplingParams
from recipes.assembly.engine import build
from recipes.cluster import rank_process, spare_process
from recipes.cluster.rank_process import SpareRanks
from recipes.cluster.spare_process import LAST, restore_priority, session_niceness
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from serving.engine.messages import BEGIN, HURRY
from tests.patience import PATIENCE_S
from tests.serving.server import TINY

TELL = """
import importlib, os, sys, threading, time
from recipes.cluster import rank_process, spare_process

def priorities():
    group = spare_process.AUTOGROUP
    of_thread = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    return f"{of_thread} {([*'-'] + group.read_text().split())[-1] if group.exists() else '-'}"

def told(module):
    gentle, until_s = priorities(), time.monotonic() + 300  # read before anybody hears of it, and hurries
    print(module, gentle, flush=True)
    if module == "large" and "wait" in sys.argv:
        while priorities().split() == gentle.split() and time.monotonic() < until_s:
            time.sleep(0.01)
        print("hurried", priorities(), flush=True)

importlib.import_module = told
spare_process.import_gently("large")
told("after")
"""


def spare(*arguments: str) -> subprocess.Popen[str]:
    """A process that prepares, and whose import tells its priorities."""
    return subprocess.Popen(
        [sys.executable, "-c", TELL, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # the engine has one, too: the niceness of a session is set
    )


@pytest.fixture(scope="module")
def has_group() -> bool:
    """Whether the system schedules a new session as a group; ours may be older than that."""
    brief = "from recipes.cluster import spare_process; print(spare_process.own_niceness())"
    command = [sys.executable, "-c", brief]
    return subprocess.check_output(command, cwd=ROOT, text=True, start_new_session=True) != "None\n"


def priorities_can_rise() -> bool:
    """Whether a process here may undo that it gives way: in a container root cannot either."""
    brief = "import os; ours = os.getpriority(0, 0); os.nice(1); os.setpriority(0, 0, ours)"
    return subprocess.run([sys.executable, "-c", brief], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_it_gives_way_while_it_imports(has_group: bool) -> None:
    ours = os.getpriority(os.PRIO_PROCESS, 0)  # a process inherits it; a session begins at 0
    with spare() as process:
        assert process.stdout is not None
        before, during, after = process.stdout.read().splitlines()
    assert before == f"numpy {ours} {0 if has_group else '-'}"
    assert during == f"large {LAST} {LAST if has_group else '-'}"
    assert after == f"after {ours} {0 if has_group else '-'}"


def test_it_gives_way_no_longer_once_it_is_needed(has_group: bool) -> None:
    if not has_group:
        pytest.skip("without it, only root may raise a priority again")
    with spare("wait") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(2):  # its import has begun, and does not end before its priority changes
            line = process.stdout.readline()
        assert line == f"large {LAST} {LAST}\n"
        process.stdin.write("!")
        process.stdin.flush()
        hurried, after = process.stdout.read().splitlines()
    assert (hurried.split()[0], hurried.split()[2]) == ("hurried", "0")
    assert after.startswith("after ")


def test_it_goes_on_as_the_module_it_is_told() -> None:
    brief = (
        "from recipes.cluster import spare_process; spare_process.LARGE = 'json'; import sys;"
        " spare_process.main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", brief, "serving.engine.main", "--help"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        start_new_session=True,
    )
    assert done.stdout.startswith("usage: python -m serving.engine.main")
    assert not done.stderr


def test_who_shall_hurry_has_not_begun() -> None:
    large = [f"recipes.{each}" for each in ("assembly.engine", "cluster.ranks")]
    large += [f"serving.engine.{each}" for each in ("expert_readings", "facts", "page_exchange", "worker")]
    brief = (
        f"import sys; from unittest import mock; sys.modules |= dict.fromkeys({large}, mock.MagicMock());"
        " from serving.engine import main; sys.exit(main.main(['ipc:///nowhere', 'no.yaml']))"
    )
    pipe = subprocess.PIPE
    for words, status in ((HURRY, 0), (HURRY + BEGIN + b"\n", 2)):
        with subprocess.Popen([sys.executable, "-c", brief], cwd=ROOT, stdin=pipe, stderr=pipe) as process:
            assert process.stdin is not None
            assert process.stderr is not None
            process.stdin.write(words)
            process.stdin.flush()
            if words == HURRY:
                process.stdin.close()  # the server does so when it ends
            said = process.stderr.read()
            assert (process.wait(PATIENCE_S), b"no.yaml" in said) == (status, status == 2), said


def test_what_only_some_need_is_not_begun_once_the_engine_is_needed() -> None:
    brief = (
        "import os, sys, threading; from recipes.cluster import spare_process\n"
        "begun, needed = [], threading.Event()\n"
        "def told(name): begun.append(name); needed.set() if name == 'b' else None\n"
        "spare_process.importlib.import_module = told\n"
        "spare_process._import('a', ('b', 'c'), needed); print(begun)"
    )
    done = subprocess.run([sys.executable, "-c", brief], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "['a', 'b']\n"


def test_its_priority_is_restored_from_outside(has_group: bool) -> None:
    """On busy cores it would hear only seconds later that it is needed."""
    if not has_group:
        pytest.skip("without it, only root may raise a priority again")
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    with spare("wait") as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)  # it can do nothing for itself
        group, until_s = "", time.monotonic() + PATIENCE_S
        while group != str(session_niceness()) and time.monotonic() < until_s:  # see set_session_niceness
            restore_priority(process.pid)
            group = Path(f"/proc/{process.pid}/autogroup").read_text().split()[-1]
            time.sleep(0.01)
        tasks = [int(each) for each in os.listdir(f"/proc/{process.pid}/task")]
        found = {os.getpriority(os.PRIO_PROCESS, each) for each in tasks}
        process.kill()
    assert group == str(session_niceness())
    assert found == {ours} if priorities_can_rise() else found <= {ours, LAST}


@pytest.mark.parametrize(
    ("told", "niceness"),
    [("/autogroup-3087 nice -11\n", -11), ("/autogroup-12 nice\n", None), (b"\xff", None), (None, None)],
)
def test_what_a_system_tells_of_a_session_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str | bytes | None, niceness: int | None
) -> None:
    group = tmp_path / "autogroup"
    if told is None:
        group.mkdir()  # cannot be read, also by root
    else:
        group.write_bytes(told if isinstance(told, bytes) else told.encode())
    monkeypatch.setattr(spare_process, "AUTOGROUP", group)
    assert spare_process.own_niceness() == niceness
    assert session_niceness() == (niceness or 0)


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
@pytest.mark.parametrize("name", ["listdir", "setpriority"])
def test_a_system_that_restores_no_priority_ends_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may end between two looks at it, and a sandbox may not know the call."""

    def refused(*arguments: object) -> list[str]:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, name, refused)
    restore_priority(os.getpid())
    done: list[str] = []
    monkeypatch.setattr(spare_process.importlib, "import_module", done.append)
    importing = threading.Thread(target=spare_process._import, args=("large", (), threading.Event()))
    if name == "setpriority":  # else the thread would keep the lowest priority of a test that goes on
        importing.run()
        assert done == ["large"]
        spare_process._hurry(threading.current_thread())


@pytest.mark.slow
def test_ranks_that_have_waited_join_and_one_that_was_lost_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The variable says where ranks meet; what it was when they began to wait would let none join.

    They import at the usual priority, since what runs beside this test does not end.
    """
    monkeypatch.setattr(rank_process, "SPARE", rank_process.FOLLOWER)
    asked = ("parallel.pipeline=3", "device.threads=1", "device.compile=false", "scheduler.num_slots=2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    spares = SpareRanks(4)
    try:
        lost, waited, *left = (each.process for each in spares._waiting)
        lost.kill()
        lost.wait()
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        built = build(load(TINY, asked), spares=spares)
        try:
            assert built.ranks is not None
            followers = [each.pid for each in built.ranks._processes]
            assert followers == [waited.pid, left.pop(0).pid]
            request = Request("a", np.arange(3, 20, dtype=np.int32), SamplingParams(max_tokens=4))
            built.engine.add(request)
            while request.finish_reason is None:
                built.engine.step()
        finally:
            built.engine.close()
    finally:
        spares.close()
    assert [each.poll() for each in left] == [-signal.SIGKILL]
