"""Try a client library on a server of `recipes/tiny/agent.yaml`: `python tried.py CLIENT URL`.

It prints one JSON object: the library's version, and of each way of asking `ok` or what went wrong. Each
client is used as its own documentation shows; only the address, the key and the model's name are ours.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from pydantic import BaseModel

HELLO, SAID = "What does the lamp cost?", "I have no tool for this."
QUESTION = "What do the lamp and the clock cost together?"
ANSWER = "The lamp and the clock cost 623 together."
PRICES = {"lamp": 348, "clock": 275}
WAYS = ("chat", "stream", "tools", "form")  # the methods of a client; one that it lacks is not tried
KEY, MODEL = "any", "agent"


class Total(BaseModel):
    """What is asked for as structured output."""

    total: int


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def price(item: str) -> int:
    """What an item costs."""
    return PRICES[item]


FUNCTIONS: dict[str, Callable[..., int]] = {"add": add, "price": price}
PARAMETERS: dict[str, Any] = {
    "add": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "price": {"item": {"type": "string"}},
}


def described() -> list[dict[str, Any]]:
    """The functions as OpenAI's API describes them."""
    return [{"name": name, "parameters": schema_of(name)} for name in FUNCTIONS]


def schema_of(name: str) -> dict[str, Any]:
    """The schema of a function's arguments."""
    return {"type": "object", "properties": PARAMETERS[name], "required": [*PARAMETERS[name]]}


