"""Call an agent's tools with LangChain and LiteLLM: `python tools.py URL` prints `passed`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from langchain_core.messages import AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI

PRICES = {"lamp": 348, "clock": 275}
QUESTION = "What do the lamp and the clock cost together?"
ANSWER = "The lamp and the clock cost 623 together."


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def price(item: str) -> int:
    """What an item costs."""
    return PRICES[item]


TOOLS = {"add": tool(add), "price": tool(price)}


def by_langchain(url: str, *, streams: bool) -> None:
    """A loop by `bind_tools`, whose calls LangChain has parsed."""
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="any", model="agent", temperature=0, max_retries=0)
    bound = chat.bind_tools([*TOOLS.values()])
    messages: list[AnyMessage] = [HumanMessage(QUESTION)]
    called: list[list[str]] = []
    while True:
        if streams:
            first, *rest = bound.stream(messages)
            answer: Any = first
            for piece in rest:
                answer += piece
        else:
            answer = bound.invoke(messages)
        if not answer.tool_calls:
            break
        assert not answer.invalid_tool_calls
        messages.append(answer)
        called.append([call["name"] for call in answer.tool_calls])
        for call in answer.tool_calls:
            messages.append(TOOLS[call["name"]].invoke(call))
            assert isinstance(messages[-1], ToolMessage)
    assert called == [["price", "price"], ["add"]]
    assert answer.content == ANSWER


def by_litellm(url: str) -> None:
    """A loop by `completion`, with the tools as LangChain describes them to OpenAI."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network when it is imported
    import litellm

    tools = [convert_to_openai_tool(each) for each in TOOLS.values()]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    thoughts = []
    while True:
        answer = litellm.completion(
            model="openai/agent",
            api_base=f"{url}/v1",
            api_key="any",
            messages=messages,
            tools=tools,
            temperature=0,
        ).choices[0]
        thoughts.append(answer.message.reasoning_content)
        if not answer.message.tool_calls:
            break
        assert answer.finish_reason == "tool_calls"
        messages.append(answer.message)
        for call in answer.message.tool_calls:
            result = TOOLS[call.function.name].invoke(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    assert answer.message.content == ANSWER
    assert thoughts[-1] == "The sum is 623."


def main(url: str) -> None:
    """Every loop."""
    for streams in (False, True):
        by_langchain(url, streams=streams)
    by_litellm(url)
    print("passed")


if __name__ == "__main__":
    main(sys.argv[1])
