"""Ask for answers of every kind through a router, and compare them with what one replica alone answers.

An answer is compared as a whole: every event in its order, with its texts, calls, log-probabilities and
numbers. Ids are random, so that each counts as the place where it first appears, and how many tokens were
found in a cache is left out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.patience import PATIENCE_S

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
_STRING = {"type": "string"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {argument: _STRING}, "required": [argument]},
        },
    }
    for name, argument in (("calculate", "expression"), ("price", "item"))
]
TALK = [{"role": "user", "content": "Ben has 348 books and gets 275 more. How many books does Ben have now?"}]
FORM = {"type": "regex", "pattern": "[a-z]{5,30}( [a-z]{3,9}){3,30}"}
LONG = {"ignore_eos": True}
DRAWN = {"temperature": 1, "seed": 11}


def asked(num_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """One request of every kind; each is sent as a stream and whole."""
    text = {"prompt": "Once upon a time", "max_tokens": num_tokens, **LONG}
    talk = {"model": "agent", "messages": TALK, "max_tokens": num_tokens}
    return [
        (COMPLETIONS, text | {"temperature": 0}),
        (COMPLETIONS, text | DRAWN | {"logprobs": 3, "echo": True}),
        (COMPLETIONS, text | DRAWN | {"stop": ["zzzz", "the end of it all"], "presence_penalty": 1}),
        (CHAT, talk | DRAWN | LONG | {"logprobs": True, "top_logprobs": 2}),
        (CHAT, talk | DRAWN | {"guided_regex": FORM["pattern"]}),
        (CHAT, talk | {"temperature": 0, "tools": TOOLS, "return_token_ids": True}),
        (CHAT, talk | {"temperature": 0, "tools": TOOLS, "tool_choice": "required"}),
        (MESSAGES, talk | {"temperature": 0, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
        (MESSAGES, talk | DRAWN | {"stop_sequences": ["zzzz"]}),
        (RESPONSES, {"input": TALK, "max_output_tokens": num_tokens, "temperature": 0}),
        (
            RESPONSES,
            {
                "input": TALK,
                "max_output_tokens": num_tokens,
                **DRAWN,
                "top_logprobs": 1,
                "include": ["message.output_text.logprobs"],
            },
        ),
    ]


def lasting(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Streams that go on when those of `asked` have ended, so that a kill has something to hit."""
    text = {"max_tokens": 400, "temperature": 0, "stream": True, **LONG}
    return [(COMPLETIONS, text | {"prompt": f"Of {number} foxes, "}) for number in range(count)]


@dataclass(slots=True)
class Outcome:
    """What a client got: its status, and events (one, if it is no stream) without what is random."""

    status: int
    events: list[Any] = field(default_factory=list)
    num_resumed: int = 0
    floats: list[float] = field(default_factory=list)  # numbers of its events, in their order

    def is_like(self, other: Outcome) -> bool:
        """Whether it is the same answer; log-probabilities differ in their last digits between batches."""
        same = (self.status, self.events, len(self.floats)) == (other.status, other.events, len(other.floats))
        return same and all(abs(one - two) < 1e-3 for one, two in zip(self.floats, other.floats))


_LEFT_OUT = {
    *("created", "created_at", "completed_at", "resumed"),
    *("input_tokens_details", "prompt_tokens_details"),
}


class _Names:
    """Numbers ids by their first appearance."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self.num_resumed = 0
        self.floats: list[float] = []

    def plain(self, value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            self.num_resumed = max(self.num_resumed, value.get("resumed", 0) if name == "usage" else 0)
            return {
                key: self.plain(each, key)
                for key, each in value.items()
                if key not in _LEFT_OUT
                and not key.startswith("cache_")
                and (name, key) != ("usage", "input_tokens")
            }
        if isinstance(value, list):
            return [self.plain(each, name) for each in value]
        if name in ("id", "item_id", "call_id") and isinstance(value, str):
            return self._known.setdefault(value, f"id {len(self._known)}")
        if isinstance(value, float):
            self.floats.append(value)
            return "a number"
        return value


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    path: str,
    body: dict[str, Any],
    grown: Callable[[], None] = lambda: None,
) -> Outcome:
    """One request; `grown` is called with each part of a stream."""
    received, names = b"", _Names()
    async with http.post(url + path, json=body) as response:
        async for part in response.content.iter_any():
            received += part
            grown()
    if not body.get("stream") or response.status != 200:
        found = [names.plain(json.loads(received))]
        return Outcome(response.status, found, names.num_resumed, names.floats)
    events = [each for each in received.decode().split("\n\n") if each and not each.startswith(":")]
    data = ["".join(line[6:] for line in each.split("\n") if line.startswith("data: ")) for each in events]
    read = [each if each == "[DONE]" else names.plain(json.loads(each)) for each in data]
    said = [each for each in read if each != {"type": "ping"}]
    return Outcome(response.status, said, names.num_resumed, names.floats)


def session() -> aiohttp.ClientSession:
    """For any number of requests at once."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(PATIENCE_S)
    )


async def ask_all(
    url: str, requests: list[tuple[str, dict[str, Any]]], grown: Callable[[], None] = lambda: None
) -> list[Outcome]:
    """All at once."""
    async with session() as http:
        return await asyncio.gather(*(ask(http, url, *each, grown) for each in requests))
