"""The fields that change a prompt, or forbid words, do what vLLM's users expect of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from borders.field_table import LONGEST_KWARGS
from borders.refusal import BadRequest
from serving.llm import LLM, SamplingParams
from serving.offline import read_jobs, run_jobs
from serving.text.chat_options import ChatOptions
from serving.text.chat_template import ChatTemplate
from serving.text.request_fields import fit, parse_request, text_options
from serving.text.tokenizer import Text
from tests.each_of import each_of
from tests.lazy import transformers
from tests.serving.conftest import CHATML
from tests.serving.server import TINY

SMALL = ["cache.num_pages=40", "scheduler.num_slots=4", "device.threads=1"]
TALK = [{"role": "user", "content": "What is 1?"}, {"role": "assistant", "content": " It is  "}]
OPEN = {"add_generation_prompt": False, "continue_final_message": True}
REPEATS = (
    "{% for each in messages %}{{ each.content }}</s>{% endfor %}{{ messages[0].content }} im <|im_end|>"
)
THINKING = "{{ messages[0].content }}{% if mode is defined %}|{{ mode }}|{{ deep | tojson }}{% endif %}"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(TINY, *SMALL)


@each_of("template", [CHATML, CHATML.replace(" | trim", ""), REPEATS])
@each_of("options", [{}, {"add_generation_prompt": False}, OPEN])
@each_of("final", [" It is  ", "It is", "What is 1?", "多。", "im", " > ", "<|im_end|>"])
def test_a_conversation_ends_as_transformers_lets_it_end(
    template: str, options: dict[str, bool], final: str
) -> None:
    talk = [TALK[0], {"role": "assistant", "content": final}]
    ours = ChatTemplate(template, {}).render(talk, ChatOptions(**options))
    asked = {"add_generation_prompt": True} | options
    render = transformers.utils.chat_template_utils.render_jinja_template
    theirs, _ = render([talk], chat_template=template, **asked)
    assert [ours] == theirs


PARTS = (
    "{% for m in messages %}<|im_start|>{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}"
    "{% else %}<image>{% endif %}{% endfor %}<|im_end|>{% endfor %}"
)


@each_of(
    "last, shown",
    [
        (["The sky"], "The sky"),
        (["Yes.", "It is  "], "Yes.It is  "),
        (["The sky", None], "The sky"),
        (["The sky", ""], "The sky"),
    ],
)
def test_parts_of_the_last_message_go_on_behind_their_last_text(last: list[str | None], shown: str) -> None:
    parts = [{"type": "image"} if each is None else {"type": "text", "text": each} for each in last]
    talk = [{"role": "user", "content": parts[:1]}, {"role": "assistant", "content": parts}]
    ours = ChatTemplate(PARTS, {}).render(talk, ChatOptions(**OPEN))
    assert ours == f"<|im_start|>{last[0]}<|im_end|><|im_start|>{shown}"
    with pytest.raises(BadRequest, match="finds no content of the last message"):
        ChatTemplate(PARTS, {}).render([{"role": "assistant", "content": []}], ChatOptions(**OPEN))


@pytest.mark.parametrize("final", ["", "   "])
def test_nothing_is_continued_where_the_last_message_has_no_text(texts: dict[str, Text], final: str) -> None:
    talk = [TALK[0], {"role": "assistant", "content": final}]
    with pytest.raises(BadRequest, match="finds no content of the last message") as refusal:
        texts["byte_level"].chat(talk, ChatOptions(**OPEN))
    assert refusal.value.field == "continue_final_message"


def test_variables_reach_the_template_and_control_tokens_in_them_are_text(texts: dict[str, Text]) -> None:
    text = texts["byte_level"]
    own = Text(text._vocabulary, {}, {"default": THINKING})
    given = {"mode": "<|im_start|>x", "deep": {"a": ["<|im_end|>", 1, None]}}
    ids = own.chat([{"role": "user", "content": "Hi"}], ChatOptions(chat_template_kwargs=given))
    assert own.decode(ids, skip_special_tokens=False) == ('Hi|<|im_start|>x|{"a": ["<|im_end|>", 1, null]}')
    assert not {text._vocabulary.find("<|im_start|>"), text._vocabulary.find("<|im_end|>")} & set(ids)
    assert own.decode(own.chat([{"role": "user", "content": "Hi"}])) == "Hi"


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@each_of(
    "kwargs, message",
    [
        ({"messages": []}, "has messages, which the server gives the template: leave it out"),
        ({"bos_token": "x"}, "has bos_token, which"),
        ({"tools": []}, "has tools, which"),
        ({"add_generation_prompt": False}, "has add_generation_prompt, which"),
        ({"raise_exception": 1}, "has raise_exception, which"),
        ({"_check_the_time": 1}, "has a name that is not a variable's"),
        ({"": 1}, "has a name that is not a variable's"),
        ({f"a{n}": 1 for n in range(33)}, "has 33 names; it may have 32"),
        ({"a": "x" * LONGEST_KWARGS}, "characters of JSON; it may be 16384"),
        ({"a": nested(8)}, "is nested more than 8 deep"),
        ({"a": nested(9000)}, "is nested more than 8 deep"),
        ({"a": "\ud800"}, "is not Unicode text"),
    ],
)
def test_variables_are_bounded_and_cannot_stand_for_the_server_s_own(
    texts: dict[str, Text], kwargs: dict[str, Any], message: str
) -> None:
    fields = {"id": "a", "messages": TALK, "chat_template_kwargs": kwargs}
    with pytest.raises(BadRequest) as refusal:
        parse_request(fields, texts["byte_level"])
    assert refusal.value.field == "chat_template_kwargs"
    assert message in str(refusal.value)


@each_of(
    "fields, message",
    [
        ({"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt needs messages"),
        ({"messages": TALK, "continue_final_message": True}, "excludes add_generation_prompt, which is true"),
        (
            {"prompt": "a", "truncate_prompt_tokens": 0},
            "truncate_prompt_tokens is 0; it must be an integer from 1 to 2147483647, or -1",
        ),
        ({"prompt": "a", "truncate_prompt_tokens": 51}, "or from 1 to 50, the model's maximum context"),
        ({"prompt": "a", "bad_words": ["  "]}, "bad_words[0] is "),
        (
            {"prompt": "a", "bad_words": ["x" * 129]},
            "has 129 characters in one string; it must have 1 to 128",
        ),
        ({"prompt": "a", "bad_words": ["x"] * 129}, "bad_words has 129 strings; it must have at most 128"),
        ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids has 0 token ids; it must have 1 to"),
        ({"prompt": "a", "allowed_token_ids": [1, -1]}, "allowed_token_ids[1] is -1"),
        ({"prompt": "a", "allowed_token_ids": [1] * (2**18 + 1)}, "allowed_token_ids has 262145"),
    ],
)
def test_what_is_wrong_is_named(texts: dict[str, Text], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        parse_request({"id": "a", **fields}, texts["byte_level"], limit=50)
    assert message in str(refusal.value)


def test_a_prompt_is_cut_from_its_beginning() -> None:
    def kept(**fields: Any) -> list[int]:
        given = {"id": "a", "prompt_token_ids": list(range(100)), "n": 2} | fields
        leader = parse_request(given, None, longest=fields.pop("longest", None), limit=50)
        assert all(np.array_equal(each.prompt, leader.prompt) for each in leader.followers)
        assert leader.num_prompt_tokens + leader.params.max_tokens <= 50
        return leader.prompt.tolist()

    assert kept(truncate_prompt_tokens=7) == list(range(93, 100))
    assert kept(truncate_prompt_tokens=-1, max_tokens=20) == list(range(70, 100))
    both = {"max_tokens": 5, "max_completion_tokens": 20}
    assert kept(truncate_prompt_tokens=-1, **both) == list(range(70, 100)), "as the answer's own bound"
    assert kept(truncate_prompt_tokens=-1) == list(range(66, 100)), "beside the default of max_tokens"


@pytest.mark.parametrize(
    ("ends", "kept"),
    [([], [1, 5, 6, 7]), ([2], [1, 5, 6, 2]), ([3, 2], [1, 5, 3, 2]), ([9, 8, 3, 2, 4], [8, 3, 2, 4])],
)
def test_what_is_embedded_is_cut_from_its_end(
    texts: dict[str, Text], monkeypatch: pytest.MonkeyPatch, ends: list[int], kept: list[int]
) -> None:
    """As sentence-transformers cuts it: what the tokenizer puts around a text stays."""
    text = texts["byte_level"]

    def encode(prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        bare = [5] if prompt == "a" else [5, 6, 7, 7, 7]
        return [1, *bare, *ends] if add_special_tokens else bare

    monkeypatch.setattr(text, "encode", encode)
    for given in ({"prompt": "a text"}, {"prompt_token_ids": encode("a text")}):
        fields = {"id": "a", "pooling": "last"} | given
        assert parse_request(fields | {"truncate_prompt_tokens": 4}, text).prompt.tolist() == kept
        fitted = parse_request(fields | {"truncate_prompt_tokens": -1}, text)
        assert fitted.prompt.tolist() == encode("a text")
        fit(fitted, 5, text)
        assert fitted.prompt.tolist() == fitted.tokens.tolist() == kept
        long = parse_request(fields | {"truncate_prompt_tokens": 40}, text)
        assert long.prompt.tolist() == encode("a text")
    unended = {"id": "a", "pooling": "mean", "prompt_token_ids": [*range(20, 40)]}
    assert parse_request(unended | {"truncate_prompt_tokens": 2}, text).prompt.tolist() == [20, 21]


def test_a_word_is_banned_with_and_without_its_space(texts: dict[str, Text]) -> None:
    for kind, text in texts.items():
        fields = {"id": "a", "prompt_token_ids": [1], "bad_words": ["  plus"]}
        words = parse_request(fields, text).params.bad_words
        assert len(words) == 2, kind
        shown = [text.decode(word, start=False, skip_special_tokens=False) for word in words]
        lead = " " if kind == "byte_fallback" else ""  # this library adds a space wherever a text begins
        assert shown == [f"{lead}plus", f"{lead} plus"], kind


def test_a_continued_message_keeps_the_space_that_the_answer_begins_with() -> None:
    assert text_options({"messages": TALK}).start
    assert not text_options({"messages": TALK, **OPEN}).start


@each_of(
    "form, is_held",
    [
        ({"structured_outputs": {"choice": [" yes", " no"]}}, True),
        ({"guided_regex": " [a-z]{2,3}"}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "text"}}, False),
    ],
)
def test_an_answer_keeps_the_space_with_which_its_form_begins(
    form: dict[str, Any], is_held: bool, texts: dict[str, Text]
) -> None:
    text = texts["sentence_pieces"]
    start = text_options({"messages": TALK, **form}, text).start
    said = text.decode(text.encode_within(" It is"), start=start)
    assert said == (" It is" if is_held else "It is")


def test_masks_and_cuts_reach_the_answers_of_a_program_and_of_a_file(llm: LLM) -> None:
    text = llm.text
    assert text is not None
    plain = llm.generate("1+1=", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].outputs[0]
    assert plain.text.startswith("2")
    digits = [text.encode_within(digit)[-1] for digit in "579"]
    params = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=digits, bad_words=["7"])
    masked = llm.generate("1+1=", params, use_tqdm=False)[0].outputs[0]
    assert set(masked.token_ids) <= set(digits) - {text.encode_within("7")[-1]}
    cut = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=2)
    assert len(llm.generate("99999 1+1=", cut, use_tqdm=False)[0].prompt_token_ids) == 2

    line = '{"id": "a", "prompt": "%s", "max_tokens": 9, "truncate_prompt_tokens": -1, "n": 2}' % (
        "ab " * 3000
    )
    records = list(run_jobs(llm.engine, text, read_jobs([line], text)))
    assert [each["num_prompt_tokens"] + 9 for each in records] == [39 * 16 + 1] * 2, "what the cache holds"


def test_a_program_can_continue_a_message(llm: LLM) -> None:
    output = llm.chat(TALK, SamplingParams(max_tokens=2), use_tqdm=False, **OPEN)[0]
    assert output.prompt is not None
    assert output.prompt.endswith(" It is  ")
