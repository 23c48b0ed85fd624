"""A conversation reaches the model as its template reads it; test_reported_cases.py asks over HTTP.

The right texts are those of transformers' `apply_chat_template`, except where a template asks whether a
content is none: transformers 5 leaves the key away, and such templates were written for transformers 4.
"""

from __future__ import annotations

from typing import Any

import pytest

from serving.text.chat_options import ChatOptions
from serving.text.chat_template import ChatTemplate, check_messages
from tests.each_of import each_of
from tests.lazy import transformers

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ASKED = {"role": "user", "content": "1+1?"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}
EACH = "{% for m in messages %}{{ m.role }}:"
# What a message says, as templates of published models write it
SAYS = {
    "prints": "{{ m.content }}",
    "if content": "{% if m.content %}{{ m.content }}{% endif %}",
    "is string": "{% if m.content is string %}{{ m.content }}{% else %}no text{% endif %}",
    "is defined": "{% if m.content is defined %}{{ m.content }}{% else %}undefined{% endif %}",
    "joins": "{{ 'says ' + m['content'] }}",
    "is not none": "{% if m.content is not none %}{{ m.content }}{% endif %}",
    "compares": "{% if m.content == none %}nothing{% else %}{{ m.content }}{% endif %}",
}
END = "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %};{% endfor %}"


def shown(template: str, messages: list[Any], **options: Any) -> str:
    made = ChatTemplate(template, {})
    return made.render([made.form.shaped(each) for each in check_messages(messages)], ChatOptions(**options))


def theirs(template: str, messages: list[Any]) -> str:
    """What transformers makes of messages whose arguments are objects and whose nulls are left away."""
    render = transformers.utils.chat_template_utils.render_jinja_template
    return render([messages], chat_template=template)[0][0]


@each_of("way", ["prints", "if content", "is string", "is defined"])
@each_of("content", [None, "", "Let me see."])
def test_calls_may_stand_without_text(way: str, content: str | None) -> None:
    template = EACH + SAYS[way] + END
    called: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    as_object = CALL | {"function": {"name": "add", "arguments": {"a": 1}}}
    given = {key: value for key, value in called.items() if value is not None}
    expected = theirs(template, [ASKED, given | {"tool_calls": [as_object]}, RESULT])
    assert shown(template, [ASKED, called, RESULT]) == expected


@pytest.mark.parametrize(
    ("way", "said"),
    [("is not none", ""), ("compares", "nothing"), ("joins", "says ")],
)
def test_a_template_may_ask_whether_there_is_text(way: str, said: str) -> None:
    messages = [ASKED, {"role": "assistant", "content": None, "reasoning_content": "Hm."}]
    opening = "user:says 1+1?;" if way == "joins" else "user:1+1?;"
    assert shown(EACH + SAYS[way] + END, messages) == f"{opening}assistant:{said};"


