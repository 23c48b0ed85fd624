"""Write the choices of a completion or a chat, as one object or as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from borders.refusal import BadRequest
from serving.answers.answers import AnswerDelta, AnswerStream
from serving.api.errors import body_of
from serving.api.pieces import Json, is_short, object_around, to_json
from serving.api.schemas import StreamOptions
from serving.api.streamed import DONE
from serving.failures import Failure


class ChoiceFormat(Protocol):
    """The content of a choice, which differs between completions and chats."""

    whole: str  # the type of a whole answer
    piece: str  # the type of a stream's event

    def choice(self, delta: AnswerDelta, index: int) -> Json:
        """Return a whole choice."""
        ...

    def event(self, delta: AnswerDelta, index: int) -> Json:
        """Return the choice of one event."""
        ...


class Choices:
    """The choices of one response (a `ResponseForm`); `head` holds further fields of each object."""

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
        self._form = form
        self._head = {"id": answers[0].group, "created": int(time.time()), **head}
        self._shows_usage = bool(options and options.include_usage)
        self._always_usage = bool(options and options.continuous_usage_stats)
        self._hides_tokens = hides_tokens

    def whole(self, deltas: Sequence[AnswerDelta]) -> Iterator[bytes]:
        """Yield the bytes of the whole response."""
        head = {"object": self._form.whole, **self._head}
        choices = (self._form.choice(each, index) for index, each in enumerate(deltas))
        return object_around(head, choices, {"usage": self._usage()})

    def events(self, deltas: Sequence[tuple[int, AnswerDelta]]) -> Iterator[bytes]:
        """Yield an event for each piece of a choice; a long event is yielded in several parts."""
        for index, delta in deltas:
            choice = self._form.event(delta, index)
            if is_short(choice):
                yield self._event([choice], self._always_usage)
                continue
            head = {"object": self._form.piece, **self._head}
            yield b"data: "
            tail = {"usage": self._usage()} if self._always_usage else {}
            yield from object_around(head, iter([choice]), tail)
            yield b"\n\n"

    def end(self) -> bytes:
        """Return the end of a stream, with the token counts if they were asked for."""
        return (self._event([], True) if self._shows_usage else b"") + DONE

    def failed(self, failure: Failure | BadRequest) -> bytes:
        """Return the end of a stream that cannot go on."""
        return b"data: " + body_of(failure) + b"\n\n" + DONE

    def _event(self, choices: list[Json], with_usage: bool) -> bytes:
        event = {"object": self._form.piece, **self._head, "choices": choices}
        if with_usage:
            event["usage"] = self._usage()
        return b"data: " + to_json(event) + b"\n\n"

    def _usage(self) -> Json:
        num_prompt = sum(each.request.num_prompt_tokens for each in self._answers)
        num_answer = 0 if self._hides_tokens else sum(each.num_tokens for each in self._answers)
        num_cached = sum(each.num_cached_tokens for each in self._answers)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }
