"""The page in a real browser: it needs `bash scripts/setup.sh browser`, and the system's own Chromium."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.serving.server import TINY, Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

NUMBER, TEXT = {"type": "integer"}, {"type": "string"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": arguments, "required": [*arguments]},
        },
    }
    for name, arguments in (("add", {"a": NUMBER, "b": NUMBER}), ("price", {"item": TEXT}))
]
ENDLESS = {"max_tokens": 1500, "ignore_eos": True}
# What would run if any text of a model became markup
HOSTILE = """</pre><img src=x onerror="document.title='run'"><script>document.title='run'</script>&lt;b&gt;"""
MEANT = ("401 (Unauthorized)", "400 (Bad Request)", "requires 'TrustedHTML'")  # errors that tests ask for
Opens = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="bash scripts/setup.sh browser installs it")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium is installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opens(browser: Browser) -> Iterator[Opens]:
    """Opens the page of a server in a fresh browser, and looks at the end that nothing failed in it.

    A test that ends its server closes the page before, which would ask for it again.
    """
    errors: list[str] = []
    asked: list[tuple[str, str]] = []
    with ExitStack() as ends:

        def open_page(url: str, *, before: Callable[[Page], None] = lambda _: None, **options: Any) -> Page:
            context = browser.new_context(**{"viewport": {"width": 1400, "height": 900}} | options)
            ends.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(1000 * PATIENCE_S)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
            page.on("request", lambda request: asked.append((url, request.url)))
            before(page)
            page.goto(url)
            return page

        yield open_page
    assert not [each for each in errors if not any(meant in each for meant in MEANT)]
    assert all(each.startswith(url) for url, each in asked), "it asks elsewhere"


def set_fields(page: Page, **fields: Any) -> None:
    page.locator("#settings > summary").click()
    for name, value in fields.items():
        page.locator(f"[name={name}]").fill(value if isinstance(value, str) else json.dumps(value))
    page.locator("#settings > summary").click()


def say(page: Page, text: str) -> None:
    page.locator("#question").fill(text)
    page.locator("#question").press("Enter")


def ended(page: Page) -> Any:
    """The last answer, once it has ended."""
    page.locator("#send").wait_for(state="visible")
    return page.locator(".turn.assistant").last


def fulfilled(page: Page, path: str, body: str, kind: str = "application/json", status: int = 200) -> None:
    """Let a path answer with what no server of ours would say."""

    def answer(route: Route) -> None:
        route.fulfill(body=body, status=status, headers={"content-type": kind})

    page.route(f"**{path}", answer)


def test_a_conversation_with_thoughts_and_tools(agent: Server, opens: Opens) -> None:
    page = opens(agent.url)
    set_fields(page, temperature="0", tools=TOOLS)
    say(page, "What do the lamp and the clock cost together? Answer in JSON.")
    prices = {"lamp": "348", "clock": "275"}
    for answered in range(2):
        turn = ended(page)
        calls = turn.locator(".call").all()
        assert calls
        for call in calls:
            given = json.loads(call.locator("pre").text_content())
            is_price = call.locator("code").text_content() == "price"
            call.locator("textarea").fill(prices[given["item"]] if is_price else str(given["a"] + given["b"]))
        turn.get_by_role("button", name="Send results").click()
        page.locator(f".turn.assistant >> nth={1 + answered}").wait_for()
    turn = ended(page)
    assert json.loads(turn.locator(".content").text_content()) == {"total": 623}
    first = page.locator(".turn.assistant").first
    assert "look up the lamp" in first.locator(".thoughts").text_content()
    assert first.locator(".call code").all_text_contents() == ["price", "price"]
    figures = r"\d+ \+ \d+ tokens · (\d+ found cached · )?first after \d+ ms · .* ms between tokens · stop"
    assert re.fullmatch(figures, turn.locator("p.figures").text_content())
    for kind, shell in (("curl", ["bash", "-c"]), ("python", [sys.executable, "-c"])):
        said = output_of([*shell, turn.locator(f"pre.{kind}").text_content()])
        if kind == "curl":
            events = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
            deltas = [choice["delta"] for event in events for choice in event["choices"]]
            said = "".join(each.get("content") or "" for each in deltas)
        assert json.loads(said) == {"total": 623}, f"what it says was sent by {kind} asks for something else"


def output_of(command: list[str], **environment: str) -> str:
    run = subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return run.stdout


def test_an_answer_is_stopped_and_made_again_by_keyboard(shared: Server, opens: Opens) -> None:
    page = opens(shared.url)
    set_fields(page, seed="5", temperature="1", others=ENDLESS)
    page.locator("#question").focus()
    page.keyboard.type("One day")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("in May")
    page.keyboard.press("Enter")
    page.locator(".turn.assistant .content").filter(has_text=re.compile(".{20}")).wait_for()
    page.keyboard.press("Escape")
    turn = ended(page)
    assert turn.locator("p.figures").text_content().endswith("stopped")
    first = turn.locator(".content").text_content()
    page.locator("#running").filter(has_text="0 of 32").wait_for()
    assert page.locator(".turn.user .content").text_content() == "One day\nin May"
    set_fields(page, others={"max_tokens": 8, "ignore_eos": True})
    turn.get_by_role("button", name="Regenerate").press("Enter")
    page.locator(".turn.assistant p.figures").filter(has_text="length").wait_for()
    assert page.locator(".turn").count() == 2
    again = page.locator(".turn.assistant .content").text_content()
    assert again
    assert first.startswith(again), "the seed is that of the first answer"
    page.get_by_role("button", name="New").press("Enter")
    assert page.locator(".turn").count() == 0
    assert page.evaluate("document.activeElement.id") == "question"


def test_what_is_refused_is_said_and_can_be_mended(shared: Server, opens: Opens) -> None:
    page = opens(shared.url)
    set_fields(page, others={"temprature": 0})
    say(page, "348+275=")
    assert "did you mean temperature?" in ended(page).locator(".trouble").text_content()
    set_fields(page, others={"temperature": 0})
    page.get_by_role("button", name="Regenerate").click()
    page.locator(".turn.assistant .content").filter(has_text="623").wait_for()
    ended(page)
    page.locator("#settings > summary").click()
    page.locator("[name=others]").fill("[1]")
    say(page, "again")
    assert page.evaluate("document.activeElement.name") == "others", "the field that cannot be read is shown"
    assert page.locator("#question").input_value() == "again"
    assert page.locator(".turn").count() == 2


def test_no_text_of_a_model_becomes_markup(shared: Server, opens: Opens) -> None:
    call = {"index": 0, "id": "c", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    delta = {"content": HOSTILE, "reasoning_content": HOSTILE, "tool_calls": [call]}
    other = {"index": 1, "delta": {"content": "another answer"}}  # of which a turn has none
    event = {"choices": [{"index": 0, "delta": delta, "finish_reason": HOSTILE}, other]}
    stream = f": a comment\r\n\r\ndata: {json.dumps(event)}\r\n\r\n: another\n\ndata:[DONE]\n\n"

    def prepare(page: Page) -> None:
        fulfilled(page, "/v1/models", json.dumps({"data": [{"id": HOSTILE}]}))
        fulfilled(page, "/v1/chat/completions", stream, "text/event-stream")

    page = opens(shared.url, before=prepare)
    say(page, HOSTILE)
    turn = ended(page)
    for selector in (".content", ".thoughts .text", ".call code", ".call pre"):
        assert turn.locator(selector).text_content() == HOSTILE, selector
    assert page.locator(".turn.user .content").text_content() == HOSTILE
    assert page.locator("[name=model]").input_value() == HOSTILE
    page.unroute("**/v1/chat/completions")
    fulfilled(page, "/v1/chat/completions", json.dumps({"error": {"message": HOSTILE}}), status=400)
    page.get_by_role("button", name="Regenerate").click()
    assert ended(page).locator(".trouble").text_content() == HOSTILE
    assert page.locator("main img, main .turn script, main b b").count() == 0
    assert page.title() != "run"
    sets = "(text) => { try { document.body.innerHTML = text; } catch (error) { return error.name; } }"
    assert page.evaluate(sets, HOSTILE) == "TypeError", "the policy refuses it even to a script"


def test_a_server_with_keys_is_asked_with_one(tmp_path: Path, opens: Opens) -> None:
    (tmp_path / "keys").write_text("right-key someone\n")
    server = Server(TINY, "--api-keys", str(tmp_path / "keys")).ready()
    try:
        page = opens(server.url)
        page.locator("#door").wait_for(state="visible")
        for key in ("wrong-key", "right-key"):
            page.get_by_label("API key").fill(key)
            page.get_by_role("button", name="Open").click()
        page.locator("#running").filter(has_text="0 of 32").wait_for()
        set_fields(page, temperature="0")
        say(page, "348+275=")
        turn = ended(page)
        assert "623" in turn.locator(".content").text_content()
        assert not page.locator("#door").is_visible()
        places = "JSON.stringify(localStorage), document.cookie, document.documentElement.outerHTML"
        kept = page.evaluate(f"[{places}, location.href]")
        assert not [each for each in kept if "right-key" in each]
        assert page.evaluate("Object.values(sessionStorage)") == ["right-key"]
        assert '"Authorization: Bearer $API_KEY"' in turn.locator("pre.curl").text_content()
        program = turn.locator("pre.python").text_content()
        assert "623" in output_of([sys.executable, "-c", program], API_KEY="right-key")
        page.reload()
        page.locator("#running").filter(has_text="0 of 32").wait_for()
        other = opens(server.url)
        other.locator("#door").wait_for(state="visible")
        other.close()
        page.close()
    finally:
        assert server.close() == 0


def test_the_panels_are_full_when_the_page_opens(shared: Server, opens: Opens) -> None:
    asked = {"prompt": "One day", "stream": False} | ENDLESS
    httpx.post(f"{shared.url}/v1/completions", json=asked, timeout=PATIENCE_S)

    def without_stream(page: Page) -> None:
        fulfilled(page, "/live", "", "text/event-stream")  # what is drawn is the history alone

    page = opens(shared.url, before=without_stream)
    minutes = [*(f"−{each} min" for each in range(5, 0, -1)), "now"]
    for name in ("requests", "tokens", "first", "next", "cache"):
        chart = page.locator(f"[data-chart={name}]")
        chart.locator("path.line-0[d*=h]").wait_for(state="attached")
        scale = chart.locator(".scale span").all_text_contents()
        assert len(set(scale)) == 3
        of = r"[\d.]+ m?s" if name in ("first", "next") else r"[\d.]+[KM]?"
        assert all(re.fullmatch(of, each) for each in scale), scale
        assert chart.locator(".times span").all_text_contents() == minutes
        assert re.search(r"at most (?!0 ?m?s?$)[\d.]+", chart.locator("svg").get_attribute("aria-label"))
    assert painted(page, "#slots canvas") > 1
    assert page.evaluate("document.querySelector('#slots canvas').height") == 32


def painted(page: Page, selector: str) -> int:
    """The number of colours in a canvas."""
    return page.evaluate(
        """(selector) => { const canvas = document.querySelector(selector);
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        return new Set(new Uint32Array(data.buffer)).size; }""",
        selector,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_light_and_dark(shared: Server, opens: Opens, scheme: str) -> None:
    phone = {"viewport": {"width": 360, "height": 700}, "device_scale_factor": 2, "has_touch": True}
    page = opens(shared.url, color_scheme=scheme, **phone)
    page.locator("#running").filter(has_text="of 32").wait_for()
    set_fields(page, temperature="0")
    say(page, "348+275=" + 80 * "x")
    ended(page).locator(".sent summary").click()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator("#question").bounding_box()["y"] < 700
    back = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (scheme == "light")
    page.get_by_role("link", name="Figures").click()
    page.locator("#machine").filter(has_text="slots").wait_for()


def test_every_control_has_a_name_and_is_reached_by_keyboard(shared: Server, opens: Opens) -> None:
    page = opens(shared.url)
    page.locator("#settings > summary").click()
    page.locator("[name=temperature]").wait_for()
    unnamed = """() => [...document.querySelectorAll("input, select, textarea, button, canvas, svg")]
        .filter((each) => !(each.labels?.length || each.ariaLabel || each.textContent.trim()))
        .map((each) => each.outerHTML)"""
    assert page.evaluate(unnamed) == []
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.name || document.activeElement.id"))
    assert {
        "model",
        "system",
        "temperature",
        "tool_choice",
        "tools",
        "others",
        "question",
        "send",
        "turns",
    } <= reached


def test_a_router_shows_its_fleet_beside_the_same_conversation(shared: Server, opens: Opens) -> None:
    router = Server("--replica", shared.url, "--recipe", TINY, verb="scripts.route")
    try:
        router.wait_until("/ready", 200)
        page = opens(router.url)
        set_fields(page, temperature="0")
        say(page, "348+275=")
        assert "623" in ended(page).locator(".content").text_content()
        page.locator("#replicas tbody tr").filter(has_text="ready").wait_for()
        page.locator("#choices tbody tr").first.wait_for()
        assert page.locator("#replicas tbody th").all_text_contents() == [shared.url]
        assert page.text_content("#state") == "1 of 1 ready"
        fleet = httpx.get(f"{router.url}/fleet", timeout=PATIENCE_S).json()
        fleet["replicas"][0] |= {"state": "refused", "trouble": HOSTILE}
        fulfilled(page, "/fleet", json.dumps(fleet))
        page.locator("#replicas td.refused small").wait_for()
        assert page.locator("#replicas td.refused small").text_content() == HOSTILE
        assert page.text_content("#state") == "0 of 1 ready"
        page.close()
    finally:
        assert router.close() == 0