def result_of(name: str, arguments: Any) -> str:
    """What a function says when it is called with an object, or with the text of one."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return str(FUNCTIONS[name](**given))


class OpenAI:
    package = "openai"

    def __init__(self, url: str) -> None:
        import openai

        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        self._asked: Any = {"model": MODEL, "temperature": 0}

    def chat(self) -> Any:
        messages: Any = [{"role": "user", "content": HELLO}]
        answer = self._client.chat.completions.create(messages=messages, **self._asked)
        return answer.choices[0].message.content

    def stream(self) -> Any:
        messages: Any = [{"role": "user", "content": HELLO}]
        with self._client.chat.completions.stream(messages=messages, **self._asked) as stream:
            stream.until_done()
            return stream.get_final_completion().choices[0].message.content

    def tools(self) -> Any:
        tools: Any = [{"type": "function", "function": each} for each in described()]
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            asked = self._asked | {"messages": messages, "tools": tools}
            answer = self._client.chat.completions.create(**asked).choices[0].message
            if not answer.tool_calls:
                return answer.content
            messages.append(answer)
            for call in answer.tool_calls:
                said = result_of(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})

    def form(self) -> Any:
        messages: Any = [{"role": "user", "content": QUESTION}]
        asked = self._asked | {"messages": messages, "response_format": Total}
        return self._client.chat.completions.parse(**asked).choices[0].message.parsed


class OpenAIResponses(OpenAI):
    def chat(self) -> Any:
        return self._client.responses.create(input=HELLO, **self._asked).output_text

    def stream(self) -> Any:
        with self._client.responses.stream(input=HELLO, **self._asked) as stream:
            return stream.get_final_response().output_text

    def tools(self) -> Any:
        tools: Any = [{"type": "function", "strict": False, **each} for each in described()]
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            answer = self._client.responses.create(**(self._asked | {"input": items, "tools": tools}))
            items += answer.output
            calls = [each for each in answer.output if each.type == "function_call"]
            if not calls:
                return answer.output_text
            for call in calls:
                said = result_of(call.name, call.arguments)
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": said})

    def form(self) -> Any:
        return self._client.responses.parse(input=QUESTION, text_format=Total, **self._asked).output_parsed


class Anthropic:
    package = "anthropic"

    def __init__(self, url: str) -> None:
        import anthropic

        self._client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
        # Newer versions have no parameter for the temperature
        self._asked: Any = {"model": MODEL, "max_tokens": 500, "extra_body": {"temperature": 0}}

    def _ask(self, messages: list[Any], **fields: Any) -> Any:
        return self._client.messages.create(**(self._asked | {"messages": messages} | fields))

    def chat(self) -> Any:
        return self._ask([{"role": "user", "content": HELLO}]).content[0].text

    def stream(self) -> Any:
        messages: Any = [{"role": "user", "content": HELLO}]
        with self._client.messages.stream(messages=messages, **self._asked) as stream:
            return "".join(stream.text_stream)

    def tools(self) -> Any:
        tools = [{"name": name, "input_schema": schema_of(name)} for name in FUNCTIONS]
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            answer = self._ask(messages, tools=tools, thinking={"type": "adaptive"})
            if answer.stop_reason != "tool_use":
                return answer.content[-1].text
            messages.append({"role": "assistant", "content": answer.content})
            results = [
                {"type": "tool_result", "tool_use_id": each.id, "content": result_of(each.name, each.input)}
                for each in answer.content
                if each.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})

    def form(self) -> Any:
        messages: Any = [{"role": "user", "content": QUESTION}]
        message = self._client.messages.parse(messages=messages, output_format=Total, **self._asked)
        return message.parsed_output


class LangChain:
    package = "langchain-openai"

    def __init__(self, url: str) -> None:
        self._model = self._chat(url)

    def _chat(self, url: str) -> Any:
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=MODEL, temperature=0, max_retries=0)

    def chat(self) -> Any:
        return self._model.invoke(HELLO).text

    def stream(self) -> Any:
        return "".join(str(piece.text) for piece in self._model.stream(HELLO))

    def tools(self) -> Any:
        from langchain.agents import create_agent

        agent = create_agent(self._model, [*FUNCTIONS.values()])
        return agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})["messages"][-1].text

    def form(self) -> Any:
        return self._model.with_structured_output(Total).invoke(QUESTION)


class LangChainResponses(LangChain):
    def _chat(self, url: str) -> Any:
        from langchain_openai import ChatOpenAI

        options: Any = {"model": MODEL, "temperature": 0, "max_retries": 0, "use_responses_api": True}
        return ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, **options)


class LangChainAnthropic(LangChain):
    package = "langchain-anthropic"

    def _chat(self, url: str) -> Any:
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(
            base_url=url,
            api_key=KEY,
            model=MODEL,
            max_tokens=500,
            max_retries=0,
            thinking={"type": "adaptive"},
            model_kwargs={"extra_body": {"temperature": 0}},
        )

    def form(self) -> Any:
        return self._model.with_structured_output(Total, method="json_schema").invoke(QUESTION)


class LlamaIndex:
    package = "llama-index-llms-openai-like"

    def __init__(self, url: str) -> None:
        self._model = self._chat(url)

    def _chat(self, url: str) -> Any:
        from llama_index.llms.openai_like import OpenAILike

        return OpenAILike(
            api_base=f"{url}/v1",
            api_key=KEY,
            model=MODEL,
            temperature=0,
            max_retries=0,
            context_window=2048,
            is_chat_model=True,
            is_function_calling_model=True,
            should_use_structured_outputs=True,
        )

    def chat(self) -> Any:
        from llama_index.core.llms import ChatMessage

        return self._model.chat([ChatMessage(role="user", content=HELLO)]).message.content

    def stream(self) -> Any:
        from llama_index.core.llms import ChatMessage

        pieces = self._model.stream_chat([ChatMessage(role="user", content=HELLO)])
        return "".join(piece.delta for piece in pieces)

    def tools(self) -> Any:
        from llama_index.core.agent.workflow import FunctionAgent

        agent = FunctionAgent(tools=[*FUNCTIONS.values()], llm=self._model, streaming=True)

        async def run() -> Any:
            return await agent.run(user_msg=QUESTION)

        return str(asyncio.run(run()))

    def form(self) -> Any:
        from llama_index.core.llms import ChatMessage

        return self._model.as_structured_llm(Total).chat([ChatMessage(role="user", content=QUESTION)]).raw


class Instructor:
    package = "instructor"

    def __init__(self, url: str) -> None:
        import instructor
        import openai

        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        self._client = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
        self._by_form = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        self._asked: Any = {"model": MODEL, "temperature": 0, "max_retries": 0}
        self._asked |= {"messages": [{"role": "user", "content": QUESTION}]}

    def form(self) -> Any:
        """By a call of a tool that must be made, and by a schema; whole, and as it grows."""
        assert self._client.create(response_model=Total, **self._asked) is not None
        *_, last = self._by_form.create_partial(response_model=Total, **self._asked)
        assert last.total is not None
        return self._by_form.create(response_model=Total, **self._asked)


class PydanticAI:
    package = "pydantic-ai-slim"

    def __init__(self, url: str) -> None:
        self._model = self._made(url)

    def _made(self, url: str) -> Any:
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))

    def _agent(self, **options: Any) -> Any:
        from pydantic_ai import Agent

        return Agent(self._model, model_settings=self._settings(), **options)

    def _settings(self) -> Any:
        return {"temperature": 0}

    def chat(self) -> Any:
        return self._agent().run_sync(HELLO).output

    def stream(self) -> Any:
        async def run() -> str:
            async with self._agent().run_stream(HELLO) as stream:
                return "".join([piece async for piece in stream.stream_text(delta=True, debounce_by=None)])

        return asyncio.run(run())

    def tools(self) -> Any:
        return self._agent(tools=[*FUNCTIONS.values()]).run_sync(QUESTION).output

    def form(self) -> Any:
        from pydantic_ai import NativeOutput

        return self._agent(output_type=NativeOutput(Total)).run_sync(QUESTION).output


class PydanticAIResponses(PydanticAI):
    def _made(self, url: str) -> Any:
        from pydantic_ai.models.openai import OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        return OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))


class PydanticAIAnthropic(PydanticAI):
    def _made(self, url: str) -> Any:
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=url, api_key=KEY))

    def _settings(self) -> Any:
        return {"max_tokens": 500, "extra_body": {"temperature": 0}}

    def form(self) -> Any:
        """By a call that must be made: it knows no other form of a model whose name is not Anthropic's."""
        return self._agent(output_type=Total).run_sync(QUESTION).output


