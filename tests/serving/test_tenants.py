"""Each request belongs to its key and to no other, whatever its sender says."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from borders.refusal import BadRequest
from continuous_batching.counters import Counters
from continuous_batching.request import Request, SamplingParams
from serving.adapters import NO_ADAPTERS
from serving.answers.answers import AnswerStream
from serving.api.api_keys import ANYBODY, ApiKeys, Client, Rights
from serving.api.app import application
from serving.api.live_page import LivePage
from serving.async_llm import AsyncLLM
from serving.engine.messages import Beat, EngineFacts, View
from serving.failures import Unavailable
from serving.metrics.history import FIRST_COLOUR, FREE, OTHERS
from serving.metrics.server_stats import NO_GAUGES, ServerStats
from serving.text.tokenizer import TextOptions
from tests.each_of import each_of
from tests.serving.server import TINY

KEYS = {key: Rights(tenant) for key, tenant in {"one": "a", "two": "a", "three": "", "gate": "*"}.items()}
CHAT = [{"role": "user", "content": "a"}]
SHARED = "server.share_prefixes=true"


def answer(group: str, owner: str, length: int = 8) -> AnswerStream:
    """An answer to a request that the engine works on."""
    request = Request(id=group, prompt=np.arange(300, 300 + length), params=SamplingParams())
    return AnswerStream(
        request, None, TextOptions(), num_answers=1, max_unread_tokens=9, group=group, owner=owner
    )


def client_of(key: str, *, share_prefixes: bool = False) -> Client:
    client = ApiKeys(KEYS, share_prefixes=share_prefixes).client(f"Bearer {key}")
    assert client is not None
    return client


def http(llm: AsyncLLM, key: str) -> httpx.AsyncClient:
    """One who asks with a key; the server's keys share their pages."""
    app = application(llm, "tiny", ApiKeys(KEYS, share_prefixes=True), is_local=False)
    headers = {"authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


def test_a_key_ends_its_own_requests_alone_although_pages_are_shared() -> None:
    async def statuses() -> list[tuple[str, int]]:
        llm, told = AsyncLLM(TINY, SHARED), []
        llm._streams[0] = answer("cmpl-a", client_of("one", share_prefixes=True).owner), 0
        for key in ("two", "three", "gate", "one"):
            async with http(llm, key) as client:
                told.append((key, (await client.post("/abort/cmpl-a")).status_code))
        return told

    assert asyncio.run(statuses()) == [("two", 404), ("three", 404), ("gate", 404), ("one", 200)]


def test_a_tenant_is_its_keys_and_only_a_gateway_names_others() -> None:
    assert client_of("one").tenant_for(None, "somebody") == client_of("two").tenant_for("a", None) == "a"
    alone = client_of("three").tenant_for(None, "somebody")
    assert alone not in ("", "a", "somebody")
    assert " " in alone, "a line of a keys file could name the same tenant"
    for key in ("one", "three"):
        with pytest.raises(BadRequest, match="leave it out") as refused:
            client_of(key).tenant_for("other", None)
        assert refused.value.field == "tenant"
    for client in (client_of("gate"), ANYBODY):
        assert client.tenant_for("other", "somebody") == "other"
        assert client.tenant_for(None, "somebody") == "somebody"
    assert client_of("gate").tenant_for(None, None) not in ("", "*")
    assert ANYBODY.tenant_for(None, None) == ""


@each_of(
    "key, named, expected",
    [
        ("three", {}, "key 3"),
        ("three", {"user": "somebody"}, "key 3"),
        ("three", {"tenant": "a"}, None),
        ("three", {"x-tenant": "a"}, None),
        ("one", {"x-tenant": "b"}, None),
        ("one", {"tenant": "a"}, "a"),
        ("gate", {"x-tenant": "b"}, "b"),
        ("gate", {"user": "c"}, "c"),
    ],
)
def test_what_a_request_counts_against(key: str, named: dict[str, str], expected: str | None) -> None:
    asked: list[Any] = []

    async def status() -> httpx.Response:
        llm = AsyncLLM(TINY, SHARED)

        async def ask(requests: Sequence[Mapping[str, Any]], **more: Any) -> list[AnswerStream]:
            asked.extend((each.get("tenant"), more["owner"]) for each in requests)
            raise Unavailable("there is no engine")

        llm.ask = ask
        async with http(llm, key) as client:
            header = {name: value for name, value in named.items() if name == "x-tenant"}
            body = {name: value for name, value in named.items() if name != "x-tenant"}
            return await client.post("/v1/completions", json={"prompt": "1+1=", **body}, headers=header)

    response = asyncio.run(status())
    if expected is None:
        assert (response.status_code, response.json()["error"]["param"], asked) == (400, "tenant", [])
    else:
        assert (response.status_code, asked) == (503, [(expected, client_of(key).owner)])


@each_of(
    "most, asked, is_let_in",
    [
        *((0, 1, False), (0, 0, True), (0, None, True), (0, -3, True)),
        *((-2, -1, False), (-2, 0, False), (-2, None, True), (-2, -2, True)),
        *((5, 5, True), (5, 6, False), (None, 10**6, True)),
    ],
)
@each_of("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_key_asks_for_no_priority_above_its_own(
    path: str, most: int | None, asked: int | None, is_let_in: bool
) -> None:
    async def told() -> httpx.Response:
        keys = ApiKeys({"one": Rights("a", most)})
        app = application(AsyncLLM(TINY), "tiny", keys, is_local=False)
        headers = {"authorization": "Bearer one"}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", headers=headers
        ) as client:
            prompt = {"prompt": "a"} if path == "/v1/completions" else {"messages": CHAT}
            return await client.post(path, json=prompt | {"priority": asked})

    response = asyncio.run(told())
    if is_let_in:
        assert response.status_code == 503, "there is no engine"
    else:
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "priority")
        assert f"at most {most}" in error["message"]


