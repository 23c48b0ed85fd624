"""Write tokens and their log-probabilities in the formats of completions, chats and vLLM."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from continuous_batching.request import TokenLogprobs
from serving.answers.answers import finite
from serving.api.pieces import Items, Json, items
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
        offset = max(0, self._offset)
        if self._text is not None:
            data = self._text.token_bytes(token, skip_special_tokens=skip_special_tokens)
            self._offset += len(self._decoder.decode(data))
        return offset


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
