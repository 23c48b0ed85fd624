"""In every format, what the grammar takes is what the parser finds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from llguidance import LLMatcher

from borders.refusal import BadRequest
from serving.grammars import matching
from serving.grammars.matching import json_rule
from serving.grammars.structured_output import FormedAnswer
from serving.tools import argument_rules
from serving.tools.channels import HARMONY
from serving.tools.definitions import ToolUse, channel_grammar, tool_use
from serving.tools.formats import TOOL_FORMATS
from serving.tools.parsing import ToolParser
from tests.each_of import each_of
from tests.serving.call_templates import of_bytes
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


@lru_cache(maxsize=64)  # one entry is a pattern or schema, for all formats
def compiled(lark: str) -> LLMatcher:
    """A matcher at the beginning of an answer, to be copied for each."""
    matcher = LLMatcher(of_bytes(), '%llguidance {"no_forcing": true}\n' + lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def takes(use: ToolUse, name: str, answer: str, formed: FormedAnswer | None = None) -> bool:
    grammar = use.grammar(TOOL_FORMATS[name], {}, formed)
    assert grammar is not None
    _, kind, lark = json.loads(grammar)
    assert kind == "lark"
    matcher = compiled(lark).deep_copy()
    data = list(answer.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@each_of("name", TOOL_FORMATS)
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


@each_of("name", TOOL_FORMATS)
def test_a_named_call_is_one_of_that_function(name: str) -> None:
    use = asked(tool_choice=tool("add"))
    one = ("add", {"y": "a"})
    assert takes(use, name, written(name, [one]))
    assert not takes(use, name, written(name, [one, one]))
    assert not takes(use, name, written(name, [("get_weather", {})]))


@each_of("name", TOOL_FORMATS)
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


@each_of("name", TOOL_FORMATS)
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


def test_line_breaks_within_olmos_block_may_be_left_out() -> None:
    calls = [("add", {"y": "a"}), ("add", {"y": "b"})]
    for use in (asked(tool_choice="required"), asked()):
        for some in (calls, calls[:1]):
            answer = written("olmo3", some)
            for text in (answer, answer.replace("s>\n", "s>"), answer.replace("\n<", "<")):
                assert takes(use, "olmo3", text)
                assert [*parsed(TOOL_FORMATS["olmo3"], [text])[1]] == [
                    (name, json.dumps(values)) for name, values in some
                ]


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
DEFS = {
    "one": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "other": {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]},
    "count": {"type": "integer"},
    "letter": {"enum": ["a", "b"]},
}
NOT_JSON = [name for name, form in TOOL_FORMATS.items() if form.arguments != "json"]
PAIRS = [name for name, form in TOOL_FORMATS.items() if form.arguments == "pairs"]
TEXTS = [*PAIRS, "gemma4"]  # formats in which a text is not JSON


def read_by(name: str, schema: Any, answer: str) -> Any:
    """The arguments of the call in an answer, read by a schema as a client sent it."""
    calls = ToolParser(TOOL_FORMATS[name], ["f"], schemas={"f": schema}, is_held=True).push(answer).calls
    return json.loads("".join(each.arguments for each in calls))


@each_of(
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


def one_tool(schema: Any, *, strict: bool = False) -> ToolUse:
    use = tool_use({"tools": [tool("f", parameters=schema, strict=strict)], "tool_choice": "required"})
    assert use is not None
    return use


def having(value: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"v": value}, "required": ["v"], "$defs": DEFS}


def check_taken(name: str, use: ToolUse, right: list[Any], wrong: list[Any]) -> None:
    """The grammar takes the right arguments, which the parser reads as they were meant, and no wrong ones."""
    for values in right:
        answer = written(name, [("f", values)])
        assert takes(use, name, answer), answer
        assert read_by(name, use.parameters["f"], answer) == values, answer
    for values in wrong:
        assert not takes(use, name, written(name, [("f", values)])), values


@each_of("name", NOT_JSON)
def test_a_grammar_visits_each_reference_once(name: str) -> None:
    check_taken(name, one_tool(MANY_WAYS), [{"v": "x"}], [{}, {"v": 1, "w": 2}])


def rings() -> dict[str, Any]:
    """Two cycles of references in one part, which has as many ends as the product of their lengths."""

    def ring(name: str, size: int) -> dict[str, Any]:
        further = (
            {"y": {"const": 1}, "z": {"$ref": f"#/$defs/{name}{(at + 1) % size}"}} for at in range(size)
        )
        return {f"{name}{at}": {"type": "object", "properties": each} for at, each in enumerate(further)}

    both = {"allOf": [{"$ref": "#/$defs/a0"}, {"$ref": "#/$defs/b0"}]}
    return {"type": "object", "properties": {"z": both}, "$defs": ring("a", 31) | ring("b", 33)}


def spellings() -> dict[str, Any]:
    """A part that refers to itself in 150 ways, each of which has rules for 150 properties."""
    ways = {f"p{at}": {"$ref": "#/$defs/D", "maxProperties": 1000 + at} for at in range(150)}
    return {
        "properties": {"x": {"$ref": "#/$defs/D"}},
        "$defs": {"D": {"type": "object", "properties": ways}},
    }


@pytest.mark.parametrize("made", [rings, spellings])
def test_parts_of_parts_lie_no_deeper_than_the_matchers_stack_reaches(
    made: Callable[[], dict[str, Any]],
) -> None:
    use = one_tool(made())
    asked = use.grammar(TOOL_FORMATS["gemma4"], {}, None)
    assert asked is not None
    assert matching._levels(json.loads(asked)[2]) < 5000, "16 MiB hold 5,400"
    assert use.notes_in(TOOL_FORMATS["gemma4"]), "what is any value is told"


def test_what_a_part_leads_to_is_looked_at_in_proportion_to_the_schema(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = list[str]()
    monkeypatch.setattr(argument_rules, "why_not", lambda rule: looked.append(rule) or "")
    wide = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(200)}}
    part = {"type": "array", "items": {"$ref": "#/$defs/wide"}}
    some = {f"a{at}": part | {"minItems": at} for at in range(100)}
    schema = {"properties": some | {"n": {"type": "integer"}}, "$defs": {"wide": wide, "other": wide}}
    argument_rules.argument_rules(TOOL_FORMATS["pythonic"], "f", schema, {})
    assert 10 < len(looked) < 100
    assert sum(map(len, looked)) <= max(2**16, 8 * len(json.dumps(schema)))
    looked.clear()
    argument_rules.argument_rules(
        TOOL_FORMATS["pythonic"], "f", schema | {"properties": {"n": {"enum": [1]}}}, {}
    )
    assert not any("wide" in rule for rule in looked), "what a part does not lead to is no part of its rule"


CLOSED = {"additionalProperties": False}
STRICT_ONES: list[tuple[Any, list[Any], list[Any]]] = [
    (
        having({"allOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/other"}]}),
        [{"v": {"a": 1, "b": 2}}],
        [{"v": {"a": 1}}, {"v": {"b": 2}}, {"v": "x"}],
    ),
    (having({"allOf": [{"$ref": "#/$defs/count"}, {"minimum": 3}]}), [{"v": 3}], [{"v": 2}, {"v": "x"}]),
    (having({"$ref": "#/$defs/count", "minimum": 3}), [{"v": 3}], [{"v": 2}, {"v": "x"}]),
    (having({"allOf": [{"$ref": "#/$defs/letter"}, {"description": "x"}]}), [{"v": "a"}], [{"v": "c"}]),
    (having({"type": "string", "anyOf": [{"enum": ["a"]}, {"enum": ["b"]}]}), [{"v": "b"}], [{"v": "c"}]),
    (having({"enum": ["a", "abc", 3], "maxLength": 1}), [{"v": "a"}, {"v": 3}], [{"v": "abc"}]),
    (having({"const": "a", "enum": ["a", "b"]}), [{"v": "a"}], [{"v": "b"}]),
    (
        {"allOf": [{"properties": {"s": TEXT}, "required": ["s"], "additionalProperties": False}]},
        [{"s": "x"}],
        [{}, {"other": "x"}],
    ),
    (
        {"anyOf": [{"properties": {"s": TEXT}, "required": ["s"], "additionalProperties": False}]},
        [{"s": "x"}],
        [{}, {"other": "x"}],
    ),
    (
        {"properties": {"s": TEXT, "t": TEXT}, "anyOf": [{"required": ["s"]}, {"required": ["t"]}]},
        [{"s": "x"}, {"t": "x"}, {"s": "x", "t": "y"}],
        [{}],
    ),
    (
        {"properties": {"s": TEXT}, "anyOf": [{"required": ["s"]}, {"required": ["t"]}], **CLOSED},
        [{"s": "x"}],
        [{}, {"t": "x"}],
    ),
    ({"properties": {"s": TEXT}, "required": ["s", "t"]}, [{"s": "x", "t": "y"}], [{"s": "x"}]),
]


@pytest.mark.parametrize("name", NOT_JSON)
@each_of("schema, right, wrong", STRICT_ONES)
def test_all_parts_of_a_strict_schema_are_held(name: str, schema: Any, right: Any, wrong: Any) -> None:
    use = one_tool(schema, strict=True)
    assert use.notes_in(TOOL_FORMATS[name]) == ()
    check_taken(name, use, right, wrong)


APART = [{"type": "object", "properties": {n: {}}, "required": [n], **CLOSED} for n in "ab"]


@each_of(
    "schema",
    [
        {"properties": {"a": {}, "b": {}}, "minProperties": 2, **CLOSED},
        {"patternProperties": {"a": {}, "b": {}}},
        {"properties": {"a": {}}, "required": ["b"], **CLOSED},
        {"allOf": APART},
    ],
)
@each_of("name", ["hermes", "llama3_json"])
def test_a_tool_that_the_matcher_refuses_takes_no_other_with_it(name: str, schema: Any) -> None:
    """Its arguments are any object unless it is strict; in the other formats, its parts are looked at."""
    form = TOOL_FORMATS[name]
    tools = [tool("f", parameters=schema), tool("add", parameters=SCHEMA, strict=True)]
    for choice in ("auto", "required"):
        use = tool_use({"tools": tools, "tool_choice": choice})
        assert use is not None
        assert takes(use, name, written(name, [("f", {"c": 1})]))
        assert takes(use, name, written(name, [("add", {"y": "a"})]))
        assert not takes(use, name, written(name, [("add", {"y": "c"})]))
        assert use.notes_in(form) == use.notes_in(None) == ("f: parameters",)
    formed = FormedAnswer("response_format", SCHEMA)
    tools.pop()
    loose = tool_use({"tools": tools})
    assert loose is not None
    assert takes(loose, name, written(name, [("f", {"c": 1})]), formed)
    said = channel_grammar(HARMONY, {}, "", use=one_tool(schema))
    assert said is not None
    assert json_rule({"type": "object"}) in json.loads(said)[2]["outer"]
    strict = one_tool(schema, strict=True)
    with pytest.raises(BadRequest, match="strict tool f in tools has parameters that cannot be followed"):
        strict.grammar(form, {})
    with pytest.raises(BadRequest, match="strict tool f in tools"):
        channel_grammar(HARMONY, {}, "", use=strict)


@each_of("name", ["glm45", "pythonic"])
def test_a_part_that_the_matcher_refuses_is_any_of_its_type(name: str) -> None:
    schema = {"properties": {"v": {"type": "object", "patternProperties": {"a": {}, "b": {}}}, "w": TEXT}}
    check_taken(name, one_tool(schema), [{"v": {"ab": 1}, "w": "a"}], [{"v": [1]}])
    assert one_tool(schema).notes_in(TOOL_FORMATS[name]) == ("f: v: a schema that cannot be followed",)
    with pytest.raises(BadRequest, match="strict tool f in tools has v: a schema that cannot be followed"):
        one_tool(schema, strict=True).grammar(TOOL_FORMATS[name], {})


@each_of("name", ["pythonic", "glm45", "gemma4"])
@each_of(
    "value, any_of_its_type",
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, 4),
        ({"type": "string", "minLength": 3, "maxLength": 1}, ""),
        ({"type": "string", "pattern": "^a{5}$", "maxLength": 3}, "b"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, []),
        ({"type": "array", "minItems": 1, "items": False}, []),
        ({"type": "object", "minProperties": 1, "maxProperties": 0}, {}),
    ],
)
def test_an_argument_that_nothing_satisfies_is_of_its_type(
    name: str, value: Any, any_of_its_type: Any
) -> None:
    """The matcher takes the whole schema, since the argument may be left out."""
    schema = {"type": "object", "properties": {"v": value, "w": TEXT}}
    use = one_tool(schema)
    wrong = [] if value["type"] == "string" else [{"v": None}]  # which is a text like others in pairs
    check_taken(name, use, [{"w": "x"}, {"v": any_of_its_type, "w": "x"}], wrong)
    (note,) = use.notes_in(TOOL_FORMATS[name])
    assert note.startswith("f: v: ")
    with pytest.raises(BadRequest, match="strict tool f in tools has v: "):
        one_tool(schema, strict=True).grammar(TOOL_FORMATS[name], {})


@each_of("name", NOT_JSON)
def test_at_most_one_item_and_property(name: str) -> None:
    for least in (0, 1):
        items = {"type": "array", "items": {"type": "integer"}, "minItems": least, "maxItems": 1}
        keys = {
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "minProperties": least,
            "maxProperties": 1,
        }
        schema = {"properties": {"v": items, "w": keys}}
        right: list[Any] = [{"v": [1], "w": {"a": 1}}, *([] if least else [{"v": [], "w": {}}])]
        wrong: list[Any] = [
            {"v": [1, 2]},
            {"w": {"a": 1, "b": 2}},
            *([{"v": []}, {"w": {}}] if least else []),
        ]
        check_taken(name, one_tool(schema, strict=True), right, wrong)
    check_taken(name, one_tool(keys, strict=True), [{"a": 1}], [{}, {"a": 1, "b": 2}])


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"properties": {"s": TEXT}, "required": ["t"], "additionalProperties": False}, "required t"),
        (having({"type": "string", "pattern": "(?i:a)"}), "v: pattern with a look around or a flag"),
        ({"properties": {"": TEXT}}, 'the name ""'),
        ({"patternProperties": {"^a": TEXT}}, "patternProperties"),
    ],
)
def test_what_a_notation_cannot_hold_is_named(schema: Any, what: str) -> None:
    loose, strict, json_form = one_tool(schema), one_tool(schema, strict=True), TOOL_FORMATS["hermes"]
    for name in TEXTS:
        assert loose.notes_in(TOOL_FORMATS[name]) == (f"f: {what}",)
        assert takes(loose, name, written(name, [("f", {"v": "a"} if "v:" in what else {})]))
        with pytest.raises(
            BadRequest, match=f"strict tool f in tools has {re.escape(what)} in its parameters"
        ):
            strict.grammar(TOOL_FORMATS[name], {})
    taken_as_json = "required" not in what
    assert loose.notes_in(json_form) == (() if taken_as_json else ("f: parameters",))
    free = tool_use({"tools": [tool("f", parameters=schema)]})
    assert free is not None
    assert free.notes_in(TOOL_FORMATS["glm45"]) == ()


@each_of("schema", [{"type": "object"}, {}, {"additionalProperties": {"type": "integer"}}])
@each_of("name", NOT_JSON)
def test_arguments_may_have_any_name_where_the_schema_names_none(name: str, schema: Any) -> None:
    check_taken(name, one_tool(schema), [{}, {"a": 1}, {"a": 1, "b_2": 20}], [])


@each_of(
    "name, key",
    [
        *(("olmo3", key) for key in ("from", "None", "user-id", "$filter")),
        *(("qwen3_coder", key) for key in ("a>b", "a\nb", "", " a", "a ")),
        *(("gemma4", key) for key in ("a:b", "", "} a", " a", ",a", '"q"')),
        *(("minimax_m2", '"q"'), ("deepseek_v32", '"q"'), ("pythonic", "class")),
    ],
)
def test_names_that_the_parser_cannot_read_are_left_out(name: str, key: str) -> None:
    use = one_tool({"properties": {key: {"type": "integer"}, "s": {"type": "integer"}}})
    check_taken(name, use, [{}, {"s": 1}], [{key: 1}])
    (note,) = use.notes_in(TOOL_FORMATS[name])
    assert note == f"f: the name {json.dumps(key)}"


@each_of(
    "pattern",
    [
        *(
            "^a$|^b$",
            "^(a|b$)",
            "^a|b$",
            r"^a\\$",
            r"\\/",
            r"^[a\\/]+$",
            r"[\\/:]",
            "[\\\\\n]",
            "a/b",
            "[/]",
            "^a{2,3}$",
            "(^a|b)c",
            "x(a$)",
            "a|^b",
        ),
        *("", "^$", "^(?:a|b)+$", r"\$", "[$^]", "a\nb", "(a|b)(c|d)"),
    ],
)
def test_a_pattern_means_what_it_means_in_json(pattern: str) -> None:
    use = one_tool(having({"type": "string", "pattern": pattern}))
    texts = (
        "a",
        "b",
        "ab",
        "xa",
        "ax",
        "xb",
        "aa",
        "ac",
        "bc",
        "xbc",
        "xac",
        "x\\/",
        "/",
        "a/b",
        "a\\",
        "$",
        "^",
    )
    for text in (*texts, "a\nb", "bd", ""):
        call = [("f", {"v": text})]
        is_taken = takes(use, "hermes", written("hermes", call))
        for name in ("glm45", "qwen3_coder", "minimax_m2", "gemma4"):
            assert takes(use, name, written(name, call)) == is_taken, (name, text)


MIXED: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": ["string", "integer"], "minLength": 2}, [5, "ab", "5x", -12], ["a"]),
    (
        {
            "anyOf": [
                {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
                {"type": "array", "items": {"enum": ["a", "b"]}},
            ]
        },
        [["a"], 5, "xy", [], ["a", "b"]],
        [["c"], "xyz"],
    ),
    ({"anyOf": [TEXT, {"type": "integer", "minimum": 3}]}, [3, "xy", 14], [1]),
    (
        {"type": ["string", "boolean", "null", "object", "number"], "minLength": 2},
        [True, "truer", None, {"a": [1]}, "nu", 1.5, -2, "1.5.2"],
        ["x"],
    ),
    ({"anyOf": [{"enum": ["a", "b", 1]}, TEXT]}, ["a", "ab", 1], [2]),
    ({"enum": ["a", 5, None, [1]]}, [5, "a", None, [1]], [1, "b"]),
    ({"anyOf": [{"type": "string", "enum": ["1", "2"]}, {"type": "null"}]}, ["1", "2", None], ["3"]),
    ({"enum": ["5", "true", "x", None]}, ["5", "true", "x", None], ["6"]),
    ({"anyOf": [{"const": "true"}, {"const": "auto"}, {"type": "integer"}]}, ["true", "auto", 5], ["x"]),
]


@each_of("value, right, wrong", MIXED)
@each_of("name", TEXTS)
def test_text_and_other_types_stand_beside_each_other(name: str, value: Any, right: Any, wrong: Any) -> None:
    use = one_tool(having(value))
    check_taken(name, use, [{"v": each} for each in right], [{"v": each} for each in wrong])


@each_of("name", [name for name in PAIRS if (pairs := TOOL_FORMATS[name].pairs) and pairs.is_by_line])
def test_no_line_of_a_text_ends_a_value_that_a_grammar_closes(name: str) -> None:
    """Elsewhere, the parser takes it for the end of a value without a closing tag."""
    form, pairs = TOOL_FORMATS[name], TOOL_FORMATS[name].pairs
    assert pairs is not None
    ends = (form.tail + form.closing, form.tail + form.between + form.head, f"{pairs.key}w{pairs.value}")
    schema = {"properties": {"v": TEXT, "w": TEXT}, "required": ["v"]}
    check_taken(name, one_tool(schema), [{"v": f"x\n{end}y", "w": "z"} for end in ends], [])
    answer = written(name, [("f", {"v": "x", "w": "y"})])
    assert takes(one_tool(schema), name, answer)
    early = answer.replace(pairs.margin + pairs.close, pairs.close, 1)
    assert takes(one_tool(schema), name, early) == (not pairs.margin), "the parser ends the text there"
