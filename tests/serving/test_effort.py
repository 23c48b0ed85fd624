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


@pytest.mark.parametrize(
    ("template", "effort", "variables"),
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


@pytest.mark.parametrize(
    ("template", "thinks", "effort", "limit"),
    [
        (QWEN3, True, "high", "none or minimal"),
        (PLAIN, True, "none", "left out"),
        (PLAIN, False, "low", "none"),
        (PLAIN, False, "minimal", "none"),
    ],
)
def test_an_effort_that_no_template_is_told_is_refused(
    template: str, thinks: bool, effort: str, limit: str
) -> None:
    made = ChatTemplate(template, {}, thinks=thinks)
    with pytest.raises(BadRequest, match=f'reasoning_effort is "{effort}"; it must be {limit}: this'):
        made.render(TALK, ChatOptions(reasoning_effort=effort))


def test_a_model_that_never_thinks_needs_no_word() -> None:
    assert ChatTemplate(PLAIN, {}).render(TALK, ChatOptions(reasoning_effort="none")) == "What is 1?"


def test_two_words_for_one_variable_are_refused() -> None:
    both = ChatOptions(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    with pytest.raises(BadRequest, match="and chat_template_kwargs both set enable_thinking"):
        ChatTemplate(QWEN3, {}).render(TALK, both)


def test_the_field_of_a_request_reaches_the_template(texts: dict[str, Text]) -> None:
    text = Text(texts["byte_level"]._vocabulary, {}, {"default": QWEN3}, thinks=True)
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
    refused = http.post("/v1/chat/completions", json=body | {"reasoning_effort": "high"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reasoning_effort")
    counted = http.post("/tokenize", json={"messages": TALK, "reasoning_effort": "high"})
    assert counted.json()["error"]["param"] == "reasoning_effort"
