"""How are tokens and their log-probabilities written down, so that clients can reckon with them?"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from continuous_batching.request import TokenLogprobs
from serving.answers.finite import finite
from serving.text.tokenizer import Text

Json = dict[str, Any]


def spelt(text: Text | None, token: int) -> str:
    """A token as text; its bytes, as OpenAI writes them, where they are not a text of their own."""
    if text is None:
        return f"token_id:{token}"
    data = text.token_bytes(token, skip_special_tokens=False)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Place:
    """How far the text of a choice is told, in characters: a token's offset is where its first one begins.

    `num_ahead` characters of the tokens are not of the text, as a space that only the tokenizer sees.
    """

    def __init__(self, text: Text | None, num_ahead: int = 0) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = -num_ahead

    def step(self, token: int, *, skip_special_tokens: bool) -> int:
        """The offset of a token, and go past it."""
        offset = max(0, self._offset)
        if self._text is not None:
            data = self._text.token_bytes(token, skip_special_tokens=skip_special_tokens)
            self._offset += len(self._decoder.decode(data))
        return offset

    def copy(self) -> Place:
        """The same place, of another choice."""
        other = Place(self._text, -self._offset)
        other._decoder.setstate(self._decoder.getstate())
        return other


def listed(text: Text | None, entries: Sequence[TokenLogprobs | None], tokens: Sequence[int]) -> Json:
    """As completions have them: four lists, of which `text_offset` is left to the caller.

    An entry None is that of a prompt's first token, which follows nothing.
    """
    names = [spelt(text, token) for token in tokens]
    return {
        "tokens": names,
        "token_logprobs": [entry and finite(entry.logprob) for entry in entries],
        "top_logprobs": [entry and _tops(text, entry) for entry in entries],
    }


def _tops(text: Text | None, entry: TokenLogprobs) -> dict[str, float]:
    """The likeliest by their names, and the token itself; of those spelt alike the likeliest."""
    tops: dict[str, float] = {}
    for token, value in (*entry.top, (entry.token, entry.logprob)):
        tops.setdefault(spelt(text, token), finite(value))
    return tops


def by_token(text: Text | None, entries: Sequence[TokenLogprobs]) -> list[Json | None]:
    """A prompt's, as vLLM has them: for each token what its id and the likeliest ones come to."""
    told: list[Json | None] = [None]  # the first token follows nothing
    for entry in entries:
        values = {entry.token: entry.logprob} | dict(entry.top)
        told.append(
            {
                str(token): {"logprob": finite(value), "decoded_token": spelt(text, token)}
                for token, value in values.items()
            }
        )
    return told


def of_turn(text: Text | None, entries: Sequence[TokenLogprobs]) -> Json:
    """As chats have them: an object for each token, with its bytes."""

    def said(token: int, logprob: float) -> Json:
        data = b"" if text is None else text.token_bytes(token, skip_special_tokens=False)
        return {"token": spelt(text, token), "logprob": finite(logprob), "bytes": list(data)}

    return {
        "content": [
            said(entry.token, entry.logprob) | {"top_logprobs": [said(*each) for each in entry.top]}
            for entry in entries
        ]
    }
