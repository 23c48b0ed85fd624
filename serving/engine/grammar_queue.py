"""Where do requests wait whose grammar is being compiled? Before the engine's queue, and off its thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from continuous_batching.refusal import BadRequest
from continuous_batching.request import Request
from serving.grammars.matching import Grammars

MOST_COMPILE_S = 10.0  # the caps on grammars allow for a hundredth of it; a busy machine takes longer
_THREADS = 2  # more would take cores from the engine


@dataclass(slots=True)
class Compiling:
    """A request whose grammar is not there yet. Of its streams, those of `ends` are to end as it begins."""

    stream: int
    leader: Request
    work: Future[None]
    due_s: float
    ends: dict[int, str] = field(default_factory=dict)


class GrammarQueue:
    """Compiles in threads of its own, with a limit on the time."""

    def __init__(self, grammars: Grammars, most_s: float = MOST_COMPILE_S) -> None:
        self.grammars = grammars
        self._most_s = most_s
        self._threads = ThreadPoolExecutor(_THREADS, "grammar")
        self._waiting: list[Compiling] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, stream: int, leader: Request) -> None:
        """Begin to compile what a request and its further samples need."""
        work = self._threads.submit(self.grammars.constrain, leader)
        self._waiting.append(Compiling(stream, leader, work, time.monotonic() + self._most_s))

    def end(self, stream: int, reason: str) -> bool:
        """Let a sample end when it has begun; False where it does not wait here."""
        for each in self._waiting:
            if each.stream <= stream <= each.stream + len(each.leader.followers):
                each.ends[stream] = reason
                return True
        return False

    def take_ready(self) -> Iterator[tuple[Compiling, BadRequest | None]]:
        """Those that wait no longer, in the order of their arrival, and why they are refused, if so."""
        still = []
        now_s = time.monotonic()
        for each in self._waiting:
            if each.work.done():
                error = each.work.exception()
                if error is not None and not isinstance(error, BadRequest):
                    raise error
                yield each, error
            elif now_s >= each.due_s:
                each.work.cancel()
                problem = f"takes longer to prepare than the {self._most_s:g} s that it may"
                fix = "make it simpler, or try again when the server is less busy"
                yield each, BadRequest(None, problem, fix=fix, subject="the answer's grammar")
            else:
                still.append(each)
        self._waiting = still
