"""A form begins behind the thoughts of an answer, and thoughts end where they must."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from borders.refusal import BadRequest
from continuous_batching.constraints import Constraint, Mask
from continuous_batching.request import Request
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from serving.answers.answers import AnswerDelta
from serving.api.answer_parser import AnswerParser
from serving.grammars.matching import Grammars
from serving.grammars.thinking import Thinking, ThinkingMatcher
from serving.text.request_fields import parse_request
from serving.text.tokenizer import Text
from serving.tools.definitions import tool_use
from serving.tools.formats import THOUGHT_FORMATS, TOOL_FORMATS
from serving.tools.parsing import ReasoningParser
from tests.each_of import each_of
from tests.matchers import Allowing
from tests.serving.test_constrained_schedules import PLAIN, RECIPE, WAYS
from tests.serving.test_tool_parsing import cut

FORM = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 9999}, "is_even": {"type": "boolean"}},
    "required": ["sum", "is_even"],
    "additionalProperties": False,
}
VOCABULARY, BEGIN, END, EOS = 70, 65, 66, 2


class Counting(Allowing):
    """A form of tokens below 10, any number of them; the end token ends it behind the third."""

    vocabulary, end = VOCABULARY, EOS

    def allowed(self) -> set[int]:
        return {*range(3, 10)} | ({EOS} if len(self.tokens) >= 3 else set())

    def forced(self) -> list[int]:
        return [7]


def allowed(tokens: list[int], is_open: bool, budget: int | None, has_form: bool) -> set[int]:
    """What may follow these tokens, by the definition alone."""
    everything = set(range(VOCABULARY))
    block = tokens if is_open else tokens[1:] if tokens[:1] == [BEGIN] else None
    if block is not None and END not in block:
        if budget is not None and len(block) >= budget:
            return {END}
        return everything - {EOS} if has_form else everything
    if not has_form:
        return everything
    answer = tokens if block is None else block[block.index(END) + 1 :]
    form = set(range(3, 10)) | ({EOS} if len(answer) >= 3 else set())
    return form | ({BEGIN} if not tokens and not is_open else set())


def unpacked(mask: Mask | None) -> set[int]:
    if mask is None:
        return set(range(VOCABULARY))
    words = [int(word) & 0xFFFFFFFF for word in mask]
    return {
        token
        for token in range(VOCABULARY)
        if token // 32 < len(words) and words[token // 32] >> token % 32 & 1
    }


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("budget", [None, 0, 4])
@pytest.mark.parametrize("has_form", [True, False])
def test_what_may_come_is_what_the_definition_says(is_open: bool, budget: int | None, has_form: bool) -> None:
    """Along 200 random answers, with guesses that are taken back on the way."""
    draw = random.Random(3)
    thinking = Thinking(BEGIN, END, is_open, budget)
    for _ in range(200):
        matcher = ThinkingMatcher(thinking, Counting() if has_form else None, frozenset({EOS}), VOCABULARY)
        tokens: list[int] = []
        for _ in range(12):
            assert unpacked(matcher.mask()) == allowed(tokens, is_open, budget, has_form)
            guesses = [draw.choice([BEGIN, END, EOS, 3, 5, 40]) for _ in range(draw.randrange(5))]
            possible = 0
            while possible < len(guesses):
                token = guesses[possible]
                if token == EOS or token not in allowed(
                    tokens + guesses[:possible], is_open, budget, has_form
                ):
                    break
                possible += 1
            assert matcher.num_possible(guesses) == possible
            assert all(matcher.consume(token) for token in guesses[:possible])
            matcher.rollback(possible)
            token = draw.choice([BEGIN, END, 3, 4, 40])
            may = token in allowed(tokens, is_open, budget, has_form)
            assert matcher.consume(token) == may
            tokens += [token] * may


def test_the_end_is_forced_and_then_what_the_form_forces() -> None:
    matcher = ThinkingMatcher(Thinking(BEGIN, END, True, 1), Counting(), frozenset({EOS}), VOCABULARY)
    assert matcher.forced() == []
    assert matcher.consume(40)
    assert matcher.forced() == [END]
    assert matcher.consume(END)
    assert matcher.forced() == [7]


def text_with_marks() -> Text:
    """The tiny model's tokenizer, in which "+" and "=" stand around thoughts: it writes both."""
    text = Text.load(ROOT / "recipes/tiny/weights", reasoning="think")
    assert text is not None
    assert text.think_marks == (), "it has no such tokens of its own"
    tokens = text.encode("506+3=509", add_special_tokens=False)
    text.think_marks = tuple(token for token in tokens if text.decode([token]) in ("+", "="))
    assert len(text.think_marks) == 2
    return text


