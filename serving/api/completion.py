"""Serve `POST /v1/completions`: continue one text or several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from continuous_batching.request import TokenLogprobs
from serving.answers.answers import AnswerDelta, AnswerStream
from serving.api.choices import Choices, TextOffset, as_lists, by_token, is_silent
from serving.api.generation import Generation, fields_as_sent, prompts_of
from serving.api.pieces import Json, items
from serving.api.schemas import CompletionBody
from serving.text.tokenizer import Text


class CompletionRoute:
    """The route for completions."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        """Continue a text, or several."""
        generation = self._generation
        prompts = prompts_of(body.prompt)
        given = {"prompt": len(prompts) > 1, "n": body.n is not None, "best_of": body.best_of is not None}
        subject = " and ".join(name for name, is_given in given.items() if is_given)
        generation.check_number(len(prompts), body.best_of or body.n, subject=subject)
        fields, is_hidden = generation.fields(body, request), hides_answer(body)
        if body.echo and body.logprobs is not None:
            fields["prompt_logprobs"] = body.logprobs
        if is_hidden:
            fields["max_tokens"] = 1  # an engine answers at least one token; the client does not see it
        name = generation.name("cmpl-", request)
        ids = [name] if len(prompts) == 1 else [f"{name}-{index}" for index in range(len(prompts))]
        names = {"prompt_token_ids": "prompt"}
        if body.prompt_logprobs is None:
            # A prompt's log-probabilities come from `logprobs` of an echo.
            names["prompt_logprobs"] = "logprobs"
        with fields_as_sent(names):
            asked = [{"id": each, **prompt, **fields} for each, prompt in zip(ids, prompts)]
            answers = await generation.ask(asked, name, request, fill=body.fills)
            form = CompletionFormat(generation.llm.text, answers, prompts, body)
            choices = Choices(
                answers, form, generation.head(body), body.stream_options, hides_tokens=is_hidden
            )
            return await generation.respond(answers, choices, request, is_streamed=bool(body.stream))


def hides_answer(body: CompletionBody) -> bool:
    """Return whether the client wants only its prompt back, with its log-probabilities."""
    return bool(body.echo) and body.max_tokens == 0


class CompletionFormat:
    """The JSON form of continued texts; `answers` are in the order of `prompts`."""

    whole, piece = "text_completion", "text_completion"

    def __init__(
        self,
        text: Text | None,
        answers: Sequence[AnswerStream],
        prompts: Sequence[dict[str, Any]],
        body: CompletionBody,
    ) -> None:
        self._text = text
        self._answers = answers
        self._prompts = prompts
        self._body = body
        self._with_logprobs = body.logprobs is not None
        self._hides_answer = hides_answer(body)
        self._offsets: dict[int, TextOffset] = {}  # keyed by the index of each choice that has begun

    def choice(self, delta: AnswerDelta, index: int) -> Json:
        """Return a whole choice."""
        return self._choice(delta, index)

    def tail(self) -> Json:
        """Return nothing, since a completion's choices may be of several prompts and hold all of these."""
        return {}

    def event(self, delta: AnswerDelta, index: int) -> Json | None:
        """Return a piece of a choice; the first piece starts with the prompt, if an echo was asked for."""
        is_first = index not in self._offsets
        choice = self._choice(delta, index)
        is_said = is_first or choice["text"] or self._text is None  # tokens have no text without a tokenizer
        return choice if is_said or not is_silent(choice) else None

    def _choice(self, delta: AnswerDelta, index: int) -> Json:
        prompt = index // self._answers[0].num_answers
        if self._hides_answer:
            reason = delta.finish_reason if delta.finish_reason == "timeout" else "length"
            delta = AnswerDelta(delta.index, "", finish_reason=reason)
        choice: Json = {"index": index, "text": delta.text, "logprobs": None}
        entries: list[TokenLogprobs | None] = [*delta.logprobs]
        echoed: list[int] = []
        if index not in self._offsets:
            self._offsets[index] = TextOffset(self._text)
            if self._body.echo:
                choice["text"], echoed, before = self._echo(prompt, index)
                choice["text"] += delta.text
                entries = before + entries
        if self._with_logprobs:
            choice["logprobs"] = self._logprobs(entries, echoed, index)
        choice["finish_reason"], choice["stop_reason"] = delta.finish_reason, delta.stop_reason
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = by_token(self._text, self._answers[prompt].prompt_logprobs)
        return choice | {"token_ids": delta.tokens} if self._body.return_token_ids else choice

    def _echo(self, prompt: int, index: int) -> tuple[str, list[int], list[TokenLogprobs | None]]:
        """Return a prompt as its sender wrote it, its tokens and their log-probabilities, if those are shown.

        The offsets of the choice then begin where the text of the prompt does.
        """
        answer, given = self._answers[prompt], self._prompts[prompt]
        echoed = (
            given["prompt"] if "prompt" in given else self._decoded(given["prompt_token_ids"], start=True)
        )
        if not self._with_logprobs:
            return echoed, [], []
        tokens: list[int] = answer.request.prompt.tolist()
        self._offsets[index] = TextOffset(self._text, len(self._decoded(tokens, start=False)) - len(echoed))
        if len(answer.prompt_logprobs) < len(tokens) - 1:  # the request ended before they were known
            for token in tokens:
                self._offsets[index].step(token, skip_special_tokens=False)
            self._offsets[index].end()
            return echoed, [], []
        return echoed, tokens, [None, *answer.prompt_logprobs]

    def _decoded(self, tokens: list[int], *, start: bool) -> str:
        return "" if self._text is None else self._text.decode(tokens, skip_special_tokens=False, start=start)

    def _logprobs(self, entries: list[TokenLogprobs | None], echoed: list[int], index: int) -> Json:
        """Return the log-probability lists of a choice; the echoed tokens of its prompt come first."""
        skip, offset = self._body.skip_special_tokens is not False, self._offsets[index]
        answered = [entry.token for entry in entries[len(echoed) :] if entry is not None]
        tokens = echoed + answered

        def offsets() -> Iterator[int]:
            yield from (offset.step(token, skip_special_tokens=False) for token in echoed)
            if echoed:  # the text of the answer begins anew behind that of the prompt
                offset.end()
            yield from (offset.step(token, skip_special_tokens=skip) for token in answered)

        return as_lists(self._text, entries, tokens) | {"text_offset": items(offsets(), len(tokens))}
