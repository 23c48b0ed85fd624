"""Calls that models write by their own templates are read as they were meant, however spoilt and cut.

The templates of call_templates.py are the judges: a turn is written by one, spoilt by an edit whose right
reading is known, and read whole, byte by byte and in drawn pieces. The grammar of each format takes what the
template writes, and the parser finds valid calls in everything that the grammar takes.
"""

from __future__ import annotations

import codecs
import functools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from continuous_batching.request import Request
from serving.answers.answers import AnswerDelta
from serving.api.answer_parser import AnswerParser
from serving.grammars.matching import Grammars
from serving.text.tokenizer import Text
from serving.tools.channels import HARMONY
from serving.tools.definitions import tool_use
from serving.tools.formats import THOUGHT_FORMATS, TOOL_FORMATS
from tests.each_of import each_of
from tests.serving.call_templates import (
    CALLS,
    KEYWORDS,
    PAIRS,
    REASONING,
    SCHEMAS,
    THOUGHTS,
    TOOLS,
    WHOLE,
    Turn,
    Ways,
    of_bytes,
    render,
    turn,
)
from tests.serving.conftest import write_settings
from tests.thorough import cases, first_quick

NUM_TURNS = cases(10, 1000)
# The end of all calls, which models forget
CLOSINGS = {
    "mistral": "]",
    "deepseek": "<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁end｜>",
    "deepseek_v32": "</｜DSML｜function_calls>",
    "kimi_k2": "<|tool_calls_section_end|>",
    "minimax_m2": "</minimax:tool_call>",
    "hy_v3": "</tool_calls>",
    "hunyuan_a13b": "]</tool_calls>",
    "olmo3": "</function_calls>",
    "pythonic": "]",
}
WRAPS = {"llama3_json": ("<|python_tag|>", ""), "pythonic": ("<|python_start|>", "<|python_end|>")}
LINES = {"qwen3_coder": "<parameter=", "seed_oss": "<parameter=", "minimax_m2": "<parameter name="}


@dataclass
class Read:
    """What an answer says."""

    thoughts: str
    content: str
    calls: list[list[Any]]  # each has name, arguments and id


def parser_of(
    form: str, *, is_open: bool = False, is_held: bool = False, grammar: str | None = None
) -> AnswerParser:
    """The product's parser of answers to a request with the tools, without a tokenizer."""
    is_harmony = form == "harmony"
    text = SimpleNamespace(
        tool_format=TOOL_FORMATS.get(form),
        channels=HARMONY if is_harmony else None,
        thoughts=THOUGHT_FORMATS.get(REASONING.get(form, "think")),
        think_marks=(1, 2),
        opens_thoughts=lambda prompt: is_open,
        cuts_thoughts=lambda prompt: False,
        since_mark=lambda prompt, mark: "<|start|>assistant",
        control_tokens=lambda names: {},
    )
    grammar = json.dumps(["tools", "lark", ""]) if is_held else grammar
    request = SimpleNamespace(id="chatcmpl-1", params=SimpleNamespace(grammar=grammar), prompt=None)
    return AnswerParser(cast(Text, text), cast(Request, request), tool_use({"tools": TOOLS}))


def read(
    form: str, pieces: list[str], *, is_open: bool = False, is_held: bool = False, reason: str = "stop"
) -> Read:
    """The sum of what the parser gives for these pieces, which end for this reason."""
    parser, found = parser_of(form, is_open=is_open, is_held=is_held), Read("", "", [])
    for number, piece in enumerate(pieces):
        is_last = number == len(pieces) - 1
        parsed = parser.push(0, AnswerDelta(0, piece, finish_reason=reason if is_last else None))
        assert len({call.index for call in parsed.calls}) == len(parsed.calls), "a call has one entry"
        found.thoughts += parsed.thoughts
        found.content += parsed.content
        for call in parsed.calls:
            if call.name is not None:
                assert call.index == len(found.calls), "a name comes first, and once"
                found.calls.append([call.name, "", call.id])
            assert call.index == len(found.calls) - 1, "calls come one after the other"
            found.calls[-1][1] += call.arguments
    return found


def cuts(answer: str, rng: random.Random) -> Iterator[list[str]]:
    """The pieces of an answer: byte by byte, and in drawn ones, as a server decodes them."""
    data = answer.encode()
    for drawn in ((1,), (1, 2, 3, 5, 8, 40), (30, 200)):
        decode, pieces, at = codecs.getincrementaldecoder("utf-8")().decode, [], 0
        while at < len(data):
            size = rng.choice(drawn)
            pieces.append(decode(data[at : at + size]))
            at += size
        yield pieces or [""]