def asked(text: Text) -> list[Request]:
    question = "Ben has 506 books and gets 3 more. How many books does Ben have now?"
    messages = [{"role": "user", "content": question}]
    fields = {"messages": messages, "max_tokens": 160, "temperature": 0, "guided_json": FORM}
    return [
        parse_request({"id": f"{number}", **fields, **each}, text)
        for number, each in enumerate([{}, {"thinking_token_budget": 2}, {"temperature": 1.5, "seed": 3}])
    ]


def answered(way: str, text: Text, opened: bool) -> list[list[int]]:
    built = build(load(RECIPE, [*PLAIN, *WAYS.get(way, ())]))
    scheduler = built.engine.scheduler
    grammars = Grammars(lambda: text, scheduler.vocab_size, scheduler.eos_token_ids)
    requests = asked(text)
    for request in requests:
        grammar = json.loads(request.params.grammar or "null")
        grammar[2]["is_open"] = opened
        request.params = replace(request.params, grammar=json.dumps(grammar))
        grammars.constrain(request)
        built.engine.add(request)
    while built.engine.has_work:
        built.engine.step()
    assert all(isinstance(each.constraint, Constraint) for each in requests)
    assert {each.finish_reason for each in requests} <= {"stop", "length"}
    return [each.answer.tolist() for each in requests]


def test_a_form_begins_behind_the_thoughts_whatever_the_schedule() -> None:
    text = text_with_marks()
    _, end = text.think_marks
    alone = answered("", text, opened=True)
    for tokens, budget in zip(alone, (None, 2, None)):
        at = tokens.index(end) if end in tokens else len(tokens)
        assert budget is None or at <= budget
        if tokens[-1] in text.eos_token_ids:
            jsonschema.validate(json.loads(text.decode(tokens[at + 1 : -1])), FORM)
    assert sum(tokens[-1] in text.eos_token_ids for tokens in alone) >= 2
    assert alone[0][: alone[0].index(end)] == text.encode("506+3", add_special_tokens=False)
    for way in ("suffix", "few pages"):
        assert answered(way, text, opened=True) == alone, way


def test_a_prompt_says_whether_thoughts_are_open() -> None:
    text = text_with_marks()

    def said(prompt: str) -> Thinking | None:
        return text.thinking(np.array(text.encode(prompt)), 5)

    begin, end = text.think_marks
    assert said("12<think>\n") == Thinking(begin, end, is_open=True, budget=5)
    assert said("<think> 12") == Thinking(begin, end, is_open=False, budget=5)
    assert said("<think>\n\n</think>\n\n") is None
    turn = "1<|user|><think> 3<|assistant|>"  # thoughts that go on, and text of others that has a mark
    for prompt, is_open in (
        *(("<think>\n12", True), ("<think></think><think>1\n", True), ("12", False)),
        *(("<think>\n\n</think>\n\n12 <think> 3", False), ("1 <think> 2", False)),
    ):
        assert said(turn + prompt) == Thinking(begin, end, is_open=is_open, budget=5), prompt
        assert text.cuts_thoughts(np.array(text.encode(turn + prompt))) == is_open
    assert said(turn + "<think>1</think> 2") == Thinking(begin, end, is_open=False, budget=5)
    assert not text.cuts_thoughts(np.array(text.encode(turn + "<think>\n")))
    text.think_marks = ()
    assert said("12<think>") is None


def test_a_remark_on_their_length_may_stand_at_the_beginning_of_open_thoughts() -> None:
    text = Text.load(ROOT / "recipes/tiny/weights")
    assert text is not None
    text.thoughts = THOUGHT_FORMATS["seed"]
    for prompt, is_open in (
        ("<seed:think>", True),
        ("<seed:think><seed:cot_budget_reflect>", True),
        ("<seed:think>\n<seed:cot_budget_reflect>\n", True),
        ("<seed:cot_budget_reflect>", False),
        ("<seed:think></seed:think>", False),
    ):
        assert text.opens_thoughts(np.array(text.encode(prompt))) == is_open, prompt


