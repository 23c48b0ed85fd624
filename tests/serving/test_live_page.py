"""The page that shows slots, pages and the queue."""

from __future__ import annotations

import base64
import json
import shutil
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.schema.recipe import ROOT
from serving.api.live_page import CACHED, FREE, HELD, SHARED, page_map
from serving.engine.messages import View
from serving.text.tokenizer import Text
from tests.patience import PATIENCE_S
from tests.serving.server import Server

FORM = {
    "type": "object",
    "properties": {"secret": {"type": "string", "minLength": 800}},
    "required": ["secret"],
}
TOOL, OTHER = (
    {"type": "function", "function": {"name": name, "parameters": FORM}} for name in ("secret", "other")
)
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


def test_what_lies_where_is_told_while_a_request_runs(shared: Server) -> None:
    with httpx.stream("POST", f"{shared.url}/v1/completions", json=LONG, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()  # kept: a response whose iterator is gone is closed
        first = json.loads(next(lines).removeprefix("data: "))
        with httpx.stream("GET", f"{shared.url}/live", timeout=PATIENCE_S) as live:
            assert live.headers["content-type"].startswith("text/event-stream")
            events = (json.loads(line[6:]) for line in live.iter_lines() if line)
            event = next(each for each in events if any(each["slots"]))
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
        ({"tools": [TOOL, OTHER], "chat_template_kwargs": {}}, {"tools": 2}),
        ({"tools": [TOOL], "tool_choice": "required"}, {"form": "lark by tools", "tools": 1}),
        ({"tools": [TOOL], "tool_choice": "none"}, {}),
    ],
    ids=["schema", "tools", "required tools", "no tools"],
)
def test_it_tells_what_kind_of_answer_is_asked_for(
    agent: Server, fields: dict[str, Any], shown: dict[str, Any]
) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 900, "stream": True} | fields
    body |= {"temperature": 1, "logit_bias": {str(token): -100 for token in agent_ends()}, "seed": 1}
    url = f"{agent.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        with httpx.stream("GET", f"{agent.url}/live", timeout=PATIENCE_S) as live:
            events = (json.loads(line[6:]) for line in live.iter_lines() if line)
            event = next(each for each in events if any(each["slots"]))
    slot = next(each for each in event["slots"] if each)
    assert {name: slot[name] for name in ("form", "tools", "adapter") if name in slot} == shown
    assert "secret" not in json.dumps(event), "who looks may be another than who asked"


def test_it_is_drawn_in_a_browser_of_a_phone(shared: Server) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="bash scripts/setup.sh browser")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium is installed")
    request = LONG | {"n": 4}
    with (
        httpx.stream("POST", f"{shared.url}/v1/completions", json=request, timeout=PATIENCE_S) as answer,
        sync_api.sync_playwright() as playwright,
    ):
        lines = answer.iter_lines()
        next(lines)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 375, "height": 700}, device_scale_factor=2)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(shared.url)
        page.locator("#running").filter(has_text="4 of 32").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        for name in ("slots", "map"):
            assert page.evaluate(
                """(name) => { const canvas = document.getElementById(name);
                const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
                return new Set(new Uint32Array(data.buffer)).size > 1; }""",
                name,
            )
        assert page.text_content("#state") == "ready"
        browser.close()
    assert not errors
    assert all(each.startswith(shared.url) for each in requests)
