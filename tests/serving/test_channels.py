"""The parts of an answer on gpt-oss' channels are separated as openai-harmony does, however it is cut.

harmony_answers.jsonl holds 150 made answers, and for each the messages (channel, recipient, text) that
openai-harmony 0.0.8's own parser found in it, of the tokens of its own encoding.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from borders.refusal import BadRequest
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError
from serving.grammars.matching import Grammars
from serving.offline import Job, read_jobs
from serving.text.chat_options import ChatOptions
from serving.text.request_fields import parse_request, text_options
from serving.text.tokenizer import Text
from serving.tools.channels import HARMONY, LONGEST_HEAD, ChannelParser
from serving.tools.parsing import MOST_SPACE
from tests.each_of import each_of
from tests.serving.channel_model import write_model
from tests.serving.test_tool_grammars import SCHEMA, tool
from tests.serving.test_tool_parsing import NAMES, Calls, cut

THINKS = "<|channel|>analysis<|message|>"
SAYS = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
BEGIN = "<|start|>assistant"


def parsed(pieces: list[str], prompt: str = BEGIN, *, is_ended: bool = False) -> tuple[str, str, Calls]:
    """Thoughts, content and calls, by the sum of what comes for these pieces."""
    parser, thoughts, content, calls = ChannelParser(HARMONY, NAMES, prompt), "", "", list[list[str]]()
    for each in [*map(parser.push, pieces), parser.finish(is_ended=is_ended)]:
        thoughts, content = thoughts + each.thoughts, content + each.content
        for delta in each.calls:
            if delta.name is not None:
                assert delta.index == len(calls), "a name comes first, and once"
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments
    assert parser.num_calls == len(calls)
    return thoughts, content, [(name, text) for name, text in calls]


def meant(messages: list[list[str | None]]) -> tuple[str, str, Calls]:
    """The same, of the messages that openai-harmony found."""
    said: dict[bool, list[str]] = {True: [], False: []}
    calls: Calls = []
    for channel, recipient, text in messages:
        if recipient is not None:
            calls.append((recipient.removeprefix("functions."), (text or "").lstrip()))
        elif text:
            said[channel == "analysis"].append(text)
    return "\n".join(said[True]), "\n".join(said[False]), calls


def test_messages_are_those_that_openai_harmony_finds() -> None:
    lines = (Path(__file__).parent / "harmony_answers.jsonl").read_text(encoding="utf-8").splitlines()
    rng = random.Random(2)
    for answer, messages in map(json.loads, lines):
        for pieces in ([answer], list(answer), cut(answer, rng)):
            assert parsed(pieces) == meant(messages), answer
    assert len(lines) == 150


def made(rng: random.Random) -> str:
    """An answer whose messages, heads and calls may be spoilt."""
    marks = [*HARMONY.marks, BEGIN, "<|start|>user<|message|>", " to=functions.add", "json", "<|", "\n"]
    words = ["So ", "天气", " \n", "{", '"}', "to", *marks]
    heads = [head for name in (*NAMES, "unknown") for head in HARMONY.call_heads(name)]
    answer = ""
    for _ in range(rng.choice((0, 1, 2, 2, 3))):
        text = "".join(rng.choice(words) for _ in range(rng.randrange(4)))
        head = rng.choice([THINKS, SAYS, "<|channel|>commentary<|message|>", *rng.sample(heads, 3)])
        message = head + (text if head not in heads else rng.choice(["", " "]) + '{"a": "}<|"}')
        part = message + rng.choice([NEXT, NEXT, "<|call|>" + BEGIN, *marks])
        answer += part if rng.random() < 0.7 else part[: rng.randrange(len(part))]
    return answer


def test_no_way_to_cut_an_answer_changes_what_is_found() -> None:
    rng, num_calls = random.Random(19), 0
    for _ in range(1000):
        answer, prompt = made(rng), rng.choice([BEGIN, BEGIN, "", BEGIN + THINKS, BEGIN + SAYS + "So"])
        whole = parsed([answer], prompt)
        num_calls += len(whole[2])
        assert parsed(list(answer), prompt) == whole, answer
        assert parsed(cut(answer, rng), prompt) == whole, answer
    assert num_calls > 100


@pytest.mark.parametrize("head", HARMONY.call_heads("add"))
def test_a_call_is_found_as_models_and_templates_write_it(head: str) -> None:
    answer = f'{THINKS}Look.{NEXT}{head}{{"x": "<|}}"}}'
    assert parsed([answer]) == ("Look.", "", [("add", '{"x": "<|}"}')])
    unknown = answer.replace("functions.add", "functions.other")
    assert parsed([unknown]) == ("Look.", unknown.partition("<|end|>")[2], [])


@each_of(
    "answer, content",
    [
        ("Hello", "Hello"),
        ("to be", "to be"),
        ("json<|message|>a", None),
        ("<|channel|>" + "a" * LONGEST_HEAD + "<|message|>a", None),
        (SAYS + "a <|chan", "a <|chan"),
        (SAYS + "a" + NEXT + SAYS + "b", "a\nb"),
        ("<|channel|>final", ""),
        ("<|channel|>commentary to=functions.add <|constrain|>", ""),
        (HARMONY.call_heads("add")[0], ""),
        (SAYS + "a" + NEXT, "a"),
        ("<|channel|>final oh no<|message|>a", "<|channel|>final oh no<|message|>a"),
        (HARMONY.call_heads("add")[0] + "[1]<|call|>", HARMONY.call_heads("add")[0] + "[1]<|call|>"),
        (HARMONY.call_heads("add")[0] + " " * (MOST_SPACE + 1), None),
        ("<|channel|>" + "a" * LONGEST_HEAD, None),
    ],
)
def test_what_is_no_message_is_given_back_and_what_is_none_yet_says_nothing(
    answer: str, content: str | None
) -> None:
    assert parsed([answer]) == parsed([*answer]) == ("", answer if content is None else content, [])


@pytest.mark.parametrize("head", HARMONY.call_heads("add"))
def test_a_call_without_arguments_is_one_where_the_model_has_ended_it(head: str) -> None:
    for space in ("", " \n"):
        call = head + space
        assert parsed([call], is_ended=True) == parsed([*call], is_ended=True) == ("", "", [("add", "{}")])
        assert parsed([call]) == parsed([*call]) == ("", "", [])
        for end in HARMONY.ends:
            found = ("", "", [("add", "{}")])
            assert parsed([call + end]) == parsed([*call, *end]) == parsed([call, end]) == found
        assert parsed([call + "<|x"], is_ended=True) == parsed([*call, *"<|x"]) == ("", call + "<|x", [])
        assert parsed([call + "<|"], is_ended=True) == parsed([*call, *"<|"]) == ("", call + "<|", [])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    loaded = Text.load(write_model(tmp_path_factory.mktemp("channels")), "harmony", "harmony")
    assert loaded is not None
    return loaded


def asked(text: Text, **fields: Any) -> str | None:
    talk = [{"role": "user", "content": "a"}]
    return parse_request({"id": "0", "messages": talk, **fields}, text).params.grammar


def takes(text: Text, grammar: str | None, answer: str) -> bool:
    assert grammar is not None
    ends = [text.encode(each, add_special_tokens=False)[0] for each in ("<|return|>", "<|call|>")]
    matcher = Grammars(lambda: text, text.vocab_size, ends).beginning(grammar)
    tokens = text.encode(answer, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


FORM: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOLS = [tool("add", parameters=SCHEMA, strict=True), tool("get_weather")]


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": FORM}, '{"y": "a"}', '{"y": "c"}'),
        ({"guided_regex": "a+b"}, "aab", "aa"),
        ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
        ({"guided_grammar": 'root ::= "x" | "y"'}, "y", "z"),
    ],
)
def test_a_form_begins_behind_the_mark_of_the_final_channel(
    text: Text, fields: dict[str, Any], right: str, wrong: str
) -> None:
    grammar = asked(text, **fields)
    for before in ("", f"{THINKS}{NEXT}", f"{THINKS}So. <|{NEXT}", f"{THINKS}a{NEXT}{THINKS}b{NEXT}"):
        assert takes(text, grammar, f"{before}{SAYS}{right}")
        assert not takes(text, grammar, f"{before}{SAYS}{wrong}")
        assert not takes(text, grammar, before)
        assert parsed([f"{before}{SAYS}{right}"])[1] == right
    assert not takes(text, grammar, right)
    assert not takes(text, grammar, f"<|channel|>commentary<|message|>a{NEXT}{SAYS}{right}")


def test_calls_are_held_to_their_schemas_as_the_parser_finds_them(text: Text) -> None:
    required, free = asked(text, tools=TOOLS, tool_choice="required"), asked(text, tools=TOOLS)
    formed = asked(text, tools=TOOLS, response_format=FORM)
    for head in HARMONY.call_heads("add"):
        for grammar in (required, free, formed):
            assert takes(text, grammar, f'{THINKS}So.{NEXT}{head}{{"y": "a"}}')
            assert takes(text, grammar, f'{head}{{"y": "a"}}')
            assert not takes(text, grammar, f'{head}{{"y": "c"}}')
            assert not takes(text, grammar, head.replace("add", "other") + '{"y": "a"}')
        assert parsed([f'{head}{{"y": "a"}}'])[2] == [("add", '{"y": "a"}')]
    assert takes(text, free, f"<|channel|>commentary<|message|>I look.{NEXT}{SAYS}It is 天气.")
    assert not takes(text, required, f"{SAYS}It is.")
    assert takes(text, formed, f'{SAYS}{{"y": "b"}}')
    assert not takes(text, formed, f"{SAYS}It is b.")
    named = asked(text, tools=TOOLS, tool_choice=tool("add"))
    assert not takes(text, named, HARMONY.call_heads("get_weather")[0] + "{}")
    with pytest.raises(BadRequest, match="both set the form"):
        asked(text, tools=TOOLS, tool_choice="required", response_format=FORM)
    assert asked(text, tools=[tool("get_weather")]) is None
    assert asked(text, tools=TOOLS, tool_choice="none") is None


def test_a_prompt_says_on_which_channel_an_answer_begins(text: Text) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "no"}]
    goes_on = {"messages": talk, "continue_final_message": True, "add_generation_prompt": False}
    request = parse_request({"id": "0", "guided_choice": ["yes"], **goes_on}, text)
    assert takes(text, request.params.grammar, "yes")
    assert not takes(text, request.params.grammar, "no")
    opening = text.since_mark(request.prompt, HARMONY.start)
    assert opening == f"{BEGIN}{SAYS}no"
    assert parsed([f" more{NEXT}{THINKS}b"], opening) == ("b", " more", [])
    ended = parse_request(
        {"id": "0", "guided_choice": ["yes"], "messages": talk[:1], "add_generation_prompt": False}, text
    )
    assert takes(text, ended.params.grammar, f"{BEGIN}{SAYS}yes")
    assert ChannelParser(HARMONY, (), text.since_mark(ended.prompt, HARMONY.start)).place == "between"
    assert parsed(["So." + NEXT + SAYS + "b"], BEGIN + THINKS) == ("So.", "b", [])
    assert text.since_mark(np.array(text.encode("a")), HARMONY.start) == ""


def test_what_was_said_before_a_call_goes_back_as_thoughts(text: Text) -> None:
    function = {"name": "add", "arguments": '{"x": 1}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    head = HARMONY.call_heads("add")[3]
    for said, thought in (({"content": "I look."}, "Hm.\nI look."), ({}, "Hm.")):
        message = {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": calls, **said}
        ids = text.chat([message], ChatOptions())
        assert text.decode(ids, skip_special_tokens=False) == (
            f'{BEGIN}{THINKS}{thought}<|end|>{BEGIN}{head}{{"x": 1}}<|call|>{BEGIN}'
        )


def test_marks_are_seen_by_the_parser_and_never_shown(text: Text) -> None:
    talk = [{"role": "user", "content": "a"}]
    assert not text_options({"messages": talk, "skip_special_tokens": True}, text).skip_special_tokens
    assert text_options({"prompt": "a"}, text).skip_special_tokens
    (job,) = read_jobs([json.dumps({"id": "a", "messages": talk, "max_tokens": 1})], text)
    assert isinstance(job, Job)
    assert not job.options.skip_special_tokens, "in a file, too"


def test_channels_need_their_marks_and_both_keys() -> None:
    with pytest.raises(ValueError, match=r"no control token <\|start\|>; serve a model that writes"):
        Text.load(ROOT / "recipes/tiny/weights", "harmony", "harmony")
    for override in ("server.tool_format=harmony", "server.reasoning=harmony"):
        with pytest.raises(RecipeError, match="set both to harmony, or neither"):
            load("recipes/tiny/cpu.yaml", [override])