def test_a_budget_is_refused_where_no_thoughts_are_known() -> None:
    text = Text.load(ROOT / "recipes/tiny/weights")
    fields = {"id": "0", "messages": [{"role": "user", "content": "1"}]}
    with pytest.raises(BadRequest, match=r"thinking_token_budget is not supported: the recipe has no server"):
        parse_request(fields | {"thinking_token_budget": 3}, text)
    with pytest.raises(BadRequest, match=r"thinking_token_budget.* from 0 to"):
        parse_request(fields | {"thinking_token_budget": -1}, text_with_marks())
    with pytest.raises(BadRequest, match=r"thinking_token_budget needs messages"):
        parse_request({"id": "0", "prompt": "1<think>", "thinking_token_budget": 3}, text_with_marks())
    plain = parse_request({"id": "0", "prompt": "1", "guided_json": FORM}, text_with_marks())
    assert json.loads(plain.params.grammar or "")[1] == "json", "a prompt of one's own has no turns"


@each_of("name", [*THOUGHT_FORMATS])
def test_a_budget_holds_for_every_format_whose_marks_are_tokens(name: str) -> None:
    text = text_with_marks()
    text.thoughts = THOUGHT_FORMATS[name]
    fields = {"id": "0", "messages": [{"role": "user", "content": "1"}], "thinking_token_budget": 3}
    field, kind, asked = json.loads(parse_request(fields, text).params.grammar or "")
    assert (field, kind, asked["budget"]) == ("thinking_token_budget", "thinking", 3)


def test_thoughts_before_a_form_are_told_apart() -> None:
    text = text_with_marks()
    (request, *_) = asked(text)
    assert AnswerParser(text, request, None).thinks
    text.think_marks = ()
    assert not AnswerParser(text, request, None).thinks


@each_of(
    "form, shown",
    [
        ({"guided_regex": " [a-z]{2,3}"}, " yes"),
        ({"guided_regex": " [a-z]{2,3}", "tools": [], "tool_choice": "none"}, " yes"),
        ({}, "yes"),
    ],
)
@each_of("begin", ["<think>So.</think>", "<think></think>"])
def test_a_form_behind_thoughts_keeps_the_space_with_which_it_begins(
    form: dict[str, Any], shown: str, begin: str
) -> None:
    text = text_with_marks()
    request = parse_request({"id": "0", "messages": [{"role": "user", "content": "1"}], **form}, text)
    for pieces in ([f"{begin} yes"], [*begin, " ", "yes"]):
        parser = AnswerParser(text, request, None)
        parts = [parser.push(0, AnswerDelta(0, each)) for each in pieces]
        parts.append(parser.push(0, AnswerDelta(0, "", finish_reason="stop")))
        said = [each for part in parts for each in part.parts]
        assert "".join(each for each in said if isinstance(each, str)) == shown


CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


@each_of(
    "form, answer",
    [
        ({"guided_regex": " [a-z]{2,3} "}, " yes "),
        ({"guided_choice": [CALL]}, CALL),
        ({"guided_json": {"type": ["array", "object"]}}, f" [{json.dumps(CALL)}]"),
    ],
)
@each_of("begin", ["<think>So.</think>", ""])
def test_a_form_beside_tools_that_may_be_called_is_told_as_it_is(
    form: dict[str, Any], answer: str, begin: str
) -> None:
    text = text_with_marks()
    text.tool_format = TOOL_FORMATS["hermes"]
    tools = {"tools": [{"type": "function", "function": {"name": "add"}}]}
    messages = [{"role": "user", "content": "1"}]
    request = parse_request({"id": "0", "messages": messages, **tools, **form}, text)
    for pieces in ([begin + answer], [*begin, *answer]):
        parser = AnswerParser(text, request, tool_use(tools))
        parts = [parser.push(0, AnswerDelta(0, each)) for each in pieces]
        parts.append(parser.push(0, AnswerDelta(0, "", finish_reason="stop")))
        assert "".join(part.content for part in parts) == answer
        assert not any(part.calls for part in parts)


