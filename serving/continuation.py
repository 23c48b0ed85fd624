"""Define what a replica tells its router of an answer, and how the router has the answer continued elsewhere.

An answer is its tokens. To a router that holds the operator's key a replica sends, in place of the answer
itself, frames: first what the answer began with (`AnswerBegun`), then tokens with the bytes that they become
for the client (`Grown`), at last how it ended (`Over`). The router passes the bytes on and keeps the tokens.
If the replica is lost, the router sends the tokens of prompt and answer with the client's request to
another one (`Continuation`, at `PATH`), which rebuilds everything else from them: no text is tokenised again.
No client sees a frame. All of it is MessagePack of these types, and each has bounds: a replica may lie.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from borders.field_types import LAST_ID, LONGEST_NAME
from borders.refusal import BadRequest
from continuous_batching.request import TokenIds, TokenLogprobs

PATH = "/internal/continue"
ROUTER_KEY_HEADER = "x-router-key"  # holds an operator's key, as Authorization does: a router sends it
FRAMES = "application/x-answer-frames"
# A replica's answer without frames says so why it could not go on elsewhere
NOT_RESUMED_HEADER = "x-not-resumed"
# The paths whose answers can go on
RESUMED_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
MOST_KNOWN_BYTES = 2**24  # most bytes of the tokens and log-probabilities of one answer
MOST_RESUMED = 64  # most that server.resume may be, and that an answer goes on behind orderly ends, too
PIECE_BYTES = 2**22  # an answer that is no stream is sent in pieces of so many bytes
LONGEST_FRAME = 2**25
_LENGTH_BYTES = 4

Count = Annotated[int, Meta(ge=0, le=LAST_ID)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Name = Annotated[str, Meta(max_length=LONGEST_NAME)]
# The pattern makes it safe in a header and in a line of JSON
AnswerId = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[!-~]+\Z")]
Ids = Annotated[bytes, Meta(max_length=MOST_KNOWN_BYTES)]  # little-endian int32


class Frame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The base of all frames."""


class AnswerBegun(Frame, frozen=True):
    """What an answer begins with, and what must hold where it goes on."""

    group: AnswerId  # its id, as the client knows it
    created_s: Count
    fingerprint: Name
    adapter: Name  # digest of its adapter, or ""
    seed: Seed
    max_tokens: Count
    prompt_token_ids: Ids
    most_resumed: Annotated[int, Meta(ge=1, le=MOST_RESUMED)]
    most_tokens: Count  # tokens of prompt and answer up to which it may go on
    is_stream: bool  # the client is sent its parts as they come, and otherwise the whole at the end


class Grown(Frame, frozen=True):
    """New tokens, and the bytes for the client that they have completed.

    The log-probabilities are those of the tokens, as `logprobs_of` reads them; the router does not.
    """

    tokens: list[Token]
    logprobs: msgspec.Raw
    num_cached_tokens: Count
    payload: bytes


class Over(Frame, frozen=True):
    """The end of an answer: the last bytes of a stream, or the whole answer to a request that is none.

    A stream that fails has the status that it would have had before its head was sent.
    If it `is_lost`, the engine ended and not the answer, and there is no payload. That `is_orderly` if the
    server ends, too, so that the request is not the cause.
    """

    status: Annotated[int, Meta(ge=200, le=599)]
    retry_after: Name
    payload: bytes
    is_lost: bool = False
    has_more: bool = False  # a long answer that is no stream comes in several of these
    is_orderly: bool = False


class Continuation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a client whose answer another replica has begun, and what is known of the answer."""

    path: str
    body: bytes
    begun: AnswerBegun
    known_token_ids: Ids
    logprobs: list[list[TokenLogprobs]]
    num_cached_tokens: Count
    num_resumed: Annotated[int, Meta(ge=1, le=MOST_RESUMED)]
    age_s: Annotated[float, Meta(ge=0, le=2**31)]  # time since the request came to the router

    @property
    def prompt(self) -> TokenIds:
        """The tokens of the prompt."""
        return ids_of(self.begun.prompt_token_ids)

    @property
    def known(self) -> TokenIds:
        """The tokens of the answer so far."""
        return ids_of(self.known_token_ids)


class SentContinuation(msgspec.Struct, frozen=True):
    """A `Continuation` as a router sends it, with log-probabilities that it has not read."""

    path: str
    body: bytes
    begun: AnswerBegun
    known_token_ids: bytes
    logprobs: list[msgspec.Raw]
    num_cached_tokens: int
    num_resumed: int
    age_s: float


encode = msgspec.msgpack.Encoder().encode
_decode_frame = msgspec.msgpack.Decoder(AnswerBegun | Grown | Over).decode
_decode_continuation = msgspec.msgpack.Decoder(Continuation).decode
NO_LOGPROBS = msgspec.Raw(encode([]))


def ids_of(data: bytes) -> TokenIds:
    """Return token ids from their bytes; raises ValueError for what is no number of whole ids."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32)


def read_continuation(body: bytes) -> Continuation:
    """Return what a router sends; raises BadRequest."""
    try:
        found = _decode_continuation(body)
        num_known = len(found.known)
        num_prompt, num_logprobs = len(found.prompt), sum(map(len, found.logprobs))
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(None, str(error)[:200], subject="the continuation") from error
    if found.path not in RESUMED_PATHS:
        raise BadRequest("path", value=found.path, limit=" or ".join(RESUMED_PATHS))
    if not num_prompt or not num_known:
        raise BadRequest("known_token_ids", "or prompt_token_ids is empty: send the request itself")
    if num_logprobs not in (0, num_known):
        problem = f"has {num_logprobs} entries for {num_known} tokens"
        raise BadRequest("logprobs", problem, value=num_logprobs, limit=num_known)
    return found


def framed(frame: Frame) -> bytes:
    """Return a frame as it is sent: its length, then its MessagePack."""
    data = encode(frame)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class FrameReader:
    """Cuts what a replica sends into frames; raises ValueError for what is none."""

    def __init__(self) -> None:
        self._received = bytearray()

    def push(self, data: bytes) -> list[AnswerBegun | Grown | Over]:
        """Return the frames that are complete now."""
        found: list[AnswerBegun | Grown | Over] = []
        received, at = self._received, 0
        received += data
        while (begin := at + _LENGTH_BYTES) <= len(received):
            size = int.from_bytes(received[at:begin], "big")
            if size > LONGEST_FRAME:
                raise ValueError(f"a frame of {size} bytes; the longest has {LONGEST_FRAME}")
            if begin + size > len(received):
                break
            at = begin + size
            try:
                found.append(_decode_frame(received[begin:at]))
            except (msgspec.MsgspecError, RecursionError) as error:
                raise ValueError(f"a frame that is none: {error}"[:200]) from error
        del received[:at]
        return found
