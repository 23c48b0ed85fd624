"""Choose how many threads compute on a CPU, and whether they spin or sleep at barriers.

Every operator ends at a barrier. Spinning threads are fastest while each has a core of its own; beside busy
processes they spin for a thread that the system has descheduled. So the usual number of spinning threads, the
same number of sleeping ones and a single thread are timed on the model's own step at start-up, as far as the
recipe and the environment leave a choice. If the spinning threads later get much less processor time than at
start-up, the engine switches once to sleeping threads or to one thread. How a barrier's policy is changed is
left to `Barriers`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from devices.host_limits import within_quota

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
        path = loaded_library("libgomp")
        return GnuBarriers(path) if path else Barriers()
    except OSError as error:  # /proc is missing, or the file is gone or not where /proc says
        log.info("threads: the OpenMP library is not found, and waits as it does: %s", error)
        return Barriers()


def forget_registration(folder: Path = Path("/dev/shm")) -> None:
    """Remove the file by which libiomp5 and libomp would find a second copy of them in this process.

    They remove it themselves at a normal exit alone, while engines end without one, or are killed.
    """
    with contextlib.suppress(OSError):
        (folder / f"__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}").unlink()


def loaded_library(name: str, maps: Path = Path("/proc/self/maps")) -> str | None:
    """Return the file of a library that this process has loaded, or None; of several, torch's own.

    Another package's wheel may have brought a second one, whose threads compute nothing of torch's.
    """
    lines = os.fsdecode(maps.read_bytes()).splitlines()
    paths = [line.split(maxsplit=5)[5] for line in lines if "/" in line]
    found = [path for path in paths if Path(path).name.startswith(name)]
    package = Path(torch.__file__).resolve().parent
    folders = package, package.with_name("torch.libs")
    own = [path for path in found if any(map(Path(path).is_relative_to, folders))]
    return next(iter([*own, *found]), None)


def usual_threads() -> int:
    """Return OMP_NUM_THREADS as torch has read it, or else one thread for each core that may be used.

    A container's quota leaves all cores visible to torch.
    """
    threads = torch.get_num_threads()
    return threads if os.environ.get("OMP_NUM_THREADS") else within_quota(threads)


USUAL_THREADS = usual_threads()  # before any engine of this process changes torch's number

# Rounds of each alternative, least time of a round, and approximate time of the whole measurement
ROUNDS, ROUND_S, LIMIT_S = 3, 0.06, 4.0
CLEARLY_FASTER = 0.9  # ratio to the usual alternative's time; a smaller gain may be chance
SLOW = 3.0  # ratio to the best time above which an alternative is not measured again
WINDOW_S = 0.5  # computing time over which processor time is watched
# Share of the processor time measured at start-up; less means that other processes use these cores
STARVED = 0.7
# Share of their cores; spinning threads that get less share them from the start
CROWDED = 0.8
# Ratio to the best time that is acceptable for a step that waits for no other thread
PATIENT = 1.6


@dataclass(frozen=True, slots=True)
class Way:
    """A number of threads, and whether they sleep at barriers."""

    threads: int
    sleeps: bool = False

    def __str__(self) -> str:
        if self.threads == 1:
            return "1 thread"
        return f"{self.threads} threads that {'sleep' if self.sleeps else 'spin'} at barriers"

    @property
    def word(self) -> str:
        """A short form, which `of` reads."""
        return f"{self.threads}{'z' * self.sleeps}"

    @staticmethod
    def of(word: str) -> Way:
        """Read the short form."""
        return Way(int(word.removesuffix("z")), word.endswith("z"))


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured alternative: the time of a step, and the share of `threads` cores that it got meanwhile."""

    way: Way
    step_s: float
    share: float

    def __str__(self) -> str:
        return f"{self.way} {1e3 * self.step_s:.2f} ms"


def ways(threads: int, *, may_be_fewer: bool, may_sleep: bool) -> list[Way]:
    """Return the alternatives to choose from, the usual one first."""
    found = [Way(threads)]
    if threads > 1 and may_sleep:
        found.append(Way(threads, sleeps=True))
    if threads > 1 and may_be_fewer:
        found.append(Way(1))
    return found


def choose(measured: Sequence[Measured]) -> Measured:
    """Choose the usual alternative unless another is clearly faster, or other processes use its cores."""
    usual, best = measured[0], min(measured, key=lambda each: each.step_s)
    if usual.share < CROWDED and len(measured) > 1:
        return beside_others(measured)
    return best if best.step_s < CLEARLY_FASTER * usual.step_s else usual


def beside_others(measured: Sequence[Measured]) -> Measured:
    """Choose for computing beside other processes: the fewest threads, if they are not much slower.

    A barrier may then wait for as long as the system runs another process, which so short a measurement may
    or may not meet: two threads took 5 ms a step when they were measured, and 50 to 500 ms later.
    """
    best_s = min(each.step_s for each in measured)
    fewest = min(measured[1:], key=lambda each: each.way.threads)
    return fewest if fewest.step_s < PATIENT * best_s else min(measured[1:], key=lambda each: each.step_s)


