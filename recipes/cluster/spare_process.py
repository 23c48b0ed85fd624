"""Prepare a process to replace an engine or one of its ranks, without slowing the engine that serves.

    python -m recipes.cluster.spare_process MODULE [ARGUMENT ...]

It imports large modules in a thread of the lowest priority, and continues as MODULE. A byte on its standard
input says that the engine is needed now, or may be soon: the rest of the import then runs at the usual
priority. The byte stays there for MODULE to read. Kernels that divide processor time by session (sched(7),
autogroup) need the session's niceness changed as well, which only the session's first process does: the ranks
of an engine share its session.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import runpy
import select
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

LARGE = "recipes.assembly.engine"  # it imports torch
# Used only for compiling, so the import is never waited for.
LARGE_AND_RARE = "torch.fx.experimental.symbolic_shapes"
LAST = 19  # the niceness of a process that runs only when no other wants to
AUTOGROUP = Path("/proc/self/autogroup")
_OF_SESSION = re.compile(r".* (-?\d+)")  # matches "/autogroup-12 nice 0"
_TRIES = 40
_LOOKS_S = 0.05  # interval between checks whether the import has ended, or the engine is needed


def main(argv: list[str]) -> None:
    """Prepare, and continue as the module."""
    sys.argv = argv
    gc.disable()  # the objects of the imports stay, so collecting during them is wasted
    import_gently(LARGE, LARGE_AND_RARE)
    gc.enable()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def import_gently(module: str, *rare: str) -> None:
    """Import a module in a thread of the lowest priority; on Linux, each thread has a priority of its own.

    The rare modules follow; none of them is begun once the engine is needed.
    """
    importlib.import_module("numpy")  # its own threads start now, at the usual priority
    if is_needed(0):
        importlib.import_module(module)
        return
    needed = threading.Event()
    thread = threading.Thread(target=_import, args=(module, rare, needed))
    with lowest_session_niceness() if os.getsid(0) == os.getpid() else contextlib.nullcontext():
        thread.start()
        while thread.is_alive() and not is_needed(_LOOKS_S):
            pass
        needed.set()
    if thread.is_alive():
        _hurry(thread)
    thread.join()


@contextlib.contextmanager
def lowest_session_niceness() -> Iterator[None]:
    """Let this session run only when no other wants to, while inside this context."""
    usual = session_niceness()
    set_session_niceness(LAST)
    try:
        yield
    finally:
        set_session_niceness(usual)


def is_needed(within_s: float) -> bool:
    """Return whether a byte, or the end, of standard input has come within this time."""
    return bool(select.select([0], [], [], within_s)[0])


def own_niceness() -> int | None:
    """Return the niceness of this session, or None where it has none of its own.

    It has none where the file is missing or cannot be read, and where it is empty: then the session is
    scheduled with the whole system, as a container's first one may be.
    """
    try:
        found = _OF_SESSION.fullmatch(AUTOGROUP.read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        return None
    return None if found is None else int(found[1])


def session_niceness() -> int:
    """Return the niceness of this session, or 0 where it has none."""
    return own_niceness() or 0


def set_session_niceness(niceness: int) -> None:
    """Set this session's niceness, where it has one."""
    has_one = own_niceness() is not None
    for _ in range(_TRIES if has_one else 0):
        try:
            AUTOGROUP.write_text(str(niceness))
        except BlockingIOError:  # the kernel accepts only one write in 0.1 s, except from root
            time.sleep(0.05)
        except OSError:  # this /proc cannot be written
            break
        else:
            return
    if has_one:
        print(f"WARNING this session's niceness cannot be set to {niceness}", file=sys.stderr)


def restore_priority(pid: int) -> None:
    """Give all threads of a spare process our priority at once, as far as the system allows.

    The process is also told that it is needed, but one that yields on busy cores takes seconds to notice.
    """
    with contextlib.suppress(OSError):  # not Linux, or too soon after another write, or the process has ended
        Path(f"/proc/{pid}/autogroup").write_text(str(session_niceness()))
    threads: list[str] = []
    with contextlib.suppress(OSError):  # not Linux, or the process has ended
        threads = os.listdir(f"/proc/{pid}/task")
    for thread in threads:
        with contextlib.suppress(OSError):  # the thread has ended, or the system lets no priority rise
            os.setpriority(os.PRIO_PROCESS, int(thread), os.getpriority(os.PRIO_PROCESS, 0))


def _hurry(thread: threading.Thread) -> None:
    """Give the importing thread the priority of this one, where the system lets it rise again."""
    if sys.platform != "linux":
        return
    assert thread.native_id is not None, "not started"
    # It has just ended, or CAP_SYS_NICE is missing: then its session's niceness may help.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread.native_id, os.getpriority(os.PRIO_PROCESS, 0))


def _import(module: str, rare: Sequence[str], needed: threading.Event) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may refuse the call, and the import matters more
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LAST)
    importlib.import_module(module)
    for each in rare:
        if not needed.is_set():
            importlib.import_module(each)


if __name__ == "__main__":
    main(sys.argv[1:])