class OpenAIAgents:
    package = "openai-agents"

    def __init__(self, url: str) -> None:
        import agents
        import openai

        agents.set_tracing_disabled(True)
        # A client belongs to one event loop, and each run here has its own
        self._client: Callable[[], Any] = lambda: openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=KEY, max_retries=0
        )

    def _made(self, client: Any) -> Any:
        from agents import OpenAIChatCompletionsModel

        return OpenAIChatCompletionsModel(model=MODEL, openai_client=client)

    def _agent(self, **options: Any) -> Any:
        from agents import Agent, ModelSettings

        settings: Any = ModelSettings(temperature=0)
        model = self._made(self._client())
        return Agent(name="agent", model=model, model_settings=settings, **options)

    def _run(self, text: str, **options: Any) -> Any:
        from agents import Runner

        return asyncio.run(Runner.run(self._agent(**options), text)).final_output

    def chat(self) -> Any:
        return self._run(HELLO)

    def stream(self) -> Any:
        from agents import Runner

        async def run() -> str:
            events = Runner.run_streamed(self._agent(), HELLO).stream_events()
            raw = [each.data async for each in events if each.type == "raw_response_event"]
            return "".join(each.delta for each in raw if each.type == "response.output_text.delta")

        return asyncio.run(run())

    def tools(self) -> Any:
        from agents import function_tool

        return self._run(QUESTION, tools=[function_tool(each) for each in FUNCTIONS.values()])

    def form(self) -> Any:
        return self._run(QUESTION, output_type=Total)


class OpenAIAgentsResponses(OpenAIAgents):
    def _made(self, client: Any) -> Any:
        from agents import OpenAIResponsesModel

        return OpenAIResponsesModel(model=MODEL, openai_client=client)


class SmolAgents:
    """Its models; its agents' own prompts are longer than what the tiny model reads."""

    package = "smolagents"

    def __init__(self, url: str) -> None:
        from smolagents import OpenAIModel

        self._model: Any = OpenAIModel(model_id=MODEL, api_base=f"{url}/v1", api_key=KEY, temperature=0)

    def chat(self) -> Any:
        return self._model([{"role": "user", "content": [{"type": "text", "text": HELLO}]}]).content

    def stream(self) -> Any:
        pieces = self._model.generate_stream([{"role": "user", "content": [{"type": "text", "text": HELLO}]}])
        return "".join(piece.content or "" for piece in pieces)

    def tools(self) -> Any:
        from smolagents import ChatMessage, MessageRole, tool

        add.__doc__ = "Adds two numbers.\n\nArgs:\n    a: one\n    b: another"
        price.__doc__ = "What an item costs.\n\nArgs:\n    item: its name"
        made = [tool(each) for each in FUNCTIONS.values()]
        question = [{"type": "text", "text": QUESTION}]
        called = self._model([ChatMessage(MessageRole.USER, question)], tools_to_call_from=made)
        assert [each.function.name for each in called.tool_calls] == ["price", "price"], called.tool_calls
        return ANSWER

    def form(self) -> Any:
        form = {"type": "json_schema", "json_schema": {"name": "total", "schema": Total.model_json_schema()}}
        asked = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
        return Total.model_validate_json(self._model(asked, response_format=form).content)


class LiteLLM:
    package = "litellm"
    prefix, suffix = "openai", "/v1"

    def __init__(self, url: str) -> None:
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network when it is imported
        import litellm

        self._complete: Any = litellm.completion
        self._asked: Any = {"model": f"{self.prefix}/{MODEL}", "api_base": url + self.suffix, "api_key": KEY}
        self._asked |= {"temperature": 0, "max_retries": 0, "max_tokens": 500}

    def chat(self) -> Any:
        messages = [{"role": "user", "content": HELLO}]
        return self._complete(messages=messages, **self._asked).choices[0].message.content

    def stream(self) -> Any:
        messages = [{"role": "user", "content": HELLO}]
        pieces = self._complete(messages=messages, stream=True, **self._asked)
        return "".join(piece.choices[0].delta.content or "" for piece in pieces)

    def tools(self) -> Any:
        tools: Any = [{"type": "function", "function": each} for each in described()]
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            asked = self._asked | self._thinking()
            answer = self._complete(messages=messages, tools=tools, **asked).choices[0].message
            if not answer.tool_calls:
                return answer.content
            messages.append(answer)
            for call in answer.tool_calls:
                said = result_of(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})

    def _thinking(self) -> Any:
        return {}

    def form(self) -> Any:
        messages = [{"role": "user", "content": QUESTION}]
        answer = self._complete(messages=messages, response_format=Total, **self._asked)
        return Total.model_validate_json(answer.choices[0].message.content)


class LiteLLMAnthropic(LiteLLM):
    prefix, suffix = "anthropic", ""

    def _thinking(self) -> Any:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        return {"thinking": thinking, "max_tokens": 1500, "allowed_openai_params": ["thinking"]}


class Outlines:
    package = "outlines"

    def __init__(self, url: str) -> None:
        import openai
        import outlines

        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        self._model: Any = outlines.from_openai(client, MODEL)

    def chat(self) -> Any:
        return self._model(HELLO, temperature=0)

    def stream(self) -> Any:
        pieces: Iterator[str] = self._model.stream(HELLO, temperature=0)
        return "".join(pieces)

    def form(self) -> Any:
        return Total.model_validate_json(self._model(QUESTION, Total, temperature=0))


CLIENTS: dict[str, Any] = {
    "openai": OpenAI,
    "openai+responses": OpenAIResponses,
    "anthropic": Anthropic,
    "langchain-openai": LangChain,
    "langchain-openai+responses": LangChainResponses,
    "langchain-anthropic": LangChainAnthropic,
    "llama-index": LlamaIndex,
    "instructor": Instructor,
    "pydantic-ai": PydanticAI,
    "pydantic-ai+responses": PydanticAIResponses,
    "pydantic-ai+messages": PydanticAIAnthropic,
    "openai-agents": OpenAIAgents,
    "openai-agents+responses": OpenAIAgentsResponses,
    "smolagents": SmolAgents,
    "litellm": LiteLLM,
    "litellm+messages": LiteLLMAnthropic,
    "outlines": Outlines,
}


def judged(way: str, client: Any) -> str:
    """Return `ok`, or what went wrong."""
    expected = {"chat": SAID, "stream": SAID, "tools": ANSWER}
    try:
        said = getattr(client, way)()
    except Exception as error:  # noqa: BLE001 - whatever a library raises is its result
        return f"{type(error).__name__}: {error}"[:600]
    is_right = isinstance(said, Total) if way == "form" else said == expected[way]
    return "ok" if is_right else f"said {said!r}"[:600]


def main(name: str, url: str) -> None:
    """Try one client, and print what came out."""
    made = CLIENTS[name]
    client, found = made(url), {}
    for way in WAYS:
        found[way] = judged(way, client) if hasattr(client, way) else "none"
    print(json.dumps({"version": metadata.version(made.package), "ways": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
