"""Write an answer as the frames of serving/continuation.py, for a router that keeps its tokens.

The bytes for the client are those that the answer's form writes for any client. Each frame holds some of them
with the tokens that they come from, so that what a client was sent and which tokens are known never differ.
An answer that was begun elsewhere is first written again from its known tokens, and what the client has
already is dropped: parsers, numbers of events and held-back text then stand where they stood.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

import msgspec
from fastapi import Request
from starlette.responses import Response

from borders.refusal import BadRequest
from serving.answers.answers import AnswerDelta, AnswerStream
from serving.api.errors import response_of
from serving.api.pieces import Turns, gathered
from serving.api.streamed import KeepAlive, StreamedResponse
from serving.api.writer import LONG_TEXT, AnswerWriter, ResponseForm, WholeForm
from serving.async_llm import AsyncLLM
from serving.continuation import FRAMES, NO_LOGPROBS, PIECE_BYTES, AnswerBegun, Grown, Over, encode, framed
from serving.failures import EngineEnded, Failure, ShutDown, Unavailable

_TOLD_TOGETHER = 16  # tokens of an answer that is no stream, of which the router is told in one frame
_REWRITTEN = 64  # parts of an answer that are taken or written again in one turn of the event loop


class FrameWriter(AnswerWriter):
    """Writes the one answer to a request for a router; `begun` is what it begins with."""

    def __init__(self, llm: AsyncLLM, turns: Turns, answer: AnswerStream, begun: AnswerBegun) -> None:
        super().__init__(llm, turns, [answer])
        self._answer = answer
        self._begun = begun

    async def whole(self, request: Request, form: WholeForm) -> Response:
        """Return the frames of an answer whose client gets it in one piece."""
        await self._unless_gone(request.receive, self._accepted(math.inf))
        return self._response(self._whole_frames(request, form), KeepAlive())

    async def stream(self, request: Request, form: ResponseForm) -> Response:
        """Return the frames of a stream."""
        every_s = self._llm.recipe.server.keep_alive_s
        await self._unless_gone(request.receive, self._accepted(every_s or math.inf))
        sign = framed(Grown([], NO_LOGPROBS, 0, form.keep_alive))
        return self._response(self._stream_frames(form), KeepAlive(every_s, sign, event_end=b""))

    def _response(self, frames: AsyncGenerator[bytes, None], keep_alive: KeepAlive) -> Response:
        return StreamedResponse(frames, self._end, self._cut_off, FRAMES, keep_alive)

    async def _stream_frames(self, form: ResponseForm) -> AsyncGenerator[bytes, None]:
        yield framed(self._begun)
        async for known in self._replayed():
            for _ in form.events(known):
                pass
        while True:
            try:
                deltas = await self._answer.next()
            except (Failure, BadRequest) as failure:
                if _is_lost(failure):
                    yield _lost(failure)
                else:
                    yield framed(Over(response_of(failure).status_code, "", form.failed(failure)))
                return
            pieces = form.events([(each.index, each) for each in deltas])
            payload = await self._joined(pieces) if deltas else b""
            if not deltas or self._answer.is_read:
                yield framed(Over(200, "", payload + form.end()))
                return
            yield self._grown(deltas, payload)

    async def _whole_frames(self, request: Request, form: WholeForm) -> AsyncGenerator[bytes, None]:
        yield framed(self._begun)
        num_characters = sum(len(each.text) for each in self._answer.replayed)
        async for known in self._replayed():
            form.take(known)
        untold: list[AnswerDelta] = []
        try:
            while deltas := await self._answer.next():
                # The parts that are told must not grow with the answer that the form may make of them
                untold += [_copy(each) for each in deltas]
                num_characters += sum(len(each.text) for each in deltas)
                form.take([(each.index, each) for each in deltas])
                # Nothing goes on behind the last tokens, which come with the answer itself
                if sum(len(each.tokens) for each in untold) >= _TOLD_TOGETHER and not self._answer.is_read:
                    yield self._grown(untold, b"")
                    untold = []
        except (Failure, BadRequest) as failure:
            yield _lost(failure) if _is_lost(failure) else _failed(failure, request)
            return
        whole = await self._joined(form.whole(), is_long=num_characters > LONG_TEXT)
        for at in range(0, len(whole), PIECE_BYTES):
            piece, has_more = whole[at : at + PIECE_BYTES], at + PIECE_BYTES < len(whole)
            yield framed(Over(200, "", piece, has_more=has_more))

    async def _replayed(self) -> AsyncIterator[list[tuple[int, AnswerDelta]]]:
        """Yield the parts that were answered elsewhere, some in each turn of the event loop."""
        replayed = self._answer.replayed
        for at in range(0, len(replayed), _REWRITTEN):
            yield [(each.index, each) for each in replayed[at : at + _REWRITTEN]]
            await self._turns.next()

    def _grown(self, deltas: Sequence[AnswerDelta], payload: bytes) -> bytes:
        tokens = [token for each in deltas for token in each.tokens]
        logprobs = [entry for each in deltas for entry in each.logprobs]
        raw = msgspec.Raw(encode(logprobs)) if logprobs else NO_LOGPROBS
        return framed(Grown(tokens, raw, self._answer.num_cached_tokens, payload))

    async def _joined(self, pieces: Iterator[bytes], *, is_long: bool = False) -> bytes:
        """Return pieces as one, each made in its own turn of the event loop, or in a thread if `is_long`."""
        whole: list[bytes] = []
        made = gathered(pieces)
        while (piece := await self._turns.next_of(made, is_long=is_long)) is not None:
            if whole:
                await self._turns.next()
            whole.append(piece)
        return b"".join(whole)


def _copy(delta: AnswerDelta) -> AnswerDelta:
    return AnswerDelta(delta.index, "", list(delta.tokens), list(delta.logprobs))


def _is_lost(failure: Failure | BadRequest) -> bool:
    """Return whether the engine ended, or its server, so that the answer may go on at another."""
    return isinstance(failure, (Unavailable, ShutDown))


def _lost(failure: Failure | BadRequest) -> bytes:
    is_orderly = not isinstance(failure, EngineEnded)
    return framed(Over(503, "", b"", is_lost=True, is_orderly=is_orderly))


def _failed(failure: Failure | BadRequest, request: Request) -> bytes:
    """Return the last frame of an answer that is no stream and has failed."""
    response = response_of(failure)
    response.become_of(request.scope)
    return framed(Over(response.status_code, response.headers.get("retry-after", ""), bytes(response.body)))
