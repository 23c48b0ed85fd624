"""The log-probabilities that requests ask for are counted and bounded, and long responses leave in parts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from borders.refusal import BadRequest
from continuous_batching.request import Request, SamplingParams
from recipes.schema.server_section import ServerSection
from serving.answers.answers import AnswerDelta, AnswerStream, collect
from serving.api import streamed
from serving.api.pieces import LONGEST_LIST, PIECE_BYTES, Items, Turns, gathered, items, object_around
from serving.api.streamed import StreamedResponse
from serving.api.writer import AnswerWriter
from serving.async_llm import IS_OF_BATCH, ServerLimits
from serving.failures import Overloaded
from serving.text.tokenizer import TextOptions
from serving.tools import definitions
from tests.patience import PATIENCE_S
from tests.serving.faults import Served
from tests.serving.test_faults import SMALL

COMPLETIONS = "/v1/completions"
PROMPT = [5 + index % 200 for index in range(500)]
ALL = {"prompt": PROMPT, "echo": True, "logprobs": 20, "max_tokens": 0}
CHAT = [{"role": "user", "content": "a"}]
ENTRIES = (len(PROMPT) + 1) * 21  # a token that is computed and not shown counts, too


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    limits = (
        f"server.max_logprobs_per_request={4 * ENTRIES}",
        f"server.max_logprobs_in_flight={6 * ENTRIES}",
    )
    with Served(*SMALL, *limits, "server.spare_engine=false") as served:
        yield served


def post(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(served.url + path, json=body, timeout=PATIENCE_S, trust_env=False)


def wait_until_released(served: Served) -> None:
    """A client that has gone, or whose answer is complete, is noticed a little later."""
    until_s = time.monotonic() + PATIENCE_S
    while served.llm.limits.num_logprobs or served.llm.num_requests:
        assert time.monotonic() < until_s, "they are counted for ever"
        time.sleep(0.01)


def requests(number: int = 1, **params: Any) -> list[Request]:
    return [Request(str(index), np.arange(10), SamplingParams(**params)) for index in range(number)]


def limits_of(**section: int) -> ServerLimits:
    return ServerLimits(ServerSection(**section), lambda _: None)


@pytest.mark.parametrize(
    ("params", "fields", "entries"),
    [
        ({"max_tokens": 7}, {}, 0),
        ({"max_tokens": 7, "logprobs": 4}, {}, 7 * 5),
        ({"max_tokens": 7, "logprobs": 0, "prompt_logprobs": 20}, {}, 7 + 10 * 21),
        ({"max_tokens": 7, "prompt_logprobs": 20}, {"n": 3}, 3 * 10 * 21),
        ({"max_tokens": 7, "logprobs": 1, "beam_width": 5}, {}, 7 * 2 * 5),
        ({"max_tokens": 2**30, "logprobs": 1}, {}, 100 * 2),
    ],
)
def test_what_a_request_asks_for_is_counted(
    params: dict[str, Any], fields: dict[str, Any], entries: int
) -> None:
    limits = limits_of()
    assert limits.reserve(requests(2, **params), fields, 100) == [entries, entries]
    assert limits.num_logprobs == 2 * entries


def test_samples_that_are_only_ranked_count_too() -> None:
    (leader,), followers = requests(max_tokens=7, logprobs=0), requests(4, max_tokens=7, logprobs=0)
    leader.followers = followers
    assert limits_of().reserve([leader], {"n": 1, "best_of": 5}, 100) == [5 * 7]


def test_too_much_is_refused_and_what_is_released_can_be_had_again() -> None:
    limits = limits_of(max_logprobs_per_request=100, max_logprobs_in_flight=150)
    asked = requests(max_tokens=20, logprobs=4)
    with pytest.raises(BadRequest, match="asks for 105 log-probabilities") as caught:
        limits.reserve(requests(max_tokens=21, logprobs=4), {"top_logprobs": 4}, 1000)
    assert (caught.value.field, caught.value.limit) == ("top_logprobs", 100)
    (taken,) = limits.reserve(asked, {}, 1000)
    with pytest.raises(Overloaded, match="max_logprobs_in_flight") as overloaded:
        limits.reserve(asked, {}, 1000)
    assert overloaded.value.retry_after_s
    limits.reserve(requests(3), {}, 1000)  # who asks for none is always let in
    answer = AnswerStream(asked[0], None, TextOptions(), num_answers=1, max_unread_tokens=9)
    answer.num_reserved_logprobs = taken
    limits.release(answer)
    limits.release(answer)
    assert limits.num_logprobs == 0
    assert limits.reserve(asked, {}, 1000) == [100]


def test_each_answer_to_a_prompt_may_have_so_many_unread_tokens() -> None:
    request, *request.followers = requests(3)
    answer = AnswerStream(request, None, TextOptions(), num_answers=3, max_unread_tokens=4)
    for at in range(4):
        for index in range(3):
            answer.take(index, at, None, None)
    assert answer.is_open
    answer.take(0, 4, None, None)
    assert answer.failure is not None
    assert "leave 12 unread" in str(answer.failure)


def test_a_refused_prompt_keeps_its_places_until_its_siblings_have_ended(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread still reads a sibling, so that the room for both is not free yet."""
    begun, refused, may_end = threading.Event(), threading.Event(), threading.Event()

    def parse(fields: dict[str, Any], *_: Any, **__: Any) -> AnswerStream:
        if fields["prompt"] == "refused":
            refused.set()
        else:
            begun.set()
            assert may_end.wait(PATIENCE_S)
        raise BadRequest("prompt", f"is {fields['prompt']}")

    llm = served.llm
    monkeypatch.setattr(llm, "_parse", parse)

    async def ask() -> None:
        asked = asyncio.ensure_future(llm.ask([{"prompt": "refused"}, {"prompt": "slow"}]))
        await asyncio.to_thread(refused.wait, PATIENCE_S)
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        for _ in range(10):  # turns of the event loop in which the refusal could come through
            await asyncio.sleep(0)
        is_over, num_held = asked.done(), llm.limits.num_entering
        may_end.set()
        assert (is_over, num_held) == (False, 2)
        with pytest.raises(BadRequest, match="is refused"):
            await asked
        assert llm.limits.num_entering == llm.num_requests == 0

    served.call(ask())


