"""How do the threads of the loaded OpenMP library wait at barriers, and can that be changed while they run?

GNU's library (libgomp) reads its policy once, when it is loaded. But it spins only briefly while it manages
more threads than there are cores, so a team of idle threads that is kept aside makes all others sleep
(https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html). Intel's and LLVM's (libiomp5, libomp) have
`kmp_set_blocktime`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from pathlib import Path

log = logging.getLogger(__name__)

SAID_BY = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")  # who sets one has chosen


class Barriers:
    """How threads wait at barriers; this one leaves it as it is."""

    may_sleep = False

    def sleep(self, sleeps: bool) -> None:
        """From now on, sleep there, or spin as before."""


class IntelBarriers(Barriers):
    """Those of libiomp5 and libomp, of teams that the calling thread starts."""

    may_sleep = True

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._spin_ms = library.kmp_get_blocktime()

    def sleep(self, sleeps: bool) -> None:
        self._library.kmp_set_blocktime(0 if sleeps else self._spin_ms)


class GnuBarriers(Barriers):
    """Those of libgomp, of all teams of this process; `path` is the file that torch has loaded."""

    may_sleep = True

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def sleep(self, sleeps: bool) -> None:
        # The team is found among the process's threads, because an engine that has gone may have left it
        teams = [each for each in threading.enumerate() if isinstance(each, IdleTeam)]
        if sleeps and not teams:
            team = IdleTeam(self._library)
            team.start()
            team.is_made.wait()
        elif not sleeps:
            for team in teams:
                team.release.set()
                team.join()


class IdleTeam(threading.Thread):
    """Holds one more OpenMP thread than there are cores, which do nothing, until `release` is set."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(name="idle-openmp-team", daemon=True)
        self._library = library
        self.is_made, self.release = threading.Event(), threading.Event()

    def run(self) -> None:
        """Start the team once; its threads belong to this one and end with it."""
        nothing = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p)
        size = self._library.omp_get_num_procs() + 1
        self._library.GOMP_parallel(nothing, None, ctypes.c_uint(size), ctypes.c_uint(0))
        self.is_made.set()
        self.release.wait()


def barriers() -> Barriers:
    """Those of this process; where the environment says how to wait, or the library is unknown, unchanged."""
    if any(os.environ.get(name) for name in SAID_BY):
        return Barriers()
    everything = ctypes.CDLL(None)
    if hasattr(everything, "kmp_set_blocktime"):  # preloaded, and so the one that torch uses
        return IntelBarriers(everything)
    try:
        path = _loaded("libgomp")
        return GnuBarriers(path) if path else Barriers()
    except OSError as error:  # of /proc, or a file that is gone, or lies elsewhere than /proc says
        log.info("threads: the OpenMP library is not found, and waits as it does: %s", error)
        return Barriers()


def _loaded(name: str) -> str | None:
    """The file of a library that this process has loaded."""
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if "/" in line)
    return next((path for path in paths if Path(path).name.startswith(name)), None)
