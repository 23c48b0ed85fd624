"""How is a text continued: `POST /v1/completions`?"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from continuous_batching.refusal import BadRequest
from serving.answers.answers import AnswerDelta, AnswerStream
from serving.api.generation import Generation, fields_as_sent
from serving.api.logprobs import Json, PromptLogprobs, TextOffset, as_lists
from serving.api.schemas import CompletionBody
from serving.text.tokenizer import Text


class CompletionRoute:
    """The route."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        """Continue a text, or several."""
        generation = self._generation
        prompts = _prompts(body.prompt)
        generation.check_number(len(prompts), body.best_of or body.n)
        fields, is_hidden = generation.fields(body, request), hides_answer(body)
        if body.echo and body.logprobs is not None:
            fields["prompt_logprobs"] = body.logprobs
        if is_hidden:
            fields["max_tokens"] = 1  # an engine answers at least one token; the client does not see it
        name = f"cmpl-{uuid.uuid4().hex}"
        ids = [name] if len(prompts) == 1 else [f"{name}-{index}" for index in range(len(prompts))]
        with fields_as_sent({"prompt_token_ids": "prompt"}):
            answers = await generation.ask(
                [{"id": each, **prompt, **fields} for each, prompt in zip(ids, prompts)], name, request
            )
            echoes = [self._echoed(prompt) for prompt in prompts] if body.echo else []
            form = CompletionFormat(generation.llm.text, answers, echoes, body)
            return await generation.respond(answers, form, body, request, hides_tokens=is_hidden)

    def _echoed(self, prompt: dict[str, Any]) -> str:
        """A prompt as text."""
        if "prompt" in prompt:
            return prompt["prompt"]
        text, ids = self._generation.llm.text, prompt["prompt_token_ids"]
        return "" if text is None else text.decode(ids, skip_special_tokens=False)


def hides_answer(body: CompletionBody) -> bool:
    """Whether the client wants to see its prompt alone, with its log-probabilities."""
    return bool(body.echo) and body.max_tokens == 0


def _prompts(given: str | list[Any]) -> list[dict[str, Any]]:
    """The prompts as fields of requests, each a text or token ids."""
    if not given and not isinstance(given, str):
        raise BadRequest("prompt", "is empty; it must hold at least one token")
    prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    return [{"prompt" if isinstance(each, str) else "prompt_token_ids": each} for each in prompts]


class CompletionFormat:
    """How continuations of texts are written. `answers` are in the order of the `prompts`."""

    whole, piece = "text_completion", "text_completion"

    def __init__(
        self, text: Text | None, answers: Sequence[AnswerStream], prompts: Sequence[str], body: CompletionBody
    ) -> None:
        self._text = text
        self._answers = answers
        self._prompts = prompts
        self._body = body
        self._with_logprobs = body.logprobs is not None
        self._hides_answer = hides_answer(body)
        self.is_long = (
            self._with_logprobs or body.prompt_logprobs is not None
        )  # for 20 of each token: millions
        self._offsets: dict[int, TextOffset] = {}  # of each choice that has begun
        self._echoes: dict[int, tuple[TextOffset, Json]] = {}  # of each prompt: what its choices begin with
        self._prompt_logprobs = PromptLogprobs(text)

    def choice(self, delta: AnswerDelta, index: int) -> Json:
        """A whole choice."""
        return self.event(delta, index)

    def event(self, delta: AnswerDelta, index: int) -> Json:
        """A piece of a choice; the first has the prompt, if that was asked for."""
        prompt = index // self._answers[0].num_answers
        begins = index not in self._offsets
        if self._hides_answer:
            reason = delta.finish_reason if delta.finish_reason == "timeout" else "length"
            delta = AnswerDelta(delta.index, "", finish_reason=reason)
        choice: Json = {"index": index, "text": delta.text, "logprobs": None}
        if begins:
            choice |= self._begin(index, prompt)
            choice["text"] += delta.text
        if self._with_logprobs:
            own, echoed = self._logprobs(delta, index), choice["logprobs"]
            choice["logprobs"] = {name: echoed[name] + own[name] for name in own} if echoed else own
        choice |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs.of(self._answers[prompt])
        return choice | {"token_ids": delta.tokens} if self._body.return_token_ids else choice

    def _begin(self, index: int, prompt: int) -> Json:
        """What a choice begins with: its prompt, if that was asked for."""
        if not self._body.echo:
            self._offsets[index] = TextOffset(self._text)
            return {"text": ""}
        if prompt not in self._echoes:
            self._echoes[prompt] = self._echo(self._answers[prompt], self._prompts[prompt])
        offset, echo = self._echoes[prompt]
        self._offsets[index] = offset.copy()
        return dict(echo)

    def _echo(self, answer: AnswerStream, echoed: str) -> tuple[TextOffset, Json]:
        """A prompt as its sender wrote it, and where its answers begin."""
        tokens = answer.request.prompt.tolist()
        read = "" if self._text is None else self._text.decode(tokens, skip_special_tokens=False, start=False)
        offset = TextOffset(self._text, len(read) - len(echoed))
        offsets = [offset.step(token, skip_special_tokens=False) for token in tokens]
        if not self._with_logprobs:
            return offset, {"text": echoed}
        entries = [None, *answer.prompt_logprobs]
        if len(entries) < len(tokens):
            return offset, {"text": echoed}  # it ended before they were known
        lists = as_lists(self._text, entries, tokens)
        return offset, {"text": echoed, "logprobs": lists | {"text_offset": offsets}}

    def _logprobs(self, delta: AnswerDelta, index: int) -> Json:
        skip, offset = self._body.skip_special_tokens is not False, self._offsets[index]
        tokens = [entry.token for entry in delta.logprobs]
        offsets = [offset.step(token, skip_special_tokens=skip) for token in tokens]
        return as_lists(self._text, delta.logprobs, tokens) | {"text_offset": offsets}