def test_who_asks_for_no_priority_gets_the_usual_one_or_the_highest_allowed() -> None:
    of_keys = [Client("", "", "", False, most).priority_for(None) for most in (None, 0, 5, -2)]
    assert of_keys == [0, 0, 0, -2]


def test_a_viewer_sees_of_other_keys_requests_only_that_they_are_there() -> None:
    class Engine:
        """Two requests run, of two keys."""

        state, adapters, num_requests = "ready", NO_ADAPTERS, 2
        facts = EngineFacts(*[1, (2,)], *[64] * 6, "cpu", 1, 64, True, None, 1.0, 8)

        def __init__(self) -> None:
            self.stats = ServerStats()
            self.stats.beat(Beat(NO_GAUGES, Counters(), None, 0, 0))

        async def look(self) -> View:
            return View([(0, 20, 19, 2), None, (1, 345, 344, 22)], bytes(64), bytes(64))

        def answer_of(self, stream: int) -> AnswerStream:
            return (answer("a", "key 1", 17), answer("b", "key 2", 333))[stream]

    async def events() -> list[dict[str, Any]]:
        live = LivePage(Engine())

        async def first(owner: str) -> dict[str, Any]:
            stream: AsyncIterator[bytes] = live.events(owner)
            return json.loads((await anext(stream)).removeprefix(b"data: "))

        seen = await asyncio.gather(first("key 1"), first("key 2"), first("key 3"))
        assert [live.past(f"key {number}")["cells"] for number in (1, 2, 3)] == [
            each["cells"] for each in seen
        ]
        return list(seen)

    found = asyncio.run(events())
    one, two, three = (each["slots"] for each in found)
    assert (one[0]["prompt"], one[1], one[2]) == (17, None, {})
    assert (two[0], two[1], two[2]["prompt"]) == ({}, None, 333)
    assert three == [{}, None, {}]
    one, two, three = (base64.b64decode(each["cells"])[:3] for each in found)
    assert (one[0] >= FIRST_COLOUR, one[1], one[2]) == (True, FREE, OTHERS)
    assert (*two,) == (OTHERS, FREE, FIRST_COLOUR + found[1]["slots"][2]["colour"])
    assert (*three,) == (OTHERS, FREE, OTHERS)


def test_a_key_is_shown_no_other_tenants_names() -> None:
    async def shown(key: str) -> Any:
        weights = "scheduler.tenant_weights={a: 2, b: 3}"
        llm = AsyncLLM(TINY, SHARED, "scheduler.fair_tenants=true", weights)
        async with http(llm, key) as client:
            return (await client.get("/server_info")).json()["recipe"]["scheduler"]["tenant_weights"]

    assert asyncio.run(shown("one")) == {"a": 2}
    assert asyncio.run(shown("three")) == {}
    assert asyncio.run(shown("gate")) == {"a": 2, "b": 3}
