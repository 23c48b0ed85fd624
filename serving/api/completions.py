"""How does a client's request become questions to the engine, and their answers a response?"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from serving.answers.answers import Answer
from serving.answers.failures import BadRequest, CutOff
from serving.answers.samples import MOST_SAMPLES
from serving.api.api_keys import Client
from serving.api.errors import NotFound
from serving.api.replies import Replies
from serving.api.response_formats import Chat, Completion, Envelope, Form, Shown
from serving.api.schemas import Asked, ChatBody, CompletionBody
from serving.async_llm import AsyncLLM

_NOT_SAMPLING = {
    "model",
    "stream",
    "stream_options",
    "prompt",
    "messages",
    "echo",
    "return_token_ids",
    "user",
}
_TENANT_HEADER = "x-tenant"


class Completions:
    """Answers both kinds of requests; `model` is the name that clients call the model by."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self._llm = llm
        self._model = model

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        """`POST /v1/completions`."""
        prompts = [_prompt(each) for each in _several(body.prompt)]
        self._check_number(len(prompts), body.best_of or body.n)
        fields, shown = self._fields(body, request), _shown_of(body)
        if shown.echo and shown.num_logprobs is not None:
            fields["prompt_logprobs"] = shown.num_logprobs
        if not shown.answer:
            fields["max_tokens"] = 1  # an engine answers at least one token; it is not told
        name = f"cmpl-{uuid.uuid4().hex}"
        ids = [name] if len(prompts) == 1 else [f"{name}-{index}" for index in range(len(prompts))]
        answers = await self._ask([{"id": each, **prompt, **fields} for each, prompt in zip(ids, prompts)])
        texts = [self._text_of(prompt) for prompt in prompts] if shown.echo else []
        form = Completion(self._llm.text, answers, texts, shown)
        return await self._reply(answers, form, name, body, request, is_hidden=not shown.answer)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """`POST /v1/chat/completions`; without a limit an answer may be as long as the model's context."""
        self._check_number(1, body.n)
        fields = self._fields(body, request)
        fill = body.max_tokens is None and body.max_completion_tokens is None
        name = f"chatcmpl-{uuid.uuid4().hex}"
        answers = await self._ask([{"id": name, "messages": body.messages, **fields}], fill=fill)
        form = Chat(self._llm.text, answers, _shown_of(body))
        return await self._reply(answers, form, name, body, request)

    async def _ask(self, asked: list[dict[str, Any]], *, fill: bool = False) -> list[Answer]:
        """All of them, or none."""
        alone = len(asked) == 1
        tasks = [asyncio.ensure_future(self._llm.ask(fields, fill=fill, alone=alone)) for fields in asked]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        answers = [each for each in done if isinstance(each, Answer)]
        for each in done:
            if isinstance(each, BaseException):
                for answer in answers:
                    self._llm.abort(answer, CutOff("another prompt was not taken", "sibling"))
                raise _as_sent(each)
        return answers

    async def _reply(
        self,
        answers: Sequence[Answer],
        form: Form,
        name: str,
        body: Asked,
        request: Request,
        is_hidden: bool = False,
    ) -> Response:
        replies = Replies(answers, Envelope(form, name, self._model), self._llm.abort, is_hidden)
        if not body.stream:
            return await replies.whole(request)
        options = body.stream_options
        return await replies.stream(
            request,
            show_usage=bool(options and options.include_usage),
            always_usage=bool(options and options.continuous_usage_stats),
        )

    def _fields(self, body: Asked, request: Request) -> dict[str, Any]:
        """What `parse_request` reads besides the prompt."""
        if body.model not in (None, self._model):
            raise NotFound.of_model(body.model, self._model)
        fields = body.model_dump(exclude=_NOT_SAMPLING, exclude_none=True)
        client: Client = request.state.client
        tenant = client.tenant or request.headers.get(_TENANT_HEADER) or body.tenant or body.user
        if tenant:
            fields["tenant"] = tenant
        fields["cache_salt"] = client.salted(body.cache_salt or "")
        return fields

    def _check_number(self, num_prompts: int, samples_each: int | None) -> None:
        """Raise BadRequest for more than ever come in at once."""
        limit = self._llm.recipe.server.max_requests
        each = max(1, samples_each or 1)
        num_samples = num_prompts * (each if each <= MOST_SAMPLES else 1)  # more are refused by their name
        if num_samples > limit:
            raise BadRequest(
                f"prompt, n and best_of ask for {num_samples} samples at once; the server takes {limit}"
                " (server.max_requests): send fewer at a time"
            )

    def _text_of(self, prompt: dict[str, Any]) -> str:
        """A prompt as its sender may see it again."""
        if "prompt" in prompt:
            return prompt["prompt"]
        text, ids = self._llm.text, prompt["prompt_token_ids"]
        return "" if text is None else text.decode(ids, skip_special_tokens=False)


def _shown_of(body: CompletionBody | ChatBody) -> Shown:
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    return Shown(
        num_logprobs=None if body.logprobs is None or body.logprobs is False else int(body.logprobs),
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        special_tokens=body.skip_special_tokens is False,
        echo=echo,
        answer=not (echo and body.max_tokens == 0),
    )


def _several(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts, each a text or token ids."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise BadRequest("prompt is empty; it must hold at least one token")
    return prompt


def _prompt(prompt: str | list[int]) -> dict[str, Any]:
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}


def _as_sent(error: BaseException) -> BaseException:
    """A refusal by the name that the field had before it was made a request's."""
    inner = "prompt_token_ids"
    if isinstance(error, BadRequest) and error.reason.startswith(inner):
        return BadRequest("prompt" + error.reason.removeprefix(inner))
    return error