@each_of("name, mark", [("hunyuan", "answer"), ("ernie", "response")])
def test_marks_of_an_answer_that_its_form_asks_for_are_its_own(name: str, mark: str) -> None:
    text = text_with_marks()
    text.thoughts = THOUGHT_FORMATS[name]
    answer = f"<{mark}> 42\n</{mark}>"
    messages = [{"role": "user", "content": "1"}]
    for form, shown in (({"guided_choice": [answer]}, answer), ({}, "42")):
        request = parse_request({"id": "0", "messages": messages, **form}, text)
        for pieces in ([f"<think>So.</think>{answer}"], [*"<think>So.</think>", *answer]):
            parser = AnswerParser(text, request, None)
            parts = [parser.push(0, AnswerDelta(0, each)) for each in pieces]
            parts.append(parser.push(0, AnswerDelta(0, "", finish_reason="stop")))
            assert "".join(part.content for part in parts) == shown


@each_of(
    "answer, shown",
    [
        ("<{0}>\nIt is.\n</{0}>\n", "It is."),
        ("<{0}>\n    if it:\n        is()\n</{0}>", "    if it:\n        is()"),
        ("<{0}>Write <{0}>42</{0}> so.\n</{0}>", "Write <{0}>42</{0}> so."),
        ("<{0}>Write </{0}> </{0}>", "Write </{0}>"),
        ("<{0}>It </{0}> is", "It </{0}> is"),
        ("<{0}>It is.</{0}>\n" + CALL, "It is."),
        ("<{0}>It </{0}> is. " + CALL + "</{0}>", "It </{0}> is. "),
    ],
)
@each_of("name, mark", [("hunyuan", "answer"), ("ernie", "response")])
def test_an_answer_ends_at_the_mark_that_nothing_follows(
    name: str, mark: str, answer: str, shown: str
) -> None:
    text = text_with_marks()
    text.thoughts, text.tool_format = THOUGHT_FORMATS[name], TOOL_FORMATS["hermes"]
    tools = {"tools": [{"type": "function", "function": {"name": "add"}}]}
    request = parse_request({"id": "0", "messages": [{"role": "user", "content": "1"}], **tools}, text)
    whole = "<think>So.</think>\n" + answer.replace("{0}", mark)
    for pieces in ([whole], [*whole]):
        parser = AnswerParser(text, request, tool_use(tools))
        parts = [parser.push(0, AnswerDelta(0, each)) for each in pieces]
        parts.append(parser.push(0, AnswerDelta(0, "", finish_reason="stop")))
        assert "".join(part.content for part in parts) == shown.replace("{0}", mark)
        assert any(part.calls for part in parts) == (CALL in answer)


def parsed(pieces: list[str], *, is_open: bool) -> tuple[str, str]:
    parser = ReasoningParser(is_open=is_open)
    parts = [*map(parser.push, pieces), parser.finish()]
    return "".join(each[0] for each in parts), "".join(each[1] for each in parts)


@each_of(
    "answer, is_open, thoughts, text",
    [
        ("<think>\nSo.\n\nYes.\n</think>\n\nIt is 42.", False, "So.\n\nYes.", "It is 42."),
        ("So.\n</think>\n\nIt is 42.", True, "So.", "It is 42."),
        ("<think>\n\n</think>\n\nIt is.", False, "", "It is."),
        ("<think>So", False, "So", ""),
        ("So </thin", True, "So </thin", ""),
        ("It is <think>.</think> so", False, "", "It is <think>.</think> so"),
        (" \n<think>a</think> b </think> c\n", False, "a", "b </think> c\n"),
        (" It", False, "", " It"),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
        ("<think>\nSo.</think>It is.", True, "So.", "It is."),
        (" \n<think></think>It is.", True, "", "It is."),
        ("<think>", True, "", ""),
        ("<thi", True, "<thi", ""),
        ("\n<thin air></think>It is.", True, "<thin air>", "It is."),
        ("</think>It is.", True, "", "It is."),
        ("So <think> a.</think>It is.", True, "So <think> a.", "It is."),
        ("<think>\nSo.\n</think>\n\n    if it:\n        is()", False, "So.", "    if it:\n        is()"),
        ("    So.\n</think> \n \n", True, "So.", ""),
    ],
)
def test_a_block_is_found_however_it_is_cut(answer: str, is_open: bool, thoughts: str, text: str) -> None:
    rng = random.Random(3)
    for pieces in ([answer], list(answer), *(cut(answer, rng) for _ in range(20))):
        assert parsed(pieces, is_open=is_open) == (thoughts, text)
