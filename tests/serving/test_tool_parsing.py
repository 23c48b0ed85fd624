"""A parser finds the same calls in an answer however it is cut, and loses no word of it."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Mapping
from typing import Any

import pytest

from serving.tools import parsing
from serving.tools.arguments import LONGEST_KEY, BareReader
from serving.tools.channels import HARMONY, ChannelParser
from serving.tools.formats import MOST_SPACE, TOOL_FORMATS, ToolFormat
from serving.tools.parsing import LONGEST_NAME, LONGEST_OBJECT, ToolParser, _Scan
from tests.each_of import each_of
from tests.serving.call_templates import Turn, render

NAMES = ("get_weather", "add", "mcp.files-read")
Calls = list[tuple[str, str]]


def written(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """As the template of a model of this format writes calls."""
    return render(name, Turn(None, "", [{"name": each, "arguments": values} for each, values in calls]))


def parsed(
    form: ToolFormat,
    pieces: list[str],
    schemas: Mapping[str, Any] | None = None,
    *,
    is_ended: bool = False,
) -> tuple[str, Calls]:
    """The sum of what a parser gives for these pieces; each call's name comes first, and once."""
    parser, content, calls = ToolParser(form, NAMES, schemas=schemas), "", list[list[str]]()
    for each in [*map(parser.push, pieces), parser.finish(is_ended=is_ended)]:
        content += each.content
        for delta in each.calls:
            if delta.name is not None:
                assert delta.index == len(calls), "a name comes first, and once"
                calls.append([delta.name, ""])
            assert delta.index == len(calls) - 1, "calls come one after the other"
            calls[delta.index][1] += delta.arguments
    assert parser.num_calls == len(calls)
    return content, [(name, text) for name, text in calls]


def cut(text: str, rng: random.Random) -> list[str]:
    """The text in pieces, some of one character and some of many."""
    pieces = []
    while text:
        size = rng.choice((1, 1, 2, 3, 5, 8, 40))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize("name", [name for name, form in TOOL_FORMATS.items() if form.is_whole])
def test_calls_without_a_mark_stand_alone(name: str) -> None:
    form = TOOL_FORMATS[name]
    answer = f"I look. {written(name, [('add', {'x': 1})])}"
    assert parsed(form, [answer]) == (answer, [])
    assert parsed(form, [answer.removeprefix("I look.")])[1] == [("add", '{"x": 1}')]


def test_arguments_leave_before_they_are_complete() -> None:
    parser = ToolParser(TOOL_FORMATS["hermes"], NAMES)
    first = parser.push('<tool_call>\n{"name": "add", "arguments": {"x"')
    assert [(each.name, each.arguments) for each in first.calls] == [("add", '{"x"')]
    assert [each.arguments for each in parser.push(": 1").calls] == [": 1"]
    assert parser.finish().content == ""


class Copies:
    """Counts the characters that a parser copies when it changes what it holds."""

    num_copied = 0

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_held":
            self.num_copied += len(value)


class CopiesOfTools(Copies, ToolParser):
    pass


class CopiesOfChannels(Copies, ChannelParser):
    pass


@each_of("name", ["hermes", "mistral_v11", "deepseek", "harmony"])
def test_a_long_answer_is_not_copied_at_each_place_where_a_call_might_begin(name: str) -> None:
    """One that is not streamed comes as one text, of any length."""
    form = TOOL_FORMATS.get(name)
    parser = CopiesOfChannels(HARMONY, NAMES) if form is None else CopiesOfTools(form, NAMES)
    text = (HARMONY.ends[0] if form is None else (form.opening + form.head)[0]) * 2**14
    content = parser.push(text).content + parser.finish().content
    assert form is None or content == text
    assert parser.num_copied < 3000 * len(text), "and not half of the text for each of its characters"


