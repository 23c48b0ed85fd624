"""In every format, what the grammar takes is what the parser finds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from borders.refusal import BadRequest
from serving.grammars.structured_output import FormedAnswer
from serving.tools.definitions import ToolUse, tool_use
from serving.tools.formats import TOOL_FORMATS
from serving.tools.parsing import ToolParser
from tests.serving.test_tool_parsing import parsed, written

SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"enum": ["a", "b"]}, "z": {"type": "boolean"}},
    "required": ["y"],
    "additionalProperties": False,
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def asked(**fields: Any) -> ToolUse:
    use = tool_use({"tools": [tool("add", parameters=SCHEMA, strict=True), tool("get_weather")], **fields})
    assert use is not None
    return use


def takes(use: ToolUse, name: str, answer: str, formed: FormedAnswer | None = None) -> bool:
    grammar = use.grammar(TOOL_FORMATS[name], {}, formed)
    assert grammar is not None
    _, kind, lark = json.loads(grammar)
    assert kind == "lark"
    matcher = LLMatcher(LLTokenizer("byte"), '%llguidance {"no_forcing": true}\n' + lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(answer.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_required_call_is_all_of_the_answer(name: str) -> None:
    form, use = TOOL_FORMATS[name], asked(tool_choice="required")
    right = [("add", {"x": 1, "y": "a"}), ("add", {"y": "b", "z": True}), ("get_weather", {})]
    answer = written(name, right)
    assert takes(use, name, answer)
    assert len(parsed(form, [answer])[1]) == 3
    for wrong in ([("add", {"x": 1})], [("add", {"y": "c"})], [("other", {})], [("get_weather", {"a": 1})]):
        assert not takes(use, name, written(name, wrong))
    assert not takes(use, name, "")
    assert not takes(use, name, f"So: {answer}")


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_named_call_is_one_of_that_function(name: str) -> None:
    use = asked(tool_choice=tool("add"))
    one = ("add", {"y": "a"})
    assert takes(use, name, written(name, [one]))
    assert not takes(use, name, written(name, [one, one]))
    assert not takes(use, name, written(name, [("get_weather", {})]))


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_strict_tool_is_called_right_or_not_at_all(name: str) -> None:
    form, use = TOOL_FORMATS[name], asked()
    right, wrong = ("add", {"y": "a"}), ("add", {"y": "c"})
    assert takes(use, name, "")
    assert takes(use, name, "It is 天气 <b>.")
    assert takes(use, name, written(name, [right, right]))
    assert not takes(use, name, written(name, [wrong]))
    if not form.is_whole:
        assert takes(use, name, f"I look.\n{written(name, [right])}")
        assert not takes(use, name, f"I look.\n{written(name, [wrong])}")
    assert not takes(asked(parallel_tool_calls=False), name, written(name, [right, right]))


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_an_answer_of_a_form_or_calls(name: str) -> None:
    form, formed = TOOL_FORMATS[name], FormedAnswer("response_format", SCHEMA)
    loose = tool_use({"tools": [tool("add", parameters=SCHEMA), tool("other", parameters={"not": {}})]})
    assert loose is not None
    right, wrong = ("add", {"y": "a"}), ("add", {"y": "c"})
    for use in (asked(), loose):
        assert takes(use, name, '{"x": 3, "y": "b"}', formed)
        assert takes(use, name, written(name, [right, right]), formed)
        assert not takes(use, name, "", formed)
        assert not takes(use, name, '{"x": 3}', formed)
        assert not takes(use, name, "It is b.", formed)
        assert not takes(use, name, written(name, [wrong]), formed)
    assert takes(
        loose, name, written(name, [("other", {"any": 1} if form.arguments == "json" else {})]), formed
    )
    grammar = loose.grammar(form, {}, formed)
    assert grammar is not None
    assert json.loads(grammar)[0] == "response_format"


def test_control_tokens_are_no_text() -> None:
    form = TOOL_FORMATS["mistral"]
    for choice in ("required", "auto"):
        grammar = asked(tool_choice=choice).grammar(form, {"[TOOL_CALLS]": 300})
        assert grammar is not None
        assert "<[300]>" in grammar
        assert "TOOL_CALLS" not in grammar


def test_nothing_is_held_where_nothing_was_asked_for() -> None:
    loose = [tool("add", parameters={"not": {}})]
    for fields in ({"tools": loose}, {"tools": loose, "tool_choice": "none", "parallel_tool_calls": False}):
        use = tool_use(fields)
        assert use is not None
        assert use.grammar(TOOL_FORMATS["hermes"], {}) is None
    with pytest.raises(BadRequest, match='keyword "not"'):
        tool_use({"tools": [tool("add", parameters={"not": {}}, strict=True)]})


def levels_of(number: int, end: Any) -> dict[str, Any]:
    """Definitions of which each has four branches that lead to the next one: 4**number ways to the end."""
    levels = {f"A{at}": {"anyOf": [{"$ref": f"#/$defs/A{at + 1}"}] * 4} for at in range(number)}
    return {**levels, f"A{number}": end}


MANY_WAYS = {
    "type": "object",
    "properties": {"v": {"$ref": "#/$defs/A0"}},
    "required": ["v"],
    "$defs": levels_of(14, {"type": "string"}),
}
CIRCLE = {"properties": {"v": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}] * 3}}}
TEXT = {"type": "string"}


def read_by(name: str, schema: Any, answer: str) -> Any:
    """The arguments of the call in an answer, read by a schema as a client sent it."""
    calls = ToolParser(TOOL_FORMATS[name], ["f"], schemas={"f": schema}).push(answer).calls
    return json.loads("".join(each.arguments for each in calls))


@pytest.mark.parametrize(
    "schema",
    [
        MANY_WAYS,
        {"$ref": "#/$defs/R", "$defs": {"R": {"properties": {"v": TEXT}}}},
        {"allOf": [{"properties": {"v": TEXT}}, {"properties": {"w": {"type": "integer"}}}]},
        {"anyOf": [{"properties": {"v": TEXT}}, {"properties": {"v": {"enum": ["a"]}}}]},
        {"properties": {"v": {"allOf": [TEXT, {"minLength": 1}]}}},
        {
            "properties": {
                "v": {"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}, TEXT]}
            }
        },
        {"properties": {"v": {"$ref": "#text"}}, "$defs": {"t": {"$anchor": "text", "type": "string"}}},
        {"properties": {"v": {"$ref": "#/$defs/t", "minLength": 1}}, "$defs": {"t": TEXT}},
        {"patternProperties": {"^v": TEXT}},
        {"properties": {"v": False}},
    ],
)
def test_text_stays_text_however_the_schema_says_so(schema: Any) -> None:
    for name in ("glm45", "qwen3_coder", "minimax_m2"):
        answer = written(name, [("f", {"v": "42"})])
        assert read_by(name, schema, answer) == {"v": "42"}


def test_references_in_a_circle_name_no_type() -> None:
    assert read_by("glm45", CIRCLE, written("glm45", [("f", {"v": 42})])) == {"v": 42}
