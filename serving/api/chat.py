"""How is a conversation answered: `POST /v1/chat/completions`?"""

from __future__ import annotations

import uuid
from collections import defaultdict

from fastapi import Request
from starlette.responses import Response

from serving.answers.answers import AnswerDelta, AnswerStream
from serving.api.generation import Generation, fields_as_sent
from serving.api.logprobs import as_content, by_token
from serving.api.pieces import Json
from serving.api.schemas import ChatBody
from serving.text.tokenizer import Text
from serving.tools.definitions import FIELDS as TOOLS
from serving.tools.definitions import tool_use
from serving.tools.parsing import CallDelta, Parsed, ToolParser
from serving.tools.reasoning import ReasoningParser


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
            thinks = generation.llm.recipe.server.reasoning == "think"
            form = ChatFormat(generation.llm.text, answers[0], body, thinks=thinks)
            return await generation.respond(answers, form, body, request)


class ChatFormat:
    """How the assistant's turn of a conversation is written."""

    whole, piece = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, text: Text | None, answer: AnswerStream, body: ChatBody, *, thinks: bool = False
    ) -> None:
        self._text = text
        self._answer = answer
        self._with_logprobs = bool(body.logprobs)
        self._with_prompt_logprobs = body.prompt_logprobs is not None
        self._with_token_ids = bool(body.return_token_ids)
        self._begun: set[int] = set()
        use = tool_use(body.model_dump(include={*TOOLS}))
        self._names = () if use is None else tuple(use.schemas)
        self._parsers: dict[int, ToolParser] = {}  # by the choice's index
        has_text = use is not None and bool(use.schemas) and not use.must_call
        has_place = has_text or (text is not None and len(text.think_marks) == 2)  # for thoughts
        is_held = answer.request.params.grammar is not None and not has_place
        self._thinks = thinks and not is_held
        is_open = self._thinks and text is not None and text.opens_thoughts(answer.request.prompt)
        self._thoughts = defaultdict[int, ReasoningParser](lambda: ReasoningParser(is_open=is_open))

    def choice(self, delta: AnswerDelta, index: int) -> Json:
        """A whole choice."""
        message: Json = {"role": "assistant"}
        parsed, thoughts = self._parsed(delta, index)
        message["content"] = parsed.content if parsed.content or not (parsed.calls or thoughts) else None
        message |= _of_thoughts(thoughts)
        if parsed.calls:
            message["tool_calls"] = [
                {
                    "id": self._call_id(),
                    "type": "function",
                    "function": {"name": each.name, "arguments": each.arguments},
                }
                for each in parsed.calls
            ]
        choice = self._choice(delta, index, {"message": message})
        if self._with_prompt_logprobs:
            choice["prompt_logprobs"] = by_token(self._text, self._answer.prompt_logprobs)
        return choice

    def event(self, delta: AnswerDelta, index: int) -> Json:
        """A piece of a choice; the role comes with the first token, because clients time the first event."""
        parsed, thoughts = self._parsed(delta, index)
        message: Json = _of_thoughts(thoughts)
        if parsed.content or not (parsed.calls or thoughts):
            message["content"] = parsed.content
        if parsed.calls:
            message["tool_calls"] = [self._call_event(each) for each in parsed.calls]
        if index not in self._begun:
            self._begun.add(index)
            message = {"role": "assistant", **message}
        return self._choice(delta, index, {"delta": message})

    def _parsed(self, delta: AnswerDelta, index: int) -> tuple[Parsed, str]:
        """What is new of a choice, and of its thoughts."""
        text, thoughts = delta.text, ""
        if self._thinks:
            reasoning = self._thoughts[index]
            thoughts, text = reasoning.push(text)
            if delta.finish_reason is not None:
                more_thoughts, more = reasoning.finish()
                thoughts, text = thoughts + more_thoughts, text + more
        return self._with_calls(text, index, is_last=delta.finish_reason is not None), thoughts

    def _with_calls(self, text: str, index: int, *, is_last: bool) -> Parsed:
        form = None if self._text is None else self._text.tool_format
        if form is None or not self._names:
            return Parsed(text)
        if index not in self._parsers:
            self._parsers[index] = ToolParser(form, self._names)
        parser = self._parsers[index]
        parsed = parser.push(text)
        if is_last:
            rest = parser.finish()
            parsed.content += rest.content
        return parsed

    def _call_event(self, call: CallDelta) -> Json:
        """The first piece of a call has its id and name."""
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        name = self._call_id()
        return {"index": call.index, "id": name, "type": "function", "function": function}

    def _call_id(self) -> str:
        """A new one for each call, which nothing can be told from."""
        form = None if self._text is None else self._text.tool_format
        assert form is not None, "a call without a format"
        return uuid.uuid4().hex[: form.id_length]

    def _choice(self, delta: AnswerDelta, index: int, message: Json) -> Json:
        parser = self._parsers.get(index)
        is_called = delta.finish_reason == "stop" and parser is not None and parser.num_calls > 0
        choice = {
            "index": index,
            **message,
            "logprobs": as_content(self._text, delta.logprobs) if self._with_logprobs else None,
            "finish_reason": "tool_calls" if is_called else delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        return choice | {"token_ids": delta.tokens} if self._with_token_ids else choice


def _of_thoughts(thoughts: str) -> Json:
    """By the name that DeepSeek gave it, and by that of newer clients."""
    return {"reasoning_content": thoughts, "reasoning": thoughts} if thoughts else {}
