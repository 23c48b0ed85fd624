"""An answer goes on from any of its tokens, byte for byte; only a router learns tokens, or has it continued.

The judge is the answer itself: its frames say which tokens came with which bytes, so that what a continuation
from any of them sends is known. The server is asked as a router asks it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx
import msgspec
import pytest

from borders.version import VERSION
from recipes.schema.recipe import ROOT
from serving.api.api_keys import ApiKeys
from serving.api.app import application
from serving.async_llm import AsyncLLM
from serving.continuation import (
    FRAMES,
    NO_LOGPROBS,
    NOT_RESUMED_HEADER,
    PATH,
    ROUTER_KEY_HEADER,
    AnswerBegun,
    FrameReader,
    Grown,
    Over,
    SentContinuation,
    encode,
    framed,
)
from serving.engine.messages import Ready
from serving.fingerprint import of_continuations
from tests.each_of import each_of
from tests.patience import PATIENCE_S
from tests.serving.router.resumed import CHAT, COMPLETIONS, asked
from tests.serving.server import Server
from tests.serving.test_supervisor import FACTS
from tests.thorough import cases, first_quick

AGENT = "recipes/tiny/agent.yaml"
ROUTER = {ROUTER_KEY_HEADER: "Bearer"}
NUM_TOKENS = 24
PLAIN = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server(AGENT, "server.resume=5", "server.resume_max_tokens=200").ready()
    yield found
    assert found.close() == 0


@dataclass(slots=True)
class Told:
    """An answer as its router learns it."""

    path: str
    body: bytes
    begun: AnswerBegun
    grown: list[Grown]
    over: Over

    def until(self, cut: int) -> SentContinuation:
        """What a router sends whose replica was lost behind so many frames."""
        tokens = [token for each in self.grown[:cut] for token in each.tokens]
        return SentContinuation(
            path=self.path,
            body=self.body,
            begun=self.begun,
            known_token_ids=b"".join(each.to_bytes(4, "little") for each in tokens),
            logprobs=[msgspec.Raw(bytes(each.logprobs)) for each in self.grown[:cut]],
            num_cached_tokens=self.grown[0].num_cached_tokens,
            num_resumed=1,
            age_s=0.5,
        )

    def since(self, cut: int) -> bytes:
        """What the client gets behind these frames."""
        return b"".join(each.payload for each in self.grown[cut:]) + self.over.payload


def post(server: Server, path: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
    asked = {"content-type": "application/json"} | headers
    return httpx.post(server.url + path, content=body, headers=asked, timeout=PATIENCE_S)


def told(response: httpx.Response, path: str, body: bytes) -> Told:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith(FRAMES)
    begun, *grown, over = FrameReader().push(response.content)
    assert isinstance(begun, AnswerBegun)
    assert isinstance(over, Over)
    return Told(path, body, begun, [each for each in grown if isinstance(each, Grown)], over)


def ask(server: Server, path: str, fields: dict[str, Any]) -> Told:
    body = json.dumps(fields).encode()
    return told(post(server, path, body, ROUTER), path, body)


def stream(server: Server, headers: dict[str, str] = ROUTER, **fields: Any) -> Told:
    """A stream of which at least four tokens are told before its end.

    The end does not tell those that come with it, which may be all where this process's cores are busy: then
    the same is asked again.
    """
    body = json.dumps(PLAIN | {"stream": True} | fields).encode()
    until_s = time.monotonic() + PATIENCE_S
    while True:
        found = told(post(server, COMPLETIONS, body, headers), COMPLETIONS, body)
        if sum(len(each.tokens) for each in found.grown) >= 4:
            return found
        assert time.monotonic() < until_s, "whole answers come at once, again and again"


def go_on(server: Server, sent: SentContinuation) -> Told:
    return told(post(server, PATH, encode(sent), ROUTER), sent.path, sent.body)


def without_usage(sent: bytes) -> bytes:
    """Usage says how often an answer went on, which is no part of what it would have been."""
    return sent.replace(b',"resumed":1', b"")


PATHS = [path for path, _ in asked(NUM_TOKENS)]
WHOLE = {PATHS.index(path) for path in PATHS}
KINDS = [(number, is_stream) for number in range(len(PATHS)) for is_stream in (True, False)]


@pytest.mark.parametrize(
    ("number", "is_stream"),
    # Of a whole answer each path's first kind, since its parts are those of a stream
    first_quick(4, cases([each for each in KINDS if each[1] or each[0] in WHOLE], KINDS)),
)
def test_an_answer_goes_on_byte_for_byte_from_any_token(server: Server, number: int, is_stream: bool) -> None:
    path, fields = asked(NUM_TOKENS)[number]
    if is_stream:
        fields["stream"] = True
        if path in (COMPLETIONS, CHAT):
            fields["stream_options"] = {"include_usage": True}
    before = ask(server, path, fields)
    cuts = range(1, len(before.grown) + 1)
    for cut in Random(number).sample(cuts, min(len(cuts), cases(1, 1000))):
        found = go_on(server, before.until(cut))
        assert found.begun.group == before.begun.group
        assert found.begun.seed == before.begun.seed
        assert any(b"resumed" in each.payload for each in (*found.grown, found.over))
        if "logprobs" in json.dumps(fields):  # their last digits may differ between batches
            near = _events(before.since(cut), lambda text: pytest.approx(float(text), abs=1e-3))
            assert _events(found.since(0), float) == near
        else:
            assert without_usage(found.since(0)) == before.since(cut), cut
        tokens = [
            [token for each in grown for token in each.tokens] for grown in (before.grown[cut:], found.grown)
        ]
        num_told = min(map(len, tokens))  # the last of them come with the end, which does not tell them
        assert tokens[0][:num_told] == tokens[1][:num_told]


def _events(sent: bytes, number: Callable[[str], Any]) -> list[Any]:
    """The events of a stream, or the whole answer, whose fractions are read by `number`."""
    lines = [line.removeprefix(b"data: ") for line in without_usage(sent).splitlines()]
    return [json.loads(line, parse_float=number) if line.startswith(b"{") else line for line in lines if line]


def test_what_is_drawn_without_a_seed_goes_on_too(server: Server) -> None:
    """The replica draws the seed, and tells it."""
    before = stream(server, temperature=1)
    other = stream(server, temperature=1)
    assert before.begun.seed != other.begun.seed
    assert before.grown != other.grown
    for cut in (1, 6, 11):
        assert go_on(server, before.until(cut)).since(0) == before.since(cut)


def test_limits_are_those_of_the_first_request(server: Server) -> None:
    """An answer without a limit ends where the first replica let it end, and its time goes on."""
    before = stream(server, timeout_s=100)
    three = msgspec.structs.replace(before.until(4), known_token_ids=before.until(4).known_token_ids[:12])
    late = msgspec.structs.replace(three, age_s=200.0)
    found = go_on(server, late)
    assert json.loads(found.over.payload.split(b"\n\n")[0][6:])["choices"][0]["finish_reason"] == "timeout"
    begun = msgspec.structs.replace(before.begun, max_tokens=5)
    found = go_on(server, msgspec.structs.replace(three, begun=begun))
    assert b'"finish_reason":"length"' in found.over.payload
    assert sum(len(each.tokens) for each in found.grown) <= 1, "the fifth is in the last frame"


def test_nobody_but_a_router_learns_tokens_or_continues(server: Server) -> None:
    before = stream(server)
    forged = encode(before.until(4))
    for headers in ({}, {**ROUTER, "origin": "http://localhost:1"}):
        response = post(server, PATH, forged, headers)
        assert response.status_code == 403
        assert "only a router may do this" in response.json()["error"]["message"]
        response = post(server, COMPLETIONS, before.body, headers)
        assert response.headers["content-type"].startswith("text/event-stream")


def test_with_keys_a_router_shows_an_operators(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("client\ngate *\n")
    server = Server(AGENT, "--api-keys", str(keys), environment={"API_KEY": "operator"}).ready()
    client = {"authorization": "Bearer client"}
    body = json.dumps(PLAIN | {"stream": True}).encode()
    for shown, status in (("operator", 200), ("gate", 200), ("client", 403), ("other", 403)):
        headers = client | {ROUTER_KEY_HEADER: f"Bearer {shown}"}
        response = post(server, COMPLETIONS, body, headers)
        assert response.headers["content-type"].startswith(FRAMES) == (status == 200)
        if status == 200:
            sent = encode(stream(server, headers).until(4))
        assert post(server, PATH, sent, headers).status_code == status
        assert post(server, PATH, sent, headers | {"authorization": "Bearer other"}).status_code == 401
    assert server.close() == 0


Change = dict[str, Any]


@pytest.fixture(scope="module")
def streamed(server: Server) -> Told:
    return stream(server)


@each_of(
    "change, begun, status, message",
    [
        ({"path": "/v1/embeddings"}, {}, 400, "path"),
        ({"path": 3}, {}, 400, "the continuation"),
        ({"known_token_ids": b""}, {}, 400, "known_token_ids or prompt_token_ids is empty"),
        ({"known_token_ids": b"abc"}, {}, 400, "the continuation"),
        ({"known_token_ids": b"\xff\xff\xff\x7f"}, {}, 400, "known_token_ids holds the token id"),
        ({"known_token_ids": bytes(4 * 40)}, {}, 400, "known_token_ids holds 40 tokens"),
        ({"logprobs": [msgspec.Raw(encode([[1, 2]]))]}, {}, 400, "the continuation"),
        ({"num_resumed": 65}, {}, 400, "the continuation"),
        ({"num_resumed": 0}, {}, 400, "the continuation"),
        ({"age_s": -1.0}, {}, 400, "the continuation"),
        ({"age_s": 1e300}, {}, 400, "the continuation"),
        ({"body": b"{"}, {}, 400, ""),
        ({"body": b'{"prompt": ["a", "b"]}'}, {}, 400, "one prompt"),
        ({"body": b'{"prompt": "a", "n": 2}'}, {}, 400, "known_token_ids go on in one sample"),
        ({}, {"prompt_token_ids": b""}, 400, "is empty"),
        ({}, {"prompt_token_ids": (2**30).to_bytes(4, "little")}, 400, "prompt holds the token id"),
        ({}, {"max_tokens": 2**30}, 400, "maximum context length"),
        ({}, {"max_tokens": 4}, 400, "the answer ends at 4"),
        ({}, {"seed": 2**63}, 400, "the continuation"),
        ({}, {"group": "a\r\nb"}, 400, "the continuation"),
        ({}, {"fingerprint": "go_other"}, 409, "other weights, another type or other software"),
        ({}, {"adapter": "another"}, 409, "another adapter"),
    ],
)  # fmt: skip
def test_what_cannot_go_on_is_refused(
    server: Server, streamed: Told, change: Change, begun: Change, status: int, message: str
) -> None:
    sent = streamed.until(4)
    sent = msgspec.structs.replace(sent, begun=msgspec.structs.replace(sent.begun, **begun), **change)
    response = post(server, PATH, encode(sent), ROUTER)
    assert response.status_code == status, response.text
    assert message in response.json()["error"]["message"]


def test_a_continuation_is_bounded(server: Server) -> None:
    assert post(server, PATH, b"\x91" * 1000, ROUTER).status_code == 400
    response = post(server, PATH, bytes(19 * 2**20), ROUTER)
    assert response.status_code == 413


def test_an_answer_says_why_it_cannot_go_on(server: Server) -> None:
    for fields, why in (
        ({"n": 2}, "several samples"),
        ({"best_of": 2, "logprobs": 1}, "several samples"),
        ({"beam_width": 2, "ignore_eos": False}, "a beam search"),
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": "tell me " * 200}, "server.resume_max_tokens is 200"),
    ):
        response = post(server, COMPLETIONS, json.dumps(PLAIN | fields).encode(), ROUTER)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/json"
        assert why in response.headers[NOT_RESUMED_HEADER]


@pytest.mark.parametrize("is_stream", cases([False], [False, True]))
def test_a_router_is_told_whether_an_engine_was_lost_or_its_server_ends(is_stream: bool) -> None:
    server = Server(AGENT, "server.drain_s=0").ready()
    body = PLAIN | {"max_tokens": 2000, "stream": is_stream}

    def last_frame(pid: int, number: signal.Signals) -> Over:
        reader = FrameReader()
        with httpx.stream(
            "POST", server.url + COMPLETIONS, json=body, headers=ROUTER, timeout=PATIENCE_S
        ) as response:
            parts = response.iter_raw()
            found = [*reader.push(next(parts))]
            os.kill(pid, number)
            found += [frame for part in parts for frame in reader.push(part)]
        assert isinstance(found[-1], Over)
        return found[-1]

    lost = Over(503, "", b"", is_lost=True)
    assert last_frame(server.engine_pid, signal.SIGKILL) == lost
    server.wait_until("/ready", 200)
    orderly = msgspec.structs.replace(lost, is_orderly=True)
    assert last_frame(server.process.pid, signal.SIGTERM) == orderly
    assert server.wait() == 0


def test_a_router_is_told_the_status_of_a_stream_that_fails(server: Server) -> None:
    nothing = {"allowed_token_ids": [300], "min_tokens": 2, "stop_token_ids": [300]}
    over = ask(server, COMPLETIONS, PLAIN | nothing | {"stream": True}).over
    assert (over.status, b'"code":400' in over.payload) == (400, True)


def fingerprint_of(server: Server) -> Any:
    return httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()["continuations"]


def test_a_server_says_of_the_engine_that_is_ready_where_its_answers_go_on() -> None:
    async def told(llm: AsyncLLM) -> str | None:
        app = application(llm, "tiny", ApiKeys({}), is_local=True)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            said: str | None = (await client.get("/server_info")).json()["continuations"]
            return said

    llm = AsyncLLM(AGENT)
    assert asyncio.run(told(llm)) is None
    for long_factors in (False, True):
        llm.engine._begin(Ready(msgspec.structs.replace(FACTS, long_factors=long_factors)), 0.0)
        expected = of_continuations(llm.recipe, VERSION)[long_factors]
        assert asyncio.run(told(llm)) == expected


@pytest.mark.parametrize(
    "setting", cases(["server.resume=0"], ["server.resume=0", f"server.weights_root={ROOT / 'recipes'}"])
)
def test_where_it_is_off_nothing_is_told(server: Server, setting: str) -> None:
    """It is off as well where another replica cannot know which weights began an answer."""
    assert fingerprint_of(server).startswith("go_")
    sent = stream(server).until(4)
    off = Server(AGENT, setting).ready()
    assert fingerprint_of(off) is None
    response = post(off, COMPLETIONS, sent.body, ROUTER)
    assert response.headers["content-type"].startswith("text/event-stream")
    response = post(off, PATH, encode(sent), ROUTER)
    assert (response.status_code, "server.resume is 0" in response.text) == (409, True)
    assert off.close() == 0


def test_frames_are_read_in_whatever_pieces_they_come() -> None:
    frames = [Grown([1, 2], NO_LOGPROBS, 3, b"data: a\n\n"), Over(200, "", b"x" * 300)]
    data = b"".join(map(framed, frames))
    for size in (1, 2, 3, 7, 100, 1000):
        reader = FrameReader()
        found = [each for at in range(0, len(data), size) for each in reader.push(data[at : at + size])]
        assert found == frames
    for wrong in (b"\xff" * 8, b"\x00\x00\x00\x02\x91\xa1", framed(frames[0])[:4] + bytes(40)):
        with pytest.raises(ValueError, match="a frame"):
            [*FrameReader().push(wrong)]
