"""The server tells its page about slots, pages and the queue, now and over the last minutes."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuous_batching.counters import Counters
from recipes.schema.recipe import ROOT
from serving.api.live_page import CACHED, FREE, HELD, SHARED, LivePage, page_map
from serving.engine.messages import Beat, View
from serving.metrics.history import FIRST_COLOUR, NUM_SAMPLES, PROMPT, History, Occupant, SlotColours
from serving.metrics.server_stats import NO_GAUGES, ServerStats
from serving.text.tokenizer import Text
from tests.patience import PATIENCE_S
from tests.serving.server import Server

FORM = {
    "type": "object",
    "properties": {"secret": {"type": "string", "minLength": 800}},
    "required": ["secret"],
}
TOOL = {"type": "function", "function": {"name": "secret", "parameters": FORM}}
LONG = {"prompt": "One day", "max_tokens": 1500, "ignore_eos": True, "stream": True}


def agent_ends() -> tuple[int, ...]:
    text = Text.load(ROOT / "recipes/tiny/agent")
    assert text is not None
    return text.eos_token_ids


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=50))
def test_a_page_is_what_its_holders_make_it(users_and_cached: list[tuple[int, bool]]) -> None:
    holders = bytes([0, *(users + cached for users, cached in users_and_cached)])
    view = View([], holders, bytes([0, *(cached for _, cached in users_and_cached)]))
    expected = [
        SHARED if users > 1 else HELD if users else CACHED if cached else FREE
        for users, cached in users_and_cached
    ]
    assert page_map(view).tolist() == expected


def test_a_cell_of_many_pages_is_what_most_of_them_are() -> None:
    holders = np.zeros(1 + 4096 * 4, dtype=np.uint8)
    holders[1 : 1 + 3] = 1
    holders[-4:] = 2
    cells = page_map(View([], holders.tobytes(), bytes(len(holders))))
    assert cells.tolist() == [HELD, *[FREE] * 4094, SHARED]


def seen_running(server: Server, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The first line of an answer, and what is told while only it runs; asked for until one is seen."""
    with httpx.stream("GET", f"{server.url}/live", timeout=PATIENCE_S) as live:
        assert live.headers["content-type"].startswith("text/event-stream")
        events = (json.loads(line[6:]) for line in live.iter_lines() if line)
        # The request of the test before may run on for a moment
        event: dict[str, Any] = next(each for each in events if not any(each["slots"]))
        while not any(event["slots"]):
            with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=PATIENCE_S) as answer:
                lines = answer.iter_lines()  # kept: a response whose iterator is gone is closed
                first, event = next(lines), next(events)
    return first, event


def test_what_lies_where_is_told_while_a_request_runs(shared: Server) -> None:
    line, event = seen_running(shared, "/v1/completions", LONG)
    first = json.loads(line.removeprefix("data: "))
    slot = next(each for each in event["slots"] if each)
    assert first["id"] not in json.dumps(event), "who looks may be another than who asked"
    assert slot["prompt"] < slot["tokens"]
    assert len(base64.b64decode(event["pages"])) == event["num_pages"] == 1023
    assert "One day" not in json.dumps(event)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": FORM}}},
            {"form": "json by response_format"},
        ),
        ({"tools": [TOOL], "tool_choice": "required"}, {"form": "lark by tools", "tools": 1}),
        ({"tools": [TOOL], "tool_choice": "none"}, {}),
    ],
    ids=["schema", "required tools", "no tools"],
)
def test_it_tells_what_kind_of_answer_is_asked_for(
    agent: Server, fields: dict[str, Any], shown: dict[str, Any]
) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 900, "stream": True} | fields
    body |= {"temperature": 1, "logit_bias": {str(token): -100 for token in agent_ends()}, "seed": 1}
    _, event = seen_running(agent, "/v1/chat/completions", body)
    slot = next(each for each in event["slots"] if each)
    assert {name: slot[name] for name in ("form", "tools", "adapter") if name in slot} == shown
    assert "secret" not in json.dumps(event), "who looks may be another than who asked"


