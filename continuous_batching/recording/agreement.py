"""Let the ranks that follow answer what the leader asks, so that it can decide by an entry of the recording.

A scheduler is a function of its recorded inputs, so what only one rank knows (which pages its tier has,
whether its part of a transfer came, whether it could read an adapter) must become an entry before any
scheduler may use it. The leader writes `RanksAsked`, which changes nothing in a scheduler; each rank works on
it in a thread of its own, and answers over the connection on which it reports its progress. The leader's own
answer counts as one of them. Only the leader decides, and only by an entry, between two steps: with the
answers of all ranks, or with the names of those that did not answer in time. Such a rank is a miss and no
more; an answer that comes afterwards is dropped.

On the leader: `RankQuestions.ask(topic, name, body, wait_s, then)`, and `then` is called with what is
`Settled`, from `take`, which the engine calls before each step. Where ranks have made something ready, `then`
calls `decide`, which records `RanksTold`: all ranks use it between the same two steps, or all drop it. An
engine of one rank asks itself in the same way.
On a follower: `Follower(..., works=, between=)`, with the same works by topic, and `Follower.wake()` from any
thread, after which `between` is called between two entries.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Annotated, Generic, Protocol, TypeVar

import msgspec
from msgspec import Meta

from borders.field_types import LAST_ID
from borders.files import in_one_line
from continuous_batching.recording.format import LONGEST_QUESTION, Named, RanksAsked

LEADER = "rank 0"  # the name under which the leader's own answer counts
ANSWER = b"="  # a line of a rank that begins with this is an answer
_LONGEST_REASON = 500  # characters, so that an answer stays within a rank's longest line

log = logging.getLogger(__name__)

Made = TypeVar("Made")


class Work(Protocol):
    """What a rank does about the questions of one topic."""

    def work(self, name: str, body: bytes) -> int:
        """Work on a question, in the topic's thread; return how much this rank has of what is asked.

        Raises OSError or ValueError where it fails.
        """
        ...

    def decide(self, name: str, is_agreed: bool) -> None:
        """Use what was made ready for a question, or drop it; called between two steps."""
        ...


class PreparedWork(Generic[Made]):
    """Makes something ready when all ranks are asked for it, and uses it once all of them have.

    `make` gets the name and body of a question, in the topic's thread, and `use` what was made, between two
    steps. What is decided against is dropped, also while it is still being made; `drop` gives back what it
    holds.
    """

    def __init__(
        self,
        make: Callable[[str, bytes], Made],
        use: Callable[[Made], None],
        drop: Callable[[Made], None] = lambda _: None,
    ) -> None:
        self._make, self._use, self._drop = make, use, drop
        self._ready: dict[str, Made | None] = {}  # None: it could not be made
        self._over: set[str] = set()  # decided against before this rank had made it
        self._lock = threading.Lock()

    def work(self, name: str, body: bytes) -> int:
        """Make ready what a question asks for; return 1, or 0 where it has been decided already."""
        with self._lock:
            if name in self._over:  # decided while this rank worked on earlier questions
                self._over.discard(name)
                return 0
        made: Made | None = None
        try:
            made = self._make(name, body)
        finally:
            with self._lock:
                is_over = name in self._over
                if is_over:
                    self._over.discard(name)
                else:
                    self._ready[name] = made
            if is_over and made is not None:
                self._drop(made)
        return 1

    def decide(self, name: str, is_agreed: bool) -> None:
        """Use what was made for a question, or drop it; raises ValueError where it was not made."""
        with self._lock:
            if name not in self._ready:
                self._over.add(name)
            made = self._ready.pop(name, None)
        if is_agreed:
            if made is None:
                raise ValueError(f"{name} is agreed on, and this rank has not made it")
            self._use(made)
        elif made is not None:
            self._drop(made)


class RankAnswer(msgspec.Struct, array_like=True, frozen=True):
    """What one rank answers: how much it has of what was asked, or why it failed."""

    topic: Named
    name: Named
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


def answer_to(asked: RanksAsked, work: Work | None) -> RankAnswer:
    """Do the work that a question asks for, and return the answer."""
    topic, name = asked.topic, asked.name
    if work is None:
        return RankAnswer(topic, name, 0, "this rank knows no such topic")
    try:
        count = int(work.work(name, asked.body))
        if not 0 <= count <= LAST_ID:
            raise ValueError(f"{count} is no count")
        return RankAnswer(topic, name, count)
    except Exception as error:  # noqa: BLE001 - whatever it raises is this rank's answer: its thread goes on
        said = in_one_line(error) if isinstance(error, (OSError, ValueError)) else str(error)
        # A file's name may hold what no text can, and this goes out as text
        why = (said or type(error).__name__).encode("utf-8", "replace").decode()
        log.warning("%s %s: %s", topic, name, why)
        return RankAnswer(topic, name, 0, why[:_LONGEST_REASON])


@dataclass(frozen=True, slots=True)
class Settled:
    """A question that all ranks have answered, or whose time is over."""

    topic: str
    name: str
    answers: Mapping[str, RankAnswer]  # the keys are ranks' names
    missing: tuple[str, ...]  # ranks that did not answer in time

    @property
    def least(self) -> int:
        """The least number that a rank has; 0 where one has failed or did not answer."""
        return 0 if self.problem else min(each.count for each in self.answers.values())

    @property
    def problem(self) -> str:
        """The first rank that failed or did not answer, and why; empty where there is none.

        The only rank of an engine is not named.
        """
        is_alone = len(self.answers) + len(self.missing) == 1
        for rank, each in self.answers.items():
            if each.problem:
                return each.problem if is_alone else f"{rank}: {each.problem}"
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
            if len(each) > LONGEST_QUESTION:
                raise ValueError(f"{each[:40]!r} has {len(each)} characters; {LONGEST_QUESTION} are allowed")
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

    def _settled(self, topic: str, name: str, answers: Mapping[str, RankAnswer]) -> Settled:
        ordered = {rank: answers[rank] for rank in self._names if rank in answers}
        return Settled(topic, name, ordered, tuple(rank for rank in self._names if rank not in answers))


class Answering:
    """Does what the leader asks for, each topic in a thread of its own, and sends the answers.

    Work that hangs delays its own topic alone, and neither the rank's steps nor its end.
    """

    def __init__(self, works: Mapping[str, Work], send: Callable[[RankAnswer], None]) -> None:
        self._works = works
        self._send = send
        self._asked: dict[str, SimpleQueue[RanksAsked | None]] = {}

    def ask(self, asked: RanksAsked) -> None:
        """Start to work on a question."""
        if asked.topic not in self._works:
            self._send(answer_to(asked, None))
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
            self._send(answer_to(asked, self._works[asked.topic]))


class Records(Protocol):
    """Receives what the leader asks and decides, as an engine's observer does."""

    def asked(self, topic: str, name: str, body: bytes) -> None:
        """All ranks are asked something."""
        ...

    def told(self, topic: str, name: str, is_agreed: bool) -> None:
        """All ranks use what they have made ready for a question, or drop it."""
        ...