def read(
    name: str, answer: str, schemas: Mapping[str, Any] | None = None, *, is_ended: bool = False
) -> tuple[str, Calls]:
    """What a parser finds in an answer, which is the same however it is cut."""
    rng, form = random.Random(6), TOOL_FORMATS[name]
    whole = parsed(form, [answer], schemas, is_ended=is_ended)
    for pieces in (list(answer), *(cut(answer, rng) for _ in range(5))):
        assert parsed(form, pieces, schemas, is_ended=is_ended) == whole, pieces
    for at in range(0, len(answer), 7):
        assert parsed(form, [answer[:at], answer[at:]], schemas, is_ended=is_ended) == whole, answer[:at]
    return whole


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r'"\ud83d\ude00 a\/b"', "😀 a/b"),
        (r'["\\\\/", {"\ud83d\ude00": "\u00e9"}]', [r"\\/", {"😀": "é"}]),
        (r"'it\'s \x41'", "it's A"),
        (r'"\ud83d"', "\ud83d"),
        ('"""print("it\'s")"""', 'print("it\'s")'),
        ("'''say \"(\" now\n\\''''", 'say "(" now\n\''),
        ('"""a\\""b"" ("""', 'a""b"" ('),
        ('["", \'\', """""", "(", "\'" "\\"" \')\']', ["", "", "", "(", "'\")"]),
        ('"" ")" \'\'")"', "))"),
    ],
)
def test_keywords_have_the_escapes_of_json_and_can_be_encoded(written: str, value: Any) -> None:
    for name, begin, end in (("pythonic", "[", "]"), ("olmo3", "<function_calls>\n", "\n</function_calls>")):
        _, [(_, arguments)] = read(name, f"{begin}add(s={written}){end}")
        assert json.loads(arguments.encode()) == {"s": value}


@pytest.mark.parametrize(
    "answer", ["<function_calls>\n{}", "<function_calls>\nadd(s=1){}", "[{}", "[add(s=1){}"]
)
def test_white_space_within_calls_does_not_hold_an_answer_back(answer: str) -> None:
    """What is held back is looked at again with each piece, so there has to be a limit to it."""
    name = "pythonic" if answer.startswith("[") else "olmo3"
    parser = ToolParser(TOOL_FORMATS[name], NAMES)
    for piece in list(answer.format(" " * 10 * MOST_SPACE)):
        parser.push(piece)
    shown = parser.push("x?").content
    assert shown.endswith("x?")
    assert "add" in answer or parser.push("add(s=1)").calls == []


GEMMA = "<|tool_call>call:add{}<tool_call|>"


@each_of(
    "arguments, meant",
    [
        ("{a:1, b:2}", {"a": 1, "b": 2}),
        ("{a:{ b:1 , c : [ 2 , 3 ] } }", {"a": {"b": 1, "c": [2, 3]}}),
        ("{\na:1\n,\n}", {"a": 1}),
        ("{a:None,b:True,c:False,d:[None]}", {"a": None, "b": True, "c": False, "d": [None]}),
        ("{a:null,b:true,c:-1.5e3}", {"a": None, "b": True, "c": -1500}),
        ('{"s":<|"|>x, y: z<|"|>}', {"s": "x, y: z"}),
        ('{"a:b":"x, {\\"y\\"}", <|"|>t<|"|>:<|"|> None <|"|>}', {"a:b": 'x, {"y"}', "t": " None "}),
        ("{a:low, b:1}", {"a": "low", "b": 1}),
        ("{a:[{b:[1],", {"a": [{"b": [1]}]}),
        ("{[x:true,{id}:1,a:{]b:[{[c:2}]}}", {"[x": True, "{id}": 1, "a": {"]b": [{"[c": 2}]}}),
    ],
)
def test_gemmas_arguments_are_json_whatever_their_space_and_words(arguments: str, meant: Any) -> None:
    content, [(_, found)] = read("gemma4", GEMMA.format(arguments))
    assert (content, json.loads(found)) == ("", meant)
    assert found == json.dumps(json.loads(found)).replace("-1500.0", "-1.5e3")


@each_of("name", TOOL_FORMATS)
@each_of("wrong", [0, 1, 2, 3])
def test_a_call_of_what_is_no_tool_does_not_hide_those_beside_it(name: str, wrong: int) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("add", {"x": 1}), ("get_weather", {}), ("add", {"y": [2]})]
    calls.insert(wrong, ("unknown", {"z": 3}))
    content, found = read(name, written(name, calls))
    del calls[wrong]
    assert [(each, json.loads(arguments)) for each, arguments in found] == calls
    assert "unknown" in content
    assert not any(each in content for each in NAMES)


def test_a_block_ends_with_its_end() -> None:
    """Behind it, what looks like a call without an opening is text."""
    for name in ("olmo3", "minimax_m2", "kimi_k2", "hunyuan_a13b"):
        form, block = TOOL_FORMATS[name], written(name, [("unknown", {"x": 1})])
        inner = written(name, [("add", {"x": 1})]).replace(form.opening, "")
        assert form.opening in block
        assert read(name, block + "\n" + inner) == (block + "\n" + inner, [])


