"""Carry out an operator's orders between two steps: halt, give pages back, and replace the weights.

New weights are read and checked in a thread while steps go on. They are put at a fence: requests that came
before it end with the old weights, and those that come while it waits are held until it is over. So no step
is computed with two versions, and no request either.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from borders.files import in_one_line
from continuous_batching.engine import Engine
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
    from recipes.assembly.live_memory import LiveMemory, NewWeights

_LONGEST_S = 300.0  # longest time to copy the weights, or to allocate pages and capture steps again
_FAILURES = (ValueError, OSError, RuntimeError)  # of files, and of torch for want of memory
_RANKS = "only an engine of one rank replaces its weights or gives pages back; start it again"
Held = Add | Finish


class Fence:
    """The orders that one engine was given.

    `num_begun` counts the requests that have begun and not ended; `settle` completes the steps in flight and
    sends their tokens.
    """

    def __init__(
        self,
        engine: Engine,
        live: LiveMemory | None,
        send: Callable[[FromEngine], None],
        num_begun: Callable[[], int],
        settle: Callable[[], None],
    ) -> None:
        self._engine, self._live, self._send = engine, live, send
        self._num_begun, self._settle = num_begun, settle
        self._is_halted = self._is_asleep = False
        self._thread = ThreadPoolExecutor(1, "weights")
        self._reading: Future[NewWeights] | None = None
        self._new: NewWeights | None = None  # read, and not put yet
        self._awaiting: Sleep | PutWeights | None = None  # waits for the requests that came before
        self._held: list[tuple[Held, float]] = []  # messages that wait for it, with their time
        self._held_streams: set[int] = set()

    @property
    def may_step(self) -> bool:
        """Whether steps may begin."""
        return not (self._is_halted or self._is_asleep)

    @property
    def is_busy(self) -> bool:
        """Whether `advance` should be called soon."""
        return self._reading is not None or self._awaiting is not None

    def holds(self, message: Held) -> bool:
        """Return whether a message is for a request that waits behind an order, and is kept until then."""
        if isinstance(message, Finish):
            is_held = message.stream in self._held_streams
        else:
            is_held = self._awaiting is not None
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
                self._reading = self._thread.submit(self._read, order)
            case DropWeights():
                self._drop()
            case WakeUp():
                self._wake()
            case Sleep() | PutWeights():
                self._awaiting = order

    def advance(self) -> list[Held]:
        """Do what is due between two steps, and return the messages that wait no longer."""
        if self._reading is not None and self._reading.done():
            self._take_read(self._reading)
        if self._awaiting is None or (self._engine.scheduler.has_work and self.may_step):
            return []
        order, self._awaiting = self._awaiting, None
        if count := self._num_begun():
            self._drop()
            problem = f"{count} requests have begun, and no step is made that would end them"
            self._send(OrderDone(f"{problem}: resume the engine first, or have them aborted"))
        else:
            self._settle()
            self._carry_out(order)
        return self._released()

    def _carry_out(self, order: Sleep | PutWeights) -> None:
        """Give the pages back, or put the weights. What fails here ends the engine: its state is unknown."""
        live, new = self._live, self._new
        if live is None:
            self._send(OrderDone(_RANKS))
        elif isinstance(order, Sleep):
            if self._is_asleep:
                self._send(OrderDone("the engine sleeps already"))
                return
            self._send(Pause(_LONGEST_S))
            num_bytes, self._is_asleep = live.release_pages(), True
            self._send(OrderDone("", num_bytes))
        elif new is None:
            self._send(OrderDone("there are no weights to put"))
        else:
            self._send(Pause(_LONGEST_S))
            live.put(new)
            self._new = None
            self._send(OrderDone(""))

    def _wake(self) -> None:
        """Allocate the pages again; without memory for them the engine stays asleep."""
        if self._live is None or not self._is_asleep:
            self._send(OrderDone("the engine does not sleep" if self._live else _RANKS))
            return
        self._send(Pause(_LONGEST_S))
        try:
            num_bytes = self._live.restore_pages()
        except MemoryError as error:
            self._send(OrderDone(str(error)))
        else:
            self._is_asleep = False
            self._send(OrderDone("", num_bytes))

    def _released(self) -> list[Held]:
        now_s, held = time.monotonic(), self._held
        self._held, self._held_streams = [], set()
        return [
            msgspec.structs.replace(each, age_s=each.age_s + now_s - since_s)
            if isinstance(each, Add)
            else each
            for each, since_s in held
        ]

    def _read(self, order: ReadWeights) -> NewWeights:
        if self._live is None:
            raise ValueError(_RANKS)
        if order.segment:
            return self._live.read_segment(order.segment, order.sha256)
        return self._live.read_folder(Path(order.folder))

    def _take_read(self, reading: Future[NewWeights]) -> None:
        self._reading = None
        try:
            self._new = reading.result()
        except _FAILURES as error:
            self._send(OrderDone(in_one_line(error)))
        else:
            self._send(OrderDone(""))

    def _drop(self) -> None:
        new, self._new = self._new, None
        if new is not None:
            new.drop()