class RankQuestions:
    """What the leader asks all ranks, itself included, and what it does once a question is settled.

    `records` tells the other ranks. All methods are called in the thread that steps.
    """

    def __init__(
        self,
        agreement: Agreement,
        works: Mapping[str, Work],
        records: Records,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agreement, self._works, self._records, self._clock = agreement, works, records, clock
        self._answering = Answering(works, lambda answer: agreement.answered(LEADER, answer))
        self._then: dict[tuple[str, str], Callable[[Settled], None]] = {}

    def __len__(self) -> int:
        """Return the number of questions that are not settled."""
        return len(self._then)

    def ask(self, topic: str, name: str, body: bytes, wait_s: float, then: Callable[[Settled], None]) -> None:
        """Ask all ranks; `then` is called once all have answered, or after `wait_s`."""
        self.expect(topic, name, wait_s, then)
        self._records.asked(topic, name, body)
        self._answering.ask(RanksAsked(topic, name, body))

    def expect(self, topic: str, name: str, wait_s: float, then: Callable[[Settled], None]) -> None:
        """Expect all ranks' answers to what another entry of the recording asks; `then` is as in `ask`."""
        self._agreement.expect(topic, name, self._clock() + wait_s)
        self._then[topic, name] = then

    def answer(self, answer: RankAnswer) -> None:
        """Give the leader's own answer to what another entry asks."""
        self._agreement.answered(LEADER, answer)

    def take(self) -> None:
        """Call what follows the questions that are settled now."""
        for each in self._agreement.take(self._clock()) if self._then else ():
            self._then.pop((each.topic, each.name))(each)

    def decide(self, topic: str, name: str, *, is_agreed: bool) -> None:
        """Let all ranks use what they have made ready for a question, or drop it."""
        self._records.told(topic, name, is_agreed)  # first, so that no rank waits for another in its use
        if topic in self._works:
            self._works[topic].decide(name, is_agreed)

    def close(self) -> None:
        """Let the threads of the leader's own work end; nothing waits for them."""
        self._answering.end()