def test_a_value_of_seed_is_all_between_its_tags_and_may_be_a_list_of_python() -> None:
    properties = {"s": {"type": "string"}, "l": {"type": "array"}, "o": {"type": "object"}, "u": {}}
    schemas = {"add": {"type": "object", "properties": properties}}
    answer = (
        "<seed:tool_call>\n<function=add>\n<parameter=s>\na\n\nb\n</parameter>\n"
        "<parameter=l>['a', \"it's\", None]</parameter>\n<parameter=o>{'b': [True, 1.5]}</parameter>\n"
        "<parameter=u>['a']</parameter>\n</function>\n"
        "</seed:tool_call>"
    )
    content, [(_, arguments)] = read("seed_oss", answer, schemas)
    meant = {"s": "\na\n\nb\n", "l": ["a", "it's", None], "o": {"b": [True, 1.5]}, "u": "['a']"}
    assert (content, json.loads(arguments)) == ("", meant)


def test_a_call_id_of_no_length_is_none() -> None:
    calls = ToolParser(TOOL_FORMATS["mistral_v11"], NAMES).push("[TOOL_CALLS]add[CALL_ID][ARGS]{}").calls
    assert [(each.name, each.id, each.arguments) for each in calls] == [("add", None, "{}")]


@pytest.mark.parametrize("value", ["5", "[1]", "x <y>"])
def test_the_schema_says_the_type_of_a_value_whose_tag_does_not(value: str) -> None:
    properties = {"s": {"type": "string"}, "i": {"type": ["integer", "array", "string"]}}
    schemas = {"add": {"type": "object", "properties": properties}}
    answer = written("deepseek_v32", [("add", {"s": value, "i": value})])
    assert answer.count(' string="true"') == 2
    content, [(_, arguments)] = read("deepseek_v32", answer.replace(' string="true"', ""), schemas)
    assert (content, json.loads(arguments)) == (
        "",
        {"s": value, "i": value if value[0] == "x" else json.loads(value)},
    )


@each_of("name", [name for name, form in TOOL_FORMATS.items() if form.head[-1:] != '"'])
def test_white_space_may_stand_before_a_name(name: str) -> None:
    call = written(name, [("add", {"x": 1})])
    begin = "functions." if name == "kimi_k2" else "add"
    for space in (" ", "\n", " \n "):
        content, [(_, arguments)] = read(name, call.replace(begin, space + begin, 1))
        assert (content, json.loads(arguments)) == ("", {"x": 1})
    too_wide = call.replace(begin, " " * (MOST_SPACE + 1) + begin, 1)
    if name != "olmo3":  # whose calls need nothing but a line of the block
        assert read(name, too_wide) == (too_wide, [])


def test_keywords_that_are_no_plain_values_stay_text() -> None:
    for answer in ("[add(x=open('/etc/passwd'))]", "[add(1)]", "[add(**{})]", "[add(x=)]", "[add(x=1"):
        assert parsed(TOOL_FORMATS["pythonic"], [answer]) == (answer, [])
    assert parsed(TOOL_FORMATS["pythonic"], ["[add(x=true, y=None)]"])[1] == [
        ("add", '{"x": true, "y": null}')
    ]


@each_of(
    "answer, content, calls",
    [
        (
            "I look.\n\n<function=add>\n<parameter=p>\n*.md\n</parameter>\n</function>\n</tool_call>",
            "I look.\n\n",
            1,
        ),
        ("<function=add>\n<parameter=p>\n*.md\n</parameter>\n</function>", "", 1),
        ("  <function=add>\n</function>\n<function=add>\n</function>\n</tool_call>\nSo.", "\nSo.", 2),
        ("<tool_call>\n<function=add>\n</function>\n<function=add>\n</function>\n</tool_call>", "", 2),
        ("See <function=add>\n</function>", "See <function=add>\n</function>", 0),
        ("<function=unknown>\n</function>\n</tool_call>", "<function=unknown>\n</function>\n</tool_call>", 0),
        ("a\n<function=add>\nis a tag", "a\n<function=add>\nis a tag", 0),
    ],
)
def test_qwens_opening_may_be_left_out_at_the_beginning_of_a_line(
    answer: str, content: str, calls: int
) -> None:
    said, found = read("qwen3_coder", answer)
    assert (said, len(found)) == (content, calls)
    assert all(json.loads(arguments) in ({"p": "*.md"}, {}) for _, arguments in found)
    assert ToolParser(TOOL_FORMATS["qwen3_coder"], NAMES, is_held=True).push("<function=add>\n</").calls == []


