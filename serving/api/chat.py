"""Serve `POST /v1/chat/completions`: answer a conversation."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from serving.answers.answers import AnswerDelta, AnswerStream
from serving.api.answer_parser import AnswerParser
from serving.api.choices import Choices, as_content, by_token, is_silent
from serving.api.generation import Generation, fields_as_sent
from serving.api.pieces import Json
from serving.api.schemas import ChatBody
from serving.text.tokenizer import Text
from serving.tools.definitions import ToolUse
from serving.tools.parsing import CallDelta


class ChatRoute:
    """The route for conversations."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answer a conversation; without a token limit, the answer may fill the model's context."""
        generation = self._generation
        generation.check_number(1, body.n, subject="n")
        fields = generation.fields(body, request)
        name = generation.name("chatcmpl-", request)
        asked = {"id": name, "messages": body.messages, **fields}
        names = {"prompt": "messages"}
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        with fields_as_sent(names):
            answers = await generation.ask([asked], name, request, fill=True)
            form = ChatFormat(generation.llm.text, answers[0], body, request.state.tools)
            head = generation.head(body)
            choices = Choices(answers, form, head, body.stream_options)
            return await generation.respond(answers, choices, request, is_streamed=bool(body.stream))


class ChatFormat:
    """The JSON form of the assistant's turn, whole or in events."""

    whole, piece = "chat.completion", "chat.completion.chunk"

    def __init__(self, text: Text | None, answer: AnswerStream, body: ChatBody, use: ToolUse | None) -> None:
        self._text = text
        self._answer = answer
        self._with_logprobs = bool(body.logprobs)
        self._with_prompt_logprobs = body.prompt_logprobs is not None
        self._with_token_ids = bool(body.return_token_ids)
        self._begun: set[int] = set()
        self._parser = AnswerParser(text, answer.request, use)

    def choice(self, delta: AnswerDelta, index: int) -> Json:
        """Return a whole choice."""
        message: Json = {"role": "assistant"}
        said = self._parser.push(index, delta)
        content, calls = said.content, said.calls
        message["content"] = content if content or not (calls or said.thoughts) else None
        message |= _of_thoughts(said.thoughts)
        if calls:
            message["tool_calls"] = [
                {
                    "id": self._parser.call_id(each),
                    "type": "function",
                    "function": {"name": each.name, "arguments": each.arguments},
                }
                for each in calls
            ]
        return self._choice(delta, index, {"message": message})

    def tail(self) -> Json:
        """Return the prompt's log-probabilities, which all choices share, if they were asked for."""
        if not self._with_prompt_logprobs:
            return {}
        return {"prompt_logprobs": by_token(self._text, self._answer.prompt_logprobs)}

    def event(self, delta: AnswerDelta, index: int) -> Json | None:
        """Return an event of a choice.

        The role comes with the first token, because clients time the first event.
        """
        said = self._parser.push(index, delta)
        content, calls = said.content, said.calls
        message: Json = _of_thoughts(said.thoughts)
        if content or not (calls or said.thoughts or index in self._begun):
            message["content"] = content
        if calls:
            message["tool_calls"] = [self._call_event(each) for each in calls]
        if index not in self._begun:
            self._begun.add(index)
            message = {"role": "assistant", **message}
        choice = self._choice(delta, index, {"delta": message})
        return choice if message or self._text is None or not is_silent(choice) else None

    def _call_event(self, call: CallDelta) -> Json:
        """Return a piece of a tool call; the first piece has the call's id and name."""
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        name = self._parser.call_id(call)
        return {"index": call.index, "id": name, "type": "function", "function": function}

    def _choice(self, delta: AnswerDelta, index: int, message: Json) -> Json:
        is_called = delta.finish_reason == "stop" and self._parser.num_calls(index) > 0
        choice = {
            "index": index,
            **message,
            "logprobs": as_content(self._text, delta.logprobs) if self._with_logprobs else None,
            "finish_reason": "tool_calls" if is_called else delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        return choice | {"token_ids": delta.tokens} if self._with_token_ids else choice


def _of_thoughts(thoughts: str) -> Json:
    """Return the reasoning text under DeepSeek's field name and under that of newer clients."""
    return {"reasoning_content": thoughts, "reasoning": thoughts} if thoughts else {}