def words(text: str) -> list[str]:
    """White space around calls, thoughts and answers has no meaning."""
    return text.split()


def agree(form: str, answer: str, rng: random.Random, **how: Any) -> Read:
    """What the whole answer says, which it says in pieces, too."""
    whole = read(form, [answer], **how)
    for pieces in cuts(answer, rng):
        assert read(form, pieces, **how) == whole, answer
    return whole


def called(found: Read) -> list[dict[str, Any]]:
    """The calls, whose arguments are JSON without a key twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs)
        return dict(pairs)

    return [
        {"name": name, "arguments": json.loads(text, object_pairs_hook=once)} for name, text, _ in found.calls
    ]


def holds_tags(said: Turn) -> bool:
    """Whether a value has what ends values in some format, which no grammar lets a text contain."""
    return any(tag in json.dumps(said.calls) for tag in ("</parameter>", "</arg_value>"))


class Twice(dict[str, Any]):
    """Arguments that are written with their first key again at the end."""

    def items(self) -> Any:
        pairs = [*super().items()]
        return [*pairs, *((key, "again") for key, _ in pairs[:1])]


Edit = Callable[[str, random.Random], tuple[Turn, str]]


def plain(form: str, rng: random.Random) -> tuple[Turn, str]:
    said = turn(form, rng)
    return said, render(form, said)


def other_space(form: str, rng: random.Random) -> tuple[Turn, str]:
    said = turn(form, rng)
    nl = (
        rng.choice(("", " ", "\n\n", "\r\n", " \n\t"))
        if form not in KEYWORDS
        else rng.choice(("\n\n", "\r\n"))
    )
    return said, render(form, said, Ways(nl=nl, spaces=rng.choice(((",", ":"), (" , ", " : ")))))


def text_behind(form: str, rng: random.Random) -> tuple[Turn, str]:
    said = turn(form, rng)
    if form not in (*WHOLE, "harmony"):
        said.behind = rng.choice(("\nDone.", " {x} [y] <z>", "\n\n"))
    return said, render(form, said)


def unclosed_block(form: str, rng: random.Random) -> tuple[Turn, str]:
    said = turn(form, rng)
    return said, render(form, said).removesuffix(CLOSINGS.get(form, "")) if said.calls else render(form, said)


def unclosed_value(form: str, rng: random.Random) -> tuple[Turn, str]:
    said, begin = turn(form, rng), LINES.get(form)
    gap = "" if form == "qwen3_coder" else "\n"
    text = render(form, said)
    return said, text if begin is None else text.replace(f"</parameter>\n{begin}", f"{gap}{begin}")


def python_words(form: str, rng: random.Random) -> tuple[Turn, str]:
    said = turn(form, rng)
    return said, render(form, said, Ways(words="python"))


def key_twice(form: str, rng: random.Random) -> tuple[Turn, str]:
    said = turn(form, rng)
    if form not in PAIRS:
        return said, render(form, said)
    doubled = [each | {"arguments": Twice(each["arguments"])} for each in said.calls]
    return said, render(form, replace(said, calls=doubled))


def unknown(form: str, rng: random.Random) -> tuple[Turn, str]:
    said = turn(form, rng)
    for each in said.calls:
        each["name"] = "unknown"
    return said, render(form, said)


def by_own_id(form: str, rng: random.Random) -> tuple[Turn, str]:
    said = turn(form, rng)
    text = render(form, said, Ways(call_id="[CALL_ID]a1B2c3D4e"))
    return said, text.replace("functions.", "") if form == "kimi_k2" else text


def wrapped(form: str, rng: random.Random) -> tuple[Turn, str]:
    said = turn(form, rng, num_calls=1)
    begin, end = WRAPS.get(form, ("", ""))
    said.thoughts = said.thoughts if not begin else None
    return said, begin + render(form, said) + end


def open_thoughts(form: str, rng: random.Random) -> tuple[Turn, str]:
    said = turn(form, rng, num_calls=rng.choice((1, 2)))
    if form == "harmony":
        return said, render(form, said)
    said.says, said.is_open, said.thoughts = "", True, said.thoughts or "Hm."
    return said, render(form, said)


EDITS: dict[str, Edit] = {
    "none": plain,
    "other white space": other_space,
    "text behind the calls": text_behind,
    "no end of all calls": unclosed_block,
    "no end of a value": unclosed_value,
    "Python's constants": python_words,
    "a key twice": key_twice,
    "ids": by_own_id,
    "a wrap": wrapped,
    "calls in open thoughts": open_thoughts,
}
FORMS = list(CALLS)


@pytest.mark.parametrize("form", FORMS)
@each_of("edit", EDITS)
def test_calls_thoughts_and_text_are_those_of_the_template(form: str, edit: str) -> None:
    rng = random.Random(f"{form} {edit}")
    for _ in range(-(-NUM_TURNS // len(EDITS))):
        said, answer = EDITS[edit](form, rng)
        found = agree(form, answer, rng)
        assert called(found) == said.calls, answer
        assert words(found.thoughts) == words(said.thoughts or ""), answer
        assert words(found.content) == words(said.says + said.behind), answer
        if edit == "ids" and form == "mistral_v11":
            for at, each in enumerate(found.calls):
                assert each[2] == (None if at else "a1B2c3D4e"), "an id is the first call's that has it"
        if form == "kimi_k2" and edit == "none":
            ids = [f"functions.{each['name']}:{said.first + at}" for at, each in enumerate(said.calls)]
            assert [each[2] for each in found.calls] == ids


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_that_breaks_off_has_what_came(form: str) -> None:
    rng = random.Random(f"{form} broken off")
    for _ in range(NUM_TURNS):
        said = turn(form, rng, num_calls=rng.choice((1, 2)))
        answer = render(form, said)
        if form in PAIRS and holds_tags(said):
            continue  # the value may have ended behind a tag within it
        most = len(answer) - (len("<|call|>") if form == "harmony" else 0)  # a token comes whole
        found = agree(form, answer[: rng.randrange(most)], rng, reason="length")
        names = [each["name"] for each in said.calls]
        assert [each[0] for each in found.calls] == names[: len(found.calls)]
        assert called(Read("", "", found.calls[:-1])) == said.calls[: max(0, len(found.calls) - 1)]
        for (_, text, _), call in zip(found.calls[-1:], said.calls[len(found.calls) - 1 :]):
            assert json.dumps(call["arguments"], ensure_ascii=False).startswith(text), answer
        assert " ".join(words(said.thoughts or "")).startswith(" ".join(words(found.thoughts))[:-12])


@pytest.mark.parametrize("form", first_quick(8, FORMS))
def test_calls_of_what_is_no_tool_stay_text(form: str) -> None:
    rng = random.Random(f"{form} unknown")
    for _ in range(NUM_TURNS):
        said, answer = unknown(form, rng)
        found = agree(form, answer, rng)
        assert found.calls == []
        assert words(found.thoughts) == words(said.thoughts or "")
        bare = render(form, replace(said, thoughts=None))
        if form not in ("harmony", "hunyuan_a13b"):
            assert words(found.content) == words(bare), answer


@pytest.mark.parametrize("form", first_quick(8, FORMS))
def test_thoughts_that_the_prompt_has_opened(form: str) -> None:
    rng = random.Random(f"{form} opened")
    for _ in range(NUM_TURNS if form != "harmony" else 0):
        said = turn(form, rng)
        said.thoughts, said.is_open = "So.\nI see.", bool(said.calls) and rng.random() < 0.5
        said.says = "" if said.is_open else said.says
        begin = render(form, said).partition("So.")[0]
        found = agree(form, render(form, said).removeprefix(begin), rng, is_open=True)
        assert (called(found), words(found.thoughts)) == (said.calls, ["So.", "I", "see."])
        assert words(found.content) == words(said.says)


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_a_call_that_breaks_off_in_thoughts_is_given_once(form: str) -> None:
    """Its rest is certain when the thoughts end, and further pieces of the answer add nothing to it."""
    rng = random.Random(f"{form} unfinished")
    for _ in range(NUM_TURNS):
        said = turn(form, rng, num_calls=1)
        said.thoughts, said.says = None, ""
        call = render(form, said)
        answer = f"x\n{call[: rng.randrange(len(call))]}</think>abcdef"
        _, end = THOUGHTS[REASONING.get(form, "think")]
        answer = answer.replace("</think>", end)
        found = agree(form, answer, rng, is_open=True)
        assert found.content.endswith("abcdef"), answer
        assert found.thoughts.startswith("x")


@pytest.mark.parametrize("form", PAIRS)
def test_a_call_whose_end_is_missing_is_whole_where_the_thoughts_end(form: str) -> None:
    """They end by their mark, however the answer goes on, or by the model's own stop."""
    name, pairs = next(iter(SCHEMAS)), TOOL_FORMATS[form].pairs
    assert pairs is not None
    said = Turn(None, "", [{"name": name, "arguments": {"city": "x"}}])
    call = render(form, said).rpartition(pairs.close)[0] + pairs.close
    end = THOUGHTS[REASONING.get(form, "think")][1]
    for answer, reason in ((f"{call}\n{end}It", "length"), (f"{call}\n{end}It", "stop"), (call, "stop")):
        found = agree(form, f"Hm.\n{answer}", random.Random(form), is_open=True, reason=reason)
        assert (called(found), found.thoughts.strip()) == (said.calls, "Hm."), answer
    ((_, arguments, _),) = agree(form, call, random.Random(form), is_open=True, reason="length").calls
    assert arguments == '{"city": "x"', "an answer that is cut has no end"


