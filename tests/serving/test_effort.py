"""A template is told the reasoning effort by the variable that it has for it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from borders.refusal import BadRequest
from serving.text.chat_options import ChatOptions
from serving.text.chat_template import ChatTemplate
from serving.text.request_fields import parse_request
from serving.text.tokenizer import Text
from serving.tools.formats import ThoughtFormat
from tests.each_of import each_of
from tests.lazy import transformers

TALK: list[Any] = [{"role": "user", "content": "What is 1?"}]
# How the generation prompts of these families say it
QWEN3 = (
    "{{ messages[0].content }}{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
)
DEEPSEEK = (
    "{% if not thinking is defined %}{% set thinking = true %}{% endif %}{{ 'T' if thinking else 'F' }}"
)
GPT_OSS = (
    "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}"
    "{{- 'Reasoning: ' + reasoning_effort }}"
)
PLAIN = "{{ messages[0].content }}"


@each_of(
    "template, effort, variables",
    [
        (QWEN3, None, {}),
        (QWEN3, "none", {"enable_thinking": False}),
        (QWEN3, "minimal", {"enable_thinking": False}),
        (DEEPSEEK, "none", {"thinking": False}),
        (GPT_OSS, None, {}),
        *((GPT_OSS, each, {"reasoning_effort": each}) for each in ("none", "low", "medium", "high")),
        (GPT_OSS + QWEN3, "minimal", {"enable_thinking": False}),
        (GPT_OSS + QWEN3, "high", {"reasoning_effort": "high"}),
    ],
)
def test_a_template_is_told_by_its_own_variable(
    template: str, effort: str | None, variables: dict[str, Any]
) -> None:
    ours = ChatTemplate(template, {}, thinks=True).render(TALK, ChatOptions(reasoning_effort=effort))
    render = transformers.utils.chat_template_utils.render_jinja_template
    theirs, _ = render([TALK], chat_template=template, **variables)
    assert [ours] == theirs


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
@pytest.mark.parametrize("template", [QWEN3, DEEPSEEK])
def test_a_template_that_only_switches_thinking_switches_it_on(template: str, effort: str) -> None:
    made = ChatTemplate(template, {}, thinks=True)
    asked = ChatOptions(reasoning_effort=effort)
    on = ChatOptions(chat_template_kwargs={"enable_thinking": True, "thinking": True})
    assert made.render(TALK, asked) == made.render(TALK, on)
    assert not made.ignores(effort)


@pytest.mark.parametrize(
    ("thinks", "effort", "is_ignored"),
    [(True, "none", True), (True, "high", True), (False, "low", True), (False, "none", False)],
)
def test_a_template_that_knows_nothing_is_told_nothing(thinks: bool, effort: str, is_ignored: bool) -> None:
    """A model that never reasons does what "none" asks for."""
    made = ChatTemplate(PLAIN, {}, thinks=thinks)
    assert made.render(TALK, ChatOptions(reasoning_effort=effort)) == "What is 1?"
    assert made.ignores(effort) == is_ignored


@each_of(
    "effort, kwargs",
    [
        ("none", {"enable_thinking": False}),
        ("high", {"enable_thinking": True}),
        ("none", {"thinking": True}),  # of which this template knows nothing
    ],
)
def test_two_words_that_say_the_same_are_one(effort: str, kwargs: dict[str, Any]) -> None:
    made = ChatTemplate(QWEN3, {})
    both = ChatOptions(reasoning_effort=effort, chat_template_kwargs=kwargs)
    assert made.render(TALK, both) == made.render(TALK, ChatOptions(reasoning_effort=effort))


@each_of("said", [True, 0, "false", None])
def test_two_words_for_one_variable_are_refused(said: Any) -> None:
    both = ChatOptions(reasoning_effort="none", chat_template_kwargs={"enable_thinking": said})
    with pytest.raises(BadRequest, match="and chat_template_kwargs both set enable_thinking"):
        ChatTemplate(QWEN3, {}).render(TALK, both)


def test_the_field_of_a_request_reaches_the_template(texts: dict[str, Text]) -> None:
    text = Text(texts["byte_level"]._vocabulary, {}, {"default": QWEN3}, thoughts=ThoughtFormat())
    asked = {"id": "a", "messages": TALK}
    short = parse_request(asked | {"reasoning_effort": "none"}, text).prompt
    assert text.decode(short.tolist()).endswith("</think>\n\n")
    with pytest.raises(BadRequest, match='reasoning_effort is "much"; it must be "none", "minimal", "low"'):
        parse_request(asked | {"reasoning_effort": "much"}, text)
    with pytest.raises(BadRequest, match="reasoning_effort needs messages"):
        parse_request({"id": "a", "prompt": "b", "reasoning_effort": "none"}, text)


def test_a_server_counts_and_answers_with_it(http: httpx.Client) -> None:
    body = {"messages": TALK, "reasoning_effort": "none", "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    plain = http.post("/v1/chat/completions", json=body)
    assert "x-reasoning-effort" not in plain.headers
    told = http.post("/v1/chat/completions", json=body | {"reasoning_effort": "high"})
    assert (told.status_code, told.headers["x-reasoning-effort"]) == (
        200,
        "no effect: the chat template does not know it",
    )
    counted = http.post("/tokenize", json={"messages": TALK, "reasoning_effort": "high"})
    assert counted.json()["tokens"] == http.post("/tokenize", json={"messages": TALK}).json()["tokens"]
