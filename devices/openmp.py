"""Change how the threads of the loaded OpenMP library wait at barriers, while they run.

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

# A user who sets one of these has chosen
SAID_BY = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")


class Barriers:
    """The wait policy of an OpenMP library; this class leaves it unchanged."""

    may_sleep = False

    def sleep(self, sleeps: bool) -> None:
        """Sleep at barriers from now on, or spin as before."""


class IntelBarriers(Barriers):
    """The policy of libiomp5 and libomp, for teams that the calling thread starts."""

    may_sleep = True

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._spin_ms = library.kmp_get_blocktime()

    def sleep(self, sleeps: bool) -> None:
        self._library.kmp_set_blocktime(0 if sleeps else self._spin_ms)


class GnuBarriers(Barriers):
    """The policy of libgomp, for all teams of this process; `path` is the file that torch has loaded."""

    may_sleep = True

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def sleep(self, sleeps: bool) -> None:
        # The team is looked up among the process's threads, because an earlier engine may have left it
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
    """Holds one more idle OpenMP thread than there are cores, until `release` is set."""

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
    """Return the policy of this process's library.

    It cannot be changed if the environment sets it or the library is unknown.
    """
    if any(os.environ.get(name) for name in SAID_BY):
        return Barriers()
    everything = ctypes.CDLL(None)
    if hasattr(everything, "kmp_set_blocktime"):  # it is preloaded, and so is the one that torch uses
        return IntelBarriers(everything)
    try:
        path = _loaded("libgomp")
        return GnuBarriers(path) if path else Barriers()
    except OSError as error:  # /proc is missing, or the file is gone or not where /proc says
        log.info("threads: the OpenMP library is not found, and waits as it does: %s", error)
        return Barriers()


def _loaded(name: str) -> str | None:
    """Return the file of a library that this process has loaded, or None."""
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if "/" in line)
    return next((path for path in paths if Path(path).name.startswith(name)), None)
