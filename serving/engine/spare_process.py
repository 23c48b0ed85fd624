"""How does a process prepare to replace an engine, without slowing the one that serves?

    python -m serving.engine.spare_process DONE MODULE [ARGUMENT ...]

It imports what is large in a thread of the lowest priority, creates the file DONE, and goes on as MODULE.
Kernels that divide processor time by session (sched(7), autogroup) need the session's niceness as well.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import threading
import time
from pathlib import Path

LARGE = "recipes.build.engine"  # and torch with it
LAST = 19  # niceness: runs only when no other process wants to
AUTOGROUP = Path("/proc/self/autogroup")
_TRIES = 40


def main(argv: list[str]) -> None:
    """Prepare, and go on as the module."""
    done, *sys.argv = argv
    import_gently(LARGE)
    Path(done).touch()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def import_gently(module: str) -> None:
    """Import a module in a thread of the lowest priority, which on Linux each thread has for itself."""
    importlib.import_module("numpy")  # its own threads start now, at normal priority
    thread = threading.Thread(target=_import, args=(module,))
    give_way(LAST)
    thread.start()
    thread.join()
    give_way(0)


def give_way(niceness: int) -> None:
    """Set this session's niceness, where sessions have one."""
    for _ in range(_TRIES if AUTOGROUP.exists() else 0):
        try:
            AUTOGROUP.write_text(str(niceness))
        except BlockingIOError:  # except from root, the kernel accepts one write in a tenth of a second
            time.sleep(0.05)
        except OSError:  # this /proc cannot be written
            break
        else:
            return
    if AUTOGROUP.exists():
        print(f"WARNING this session's niceness cannot be set to {niceness}", file=sys.stderr)


def _import(module: str) -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LAST)
    importlib.import_module(module)


if __name__ == "__main__":
    main(sys.argv[1:])
