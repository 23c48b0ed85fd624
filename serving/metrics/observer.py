"""Who wants to know what the server does? An observer; metrics and logs are such."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING

from serving.engine.messages import Beat, Ended, Facts, StepTimes

if TYPE_CHECKING:
    from serving.answers.answers import Answer

# By which a client says what a request is part of (W3C's Trace Context), while that request is worked at
TRACE_HEADERS: ContextVar[Mapping[str, str]] = ContextVar("TRACE_HEADERS", default=MappingProxyType({}))


class Observer:
    """Is told of everything, as it happens, within the event loop: it must be quick. Times are in seconds."""

    def ready(self, facts: Facts, start_s: float) -> None:
        """An engine can serve, so long after it was started."""

    def lost(self, reason: str) -> None:
        """An engine ended, or was ended."""

    def added(self, answer: Answer) -> None:
        """A request went to the engine."""

    def rejected(self, reason: str) -> None:
        """A request was not let in: queue_full, refused, starting, lost, draining or dead."""

    def refused(self, answer: Answer, reason: str) -> None:
        """The engine does not take a request that was added: queue_full or refused."""

    def aborted(self, answer: Answer, reason: str) -> None:
        """A request was cut off: disconnect, slow_reader, asked, shutdown, engine_lost, or
        sibling, where another prompt of the same request was not taken.
        """

    def first_token(self, answer: Answer, index: int, since_arrival_s: float) -> None:
        """A sample has its first token."""

    def next_token(self, answer: Answer, index: int, since_last_s: float) -> None:
        """A sample has one more."""

    def ended(self, answer: Answer, index: int, end: Ended, since_arrival_s: float) -> None:
        """A sample ended."""

    def stepped(self, times: StepTimes) -> None:
        """The engine made a step."""

    def beat(self, beat: Beat) -> None:
        """The engine told how it is."""

    def responded(self, status: int) -> None:
        """A response came to its end, but to a probe; 499: a client that went away before it began."""
