"""How does a process prepare to replace an engine, without slowing the one that serves?

    python -m serving.engine.spare_process MODULE [ARGUMENT ...]

It imports what is large in a thread of the lowest priority, and goes on as MODULE. A byte in its standard
input says that the engine is needed now, or may be soon: what is left of the import then has the usual
priority. The byte stays there for MODULE. Kernels that divide processor time by session (sched(7), autogroup)
need the session's niceness as well.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import select
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

LARGE = "recipes.build.engine"  # and torch with it
LARGE_AND_RARE = "torch.fx.experimental.symbolic_shapes"  # only for who compiles: never waited for
LAST = 19  # niceness: runs only when no other process wants to
AUTOGROUP = Path("/proc/self/autogroup")
_TRIES = 40
_LOOKS_S = 0.05  # between looks whether the import has ended, or the engine is needed


def main(argv: list[str]) -> None:
    """Prepare, and go on as the module."""
    sys.argv = argv
    gc.disable()  # for the imports: their objects stay
    import_gently(LARGE, LARGE_AND_RARE)
    gc.enable()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def import_gently(module: str, *rare: str) -> None:
    """Import a module in a thread of the lowest priority, which on Linux each thread has for itself.

    Then the rare ones, of which none is begun once the engine is needed.
    """
    importlib.import_module("numpy")  # its own threads start now, at the usual priority
    if _is_needed(0):
        importlib.import_module(module)
        return
    usual = session_niceness()
    needed = threading.Event()
    thread = threading.Thread(target=_import, args=(module, rare, needed))
    set_session_niceness(LAST)
    thread.start()
    while thread.is_alive() and not _is_needed(_LOOKS_S):
        pass
    needed.set()
    set_session_niceness(usual)
    if thread.is_alive():
        _hurry(thread)
    thread.join()


def _is_needed(within_s: float) -> bool:
    return bool(select.select([0], [], [], within_s)[0])


def _told_of_session() -> list[str]:
    # Nothing also in a session that is scheduled with the whole system, as a container's first one may be
    return AUTOGROUP.read_text().split() if AUTOGROUP.exists() else []


def session_niceness() -> int:
    """Of this session, where it has one; else 0."""
    return int((_told_of_session() or ["0"])[-1])


def set_session_niceness(niceness: int) -> None:
    """Set this session's niceness, where it has one."""
    has_one = bool(_told_of_session())
    for _ in range(_TRIES if has_one else 0):
        try:
            AUTOGROUP.write_text(str(niceness))
        except BlockingIOError:  # except from root, the kernel accepts one write in a tenth of a second
            time.sleep(0.05)
        except OSError:  # this /proc cannot be written
            break
        else:
            return
    if has_one:
        print(f"WARNING this session's niceness cannot be set to {niceness}", file=sys.stderr)


def restore_priority(pid: int) -> None:
    """Give all of a spare process our priority at once, as far as the system allows.

    It hears that it is needed too, but a process that gives way on busy cores takes seconds to hear.
    """
    with contextlib.suppress(OSError):  # not Linux, or too soon after another write, or it has ended
        Path(f"/proc/{pid}/autogroup").write_text(str(session_niceness()))
    tasks = Path(f"/proc/{pid}/task")
    for thread in os.listdir(tasks) if tasks.is_dir() else ():
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread), os.getpriority(os.PRIO_PROCESS, 0))


def _hurry(thread: threading.Thread) -> None:
    """Give the import the priority of this thread, where the system lets it rise again."""
    if sys.platform != "linux":
        return
    assert thread.native_id is not None, "not started"
    try:
        os.setpriority(os.PRIO_PROCESS, thread.native_id, os.getpriority(os.PRIO_PROCESS, 0))
    except PermissionError:  # not without CAP_SYS_NICE; its session's niceness is the usual one already
        return
    except ProcessLookupError:  # it has just ended
        return


def _import(module: str, rare: Sequence[str], needed: threading.Event) -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LAST)
    importlib.import_module(module)
    for each in rare:
        if not needed.is_set():
            importlib.import_module(each)


if __name__ == "__main__":
    main(sys.argv[1:])