@each_of(
    "call",
    [
        '{"arguments": {"x": 1}, "name": "add"}',
        '{"name": "add", "arguments": "{\\"x\\": 1}"}',
        '{"name": "add", "parameters": {"x": 1}}',
        '{"type": "function", "name": "add", "arguments": {"x": 1}}',
        '{\n "name" : "add" , "id": "a", "arguments" : {"x" : 1}}',
    ],
)
def test_calls_that_are_objects_may_have_other_keys_and_another_order(call: str) -> None:
    usual = '{"name": "get_weather", "arguments": {}}'
    for name, block, between in (
        ("hermes", "<tool_call>\n{}\n</tool_call>", "\n"),
        ("longcat", "<longcat_tool_call>\n{}\n</longcat_tool_call>", "\n"),
        ("mistral", "[TOOL_CALLS] [{}]", ", "),
        ("hunyuan_a13b", "<tool_calls>[{}]</tool_calls>", ", "),
    ):
        for calls in ([call], [call, usual, call], [usual, call]):
            inner = (
                calls
                if name in ("mistral", "hunyuan_a13b")
                else [block.replace("{}", each) for each in calls]
            )
            text = between.join(inner)
            text = block.replace("{}", text) if inner is calls else text
            content, found = read(name, f"So.\n{text}\nDone.")
            assert content.split() == ["So.", "Done."], name
            right = [("add", {"x": 1}) if each == call else ("get_weather", {}) for each in calls]
            assert [(each, json.loads(arguments)) for each, arguments in found] == right


@each_of(
    "text",
    [
        '<tool_call>\n{"arguments": {"x": 1}, "name": "unknown"}\n</tool_call>',
        '<tool_call>\n{"arguments": {"x": 1}, "name": "add", "other": 1}\n</tool_call>',
        '<tool_call>\n{"arguments": {"x": 1',
        '<tool_call>\n{"arguments": {"x": "1}, "name": "add"}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
        '<tool_call>{"type": "object"}</tool_call>',
    ],
)
def test_an_object_that_is_no_call_stays_content_and_hides_none(text: str) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    assert read("hermes", f"\n {text}") == (f"\n {text}", [])
    assert read("hermes", f"a{text}\n{call}") == (f"a{text}\n", [("add", "{}")])
    assert read("hermes", f"{call}{text}\n{call}")[1] == [("add", "{}")] * 2


def test_a_call_without_arguments_needs_a_mark() -> None:
    assert read("hermes", '<tool_call>\n{"name": "add"}\n</tool_call>') == ("", [("add", "{}")])
    assert read("llama3_json", '{"name": "add"}') == ('{"name": "add"}', [])
    too_long = '{"arguments": {"x": "' + "y" * LONGEST_OBJECT + '"}, "name": "add"}'
    for pieces in ([f"<tool_call>{too_long}"], [f"<tool_call>{too_long[:-9]}", too_long[-9:]]):
        assert parsed(TOOL_FORMATS["hermes"], pieces)[1] == []


@each_of("gap", ["\n", ", ", "; ", "<|python_tag|>", "\n<|python_tag|>", ""])
@each_of("key", ["parameters", "arguments"])
@each_of("kind", ["", '"type": "function", '])
def test_calls_of_llama_are_read_as_it_writes_them(gap: str, key: str, kind: str) -> None:
    calls = [f'{{{kind}"name": "{name}", "{key}": {{"x": 1}}}}' for name in ("add", "get_weather")]
    right = ("", [("add", '{"x": 1}'), ("get_weather", '{"x": 1}')])
    for begin in ("", "<|python_tag|>"):
        assert read("llama3_json", begin + gap.join(calls)) == right
    if "python_tag" not in gap:
        assert read("pythonic", gap.join(calls)) == right
        assert read("pythonic", f"<|python_start|>{gap.join(calls)}<|python_end|>") == right
    parser = ToolParser(TOOL_FORMATS["llama3_json"], NAMES)
    assert parser.push(calls[0][:-3]).calls[0].arguments == '{"x": ', "arguments leave as they come"


@each_of("name", ["llama3_json", "pythonic"])
def test_an_answer_in_json_is_no_call(name: str) -> None:
    for answer in (
        '{"type": "circle", "r": 1}',
        '{"name": "Bob"}',
        '{"type": "function", "name": "f", "a": 1}',
    ):
        assert read(name, answer) == (answer, [])
    call = '{"type": "function", "name": "add", "parameters": {}}'
    assert ToolParser(TOOL_FORMATS[name], NAMES, is_held=True).push(call).content == call
    assert ToolParser(TOOL_FORMATS[name], NAMES).push('{"type": "circle"').content == '{"type": "circle"'