@pytest.mark.parametrize("form", first_quick(2, PAIRS))
def test_a_call_is_cut_visibly_where_a_budget_ends_the_thoughts(form: str) -> None:
    name, pairs = next(iter(SCHEMAS)), TOOL_FORMATS[form].pairs
    assert pairs is not None
    call = render(form, Turn(None, "", [{"name": name, "arguments": {"city": "x"}}]))
    answer = f"{call.rpartition(pairs.close)[0]}{pairs.close}\n{THOUGHTS[REASONING.get(form, 'think')][1]}It"
    for is_open, mark in ((True, []), (False, [1])):
        budget = {"begin": 1, "end": 2, "is_open": is_open, "budget": 3, "then": None}
        grammar = json.dumps(["thinking_token_budget", "thinking", budget])
        for thoughts, expected in (([5, 5, 5], '{"city": "x"'), ([5, 5], '{"city": "x"}')):
            parser = parser_of(form, is_open=True, grammar=grammar)
            found = parser.push(0, AnswerDelta(0, answer, [*mark, *thoughts, 2, 5], finish_reason="stop"))
            assert "".join(each.arguments for each in found.calls) == expected


STRICT = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]


@functools.cache
def matcher_of(form: str, *, must_call: bool) -> LLMatcher:
    """The matcher of answers that call or, where they need not, may call strict tools."""
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"} if must_call else {"tools": STRICT}
    use = tool_use(fields)
    grammar = None if use is None else use.grammar(TOOL_FORMATS[form], {})
    assert grammar is not None
    lark = '%llguidance {"no_forcing": true}\n' + json.loads(grammar)[2]
    matcher = LLMatcher(of_bytes(), lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(form: str, answer: str, *, must_call: bool) -> bool:
    matcher, data = matcher_of(form, must_call=must_call).deep_copy(), [*answer.encode()]
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_the_grammar_takes_what_the_template_writes(form: str) -> None:
    rng = random.Random(f"{form} grammar")
    for _ in range(NUM_TURNS):
        said = turn(form, rng, num_calls=rng.choice((1, 2)))
        said.thoughts, said.says = None, ""
        if form in PAIRS and holds_tags(said):
            continue
        assert accepts(form, render(form, said), must_call=True), render(form, said)
        said.says = "" if form in WHOLE else "I look:"
        assert accepts(form, render(form, said), must_call=False), render(form, said)


def spoilt(answer: str, rng: random.Random) -> str:
    """An answer with a piece of it left out, written twice or moved."""
    at, to = sorted(rng.randrange(len(answer) + 1) for _ in range(2))
    to = min(to, at + rng.choice((1, 2, 5, 40)))
    match rng.randrange(3):
        case 0:
            return answer[:at] + answer[to:]
        case 1:
            return answer[:to] + answer[at:]
    other = rng.randrange(len(answer) + 1)
    return answer[:other] + answer[at:to] + answer[other:]


@pytest.mark.parametrize("form", first_quick(6, TOOL_FORMATS))
def test_the_parser_finds_valid_calls_in_what_the_grammar_takes(form: str) -> None:
    rng = random.Random(f"{form} taken")
    num_taken = 0
    for _ in range(cases(60, 3000)):
        said = turn(form, rng, num_calls=rng.choice((1, 2)))
        said.thoughts, said.says = None, ""
        answer = spoilt(render(form, said), rng)
        if accepts(form, answer, must_call=True):
            num_taken += 1
            found = agree(form, answer, rng, is_held=True)
            assert found.content.strip() == "", answer
            assert found.calls, answer
            for each in called(found):
                jsonschema.validate(each["arguments"], SCHEMAS[each["name"]])
    assert num_taken > 0


@pytest.mark.parametrize("form", first_quick(3, TOOL_FORMATS))
def test_no_way_to_cut_a_damaged_answer_changes_what_it_says(form: str) -> None:
    """Text, calls, and calls that are spoilt or of what is no tool, one behind the other."""
    rng, parts = random.Random(f"{form} damaged"), TOOL_FORMATS[form]
    words = ["Let me see. ", "[1] {", "<tool", parts.opening, parts.head, parts.middle, parts.tail, ""]
    num_calls = 0
    for _ in range(NUM_TURNS * 3):
        _, other = unknown(form, rng)
        whole = render(form, turn(form, rng))
        pieces = [whole, spoilt(other, rng), spoilt(whole, rng), rng.choice(words)]
        num_calls += len(agree(form, "".join(rng.sample(pieces, rng.randint(1, 4))), rng).calls)
    assert num_calls > 5


MARKS = sorted({mark for form in TOOL_FORMATS.values() for mark in form.marks})


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """A tokenizer of bytes in which every mark of every format is a control token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={sign: index for index, sign in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(each, normalized=False) for each in ("<|end|>", *MARKS)])
    folder = tmp_path_factory.mktemp("marked")
    made.save(str(folder / "tokenizer.json"))
    write_settings(folder, eos_token="<|end|>")
    text = Text.load(folder)
    assert text is not None
    return text


@pytest.mark.parametrize("form", [name for name, form in TOOL_FORMATS.items() if form.marks])
def test_marks_may_be_control_tokens(form: str, marked: Text) -> None:
    """The grammar then has them as tokens, and lets no text spell them."""
    rng, grammars = random.Random(form), Grammars(lambda: marked, marked.vocab_size, marked.eos_token_ids)
    marks = marked.control_tokens(TOOL_FORMATS[form].marks)
    asked: list[dict[str, Any]] = [{"tools": TOOLS, "tool_choice": "required"}, {"tools": STRICT}]
    uses = [use for each in asked if (use := tool_use(each)) is not None]
    beginnings = [
        grammars.beginning(grammar) for use in uses if (grammar := use.grammar(TOOL_FORMATS[form], marks))
    ]
    for _ in range(NUM_TURNS):
        said = turn(form, rng, num_calls=rng.choice((1, 2)))
        said.thoughts, said.says = None, ""
        if holds_tags(said) or any(mark in json.dumps(said.calls, ensure_ascii=False) for mark in MARKS):
            continue
        for beginning, says in zip(beginnings, ("", rng.choice(("", "I look: a < b </")))):
            tokens = marked.encode(render(form, replace(said, says=says)))
            matcher = beginning.deep_copy()
            assert matcher.try_consume_tokens(tokens) == len(tokens), render(form, replace(said, says=says))
            assert matcher.is_accepting()


CODES = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": "^[a-z</]+$", "maxLength": 4},
        "any": {"type": ["string", "integer"], "minLength": 2},
    },
    "required": ["code"],
}


@pytest.mark.parametrize("form", [*PAIRS, "gemma4"])
def test_texts_before_control_tokens_are_held_to_their_schema(form: str, marked: Text) -> None:
    grammars = Grammars(lambda: marked, marked.vocab_size, marked.eos_token_ids)
    codes = {"type": "function", "function": {"name": "codes", "parameters": CODES}}
    use = tool_use({"tools": [codes], "tool_choice": "required"})
    assert use is not None
    grammar = use.grammar(TOOL_FORMATS[form], marked.control_tokens(TOOL_FORMATS[form].marks))
    assert grammar is not None
    beginning = grammars.beginning(grammar)
    right = [{"code": "ab"}, {"code": "</a<"}, {"code": "ab</"}, {"code": "a", "any": 5}]
    wrong = [{"code": ""}, {"code": "abcde"}, {"code": "AB"}, {"code": "a", "any": "x"}]
    for values in (*right, {"code": "a", "any": "5x"}, *wrong):
        answer = render(form, Turn(None, "", [{"name": "codes", "arguments": values}]))
        matcher, tokens = beginning.deep_copy(), marked.encode(answer)
        is_taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert is_taken == (values not in wrong), answer