@given(st.lists(st.lists(st.none() | st.integers(0, 9), min_size=7, max_size=7), min_size=1, max_size=20))
def test_no_request_has_the_colour_of_a_neighbour_or_of_the_last_one_in_its_slot(
    readings: list[list[int | None]],
) -> None:
    painter, last = SlotColours(), [(-1, -1)] * 7  # the request that was in each slot, and its colour
    for streams in readings:
        # A request is in one slot at a time
        streams = [each if each not in streams[:slot] else None for slot, each in enumerate(streams)]
        colours = painter.paint(streams)
        shown = [None if stream is None else colour for stream, colour in zip(streams, colours)]
        assert all(above is None or above != below for above, below in pairwise(shown))
        for slot, (stream, colour) in enumerate(zip(streams, colours)):
            if stream is not None:
                assert stream == last[slot][0] or colour != last[slot][1]
                last[slot] = (stream, colour)


def test_a_sample_holds_what_its_second_brought() -> None:
    stats, history = ServerStats(), History()
    stats.first_token_s.observe(5)
    history.add(stats, [])
    stats.beat(Beat(NO_GAUGES, Counters(), None, 0, 0))
    for value in (0.1, 0.2, 0.3):
        stats.next_token(value)
    history.add(stats, [])
    history.add(stats, [])
    before, then, after = history.samples
    assert (before.running, then.running) == (None, 0), "no engine ran yet"
    assert (before.output_tokens_per_s, after.output_tokens_per_s) == (0, 0)
    assert then.output_tokens_per_s > 0
    assert (then.first_token_p50_s, then.next_token_p50_s, then.next_token_p95_s) == (None, 0.2, 0.29)
    assert after.next_token_p50_s is None


def test_the_history_is_bounded() -> None:
    stats, history = ServerStats(), History()
    for number in range(NUM_SAMPLES + 9):
        slots = [Occupant(number, "", reads_prompt=False), None, Occupant(-1, "", reads_prompt=True)]
        history.look(slots)
        history.add(stats, slots)
    cells = history.cells("", 3)
    assert len(history.samples) == NUM_SAMPLES
    assert len(cells) == 3 * NUM_SAMPLES
    assert set(cells[0::3]) <= {*range(FIRST_COLOUR, FIRST_COLOUR + 5)}
    assert cells[1::3] == bytes(NUM_SAMPLES)
    assert set(cells[2::3]) == {PROMPT}
    assert history.cells("", 3, only_last=True) == cells[-3:]


def test_a_server_keeps_a_history_that_nobody_looks_at(shared: Server) -> None:
    body = LONG | {"stream": False, "max_tokens": 40}
    httpx.post(f"{shared.url}/v1/completions", json=body, timeout=PATIENCE_S)
    until_s = time.monotonic() + PATIENCE_S
    while True:
        past = httpx.get(f"{shared.url}/history", timeout=PATIENCE_S).json()
        samples = [dict(zip(past["columns"], each)) for each in past["samples"]]
        told = ("first_token_p50_s", "next_token_p95_s", "output_tokens_per_s")
        if all(any(each[name] for each in samples) for name in told):
            break
        assert time.monotonic() < until_s, "the request never comes into the history"
    assert [each["at_s"] for each in samples] == sorted(each["at_s"] for each in samples)
    assert len(base64.b64decode(past["cells"])) == past["num_slots"] * len(samples) == 32 * len(samples)


def test_who_ends_it_in_the_moment_of_a_view_ends_it() -> None:
    """A program's end waits for all that runs, so that the server would never end."""

    async def end_after(num_turns: int) -> None:
        view: asyncio.Future[View] = asyncio.get_running_loop().create_future()

        async def look() -> View:
            return await view

        llm: Any = SimpleNamespace(look=look, stats=SimpleNamespace(last_beat=None), facts=None, state="")
        asking = asyncio.ensure_future(LivePage(llm)._query())
        for _ in range(9):  # it waits by then
            await asyncio.sleep(0)
        view.set_result(View([], b"", b""))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking], timeout=PATIENCE_S)
        assert asking.cancelled(), f"the end was lost {num_turns} turns after the view"

    for num_turns in range(2):
        asyncio.run(end_after(num_turns))