@pytest.mark.parametrize("of_batch", [False, True])
@pytest.mark.parametrize("fields", [{}, {"n": 4}, {"beam_width": 4}])
def test_slots_of_clients_are_told_from_those_of_batches(
    served: Served, fields: dict[str, int], of_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, while_parsing, parse = served.llm, list[int](), served.llm._parse

    def watched(*given: Any, **options: Any) -> AnswerStream:
        while_parsing.append(llm.num_client_slots)
        return parse(*given, **options)

    async def ask() -> int:
        IS_OF_BATCH.set(of_batch)
        (answer,) = await llm.ask([{"id": "a", "prompt": "a", "max_tokens": 50, **fields}])
        count = llm.num_client_slots
        llm.limits.release(answer)
        llm.abort(answer)
        return count

    monkeypatch.setattr(llm, "_parse", watched)
    count = served.call(ask())
    wait_until_released(served)
    assert (while_parsing, count) == (([0], 0) if of_batch else ([1], max([1, *fields.values()])))
    assert llm.num_client_slots == 0


@pytest.mark.parametrize(
    ("body", "field", "total"),
    [
        (ALL | {"prompt": [PROMPT] * 5}, "logprobs", 5 * ENTRIES),
        ({"prompt": PROMPT, "prompt_logprobs": 20, "max_tokens": 1, "n": 5}, "prompt_logprobs", 0),
        ({"prompt": "a", "logprobs": 20, "max_tokens": 1000, "n": 4}, "logprobs", 4 * 1000 * 21),
        ({"prompt": "a", "logprobs": 20, "max_tokens": 500, "best_of": 8}, "logprobs", 8 * 500 * 21),
        ({"prompt": "a", "logprobs": 20, "max_tokens": 500, "beam_width": 8}, "logprobs", 8 * 500 * 21),
        ({"messages": CHAT, "logprobs": True, "top_logprobs": 20}, "top_logprobs", 0),
    ],
    ids=["echo", "prompt_logprobs", "n", "best_of", "beams", "chat"],
)
def test_a_small_body_cannot_ask_for_gigabytes(
    served: Served, body: dict[str, Any], field: str, total: int
) -> None:
    wait_until_released(served)
    response = post(served, "/v1/chat/completions" if "messages" in body else COMPLETIONS, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert f"may ask for {4 * ENTRIES} (server.max_logprobs_per_request)" in error["message"]
    assert f" {total or ''}" in error["message"]
    assert served.llm.num_requests == 0
    assert served.llm.limits.num_logprobs == 0


def test_a_long_answer_leaves_in_parts_and_is_the_same(served: Served) -> None:
    url = served.url + COMPLETIONS
    with httpx.stream("POST", url, json=ALL | {"prompt": [PROMPT] * 2}, timeout=PATIENCE_S) as response:
        assert response.headers["transfer-encoding"] == "chunked"
        parts = [*response.iter_raw()]
    assert len(parts) > 4
    answer = json.loads(b"".join(parts))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        lists = choice["logprobs"]
        assert {len(each) for each in lists.values()} == {len(PROMPT)}
        assert lists["top_logprobs"][0] is None
        assert len(lists["top_logprobs"][1]) >= 20
    assert answer["usage"]["prompt_tokens"] == 1000
    streamed_text = httpx.post(url, json=ALL | {"stream": True}, timeout=PATIENCE_S).text
    events = [json.loads(line[6:]) for line in streamed_text.splitlines() if line.startswith("data: {")]
    assert events[0]["choices"][0]["logprobs"] == answer["choices"][0]["logprobs"]
    assert streamed_text.endswith("data: [DONE]\n\n")
    wait_until_released(served)


def test_what_others_ask_for_counts_until_it_is_sent_or_dropped(served: Served) -> None:
    body = {"prompt": "a", "logprobs": 20, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", served.url + COMPLETIONS, json=body, timeout=PATIENCE_S) as response:
        assert response.status_code == 200
        assert served.llm.limits.num_logprobs == 1500 * 21
        refused = post(served, COMPLETIONS, ALL | {"prompt": [PROMPT] * 4})
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        assert "server.max_logprobs_in_flight" in refused.json()["error"]["message"]
        assert post(served, COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200
    wait_until_released(served)


def test_pieces_are_the_same_json() -> None:
    head, usage = {"id": "a"}, {"n": 1}
    for length in (0, 1, LONGEST_LIST, LONGEST_LIST + 1, 5000):
        values = [{"x": index, "y": None} for index in range(length)]
        made = [{"index": 0, "logprobs": {"a": items(iter(values), length)}, "b": Items(iter(values))}]
        tail = {"usage": usage, "c": items(iter(values), length)}
        pieces = [*gathered(object_around(head, iter(made), tail))]
        whole = {"index": 0, "logprobs": {"a": values}, "b": values}
        assert json.loads(b"".join(pieces)) == head | {"choices": [whole], "usage": usage, "c": values}
        assert all(PIECE_BYTES <= len(each) < 2 * PIECE_BYTES for each in pieces[:-1])


def test_tools_are_prepared_in_threads_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, threads = definitions.prepared, list[str]()

    def prepared(*given: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return prepare(*given, **options)

    monkeypatch.setattr(definitions, "prepared", prepared)
    tool: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
    asked = {"model": "tiny", "tool_choice": "none", "tools": [{"type": "function", "function": tool}]}
    flat = asked | {"tools": [{"type": "function"} | tool]}
    other = {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "none"}}
    for path, body in (
        ("/v1/chat/completions", asked | {"messages": CHAT, "max_tokens": 2}),
        ("/v1/responses", flat | {"input": "a", "max_output_tokens": 2}),
        ("/v1/messages", asked | {"messages": CHAT, "max_tokens": 2} | other),
    ):
        threads.clear()
        answer = post(served, path, body)
        assert answer.status_code == 200, answer.text
        assert {each.partition("_")[0] for each in threads} == {"text"}


def test_a_long_answer_is_collected_without_copies_of_its_text() -> None:
    """With a copy at each of its tokens, this takes two minutes."""
    known: dict[int, AnswerDelta] = {}
    for number in range(2**18):
        collect(known, [(0, AnswerDelta(0, "ab é" if number % 2 else "天", [number]))])
    assert known[0].text == "天ab é" * 2**17
    assert len(known[0].tokens) == 2**18


def test_calls_are_looked_for_in_a_thread_where_a_whole_answer_is_long() -> None:
    threads: list[str] = []

    class Form:
        def take(self, deltas: Sequence[tuple[int, AnswerDelta]]) -> None:
            pass

        def whole(self) -> Iterator[bytes]:
            for part in (b"x" * PIECE_BYTES, b"y"):
                threads.append(threading.current_thread().name)
                yield part

    async def written(num_characters: int) -> bytes:
        deltas = [[AnswerDelta(0, "<" * num_characters)], []]

        async def following() -> list[AnswerDelta]:
            return deltas.pop(0)

        async def receive() -> Any:
            await asyncio.Event().wait()

        answer: Any = SimpleNamespace(
            num_answers=1, next=following, is_open=False, failure=None, is_of_batch=False
        )
        llm: Any = SimpleNamespace(limits=SimpleNamespace(release=lambda answer: None))
        request: Any = SimpleNamespace(receive=receive)
        response = await AnswerWriter(llm, Turns(), [answer]).whole(request, Form())
        sent: list[bytes] = []

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        await response({"type": "http"}, receive, send)
        return b"".join(sent)

    for num_characters in (2**10, 2**16):
        threads.clear()
        whole = asyncio.run(asyncio.wait_for(written(num_characters), PATIENCE_S))
        assert whole == b"x" * PIECE_BYTES + b"y"
        here = threading.current_thread().name
        is_short = num_characters == 2**10
        assert [each.partition("_")[0] for each in threads] == [here if is_short else "answers"] * 2


def test_however_many_wait_there_is_one_turn_in_a_round_of_the_loop() -> None:
    async def work() -> list[int]:
        turns, taken, rounds = Turns(), list[int](), 0

        async def take() -> None:
            for _ in range(3):
                await turns.next()
                taken.append(rounds)

        tasks = [asyncio.ensure_future(take()) for _ in range(10)]
        tasks[3].cancel()
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            rounds += 1
        return taken

    taken = asyncio.run(work())
    assert len(taken) == 27
    assert len({*taken}) == 27


def test_who_reads_too_slowly_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "PATIENCE_S", 0.05)

    async def work() -> list[str]:
        happened: list[str] = []
        ended = asyncio.Event()

        async def parts() -> AsyncGenerator[bytes, None]:
            yield b"x" * 10

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()  # the client does not read

        async def receive() -> Any:
            await ended.wait()
            return {"type": "http.disconnect"}

        def cut_off() -> None:
            happened.append("cut off")
            ended.set()

        response = StreamedResponse(parts(), lambda: happened.append("end"), asyncio.Event().wait)
        await response({"type": "http", "state": {"cut_off": cut_off}}, receive, send)
        return happened

    assert asyncio.run(asyncio.wait_for(work(), PATIENCE_S)) == ["cut off", "end"]
