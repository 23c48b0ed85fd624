"""Forward an answer that a replica sends in the frames of serving/continuation.py, with its tokens.

The client gets only the bytes for it that the frames hold. A replica that sends bytes without tokens, or
tokens before it has begun, is treated as lost: what it sends cannot be continued elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import anyio

from serving.api.streamed import PATIENCE_S, SLOWEST_BYTES_S
from serving.continuation import FRAMES, NOT_RESUMED_HEADER, AnswerBegun, FrameReader, Grown, Over
from serving.router.reply import (
    REFUSED,
    STREAM_HEAD,
    Refusal,
    Reply,
    begun_with,
    error_event,
    own_error,
)
from serving.router.resuming import KnownAnswer
from serving.router.upstream import HeaderLines, Lost, UpstreamAnswer

# Where a client has made the router wait so long in all, a loss of its replica may be a cut by the replica
STALL_S = PATIENCE_S / 2
_END_S = 1.0  # time in which a connection must end its answer behind the last frame, to be used again


def is_framed(headers: HeaderLines) -> bool:
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


async def read_out(answer: UpstreamAnswer) -> None:
    """Read what ends an answer behind its last frame, so that its connection can be used again."""
    if answer.is_read:  # it came with the last frame
        return
    with suppress(Lost), anyio.move_on_after(_END_S):
        while await answer.next():
            pass


class FramedAnswer:
    """One replica's part of an answer; `headers` are those that its client gets."""

    def __init__(
        self, reply: Reply, known: KnownAnswer, answer: UpstreamAnswer, headers: HeaderLines
    ) -> None:
        self._reply = reply
        self._known = known
        self._answer, self._frames = answer, FrameReader()
        self._headers = [each for each in headers if each[0] != b"content-type"]
        self._unsent = b""  # what `grow` has noted since `send`
        self._is_unsent_begun = False  # tokens are part of it
        self._waited_s = 0.0  # time of waiting for the client, less what it has earned by reading
        self.is_long = False  # it is no stream, and its client has a part of it

    async def read(self) -> list[AnswerBegun | list[Grown] | Over]:
        """Return the next frames, of which those with tokens in a row are one list; raises Lost.

        The caller sends all of it before it reads again. Each write wakes the client, which costs more than
        anything else here.
        """
        if not (part := await self._answer.next()):
            raise Lost("the answer ended before its end")
        found: list[AnswerBegun | list[Grown] | Over] = []
        grown: list[Grown] = []
        try:
            for frame in self._frames.push(part):
                if self.is_long and not isinstance(frame, Over):
                    raise Lost("it told of tokens behind the end of the answer")
                if not isinstance(frame, Grown):
                    grown = []
                    found.append(frame)
                    continue
                if not grown:
                    found.append(grown)
                grown.append(frame)
        except ValueError as error:
            raise Lost(f"what it tells of the answer cannot be read: {error}") from None
        return found

    async def begin(self, begun: AnswerBegun) -> None:
        """Begin the answer, or go on with it; the head of a stream is sent at once."""
        self._known.begin(begun)
        if begun.is_stream:
            names = {name for name, _ in STREAM_HEAD}
            others = [each for each in self._headers if each[0] not in names]
            await self._reply.head(200, [*STREAM_HEAD, *others])

    def grow(self, grown: Sequence[Grown]) -> None:
        """Note what is new, which `send` sends on; raises Lost where it cannot be."""
        known, unsent, has_begun = self._known, self._unsent, self._is_unsent_begun
        for each in grown:
            if each.tokens:
                has_begun |= bool(each.payload)
            elif begun_with(each.payload)[1]:
                raise Lost("it sent a part of the answer without its tokens")
            unsent += each.payload
        known.grow(grown)
        if known.is_stream:
            self._unsent, self._is_unsent_begun = unsent, has_begun

    @property
    def has_stalled(self) -> bool:
        """Whether its client reads so slowly that its replica may have cut it."""
        return self._waited_s >= STALL_S

    async def send(self) -> None:
        """Send on what is noted."""
        if self._unsent:
            since_s, part = time.monotonic(), self._take()
            await self._reply.part(part)
            took_s = time.monotonic() - since_s
            self._waited_s = max(0.0, self._waited_s + took_s - len(part) / SLOWEST_BYTES_S)

    def _take(self) -> bytes:
        """Return what is noted, which the caller sends."""
        self._known.is_sent |= self._is_unsent_begun
        unsent, self._unsent, self._is_unsent_begun = self._unsent, b"", False
        return unsent

    async def end(self, over: Over) -> Refusal | None:
        """Send on the end, or return that it refuses, where another replica may not; that one begins anew."""
        known, reply = self._known, self._reply
        if known.begun is None:
            raise Lost("the answer ended before it began")
        if known.is_stream:
            if over.status in REFUSED and not (known.is_sent or self._is_unsent_begun):
                await self.send()  # signs of life
                known.begin_again()
                return Refusal(over.status, partial(reply.part, over.payload, more=False))
            await reply.part(self._take() + over.payload, more=False)
            return None
        headers = [(b"content-type", b"application/json"), *self._headers]
        if over.retry_after:
            headers.append((b"retry-after", over.retry_after.encode("latin-1", "replace")))
        if over.has_more or self.is_long:
            await self._long(over, headers)
            return None
        whole = partial(reply.whole, over.status, headers, over.payload)
        if over.status in REFUSED:
            known.begin_again()
            return Refusal(over.status, whole)
        await whole()
        return None

    async def _long(self, over: Over, headers: HeaderLines) -> None:
        """Send on a piece of a long answer, which is lost with its replica once it has begun."""
        if not self.is_long:
            self.is_long = self._known.is_sent = True
            self._known.why_not = "its client has a part of it already"
            await self._reply.head(over.status, headers)
        await self._reply.part(over.payload, more=over.has_more)
