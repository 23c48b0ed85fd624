"""How is an answer written down, as a completion or as a chat, whole or piece by piece?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from serving.answers.answers import Answer, Delta
from serving.api.logprobs import Json, Place, by_token, listed, of_turn
from serving.text.tokenizer import Text


class Form(Protocol):
    """What differs between the two."""

    prefix: str  # of ids
    whole: str  # the name of an answer
    piece: str  # the name of an event of a stream
    is_long: bool  # writing it down may take a second

    def choice(self, delta: Delta, index: int) -> Json:
        """A whole answer."""
        ...

    def event(self, delta: Delta, index: int) -> Json:
        """A piece of one."""
        ...


class Envelope:
    """What stands around choices: the same for all pieces of an answer."""

    def __init__(self, form: Form, request_id: str, model: str) -> None:
        self.form = form
        self._head = {"id": request_id, "created": int(time.time()), "model": model}

    def whole(self, choices: list[msgspec.Raw], usage: Json) -> Json:
        """The answer."""
        return {"object": self.form.whole, **self._head, "choices": choices, "usage": usage}

    def event(self, choices: list[Json], usage: Json | None = None) -> Json:
        """One event of a stream."""
        event = {"object": self.form.piece, **self._head, "choices": choices}
        return event if usage is None else event | {"usage": usage}


def usage(num_prompt: int, num_answer: int, num_cached: int) -> Json:
    """How many tokens a request took."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


@dataclass(frozen=True, slots=True)
class Shown:
    """What a client wants to see of its answers, beside their text."""

    num_logprobs: int | None = None
    prompt_logprobs: bool = False
    token_ids: bool = False
    special_tokens: bool = False
    echo: bool = False
    answer: bool = True  # False: the prompt alone

    @property
    def has_logprobs(self) -> bool:
        """Whether any are told: of 20 for each token, and of many samples, they are millions."""
        return self.num_logprobs is not None or self.prompt_logprobs


class PromptLogprobs:
    """Those of prompts as JSON, made once for all samples of a prompt."""

    def __init__(self, text: Text | None) -> None:
        self._text = text
        self._made: dict[int, msgspec.Raw] = {}  # by the first of a request's streams

    def of(self, answer: Answer) -> msgspec.Raw:
        """Of an answer's."""
        found = self._made.get(answer.first_stream)
        if found is None:
            told = by_token(self._text, answer.prompt_logprobs)
            found = self._made[answer.first_stream] = msgspec.Raw(msgspec.json.encode(told))
        return found


class Completion:
    """What continues a text. `answers` are those to the prompts, in turn."""

    prefix, whole, piece = "cmpl", "text_completion", "text_completion"

    def __init__(self, text: Text | None, answers: Sequence[Answer], prompts: Sequence[str], shown: Shown):
        self._text = text
        self._answers = answers
        self._prompts = prompts
        self._shown = shown
        self.is_long = shown.has_logprobs
        self._places: dict[int, Place] = {}  # of each choice that has begun
        self._echoes: dict[int, tuple[Place, Json]] = {}  # of each prompt: what its choices begin with
        self._prompt_logprobs = PromptLogprobs(text)

    def choice(self, delta: Delta, index: int) -> Json:
        """A whole answer."""
        return self.event(delta, index)

    def event(self, delta: Delta, index: int) -> Json:
        """A piece of one; the first has the prompt, if that is wanted."""
        shown, prompt = self._shown, index // self._answers[0].num_answers
        begins = index not in self._places
        if not shown.answer:
            reason = delta.finish_reason if delta.finish_reason == "timeout" else "length"
            delta = Delta(delta.index, "", finish_reason=reason)
        choice: Json = {"index": index, "text": delta.text, "logprobs": None}
        if begins:
            choice |= self._begin(index, prompt)
            choice["text"] += delta.text
        if shown.num_logprobs is not None:
            told = self._logprobs(delta, index)
            echoed = choice["logprobs"]
            choice["logprobs"] = {name: echoed[name] + told[name] for name in told} if echoed else told
        choice |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if shown.prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs.of(self._answers[prompt])
        return choice | {"token_ids": delta.tokens} if shown.token_ids else choice

    def _begin(self, index: int, prompt: int) -> Json:
        """The prompt of a choice, as far as it is to be told."""
        if not self._shown.echo:
            self._places[index] = Place(self._text)
            return {"text": ""}
        if prompt not in self._echoes:
            self._echoes[prompt] = self._echo(self._answers[prompt], self._prompts[prompt])
        place, echo = self._echoes[prompt]
        self._places[index] = place.copy()
        return dict(echo)

    def _echo(self, answer: Answer, told: str) -> tuple[Place, Json]:
        """A prompt as it is told, and where its answers begin."""
        tokens = answer.request.prompt.tolist()
        read = "" if self._text is None else self._text.decode(tokens, skip_special_tokens=False, start=False)
        place = Place(self._text, len(read) - len(told))
        offsets = [place.step(token, skip_special_tokens=False) for token in tokens]
        if self._shown.num_logprobs is None:
            return place, {"text": told}
        entries = [None, *answer.prompt_logprobs]
        if len(entries) < len(tokens):
            return place, {"text": told}  # it ended before they were known
        lists = listed(self._text, entries, tokens)
        return place, {"text": told, "logprobs": lists | {"text_offset": offsets}}

    def _logprobs(self, delta: Delta, index: int) -> Json:
        skip, place = not self._shown.special_tokens, self._places[index]
        tokens = [entry.token for entry in delta.logprobs]
        offsets = [place.step(token, skip_special_tokens=skip) for token in tokens]
        return listed(self._text, delta.logprobs, tokens) | {"text_offset": offsets}


class Chat:
    """A turn of a conversation."""

    prefix, whole, piece = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, text: Text | None, answers: Sequence[Answer], shown: Shown) -> None:
        self._text = text
        self._answers = answers
        self._shown = shown
        self.is_long = shown.has_logprobs
        self._begun: set[int] = set()
        self._prompt_logprobs = PromptLogprobs(text)

    def choice(self, delta: Delta, index: int) -> Json:
        """A whole answer."""
        choice = self._choice(delta, index, {"message": {"role": "assistant", "content": delta.text}})
        if self._shown.prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs.of(self._answers[0])
        return choice

    def event(self, delta: Delta, index: int) -> Json:
        """A piece of one; the role comes with the first token, since clients time the first event."""
        said: Json = {"content": delta.text}
        if index not in self._begun:
            self._begun.add(index)
            said = {"role": "assistant", **said}
        return self._choice(delta, index, {"delta": said})

    def _choice(self, delta: Delta, index: int, said: Json) -> Json:
        shown = self._shown
        choice = {
            "index": index,
            **said,
            "logprobs": None if shown.num_logprobs is None else of_turn(self._text, delta.logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        return choice | {"token_ids": delta.tokens} if shown.token_ids else choice
