"""Carry out an operator's orders between two steps: halt, give pages back, and replace the weights.

New weights are read and checked while steps go on, of each rank its share, in a thread. They are put at a
fence: requests that came before it end with the old weights, and those that come while it waits are held
until it is over on all ranks. So no step is computed with two versions, and no request either. What one rank
refuses, or has not ready in time, no rank does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from continuous_batching.engine import Engine
from continuous_batching.recording.agreement import RankQuestions, Settled
from recipes.assembly.rank_works import CHANGED, SLEEP, WAKE, WEIGHTS, WeightsAsked
from serving.engine.messages import (
    Add,
    DropWeights,
    Finish,
    FromEngine,
    Halt,
    Order,
    OrderDone,
    Pause,
    PutWeights,
    ReadWeights,
    Sleep,
    WakeUp,
)

if TYPE_CHECKING:
    from recipes.assembly.live_memory import LiveMemory

_LONGEST_S = 300.0  # longest time to copy the weights, or to allocate pages and capture steps again
_READ_S = 3600.0  # longest time for a rank to read its share of other weights
Held = Add | Finish


class Fence:
    """The orders that one engine was given; all its ranks carry them out, as `questions` lets them agree.

    `live` is what the first of them holds in memory. `num_begun` counts the samples that have begun and not
    ended; `has_coming` tells whether requests that came already are still to be put into the queue. `settle`
    completes the steps in flight and sends their tokens.
    """

    def __init__(
        self,
        engine: Engine,
        questions: RankQuestions | None,
        live: LiveMemory | None,
        send: Callable[[FromEngine], None],
        num_begun: Callable[[], int],
        has_coming: Callable[[], bool],
        settle: Callable[[], None],
    ) -> None:
        self._engine, self._questions, self._live, self._send = engine, questions, live, send
        self._num_begun, self._has_coming, self._settle = num_begun, has_coming, settle
        self._is_halted = self._is_asleep = False
        self._is_changing = False  # some ranks may have changed already
        self._num_asked = self._bytes_before = 0
        # The questions by which all ranks read weights, and have read some that were not put yet
        self._reading: str | None = None
        self._new: str | None = None
        self._awaiting: Sleep | PutWeights | None = None  # waits for the requests that came before
        self._held: list[tuple[Held, float]] = []  # messages that wait for it, with their time
        self._held_streams: set[int] = set()

    @property
    def may_step(self) -> bool:
        """Whether steps may begin."""
        return not (self._is_halted or self._is_asleep or self._is_changing)

    @property
    def is_busy(self) -> bool:
        """Whether `advance` should be called soon."""
        return self._reading is not None or self._is_closed

    def holds(self, message: Held) -> bool:
        """Return whether a message is for a request that waits behind an order, and is kept until then."""
        if isinstance(message, Finish):
            is_held = message.stream in self._held_streams
        else:
            is_held = self._is_closed
            if is_held:
                self._held_streams.update(range(message.stream, message.stream + len(message.ids)))
        if is_held:
            self._held.append((message, time.monotonic()))
        return is_held

    def take(self, order: Order | DropWeights) -> None:
        """Begin to carry out an order; the server gives the next one once this one is done."""
        match order:
            case Halt(is_on):
                self._is_halted = is_on
                self._settle()
                self._send(OrderDone(""))
            case ReadWeights():
                self._drop()
                self._read(order)
            case DropWeights():
                self._drop()
            case WakeUp() if self._is_asleep:
                self._prepare(WAKE)
            case WakeUp():
                self._send(OrderDone("the engine does not sleep"))
            case Sleep() | PutWeights():
                self._awaiting = order

    def advance(self) -> list[Held]:
        """Do what is due between two steps, and return the messages that wait no longer."""
        if self._awaiting is not None and not self._waits():
            order, self._awaiting = self._awaiting, None
            if count := self._num_begun():
                self._drop()
                problem = f"{count} requests have begun, and no step is made that would end them"
                self._send(OrderDone(f"{problem}: resume the engine first, or have them aborted"))
            else:
                self._settle()
                self._carry_out(order)
        return [] if self._is_closed else self._released()

    def _waits(self) -> bool:
        """Whether an order waits: until the requests that came before have ended, while steps end them.

        While no step does, it waits for lookups in a tier, which end by themselves: a request that waits for
        one counts as begun, since the pages that it finds are those of the old weights.
        """
        if self.may_step:
            return self._engine.scheduler.has_work or self._has_coming()
        return not self._is_asleep and self._engine.take_in()

    @property
    def _is_closed(self) -> bool:
        """Whether requests wait until an order has been carried out."""
        return self._awaiting is not None or self._is_changing

    def _carry_out(self, order: Sleep | PutWeights) -> None:
        """Let all ranks give their pages back, or put the weights that all of them have read."""
        if isinstance(order, Sleep):
            if self._is_asleep:
                self._send(OrderDone("the engine sleeps already"))
            else:
                self._prepare(SLEEP)
        elif self._new is None:
            self._send(OrderDone("there are no weights to put"))
        else:
            name, self._new = self._new, None
            self._change(WEIGHTS, name)

    def _ask(self, topic: str, body: bytes, wait_s: float, then: Callable[[Settled], None]) -> str:
        """Ask all ranks, and return the question's name."""
        assert self._questions is not None, "there are no orders without ranks to ask"
        self._num_asked += 1
        name = str(self._num_asked)
        self._questions.ask(topic, name, body, wait_s, then)
        return name

    def _decide(self, topic: str, name: str, *, is_agreed: bool) -> None:
        assert self._questions is not None, "they were asked"
        self._questions.decide(topic, name, is_agreed=is_agreed)

    def _page_bytes(self) -> int:
        assert self._live is not None, "there are no orders without memory"
        return self._live.num_bytes

    def _prepare(self, topic: str) -> None:
        """Ask all ranks to be ready for a change; no step is made from here on until it is over."""
        self._is_changing = True
        self._bytes_before = self._page_bytes()
        self._ask(topic, b"", _LONGEST_S, self._prepared)

    def _prepared(self, settled: Settled) -> None:
        """Let all ranks change if all can; those without memory for the pages leave all others without."""
        if settled.problem:
            self._decide(settled.topic, settled.name, is_agreed=False)
            self._is_changing = False
            self._send(OrderDone(settled.problem))
        else:
            self._change(settled.topic, settled.name)

    def _change(self, topic: str, name: str) -> None:
        """Let all ranks change, and wait until all have.

        What fails from here on ends the engine, since nobody knows what each rank has.
        """
        self._is_changing = True
        self._send(Pause(_LONGEST_S))
        self._decide(topic, name, is_agreed=True)
        self._ask(CHANGED, b"", _LONGEST_S, partial(self._changed, topic))

    def _changed(self, topic: str, settled: Settled) -> None:
        """Go on, now that all ranks have changed."""
        if settled.problem:
            raise RuntimeError(f"{topic}: {settled.problem}, and other ranks have changed")
        self._decide(CHANGED, settled.name, is_agreed=True)
        self._is_changing = False
        if topic == WEIGHTS:
            self._send(OrderDone(""))
        else:
            self._is_asleep = topic == SLEEP
            self._send(OrderDone("", abs(self._page_bytes() - self._bytes_before)))

    def _released(self) -> list[Held]:
        now_s, held = time.monotonic(), self._held
        self._held, self._held_streams = [], set()
        return [
            msgspec.structs.replace(each, age_s=each.age_s + now_s - since_s)
            if isinstance(each, Add)
            else each
            for each, since_s in held
        ]

    def _read(self, order: ReadWeights) -> None:
        """Let all ranks read their shares of other weights beside those in use."""
        body = msgspec.msgpack.encode(WeightsAsked(order.folder, order.segment, order.sha256))
        self._reading = self._ask(WEIGHTS, body, _READ_S, self._have_read)

    def _have_read(self, settled: Settled) -> None:
        """Keep weights that all ranks have read, and drop what one of them has not."""
        if settled.name != self._reading:
            return  # given up meanwhile
        self._reading = None
        if settled.problem:
            self._decide(WEIGHTS, settled.name, is_agreed=False)
        else:
            self._new = settled.name
        self._send(OrderDone(settled.problem))

    def _drop(self) -> None:
        for name in (self._reading, self._new):
            if name is not None:
                self._decide(WEIGHTS, name, is_agreed=False)
        self._reading = self._new = None
