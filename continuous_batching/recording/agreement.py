"""Let the ranks that follow answer what the leader asks, so that it can decide by an entry of the recording.

A scheduler is a function of its recorded inputs, so what only one rank knows (which pages its tier has,
whether its part of a transfer came, whether it could read an adapter) must become an entry before any
scheduler may use it. The leader writes `RanksAsked`, which changes nothing in a scheduler; each rank works on
it in a thread of its own, and answers over the connection on which it reports its progress. The leader's own
answer counts as one of them. Only the leader decides, and only by an entry of its own kind, which it writes
when `take` returns the question: with the answers of all ranks, or with the names of those that did not
answer in time. Such a rank is a miss and no more; an answer that comes afterwards is dropped.

On the leader: `Agreement(ranks)`; `expect(topic, name, until_s)` before `Recorder.asked(topic, name, body)`;
`Listeners.answered = agreement.answered`; `take(now_s)` between two steps, which returns `Settled`s; `next_s`
says until when an idle loop may wait, and `wake` is called when the last answer has come.
On a follower: `works` by topic, where `work(name, body)` returns a number, and raises OSError or ValueError
where it fails; `Follower(..., works=, between=)`, and `Follower.wake()` from any thread,
after which `between` is called between two entries.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Annotated

import msgspec
from msgspec import Meta

from borders.field_types import LAST_ID
from continuous_batching.recording.format import RanksAsked

LEADER = "rank 0"  # the name under which the leader's own answer counts
ANSWER = b"="  # a line of a rank that begins with this is an answer
_LONGEST_NAME, _LONGEST_REASON = 300, 500  # characters, so that an answer stays within a rank's longest line

log = logging.getLogger(__name__)

Work = Callable[[str, bytes], int]  # the name and body of a question; returns how much this rank has of it


class RankAnswer(msgspec.Struct, array_like=True, frozen=True):
    """What one rank answers: how much it has of what was asked, or why it failed."""

    topic: Annotated[str, Meta(max_length=_LONGEST_NAME)]
    name: Annotated[str, Meta(max_length=_LONGEST_NAME)]
    count: Annotated[int, Meta(ge=0, le=LAST_ID)]
    problem: Annotated[str, Meta(max_length=_LONGEST_REASON)] = ""

    @property
    def line(self) -> bytes:
        """The line, without its end, by which a rank answers: JSON, because that has no raw line ends."""
        return ANSWER + msgspec.json.encode(self)


_DECODER = msgspec.json.Decoder(RankAnswer)


def read_answer(line: bytes) -> RankAnswer | None:
    """Return the answer in a line that begins with ANSWER, or None if it is no answer."""
    try:
        return _DECODER.decode(line[len(ANSWER) :])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def answer_to(topic: str, name: str, work: Work | None, body: bytes) -> RankAnswer:
    """Do the work that a question asks for, and return the answer."""
    if work is None:
        return RankAnswer(topic, name, 0, "this rank knows no such topic")
    try:
        count = int(work(name, body))
        if not 0 <= count <= LAST_ID:
            raise ValueError(f"{count} is no count")
        return RankAnswer(topic, name, count)
    except Exception as error:  # noqa: BLE001 - whatever it raises is this rank's answer: its thread goes on
        log.warning("%s %s: %s", topic, name, error)
        return RankAnswer(topic, name, 0, (str(error) or type(error).__name__)[:_LONGEST_REASON])


@dataclass(frozen=True, slots=True)
class Settled:
    """A question that all ranks have answered, or whose time is over."""

    topic: str
    name: str
    answers: Mapping[str, RankAnswer]  # by the rank's name
    missing: tuple[str, ...]  # ranks that did not answer in time

    @property
    def least(self) -> int:
        """The least number that a rank has; 0 where one has failed or did not answer."""
        return 0 if self.problem else min(each.count for each in self.answers.values())

    @property
    def problem(self) -> str:
        """The first rank that failed or did not answer, and why; empty where there is none."""
        for rank, each in self.answers.items():
            if each.problem:
                return f"{rank}: {each.problem}"
        return f"{self.missing[0]}: it did not answer in time" if self.missing else ""


@dataclass(slots=True)
class _Open:
    """A question that is still to be settled."""

    until_s: float
    answers: dict[str, RankAnswer] = field(default_factory=dict)


class Agreement:
    """The leader's open questions to the ranks `names`, itself included.

    `answered` may be called from any thread, the other methods from the engine's. The memory is bounded: each
    question keeps one answer of each rank, and nothing is kept of questions that are not open.
    """

    def __init__(self, names: Collection[str], wake: Callable[[], None] = lambda: None) -> None:
        self._names = tuple(names)
        self._wake = wake
        self._open: dict[tuple[str, str], _Open] = {}
        self._lock = threading.Lock()

    def expect(self, topic: str, name: str, until_s: float) -> None:
        """Open a question, which `take` returns at `until_s` at the latest."""
        for each in (topic, name):
            if len(each) > _LONGEST_NAME:
                raise ValueError(f"{each[:40]!r} has {len(each)} characters; {_LONGEST_NAME} are allowed")
        with self._lock:
            assert (topic, name) not in self._open, f"{topic} {name} is asked twice"
            self._open[topic, name] = _Open(until_s)

    def answered(self, rank: str, answer: RankAnswer) -> None:
        """Note a rank's answer; only its first to an open question counts."""
        with self._lock:
            asked = self._open.get((answer.topic, answer.name))
            if asked is None or rank not in self._names:
                return
            asked.answers.setdefault(rank, answer)
            is_whole = len(asked.answers) == len(self._names)
        if is_whole:
            self._wake()

    def take(self, now_s: float) -> tuple[Settled, ...]:
        """Return the questions that are settled, in the order in which they were asked."""
        if not self._open:
            return ()
        with self._lock:
            over = [
                key
                for key, each in self._open.items()
                if len(each.answers) == len(self._names) or now_s >= each.until_s
            ]
            return tuple(self._settled(*key, self._open.pop(key).answers) for key in over)

    @property
    def next_s(self) -> float | None:
        """When the next open question's time is over, or None where none is open."""
        with self._lock:
            return min((each.until_s for each in self._open.values()), default=None)

    def _settled(self, topic: str, name: str, answers: Mapping[str, RankAnswer]) -> Settled:
        ordered = {rank: answers[rank] for rank in self._names if rank in answers}
        return Settled(topic, name, ordered, tuple(rank for rank in self._names if rank not in answers))


class Answering:
    """Does what the leader asks for, each topic in a thread of its own, and sends the answers.

    Work that hangs delays its own topic alone, and neither the rank's steps nor its end.
    """

    def __init__(self, works: Mapping[str, Work], send: Callable[[bytes], None]) -> None:
        self._works = works
        self._send = send
        self._asked: dict[str, SimpleQueue[RanksAsked | None]] = {}

    def ask(self, asked: RanksAsked) -> None:
        """Start to work on a question."""
        if asked.topic not in self._works:
            self._send(answer_to(asked.topic, asked.name, None, asked.body).line)
            return
        if asked.topic not in self._asked:
            queue = self._asked[asked.topic] = SimpleQueue()
            name = f"rank-answers-{asked.topic}"
            threading.Thread(target=self._answer, args=(queue,), name=name, daemon=True).start()
        self._asked[asked.topic].put(asked)

    def end(self) -> None:
        """Let the threads end behind what they do now; nothing waits for them."""
        for queue in self._asked.values():
            queue.put(None)

    def _answer(self, queue: SimpleQueue[RanksAsked | None]) -> None:
        while (asked := queue.get()) is not None:
            self._send(answer_to(asked.topic, asked.name, self._works[asked.topic], asked.body).line)
