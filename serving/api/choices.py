"""Write the choices of a completion or a chat, as one object or as the events of a stream.

Tokens and their log-probabilities are written in the formats of completions, chats and vLLM.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from borders.refusal import BadRequest
from continuous_batching.request import TokenLogprobs
from serving.answers.answers import AnswerDelta, AnswerStream, collect, finite
from serving.api.errors import body_of
from serving.api.pieces import Items, Json, is_short, items, object_around, pieces_of, to_json
from serving.api.schemas import StreamOptions
from serving.api.streamed import COMMENT, DONE
from serving.failures import Failure
from serving.text.tokenizer import Text


def token_name(text: Text | None, token: int) -> str:
    """Return a token as text.

    If its bytes are not valid UTF-8 by themselves, they are written in OpenAI's notation.
    """
    if text is None:
        return f"token_id:{token}"
    data = text.token_bytes(token, skip_special_tokens=False)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TextOffset:
    """A position in the text of a choice, in characters; the offset of a token is where its text begins.

    The first `num_ahead` characters of the tokens are not part of the text, such as a space that the
    tokenizer adds.
    """

    def __init__(self, text: Text | None, num_ahead: int = 0) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = -num_ahead

    def step(self, token: int, *, skip_special_tokens: bool) -> int:
        """Return the offset of a token, and move past it."""
        data = b""
        if self._text is not None:
            data = self._text.token_bytes(token, skip_special_tokens=skip_special_tokens)
        if data and not self._goes_on(data[:1]):
            self.end()
        offset = max(0, self._offset)
        self._offset += len(self._decoder.decode(data))
        return offset

    def end(self) -> None:
        """Move past a character that stays unfinished, which the text shows as a replacement."""
        self._offset += len(self._decoder.decode(b"", final=True))
        self._decoder.reset()

    def _goes_on(self, byte: bytes) -> bool:
        """Return whether the unfinished character, or nothing, may stand before this byte."""
        unfinished = self._decoder.getstate()[0]
        try:
            codecs.getincrementaldecoder("utf-8")().decode(unfinished + byte)
        except UnicodeDecodeError:
            return False
        return True


def as_lists(text: Text | None, entries: Sequence[TokenLogprobs | None], tokens: Sequence[int]) -> Json:
    """Return the lists of the completions format, to which the caller adds `text_offset`.

    The entry of a prompt's first token, which has no token before it, is None.
    """
    return {
        "tokens": items((token_name(text, token) for token in tokens), len(tokens)),
        "token_logprobs": items((entry and finite(entry.logprob) for entry in entries), len(entries)),
        "top_logprobs": items((entry and _tops(text, entry) for entry in entries), len(entries)),
    }


def _tops(text: Text | None, entry: TokenLogprobs) -> dict[str, float]:
    """Return the likeliest tokens and the token itself by name; of equal names, the likeliest counts."""
    tops: dict[str, float] = {}
    for token, value in (*entry.top, (entry.token, entry.logprob)):
        tops.setdefault(token_name(text, token), finite(value))
    return tops


def by_token(text: Text | None, entries: Sequence[TokenLogprobs]) -> list[Any] | Items:
    """Return a prompt's entries in vLLM's format.

    Each position has values of its token and of the likeliest ones.
    """
    first: Iterator[Json | None] = iter([None])  # the first token has no token before it
    return items(chain(first, (_values(text, entry) for entry in entries)), 1 + len(entries))


def _values(text: Text | None, entry: TokenLogprobs) -> Json:
    values = {entry.token: entry.logprob} | dict(entry.top)
    return {
        str(token): {"logprob": finite(value), "decoded_token": token_name(text, token)}
        for token, value in values.items()
    }


def as_content(text: Text | None, entries: Sequence[TokenLogprobs]) -> Json:
    """Return the entries in the format of chats: an object for each token, with its bytes."""

    def entry_of(token: int, logprob: float) -> Json:
        data = b"" if text is None else text.token_bytes(token, skip_special_tokens=False)
        return {"token": token_name(text, token), "logprob": finite(logprob), "bytes": list(data)}

    made = (
        entry_of(entry.token, entry.logprob) | {"top_logprobs": [entry_of(*each) for each in entry.top]}
        for entry in entries
    )
    return {"content": items(made, len(entries))}


class ChoiceFormat(Protocol):
    """The content of a choice, which differs between completions and chats."""

    whole: str  # the type of a whole answer
    piece: str  # the type of a stream's event

    def choice(self, delta: AnswerDelta, index: int) -> Json:
        """Return a whole choice."""
        ...

    def tail(self) -> Json:
        """Return what a whole response has beside its choices, once these are known."""
        ...

    def event(self, delta: AnswerDelta, index: int) -> Json | None:
        """Return the choice of one event; None where new tokens say nothing yet, such as half a character."""
        ...


def is_silent(choice: Json) -> bool:
    """Return whether the choice of an event has nothing beside its text."""
    return choice["finish_reason"] is None and not choice["logprobs"] and "token_ids" not in choice


class Choices:
    """The choices of one response (a `ResponseForm`); `head` holds further fields of each object."""

    keep_alive = COMMENT

    def __init__(
        self,
        answers: Sequence[AnswerStream],
        form: ChoiceFormat,
        head: Mapping[str, str],
        options: StreamOptions | None,
        *,
        hides_tokens: bool = False,
    ) -> None:
        self._answers = answers
        self._taken: dict[int, AnswerDelta] = {}  # the answers that are written whole, by index
        self._form = form
        self._head = {"id": answers[0].group, "created": answers[0].created_s, **head}
        self._event_head = self._encoded_head()
        self._num_prompt = sum(each.request.num_prompt_tokens for each in answers)
        self._shows_usage = bool(options and options.include_usage)
        self._always_usage = bool(options and options.continuous_usage_stats)
        self._hides_tokens = hides_tokens

    def take(self, deltas: Sequence[tuple[int, AnswerDelta]]) -> None:
        """Take new parts of the answers that are written whole."""
        collect(self._taken, deltas)

    def whole(self) -> Iterator[bytes]:
        """Yield the bytes of the whole response."""
        self._name_weights()
        head = {"object": self._form.whole, **self._head}
        choices = (self._form.choice(self._taken[index], index) for index in sorted(self._taken))
        return object_around(head, choices, {"usage": self._usage(), **self._form.tail()})

    def events(self, deltas: Sequence[tuple[int, AnswerDelta]]) -> Iterator[bytes]:
        """Yield an event for each piece of a choice; a long event is yielded in several parts."""
        self._name_weights()
        for index, delta in deltas:
            choice = self._form.event(delta, index)
            if choice is None:
                continue
            if is_short(choice):
                yield self._event(to_json(choice), self._always_usage)
                continue
            yield self._event_head
            yield from pieces_of(choice)
            yield self._event_tail(self._always_usage)

    def end(self) -> bytes:
        """Return the end of a stream, with the token counts if they were asked for."""
        return (self._event(b"", True) if self._shows_usage else b"") + DONE

    def failed(self, failure: Failure | BadRequest) -> bytes:
        """Return the end of a stream that cannot go on."""
        return b"data: " + body_of(failure) + b"\n\n" + DONE

    def _event(self, choice: bytes, with_usage: bool) -> bytes:
        return self._event_head + choice + self._event_tail(with_usage)

    def _encoded_head(self) -> bytes:
        """Return what all events of a stream begin with, which is encoded once."""
        return b"data: " + to_json({"object": self._form.piece, **self._head})[:-1] + b',"choices":['

    def _event_tail(self, with_usage: bool) -> bytes:
        return b'],"usage":' + to_json(self._usage()) + b"}\n\n" if with_usage else b"]}\n\n"

    def _name_weights(self) -> None:
        """Name the weights that compute the answers, which are known once these have begun."""
        weights = self._answers[0].weights
        if weights is not None and self._head["system_fingerprint"] != weights.fingerprint:
            self._head["system_fingerprint"] = weights.fingerprint
            self._event_head = self._encoded_head()

    def _usage(self) -> Json:
        num_answer = num_cached = 0
        for each in self._answers:
            num_answer += each.num_tokens
            num_cached += each.num_cached_tokens
        if self._hides_tokens:
            num_answer = 0
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": self._num_prompt + num_answer,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            **self._answers[0].resumed_usage,
            **self._answers[0].weights_usage,
        }
