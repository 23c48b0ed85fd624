"""Compile grammars outside the engine's thread, while their requests wait before the engine's queue."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from borders.refusal import BadRequest
from continuous_batching.queueing import QueueFull
from continuous_batching.request import Request
from serving.grammars.matching import Grammars

MOST_COMPILE_S = 10.0  # what the caps let through takes less than a second of a free core
MOST_WAIT_S = 60.0  # most time that a grammar waits while others are compiled
_THREADS = 2  # more threads would take cores from the engine


@dataclass(slots=True)
class Compiling:
    """A request whose grammar is not compiled yet; its streams in `ends` are to end as soon as they begin."""

    stream: int
    leader: Request
    since_s: float
    ends: dict[int, str] = field(default_factory=dict)
    begun_s: float | None = None
    work: Future[None] | None = None


class GrammarQueue:
    """Compiles in threads of its own, with limits on the time of each grammar and on the wait for it."""

    def __init__(
        self, grammars: Grammars, most_s: float = MOST_COMPILE_S, most_wait_s: float = MOST_WAIT_S
    ) -> None:
        self.grammars = grammars
        self._most_s, self._most_wait_s = most_s, most_wait_s
        self._threads = ThreadPoolExecutor(_THREADS, "grammar")
        self._waiting: list[Compiling] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def leaders(self) -> list[Request]:
        """The requests that wait here."""
        return [each.leader for each in self._waiting]

    @property
    def has_wanted(self) -> bool:
        """Whether a request waits here that has a sample which is not to end as soon as it begins."""
        return any(len(each.ends) <= len(each.leader.followers) for each in self._waiting)

    def add(self, stream: int, leader: Request) -> None:
        """Begin to compile what a request and its further samples need."""
        each = Compiling(stream, leader, time.monotonic())
        each.work = self._threads.submit(self._compile, each)
        self._waiting.append(each)

    def end(self, stream: int, reason: str) -> bool:
        """Let a sample end as soon as it begins; returns False if it does not wait here."""
        for each in self._waiting:
            if each.stream <= stream <= each.stream + len(each.leader.followers):
                each.ends[stream] = reason
                return True
        return False

    def take_ready(self) -> Iterator[tuple[Compiling, BadRequest | QueueFull | None]]:
        """Yield the requests that wait no longer, in order of arrival.

        Each comes with its refusal, if it has one.
        """
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            assert each.work is not None, "nobody compiles it"
            if each.work.done():
                error = each.work.exception()
                if error is not None and not isinstance(error, BadRequest):
                    raise error
                yield each, error
            elif (late := self._lateness(each, time.monotonic())) is not None:
                each.work.cancel()
                yield each, late
            else:
                self._waiting.append(each)

    def _compile(self, each: Compiling) -> None:
        each.begun_s = time.monotonic()
        self.grammars.constrain(each.leader)

    def _lateness(self, each: Compiling, now_s: float) -> BadRequest | QueueFull | None:
        """Return why a request waits no longer, if it has waited too long."""
        if each.begun_s is None:
            if now_s - each.since_s < self._most_wait_s:
                return None
            return QueueFull(f"too many grammars wait to be compiled, for {self._most_wait_s:g} s", 1.0)
        if now_s - each.begun_s < self._most_s:
            return None
        problem = f"takes longer to prepare than the limit of {self._most_s:g} s"
        return BadRequest(None, problem, fix="make it simpler", subject="the answer's grammar")