@each_of("sent", ["reasoning_content", "reasoning", "thinking"])
@each_of("read", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_have_the_name_that_the_template_reads(sent: str, read: str) -> None:
    template = (
        EACH + "{% if m." + read + " %}<{{ m['" + read + "'] }}>{% endif %}{{ m.content }};{% endfor %}"
    )
    messages = [ASKED, {"role": "assistant", "content": "2", sent: "I add"}]
    assert shown(template, messages) == "user:1+1?;assistant:<I add>2;"


PARTS = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
LOOPS = {
    "over the content": "{% for p in m.content %}{{ p.text }}{% endfor %}",
    "over a variable": "{% set c = m['content'] %}{% for p in c %}{{ p['text'] }}{% endfor %}",
    "over a filtered one": (
        "{% for p in m.content | selectattr('type', 'eq', 'text') %}{{ p.text }}{% endfor %}"
    ),
    "in a macro": (
        "{% macro say(content) %}{% if content is string %}{{ content }}{% else %}"
        "{% for p in content %}{{ p.text }}{% endfor %}{% endif %}{% endmacro %}{{ say(m.content) }}"
    ),
}


@each_of("way", LOOPS)
@each_of("role", ["user", "tool"])
def test_a_template_that_reads_parts_gets_them(way: str, role: str) -> None:
    template = "{% for m in messages %}" + LOOPS[way] + "{% endfor %}"
    message = {"role": role, "content": PARTS}
    assert shown(template, [message]) == theirs(template, [message]) == "Hello"


PARTS_OF_X = "{% if m.role == 'x' %}" + LOOPS["over the content"] + "{% else %}"


@each_of(
    "way, reads_no_text",
    [
        (LOOPS["over the content"], True),
        (LOOPS["over a variable"], True),
        (LOOPS["over a filtered one"], True),
        ("{% for content in m.content %}{{ content['text'] }}{% endfor %}", True),
        (
            "{% if m.content[0].type == 'x' %}!{% endif %}{% for c in m.content %}{{ c.text }}{% endfor %}",
            True,
        ),
        (LOOPS["in a macro"], False),
        (
            "{% set content = m.content %}{{ content }}"
            "{% if m.role == 'x' %}{% for content in m.content %}{{ content.text }}{% endfor %}{% endif %}",
            False,
        ),
        (
            "{% if m.content is string %}{{ m.content }}{% else %}"
            + LOOPS["over the content"]
            + "{% endif %}",
            False,
        ),
        (
            "{% set c = m.content %}{% if m.role == 'x' %}{% for p in c %}{% endfor %}"
            "{% else %}{{ c }}{% endif %}",
            False,
        ),
        (PARTS_OF_X + "{{ m.get('content') }}{% endif %}", False),
        (PARTS_OF_X + "{{ m | attr('content') or m['content'] }}{% endif %}", False),
        (
            "{% set ns = namespace() %}{% set ns.t = m.content %}" + PARTS_OF_X + "{{ ns.t }}{% endif %}",
            False,
        ),
        (
            "{% set c = m.content %}{% if c[0] is string %}{% for p in c %}{{ p }}{% endfor %}{% else %}"
            "{% for p in c %}{{ p.text }}{% endfor %}{% endif %}",
            False,
        ),
    ],
)
def test_a_text_is_a_part_where_a_template_reads_nothing_else(way: str, reads_no_text: bool) -> None:
    template = "{% for m in messages %}" + way + "{% endfor %}"
    assert ChatTemplate(template, {}).form.reads_no_text == reads_no_text
    assert shown(template, [{"role": "user", "content": "Hello"}]) == "Hello"


# Templates of the user's parts and a tool's results, as in GLM-4.5 and GLM-5.1
RESULTS = {
    "results": "{% for r in m.content %}<{{ r.output if r.output is defined else r }}>{% endfor %}",
    "references": (
        "{% for r in m.content %}{% for t in ['add'] %}{% if t == r.name %}<{{ t }}>{% endif %}{% endfor %}"
        "{% endfor %}"
    ),
}


@each_of("way", RESULTS)
def test_a_tools_parts_are_its_text_where_a_template_reads_them_as_results(way: str) -> None:
    template = (
        EACH + "{% if m.role == 'tool' %}{% if m.content is string %}<{{ m.content }}>{% else %}"
        f"{RESULTS[way]}{{% endif %}}{{% else %}}{LOOPS['in a macro']}{{% endif %}};{{% endfor %}}"
    )
    asked, result = {"role": "user", "content": PARTS}, {"role": "tool", "content": "Hel\nlo"}
    expected = theirs(template, [asked, result])
    assert shown(template, [asked, result | {"content": PARTS}]) == expected
    assert expected == "user:Hello;tool:<Hel\nlo>;"


def test_other_templates_get_parts_as_lines() -> None:
    assert shown(EACH + SAYS["prints"] + END, [{"role": "user", "content": PARTS}]) == "user:Hel\nlo;"


def test_a_template_that_reads_arguments_as_text_gets_them_so() -> None:
    (message,) = check_messages([{"role": "assistant", "tool_calls": [CALL]}], text_arguments=True)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    as_object = CALL | {"function": {"name": "add", "arguments": {"a": "é"}}}
    (message,) = check_messages([{"role": "assistant", "tool_calls": [as_object]}], text_arguments=True)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": "é"}'


def test_roles_that_a_template_may_not_know() -> None:
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "function", "name": "f", "content": "2"},
    ]
    assert shown(EACH + SAYS["prints"] + END, messages) == "system:Be kind.;tool:2;"
    knows = "{% if messages[0].role == 'developer' %}{{ messages[0].content }}{% endif %}"
    assert shown(knows, messages) == "Be kind."


@each_of(
    "written, read",
    [
        ('{"a":1', {"a": 1}),
        ('{"a":"x","b":"cu', {"a": "x", "b": "cu"}),
        ("null", {}),
        (" ", {}),
        ("[]", {}),
        ("no", {}),
        ('{"a":2}', {"a": 2}),
    ],
)
def test_arguments_that_were_cut_are_an_object_where_the_template_needs_one(written: str, read: Any) -> None:
    pairs = "{% for c in m.tool_calls %}{% for k, v in c.function.arguments|items %}{{ k }}={{ v }} "
    template = EACH + "{% if m.tool_calls %}" + pairs + "{% endfor %}{% endfor %}{% endif %};{% endfor %}"
    cut = CALL | {"function": {"name": "add", "arguments": written}}
    messages = [ASKED, {"role": "assistant", "content": None, "tool_calls": [cut, cut]}, RESULT]
    said = "".join(f"{key}={value} " for key, value in read.items())
    assert shown(template, messages) == f"user:;assistant:{said * 2};tool:;"