@each_of("member", [', "id": "abcdefghi"', ', "type": "function"', ', "id":"a" , "type":"function"'])
def test_what_follows_the_arguments_in_a_call_is_no_content(member: str) -> None:
    call = '{"name": "add", "arguments": {"x": 1}' + member + "}"
    calls = [("add", '{"x": 1}')] * 2
    assert read("mistral", f"[TOOL_CALLS] [{call}, {call}]So.") == ("So.", calls)
    assert read("hermes", f"<tool_call>\n{call}\n</tool_call>\n" * 2 + "So.") == ("\nSo.", calls)
    assert read("llama3_json", call + "\n" + call) == ("", calls)


@each_of("braces", ["", "}}", "}}}", "} }", "\n}\n}"])
def test_a_brace_too_many_or_too_few_is_no_content(braces: str) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"x": 1}' + braces + "\n</tool_call>"
    assert read("hermes", f"{call}\n{call}\nSo.") == ("\nSo.", [("add", '{"x": 1}')] * 2)
    unclosed = call.removesuffix("\n</tool_call>")
    assert read("hermes", f"{unclosed} So.")[1] == [("add", '{"x": 1}')]


def test_a_name_may_be_as_long_as_services_let_it_be() -> None:
    name, longer = "n" * LONGEST_NAME, "n" * (LONGEST_NAME + 1)
    for each, num_calls in ((name, 1), (longer, 0)):
        parser = ToolParser(TOOL_FORMATS["hermes"], [name])
        answer = f'<tool_call>\n{{"name": "{each}", "arguments": {{}}}}\n</tool_call>'
        found = [call for piece in answer for call in parser.push(piece).calls if call.name]
        assert len(found) == num_calls