def measure(
    candidates: Sequence[Way],
    step: Callable[[], object],
    use: Callable[[Way], None],
    clock: Callable[[], float] = time.perf_counter,
    processor_clock: Callable[[], float] = time.process_time,
) -> list[Measured]:
    """Measure the mean time of a step for each alternative, in interleaved rounds, and take the median round.

    The mean counts, because a step that waits for a thread takes a hundred times longer than the others.
    """
    begin_s = clock()
    rounds: dict[Way, list[Measured]] = {way: [] for way in candidates}
    for number in range(ROUNDS):
        for way, done in rounds.items():
            best_s = min((each.step_s for before in rounds.values() for each in before), default=0.0)
            if done and (clock() - begin_s > LIMIT_S or done[-1].step_s > SLOW * best_s):
                continue
            use(way)
            # Operators prepare their code for a number of threads in the first step
            for _ in range(1 if number else 2):
                step()
            start_s, used_s, count = clock(), processor_clock(), 0
            while count == 0 or clock() - start_s < ROUND_S:
                step()
                count += 1
            took_s = clock() - start_s
            share = (processor_clock() - used_s) / (took_s * way.threads)
            done.append(Measured(way, took_s / count, share))
    return [
        Measured(way, statistics.median(each.step_s for each in done), max(each.share for each in done))
        for way, done in rounds.items()
    ]


class Threads:
    """The threads of this process: chosen by a measurement, and changed once if others take their cores.

    The number is `asked`, or OMP_NUM_THREADS; if neither is given, one thread may be chosen instead. An
    engine that takes the place of another begins with the alternative `learned` by that one: it is needed at
    once, and a measurement beside busy processes takes seconds.
    """

    def __init__(self, asked: int | None, barriers: Barriers, learned: Way | None = None) -> None:
        self.barriers = barriers
        may_be_fewer = asked is None and not os.environ.get("OMP_NUM_THREADS")
        self.candidates = ways(
            asked or USUAL_THREADS,
            may_be_fewer=may_be_fewer,
            may_sleep=asked is None and barriers.may_sleep,
        )
        # The alternative in use, if it was chosen because other processes use the cores
        self.learned = learned if learned in self.candidates[1:] else None
        if self.learned is not None:
            self.candidates = [self.learned]

    @property
    def patient(self) -> Way:
        """The alternative that disturbs other processes least, used before any is measured."""
        return next((way for way in self.candidates if way.sleeps), self.candidates[0])

    def use(self, way: Way) -> None:
        """Switch to this alternative."""
        torch.set_num_threads(way.threads)
        self.barriers.sleep(way.sleeps)

    def give_way(self, way: Way) -> None:
        """Use an alternative that suits cores which other processes use, and pass it on."""
        self.learned = way
        self.use(way)

    def settle(self, step: Callable[[], object], decoder: nn.Module) -> None:
        """Choose by the time of `step`, log the choice, and watch the decoder if its threads spin."""
        if self.learned is not None:
            log.info("threads: %s, as the engine before this one", self.learned)
        if len(self.candidates) == 1:
            return
        measured = measure(self.candidates, step, self.use)
        chosen = choose(measured)
        if chosen.way == self.candidates[0]:
            self.use(chosen.way)
        else:
            self.give_way(chosen.way)
        log.info("threads: %s; measured, a decode step: %s", chosen.way, ", ".join(map(str, measured)))
        if chosen.way == self.candidates[0]:
            Watch(self, chosen, beside_others(measured).way).attach(decoder)


class Watch:
    """Detects that spinning threads lose their cores to other processes, and switches to the fallback, once.

    It compares processor time and not the time of steps, which depends on the batch: threads that spin use
    all of their cores while they have them.
    """

    def __init__(
        self,
        threads: Threads,
        measured: Measured,
        fallback: Way,
        clock: Callable[[], float] = time.perf_counter,
        processor_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self.threads, self.measured, self.fallback = threads, measured, fallback
        self.clock, self.processor_clock = clock, processor_clock
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._begin_s = self._begin_used_s = 0.0
        self._took_s = self._used_s = 0.0

    def attach(self, decoder: nn.Module) -> None:
        """Measure every pass through the decoder until the fallback is in use."""
        self._hooks = [
            decoder.register_forward_pre_hook(lambda *_: self.begin()),
            decoder.register_forward_hook(lambda *_: self.end()),
        ]

    def begin(self) -> None:
        """Note the start of a pass."""
        self._begin_s, self._begin_used_s = self.clock(), self.processor_clock()

    def end(self) -> None:
        """Note the end of a pass, and switch if the threads were starved."""
        self._took_s += self.clock() - self._begin_s
        self._used_s += self.processor_clock() - self._begin_used_s
        if self._took_s < WINDOW_S:
            return
        share = self._used_s / (self._took_s * self.measured.way.threads)
        self._took_s = self._used_s = 0.0
        if share < STARVED * self.measured.share:
            self._give_way(share)

    def _give_way(self, share: float) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.threads.give_way(self.fallback)
        log.warning(
            "threads: %s got %.0f %% of their cores (%.0f %% at start-up), because other processes use them;"
            " from now on %s",
            self.measured.way,
            100 * share,
            100 * self.measured.share,
            self.fallback,
        )
