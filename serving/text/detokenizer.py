"""Which text may be shown after each new token?

Tokens are put together as bytes, and an incremental UTF-8 decoder lets a character out once its last byte is
there: so no half of one is ever shown, and the pieces add up to the text of all tokens, because the bytes
do. What may be the beginning of a stop string waits until that is decided. A token costs its own length, not
the answer's.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass

from continuous_batching.request import SamplingParams
from serving.text.tokenizer import Text


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How an answer's tokens become its text; the engine does not care.

    `start`: the answer is a text of its own (a chat's turn), not the rest of its prompt.
    `include_stop_str_in_output`: what ended the answer belongs to its text, be it a string or a token.
    """

    start: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def detokenizer(self, text: Text, params: SamplingParams) -> Detokenizer:
        """For one answer."""
        return Detokenizer(
            text,
            params.stop,
            min_tokens=params.min_tokens,
            start=self.start,
            skip_special_tokens=self.skip_special_tokens,
            include_stop=self.include_stop_str_in_output,
        )

    def without_end(self, answer: list[int], finish_reason: str | None) -> list[int]:
        """The tokens of an answer that belong to its text: not the one that ended it, unless wanted."""
        ended = finish_reason == "stop" and not self.include_stop_str_in_output
        return answer[:-1] if ended else answer


PLAIN_TEXT = TextOptions()


class Detokenizer:
    """The text of one answer, as it grows.

    A stop string ends the text before itself, or behind itself with `include_stop`; `stopped` then names it,
    and `num_tokens` says how many tokens it took. Of several, the one that is complete first counts (of
    those, the longest), as if the text came sign by sign: how it was cut into tokens makes no difference.
    Stop strings are looked for only after the first `min_tokens` tokens. `start` is as in Text.decode.
    """

    def __init__(
        self,
        text: Text,
        stop: tuple[str, ...] = (),
        *,
        min_tokens: int = 0,
        start: bool = True,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self.stopped: str | None = None
        self.num_tokens = 0
        self._text = text
        self._stop = stop
        self._min_tokens = min_tokens
        self._skip_special_tokens = skip_special_tokens
        self._include_stop = include_stop
        self._spaces_to_drop = text.num_lead_spaces if start else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # may be the beginning of a stop string

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens decide; empty once a stop string has been found."""
        shown = ""
        for token in token_ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            data = self._text.token_bytes(token, skip_special_tokens=self._skip_special_tokens)
            shown += self._advance(self._decoder.decode(self._without_lead(data)))
        return shown

    def flush(self) -> str:
        """The rest, when no more tokens come."""
        if self.stopped is not None:
            return ""
        shown = self._advance(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return shown + rest

    def _without_lead(self, data: bytes) -> bytes:
        while self._spaces_to_drop and data:
            if data[:1] != b" ":
                self._spaces_to_drop = 0
                break
            data = data[1:]
            self._spaces_to_drop -= 1
        return data

    def _advance(self, text: str) -> str:
        if self.num_tokens <= self._min_tokens:
            return text
        self._held += text
        ends = [(at + len(stop), at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if ends:
            end, at, self.stopped = min(ends)
            shown, self._held = self._held[: end if self._include_stop else at], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown


def _overlap(text: str, stop: str) -> int:
    """How long the longest end of the text is that begins the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
