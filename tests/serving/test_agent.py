"""A model that was trained to call tools plans, calls and answers through OpenAI's client."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from recipes.tiny.agent_corpus import HELLO, ITEMS
from tests.lazy import openai
from tests.patience import PATIENCE_S
from tests.serving.server import Server
from tests.test_imports import ROOT

NUMBER = {"type": "integer"}


def tool(name: str, **arguments: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": arguments,
        "required": [*arguments],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("add", a=NUMBER, b=NUMBER), tool("price", item={"type": "string", "enum": [*ITEMS]})]


@pytest.fixture(scope="module")
def client(agent: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{agent.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


class Loop:
    """An agent's loop: asks, calls what the answer calls, and asks again, until there are no calls."""

    def __init__(self, client: openai.OpenAI, prices: dict[str, int], **fields: Any) -> None:
        self.client = client
        self.prices = prices
        self.fields: dict[str, Any] = {"model": "agent", "tools": TOOLS, "temperature": 0, **fields}
        self.calls: list[list[tuple[str, dict[str, Any]]]] = []
        self.thoughts: list[str] = []

    def turn(self, messages: list[Any]) -> Any:
        """The message of the next turn."""
        return self.client.chat.completions.create(messages=messages, **self.fields).choices[0].message

    def ask(self, question: str) -> str:
        """The answer."""
        messages: list[Any] = [{"role": "user", "content": question}]
        for _ in range(6):
            message = self.turn(messages)
            self.thoughts.append(getattr(message, "reasoning_content", ""))
            if not message.tool_calls:
                return str(message.content)
            messages.append(message)
            self.calls.append([])
            for call in message.tool_calls:
                arguments = json.loads(call.function.arguments)
                self.calls[-1].append((call.function.name, arguments))
                is_add = call.function.name == "add"
                result = {"sum": sum(arguments.values())} if is_add else self.prices[arguments["item"]]
                told = {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}
                messages.append(told)
        raise AssertionError(f"it does not end: {self.calls}")


class StreamedLoop(Loop):
    """The same by the client's own helper for streams."""

    def turn(self, messages: list[Any]) -> Any:
        with self.client.chat.completions.stream(messages=messages, **self.fields) as stream:
            return stream.get_final_completion().choices[0].message


def test_it_plans_calls_and_answers(client: openai.OpenAI) -> None:
    loop = StreamedLoop(client, {"lamp": 348, "clock": 275})
    assert loop.ask("What do the lamp and the clock cost together?") == (
        "The lamp and the clock cost 623 together."
    )
    lamp, clock = ("price", {"item": "lamp"}), ("price", {"item": "clock"})
    assert loop.calls == [[lamp, clock], [("add", {"a": 348, "b": 275})]]
    plan = "I look up the lamp and the clock, then I add."
    assert loop.thoughts == [plan, "Now I add 348 and 275.", "The sum is 623."]


@pytest.mark.slow
def test_one_call_at_a_time(client: openai.OpenAI) -> None:
    loop = Loop(client, {"book": 12, "ship": 907}, parallel_tool_calls=False)
    assert json.loads(loop.ask("How much are the book and the ship? Answer in JSON.")) == {"total": 919}
    assert [name for ((name, _),) in loop.calls] == ["price", "price", "add"]


def test_it_answers_without_thoughts_where_asked_to(client: openai.OpenAI) -> None:
    loop = Loop(client, {}, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert loop.ask("What is 12+30?") == "12+30=42."
    assert loop.calls == [[("add", {"a": 12, "b": 30})]]
    assert not any(loop.thoughts)


def test_a_form_of_the_last_answer_leaves_room_for_calls(client: openai.OpenAI) -> None:
    schema = tool("total", total=NUMBER)["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "total", "strict": True, "schema": schema}}
    tools = [{**each, "function": {**each["function"], "strict": True}} for each in TOOLS]
    loop = Loop(client, {"lamp": 348, "clock": 275}, response_format=form, tools=tools)
    answer = loop.ask("What do the lamp and the clock cost together? Answer in JSON.")
    assert json.loads(answer) == {"total": 623}
    assert [[name for name, _ in each] for each in loop.calls] == [["price", "price"], ["add"]]
    assert loop.thoughts[0].startswith("I look up")


def test_a_message_may_come_back_with_what_litellm_keeps_in_it(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": HELLO, "provider_specific_fields": {"reasoning": "I need no tool."}},
        {"role": "user", "content": "What is 12+30?"},
    ]
    (call,) = Loop(client, {}).turn(messages).tool_calls
    assert json.loads(call.function.arguments) == {"a": 12, "b": 30}


@pytest.mark.slow
def test_the_page_s_loop_runs_as_it_stands_there(agent: Server, tmp_path: Path) -> None:
    page = (ROOT / "docs/tools.md").read_text(encoding="utf-8")
    found = re.search(r"then runs this loop:\n\n(.*?)\nIt prints:\n\n(.*?)\n(?=\S)", page, re.DOTALL)
    assert found is not None
    program, printed = map(textwrap.dedent, found.groups())
    (tmp_path / "loop.py").write_text(program.replace("http://127.0.0.1:8471", agent.url))
    done = subprocess.run(
        [sys.executable, "loop.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.strip() == printed.strip(), done.stderr[-2000:]


def test_tokenize_shows_the_tools_as_a_chat_does(agent: Server) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    talk = {"messages": [{"role": "user", "content": "What is 12+30?"}], "tools": tools}
    with httpx.Client(base_url=agent.url, timeout=PATIENCE_S) as http:
        usage = http.post("/v1/chat/completions", json=talk | {"max_tokens": 1}).json()["usage"]
        counted = http.post("/tokenize", json=talk).json()["count"]
        assert counted == usage["prompt_tokens"]
        assert counted > http.post("/tokenize", json=talk | {"tools": None}).json()["count"]
        refused = http.post("/tokenize", json={"prompt": "a", "tools": tools})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
