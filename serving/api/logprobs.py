"""How are tokens and their log-probabilities written in a response?"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import msgspec

from continuous_batching.request import TokenLogprobs
from serving.answers.answers import AnswerStream, finite
from serving.text.tokenizer import Text

Json = dict[str, Any]


def token_name(text: Text | None, token: int) -> str:
    """A token as text; its bytes, as OpenAI writes them, where they are not text by themselves."""
    if text is None:
        return f"token_id:{token}"
    data = text.token_bytes(token, skip_special_tokens=False)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TextOffset:
    """The position in the text of a choice, in characters: a token's offset is where its text begins.

    The first `num_ahead` characters of the tokens are not part of the text, such as a space that the
    tokenizer adds.
    """

    def __init__(self, text: Text | None, num_ahead: int = 0) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = -num_ahead

    def step(self, token: int, *, skip_special_tokens: bool) -> int:
        """The offset of a token; moves past it."""
        offset = max(0, self._offset)
        if self._text is not None:
            data = self._text.token_bytes(token, skip_special_tokens=skip_special_tokens)
            self._offset += len(self._decoder.decode(data))
        return offset

    def copy(self) -> TextOffset:
        """The same position, for another choice."""
        other = TextOffset(self._text, -self._offset)
        other._decoder.setstate(self._decoder.getstate())
        return other


def as_lists(text: Text | None, entries: Sequence[TokenLogprobs | None], tokens: Sequence[int]) -> Json:
    """In the format of completions: four lists, of which the caller adds `text_offset`.

    The entry of a prompt's first token, which follows nothing, is None.
    """
    names = [token_name(text, token) for token in tokens]
    return {
        "tokens": names,
        "token_logprobs": [entry and finite(entry.logprob) for entry in entries],
        "top_logprobs": [entry and _tops(text, entry) for entry in entries],
    }


def _tops(text: Text | None, entry: TokenLogprobs) -> dict[str, float]:
    """The likeliest by their names, and the token itself; of equal names the likeliest."""
    tops: dict[str, float] = {}
    for token, value in (*entry.top, (entry.token, entry.logprob)):
        tops.setdefault(token_name(text, token), finite(value))
    return tops


def _by_token(text: Text | None, entries: Sequence[TokenLogprobs]) -> list[Json | None]:
    """Those of a prompt in vLLM's format: for each position a value for its token and for the likeliest."""
    positions: list[Json | None] = [None]  # the first token follows nothing
    for entry in entries:
        values = {entry.token: entry.logprob} | dict(entry.top)
        positions.append(
            {
                str(token): {"logprob": finite(value), "decoded_token": token_name(text, token)}
                for token, value in values.items()
            }
        )
    return positions


def as_content(text: Text | None, entries: Sequence[TokenLogprobs]) -> Json:
    """In the format of chats: an object for each token, with its bytes."""

    def entry_of(token: int, logprob: float) -> Json:
        data = b"" if text is None else text.token_bytes(token, skip_special_tokens=False)
        return {"token": token_name(text, token), "logprob": finite(logprob), "bytes": list(data)}

    return {
        "content": [
            entry_of(entry.token, entry.logprob) | {"top_logprobs": [entry_of(*each) for each in entry.top]}
            for entry in entries
        ]
    }


class PromptLogprobs:
    """The log-probabilities of prompts as JSON, made once for all samples of a prompt."""

    def __init__(self, text: Text | None) -> None:
        self._text = text
        self._made: dict[int, msgspec.Raw] = {}  # by the first stream of a request

    def of(self, answer: AnswerStream) -> msgspec.Raw:
        """Those of an answer's prompt."""
        found = self._made.get(answer.first_stream)
        if found is None:
            positions = _by_token(self._text, answer.prompt_logprobs)
            found = self._made[answer.first_stream] = msgspec.Raw(msgspec.json.encode(positions))
        return found
