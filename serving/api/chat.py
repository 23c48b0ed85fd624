"""How is a conversation answered: `POST /v1/chat/completions`?"""

from __future__ import annotations

import uuid

from fastapi import Request
from starlette.responses import Response

from serving.answers.answers import AnswerDelta, AnswerStream
from serving.api.generation import Generation, fields_as_sent
from serving.api.logprobs import as_content, by_token
from serving.api.pieces import Json
from serving.api.schemas import ChatBody
from serving.text.tokenizer import Text


class ChatRoute:
    """The route."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answer a conversation; without a limit the answer may be as long as the model's context."""
        generation = self._generation
        generation.check_number(1, body.n)
        fields = generation.fields(body, request)
        name = f"chatcmpl-{uuid.uuid4().hex}"
        asked = {"id": name, "messages": body.messages, **fields}
        names = {"prompt": "messages"}
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        with fields_as_sent(names):
            answers = await generation.ask([asked], name, request, fill=True)
            form = ChatFormat(generation.llm.text, answers[0], body)
            return await generation.respond(answers, form, body, request)


class ChatFormat:
    """How the assistant's turn of a conversation is written."""

    whole, piece = "chat.completion", "chat.completion.chunk"

    def __init__(self, text: Text | None, answer: AnswerStream, body: ChatBody) -> None:
        self._text = text
        self._answer = answer
        self._with_logprobs = bool(body.logprobs)
        self._with_prompt_logprobs = body.prompt_logprobs is not None
        self._with_token_ids = bool(body.return_token_ids)
        self._begun: set[int] = set()

    def choice(self, delta: AnswerDelta, index: int) -> Json:
        """A whole choice."""
        choice = self._choice(delta, index, {"message": {"role": "assistant", "content": delta.text}})
        if self._with_prompt_logprobs:
            choice["prompt_logprobs"] = by_token(self._text, self._answer.prompt_logprobs)
        return choice

    def event(self, delta: AnswerDelta, index: int) -> Json:
        """A piece of a choice; the role comes with the first token, because clients time the first event."""
        message: Json = {"content": delta.text}
        if index not in self._begun:
            self._begun.add(index)
            message = {"role": "assistant", **message}
        return self._choice(delta, index, {"delta": message})

    def _choice(self, delta: AnswerDelta, index: int, message: Json) -> Json:
        choice = {
            "index": index,
            **message,
            "logprobs": as_content(self._text, delta.logprobs) if self._with_logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        return choice | {"token_ids": delta.tokens} if self._with_token_ids else choice
