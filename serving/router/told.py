"""Send on an answer of whose tokens a replica tells, in the frames of serving/continuation.py.

The client gets the bytes in the frames and nothing else of them. A replica that sends bytes without tokens,
or tokens before it has begun, is treated as lost: what it sends cannot be continued elsewhere.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from functools import partial

import anyio

from serving.continuation import FRAMES, NOT_RESUMED_HEADER, AnswerBegun, FrameReader, Grown, Over
from serving.router.reply import REFUSED, STREAM_HEAD, Reply, begun_with, error_event, own_error, refuses
from serving.router.resuming import KnownAnswer
from serving.router.upstream import HeaderLines, Lost, UpstreamAnswer

Frames = AsyncGenerator[AnswerBegun | Grown | Over, None]
_END_S = 1.0  # time in which a connection must end its answer behind the last frame, to be used again


def is_told(headers: HeaderLines) -> bool:
    """Return whether a head announces frames."""
    return (b"content-type", FRAMES.encode()) in headers


def why_not_resumed(headers: HeaderLines) -> str:
    """Return why an answer without frames cannot go on elsewhere, as far as its replica has said it."""
    return next(
        (value.decode("latin-1") for name, value in headers if name == NOT_RESUMED_HEADER.encode()), ""
    )


def loss_event(path: str, lost: str, why_not: str = "") -> bytes:
    """Return the last event of a stream that was lost after it had begun."""
    how = f" ({lost})" if lost else ""
    only = f", which did not go on elsewhere because {why_not}" if why_not else ""
    message = f"the replica was lost during the answer{how}{only}; send the request again"
    return error_event(path, own_error(path, 502, message, code="replica_lost"))


async def frames_of(answer: UpstreamAnswer) -> Frames:
    """Yield what a replica tells, until the caller has the last frame; raises Lost where it does not come."""
    reader = FrameReader()
    while part := await answer.next():
        try:
            frames = [*reader.push(part)]
        except ValueError as error:
            raise Lost(f"what it tells of the answer cannot be read: {error}") from None
        for frame in frames:
            yield frame
    raise Lost("the answer ended before its end")


async def read_out(answer: UpstreamAnswer) -> None:
    """Read what ends an answer behind its last frame, so that its connection can be used again."""
    with suppress(Lost), anyio.move_on_after(_END_S):
        while await answer.next():
            pass


class ToldAnswer:
    """One replica's part of an answer; `headers` are those that its client gets."""

    def __init__(self, reply: Reply, known: KnownAnswer, headers: HeaderLines) -> None:
        self._reply = reply
        self._known = known
        self._headers = [each for each in headers if each[0] != b"content-type"]

    async def begin(self, begun: AnswerBegun) -> None:
        """Begin the answer, or go on with it; the head of a stream is sent at once."""
        self._known.begin(begun)
        if begun.is_stream:
            names = {name for name, _ in STREAM_HEAD}
            others = [each for each in self._headers if each[0] not in names]
            await self._reply.head(200, [*STREAM_HEAD, *others])

    async def grow(self, grown: Grown) -> None:
        """Send on what is new; raises Lost where it cannot be."""
        known, payload = self._known, grown.payload
        if not grown.tokens and begun_with(payload)[1]:
            raise Lost("it sent a part of the answer without its tokens")
        known.grow(grown)
        if payload and known.is_stream:
            known.is_sent |= bool(grown.tokens)
            await self._reply.part(payload)

    async def end(self, over: Over, frames: Frames) -> Callable[[], Awaitable[None]] | None:
        """Send on the end, or return what passes on that it refuses, where another replica may not."""
        known, reply = self._known, self._reply
        if known.begun is None:
            raise Lost("the answer ended before it began")
        if known.is_stream:
            end = partial(reply.part, over.payload, more=False)
            if not known.num_tokens and refuses(over.payload):
                return end
            await end()
            return None
        headers = [(b"content-type", b"application/json"), *self._headers]
        if over.retry_after:
            headers.append((b"retry-after", over.retry_after.encode("latin-1", "replace")))
        if over.has_more:
            await self._long(over, headers, frames)
            return None
        whole = partial(reply.whole, over.status, headers, over.payload)
        if over.status in REFUSED:
            return whole
        await whole()
        return None

    async def _long(self, over: Over, headers: HeaderLines, frames: Frames) -> None:
        """Send on a long answer in its pieces; it is lost with its replica once it has begun."""
        self._known.why_not, self._known.is_sent = "its client has a part of it already", True
        await self._reply.head(over.status, headers)
        await self._reply.part(over.payload)
        async for frame in frames:
            if not isinstance(frame, Over):
                raise Lost("it told of tokens behind the end of the answer")
            await self._reply.part(frame.payload, more=frame.has_more)
            if not frame.has_more:
                return