@each_of(
    "opening", ['[TOOL_CALLS] [{"arguments": ', '[TOOL_CALLS][{"arguments": ', '[TOOL_CALLS] [{"name": "add"']
)
def test_openings_within_openings_are_read_a_few_times_at_most(
    opening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the answer is: a user may ask for such a text."""
    read, scanned = _Scan.json, 0

    def counted(self: _Scan, text: str) -> int:
        nonlocal scanned
        taken = read(self, text)
        scanned += taken
        return taken

    monkeypatch.setattr(_Scan, "json", counted)
    text = opening * 1000
    assert parsed(TOOL_FORMATS["mistral"], [text[at : at + 4] for at in range(0, len(text), 4)]) == (text, [])
    assert scanned < 3 * len(text)


def test_no_objects_are_looked_for_after_many_that_were_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are cut; a call in the usual form is found behind them."""
    monkeypatch.setattr(parsing, "MOST_REFUSED", 400)
    nothing = '<tool_call>{"arguments": {"x": "' + "y" * 50 + '"}, "name": "none"}</tool_call>\n'
    call = '<tool_call>\n{"arguments": {"a": 1}, "name": "add"}\n</tool_call>\n'
    usual = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    assert read("hermes", nothing * 3 + call + usual)[1] == [("add", '{"a": 1}'), ("add", '{"a": 2}')]
    assert read("hermes", nothing * 6 + call + usual)[1] == [("add", '{"a": 2}')]


def test_thoughts_and_descriptions_of_tools_hold_no_calls() -> None:
    call = "I think of\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\nor so"
    parser = ToolParser(TOOL_FORMATS["qwen3_coder"], NAMES, in_thoughts=True)
    assert (parser.push(call).content + parser.finish().content, parser.num_calls) == (call, 0)
    tool = '{"name": "add", "parameters": {"type": "object", "properties": {}}}'
    assert read("pythonic", tool) == (tool, [])


ENDS = {
    "kimi_k2": "<|tool_call_end|>",
    "deepseek": "\n```<｜tool▁call▁end｜>",
    "deepseek_v31": "<｜tool▁call▁end｜>",
    "hermes": "\n</tool_call>",
    "mistral_v11": "[TOOL_CALLS]",
    "gemma4": "<tool_call|>",
}


SPOILT = ('{"l": [[1, 2}', '{"s": "5" tall"', '{"s": "5" <tall", "l": ["', "{")
OPEN_TEXT = ("gemma4", SPOILT[2])  # a text begins at its end in Gemma's notation


@each_of("name, spoilt", [each for each in itertools.product(ENDS, SPOILT) if each != OPEN_TEXT])
def test_arguments_that_are_malformed_end_with_their_call(name: str, spoilt: str) -> None:
    values = "{x:1}" if name == "gemma4" else '{"x": 1}'
    first, behind = written(name, [("add", {"x": 1}), ("add", {"x": 1})]).split(values, 1)
    content, found = read(name, f"{first}{spoilt}{behind}")
    assert content == ""
    assert found[1:] == [("add", '{"x": 1}')]
    assert name == "gemma4" or found[0][1].startswith(spoilt)
    value = f'a{ENDS[name]}{{"b\\" {ENDS[name]}'
    content, [(_, arguments), _] = read(name, written(name, [("add", {"s": value}), ("add", {})]))
    assert (content, json.loads(arguments)) == ("", {"s": value})
    breaks_off = parsed(TOOL_FORMATS[name], [first + '{"x": <'])
    assert breaks_off[1] == parsed(TOOL_FORMATS[name], [first, '{"x": ', "<"])[1]


@each_of("name", [name for name in ENDS if name != "hermes"])
def test_a_call_whose_arguments_are_missing_is_one_without_any(name: str) -> None:
    values = "{x:1}" if name == "gemma4" else '{"x": 1}'
    form, answer = TOOL_FORMATS[name], written(name, [("get_weather", {"x": 1}), ("add", {"x": 1})])
    calls = [("get_weather", "{}"), ("add", '{"x": 1}')]
    assert read(name, answer.replace(values, "", 1)) == ("", calls)
    first, _, rest = answer.partition(values)
    unended = first + rest.partition(values)[0]
    if form.arguments == "json":
        calls[1] = ("add", "{}")
        for pieces in ([unended], [*unended]):
            assert parsed(form, pieces, is_ended=True) == ("", calls)
            assert parsed(form, pieces)[1] == calls[:1], "an answer that was cut has no arguments"


PAIRS = {name: form.pairs for name, form in TOOL_FORMATS.items() if form.pairs is not None}


def whole(arguments: str) -> Any:
    """What arguments say, or None where they break off."""
    try:
        return json.loads(arguments)
    except ValueError:
        return None


@each_of("name", PAIRS)
def test_values_may_hold_what_ends_values_and_calls(name: str) -> None:
    """Other answers, with ends left out, would look the same."""
    form, pairs = TOOL_FORMATS[name], PAIRS[name]
    begun = f"\n{form.head}add{form.middle}"
    ends = [each for each in (*form.tail.split()[1:], form.closing, begun) if each]
    values = [f"x{pairs.close}{end}{more}" for end in ends for more in ("", " z", begun)]
    values += [f"x{pairs.close} z"]
    if not pairs.is_by_line:
        value = f"{pairs.key}content{pairs.value}y"
        values += [
            f"x{pairs.close}{begun}{form.tail}",
            f"x\n{form.tail}",
            f"x\n{form.tail}{begun}{value}",
            f"x\n{pairs.key}path{pairs.value}y",
        ]
        values += [f'x\n{form.head}\n{{"name": "f"}}\n{form.tail}\n{form.head}\n{{}}\n{form.tail}']
    schemas = {
        "add": {"type": "object", "properties": {key: {"type": "string"} for key in ("content", "path")}}
    }
    for value in values:
        calls = [("add", {"content": value, "path": "a.md"}), ("get_weather", {"content": value})]
        answer = written(name, calls)
        for pieces in ([answer], [*answer]):
            content, found = parsed(form, pieces, schemas, is_ended=True)
            assert (content, [(each, whole(arguments)) for each, arguments in found]) == ("", calls), value


@each_of("name", PAIRS)
@each_of("value", [5, "5 </tool_call> or </invoke>", ""])
def test_the_last_call_may_lack_an_end_where_the_model_ends(name: str, value: Any) -> None:
    schemas = {
        "add": {"type": "object", "properties": {"x": {"type": "string" if value != 5 else "integer"}}}
    }
    form, pairs = TOOL_FORMATS[name], PAIRS[name]
    calls = [("add", {"x": value}), ("add", {"x": value})]
    before, behind = written(name, calls).rsplit(pairs.close, 1)
    unclosed = f"{before.removesuffix(pairs.margin)}\n{behind.lstrip()}"
    answers = [unclosed, unclosed + "\n", unclosed.removesuffix(form.closing.strip()).rstrip()]
    if late := behind.replace(form.tail.split()[0], "", 1).strip():
        answers += [f"{before}{pairs.close}{late}", f"{before}{pairs.close}\n{late}\n"]
    for answer in answers:
        content, found = read(name, answer, schemas, is_ended=True)
        assert content.strip() == ""
        assert [(each, whole(arguments)) for each, arguments in found] == calls, answer
        is_certain = pairs.is_by_line and answer in answers[: 3 if name != "minimax_m2" else 2]
        _, [_, (_, arguments)] = read(name, answer, schemas)
        assert whole(arguments) == (calls[1][1] if is_certain else None), "a cut answer is cut visibly"


@each_of("name", PAIRS)
@each_of("value", [5, "5", ""])
def test_a_call_may_end_behind_its_last_value_where_the_model_ends(name: str, value: Any) -> None:
    """As where its end is a text at which the client lets the answer stop."""
    kind = "integer" if value == 5 else "string"
    schemas = {"add": {"type": "object", "properties": {key: {"type": kind} for key in ("x", "y")}}}
    close, calls = PAIRS[name].close, [("add", {"x": value}), ("add", {"x": value, "y": value})]
    answer = written(name, calls)
    closed = answer[: answer.rindex(close) + len(close)]
    twice = closed + closed[closed.rindex(PAIRS[name].key) :]  # the last value is passed over
    for ended in (closed, f"{closed}\n", closed + answer[len(closed) :].rstrip()[:3], twice):
        content, found = read(name, ended, schemas, is_ended=True)
        assert (content, [(each, whole(arguments)) for each, arguments in found]) == ("", calls), ended
        assert whole(read(name, ended, schemas)[1][1][1]) is None, "a cut answer is cut visibly"


@each_of("name", [*PAIRS, "gemma4"])
def test_a_value_that_is_no_text_and_has_no_end_becomes_content(name: str) -> None:
    kinds = {"n": {"type": "integer"}, "s": {"type": "string"}}
    schemas = {"add": {"type": "object", "properties": kinds}}
    call, close = written(name, [("add", {"n": 5})]), "}" if name == "gemma4" else PAIRS[name].close
    margin = "" if name == "gemma4" else PAIRS[name].margin
    cut_off = call[: call.index(margin + close)]
    answer = f"{cut_off}\n\nI did it."
    content, found = read(name, answer, schemas, is_ended=True)
    assert (content.strip(), found) == ("5\n\nI did it.", [("add", '{"n": ')])
    assert read(name, answer, schemas) == ("", found), "an answer that was cut has no more text"
    call = written(name, [("add", {"s": "It"})])
    assert read(name, call[: call.index("It") + 2], schemas, is_ended=True) == ("", [("add", '{"s": "It')])


@each_of("name", PAIRS)
def test_a_key_is_as_long_in_a_stream_as_in_a_whole_answer(name: str) -> None:
    for size in (LONGEST_KEY, LONGEST_KEY + 1):
        _, [(_, arguments)] = read(name, written(name, [("add", {"k" * size: "x"})]))
        assert arguments == ('{"%s": "x"}' % ("k" * size) if size == LONGEST_KEY else "{}")


@each_of("name", ["glm45", "hy_v3", "qwen3_coder", "minimax_m2"])
def test_a_value_with_ends_in_it_has_no_further_one_by_the_answer_s_end(name: str) -> None:
    """It may as well be several calls that lack their ends."""
    form, pairs = TOOL_FORMATS[name], PAIRS[name]
    answer = written(name, [("add", {"s": "a"}), ("add", {"s": "b"})])
    end = form.tail.split()[0] if pairs.is_by_line else pairs.close
    _, [(_, arguments)] = read(name, answer.replace(end, ""), is_ended=True)
    assert whole(arguments) is None
    assert read(name, answer.replace(end, ""), is_ended=False)[1] == [("add", arguments)]
    for calls in (answer, answer[: answer.rindex(pairs.close) + len(pairs.close)]):
        _, [*_, (_, arguments)] = read(name, calls.replace(form.tail.split()[0], ""), is_ended=True)
        assert whole(arguments) is None


def test_gemmas_texts_in_double_quotes_leave_as_they_come() -> None:
    parser = ToolParser(TOOL_FORMATS["gemma4"], NAMES)
    parser.push('<|tool_call>call:add{s:"')
    for piece in ("abcd", "<tool_call|>", "\n", "\\n", "\\", '"', "\\u00", "e9", "\\x"):
        held_back = piece in ("\\", "\\u00")
        assert bool(parser.push(piece).calls) != held_back
    answer = '<|tool_call>call:add{s:"a\n\\u00e9\\ud83d\\ude00 \\x",t:"'
    content, [(_, arguments)] = read("gemma4", answer)
    assert (content, json.loads(arguments + '"}')) == ("", {"s": "a\né😀 \\x", "t": ""})


class Counted:
    """A pattern that counts the characters in which it is sought."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern, self.num_sought = pattern, 0

    def search(self, text: str, at: int) -> re.Match[str] | None:
        self.num_sought += len(text) - at
        return self.pattern.search(text, at)


@each_of("begin, place", [("{s:", "_word_end"), ("{", "_key_end")])
def test_gemmas_bare_words_are_sought_through_once(begin: str, place: str) -> None:
    reader = BareReader('<|"|>', "<tool_call|>")
    at = reader.read(begin)[0]
    counted = Counted(getattr(reader, place))
    setattr(reader, place, counted)
    held = begin[at:]
    for _ in range(1000):
        held += "abcd"
        assert reader.read(held) == (0, "")
    assert counted.num_sought < 8 * len(held)


@each_of(
    "name, answer, num_calls",
    [
        ("pythonic", "[add(x=1), nope(a=1), get_weather()]", 2),
        ("pythonic", "[nope(a=')]'), other(), get_weather()]", 1),
        ("pythonic", "\n [f(x) for x in y]\n", 0),
        ("pythonic", "[f(x), and more", 0),
        ("llama3_json", '{"name": "nope", "parameters": {"a": "}"}}; {"name": "add", "parameters": {}}', 1),
        ("llama3_json", '{"name": "nope", "parameters": {"a": 1}, "more": [2]}\nSo.', 0),
        ("llama3_json", '[{"name": "nope", "parameters": {}}, {"parameters": {}, "name": "add"}]', 1),
    ],
)
def test_a_call_of_what_is_no_tool_is_passed_over(name: str, answer: str, num_calls: int) -> None:
    content, found = read(name, answer)
    assert len(found) == num_calls
    assert not (num_calls and content.endswith("}]")), "the end of a call is not shown"
    assert content.strip() == answer.strip() if not num_calls else "nope(" in content or '"nope"' in content


@each_of("name, call", [("llama3_json", '{"name": "Bob", "arguments": {"x": 1}}'), ("pythonic", "[f(x)")])
@each_of("end", [";", ",", "\n", " ", "; ", "]\n", "\n" * 2 * MOST_SPACE])
def test_what_stands_behind_no_call_is_shown(name: str, call: str, end: str) -> None:
    assert read(name, call + end) == (call + end, [])
    known = '{"name": "add", "arguments": {}}; ' if name == "llama3_json" else "[add(), "
    content, found = read(name, known + call.removeprefix("[") + end)
    assert content.endswith(call.removeprefix("[") + end)
    assert len(found) == 1


def test_nothing_of_an_unknown_call_is_kept() -> None:
    parser = ToolParser(TOOL_FORMATS["pythonic"], NAMES)
    for piece in ("[nope(", "a=1, ", "b='", "x" * 1000):
        assert parser.push(piece).content == piece
    assert (parser._keywords, parser._held) == ([], "")


def test_calls_of_llama_may_stand_in_a_list_and_end_with_a_semicolon() -> None:
    calls = ['{"name": "add", "parameters": {"x": 1}}', '{"parameters": {"x": 1}, "name": "get_weather"}']
    right = ("", [("add", '{"x": 1}'), ("get_weather", '{"x": 1}')])
    assert read("llama3_json", f"[{', '.join(calls)}]") == right
    assert read("llama3_json", f"[{', '.join(calls[::-1])}]") == ("", right[1][::-1])
    assert read("llama3_json", f"[\n{calls[0]}\n]") == ("", right[1][:1])
    assert read("llama3_json", "; ".join([*calls, ""])) == right
    assert read("llama3_json", f"{calls[0]};\nSo.") == (";\nSo.", right[1][:1])
    assert read("llama3_json", '[{"a": 1}]') == ('[{"a": 1}]', [])


@each_of(
    "kind, value, meant",
    [
        ("float", "2.5", 2.5),
        ("uint8", "5", 5),
        ("bool", "True", True),
        ("dict[str, int]", '{"a": 1}', {"a": 1}),
        ("List", "[1]", [1]),
        ("str", "5", "5"),
        ("double", "2.5", 2.5),
        ("short", "5", 5),
        ("unsigned int", "5", 5),
        ("binary", "true", True),
        ("any", "5", 5),
        ("any", "5 m", "5 m"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("varchar(20)", "[1]", "[1]"),
        ("char", "5", "5"),
        ("enum", "true", "true"),
        ("date", "2024", "2024"),
        (["int", "str"], "5", 5),
    ],
)
def test_types_may_have_the_names_that_other_languages_have(kind: Any, value: str, meant: Any) -> None:
    schemas = {"add": {"type": "object", "properties": {"x": {"type": kind}}}}
    _, [(_, arguments)] = read("qwen3_coder", written("qwen3_coder", [("add", {"x": value})]), schemas)
    assert json.loads(arguments) == {"x": meant}
