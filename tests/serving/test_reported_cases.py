"""Conversations of public bug reports are answered over HTTP as their templates want them.

test_conversations.py compares what templates read with transformers; here are those that need a whole server.
The right prompts are those of transformers' `apply_chat_template`. The small model has random weights, and
says what a logits processor makes it say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.patience import PATIENCE_S
from tests.serving.server import Server

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
ADDED = ("<tool_call>", "</tool_call>")
BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
EACH, TURN, SAY, END = (
    "{% for m in messages %}",
    "<|im_start|>{{ m.role }}\n",
    "{{ m.content }}",
    "<|im_end|>\n",
)
LAST = END + "{% endfor %}" + BEGIN
PLAIN = EACH + TURN + SAY + LAST
# Templates of the reports, which the variable `case` chooses between
FIRST = {
    "own": EACH
    + TURN
    + "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    + "{% if m.content %}{{ m.content }}{% endif %}"
    + "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
    + "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
    + "</tool_call>{% endfor %}"
    + LAST,
    "thought": EACH
    + TURN
    + "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}"
    + "{% if m.content %}\n</think>\n\n{% endif %}{% endif %}"
    + SAY
    + LAST,
    "plain": PLAIN,
}


def chosen(templates: dict[str, str]) -> str:
    """A template that is one of these."""
    ways = (
        f"{{% {'el' if at else ''}if case == '{name}' %}}{each}"
        for at, (name, each) in enumerate(templates.items())
    )
    return "".join(ways) + "{% endif %}"


def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={sign: index for index, sign in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(each, normalized=False) for each in CONTROL])
    made.add_tokens([AddedToken(each, normalized=False, special=False) for each in ADDED])
    return made


def write_model(folder: Path, template: Any, **settings: Any) -> Path:
    """A checkpoint without weights, whose tokenizer has the truncation and the padding of its training."""
    made = tokenizer()
    made.enable_truncation(8)
    made.enable_padding(length=12, pad_id=256, pad_token="<|endoftext|>")
    made.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": made.get_vocab_size(),
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "bos_token_id": 256, "eos_token_id": 258, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(known), encoding="utf-8")
    return folder


CLASSES = "server.logits_processors=[{}]".format(
    ", ".join(f"'tests.serving.own_classes:{name}'" for name in ("Script", "Echo"))
)


def served(folder: Path, *options: str) -> Iterator[httpx.Client]:
    server = Server(
        "recipes/any/cpu.yaml", f"model.path={folder}", "model.weights=random", "cache.memory_gib=null",
        "cache.num_pages=300", "device.compile=false", CLASSES, *options,
    ).ready()  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client
    assert server.close() == 0


TOOL_TEMPLATE = (
    "<|im_start|>system\nTools:{% for t in tools %} {{ t.function.name }}{% endfor %}<|im_end|>\n" + PLAIN
)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    named = [{"name": "default", "template": chosen(FIRST)}, {"name": "tool_use", "template": TOOL_TEMPLATE}]
    folder = write_model(
        tmp_path_factory.mktemp("first"), named, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    yield from served(folder, "server.tool_format=hermes", "server.reasoning=think")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = write_model(tmp_path_factory.mktemp("pairs"), chosen(FIRST), eos_token="<|im_end|>")
    yield from served(folder, "server.tool_format=qwen3_coder")


def check(client: httpx.Client, fields: dict[str, Any], right: str) -> None:
    """The prompt is this text to the token, and the conversation is answered."""
    expected = tokenizer().encode(right, add_special_tokens=False).ids
    if "tools" not in fields:
        counted = client.post("/tokenize", json=fields)
        assert counted.status_code == 200, counted.text
        assert counted.json()["tokens"] == expected
    echo = {"logits_processors": [{"name": "Echo"}], "max_tokens": len(expected), "ignore_eos": True}
    shown = {"return_token_ids": True, "tool_choice": "none" if "tools" in fields else None}
    answered = client.post("/v1/chat/completions", json=fields | echo | shown)
    assert answered.status_code == 200, answered.text
    assert answered.json()["choices"][0]["token_ids"] == expected


def case(name: str, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"messages": messages, "chat_template_kwargs": {"case": name}, **fields}


SUM = {"role": "user", "content": "1+1?"}
ADD = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}
ASKED = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def test_tools_have_a_template_of_their_own(first: httpx.Client) -> None:
    right = f"<|im_start|>system\nTools: add<|im_end|>\n{ASKED}"
    check(first, {"messages": [SUM], "tools": [TOOL]}, right)
    check(first, case("plain", [SUM]), ASKED)


def test_a_server_takes_back_arguments_that_were_cut(first: httpx.Client) -> None:
    cut = ADD | {"function": {"name": "add", "arguments": '{"a": 1'}}
    talk = [
        SUM,
        {"role": "assistant", "content": None, "tool_calls": [cut]},
        {"role": "tool", "tool_call_id": "c1", "content": "error: no JSON"},
        {"role": "user", "content": "again"},
    ]
    right = (
        f'{ASKED}<tool_call>add {{"a": 1</tool_call><|im_end|>\n<|im_start|>tool\nerror: no JSON<|im_end|>\n'
        "<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    )
    check(first, case("own", talk), right)


def test_a_thought_that_was_cut_goes_on(first: httpx.Client) -> None:
    talk = [SUM, {"role": "assistant", "content": None, "reasoning_content": "I add one"}]
    fields = case("thought", talk, add_generation_prompt=False, continue_final_message=True)
    check(first, fields, f"{ASKED}<think>\nI add one")
    tokens = [*tokenizer().encode(" and one.</think>It is 2.", add_special_tokens=False).ids, 258]
    script = {"logits_processors": [{"name": "Script", "args": {"tokens": tokens}}]}
    answered = first.post("/v1/chat/completions", json=fields | script | {"max_tokens": len(tokens)})
    (choice,) = answered.json()["choices"]
    assert choice["message"]["reasoning_content"] == " and one."
    assert choice["message"]["content"] == "It is 2."


def said(client: httpx.Client, answer: str, **fields: Any) -> list[list[Any]]:
    """Thoughts, content, calls and why it ended, of this answer, whole and as a stream."""
    tokens = [*tokenizer().encode(answer, add_special_tokens=False).ids, 258]
    script = {"logits_processors": [{"name": "Script", "args": {"tokens": tokens}}]}
    asked = case("plain", [SUM], max_tokens=len(tokens) + 1, temperature=0, **script, **fields)
    whole = client.post("/v1/chat/completions", json=asked)
    assert whole.status_code == 200, whole.text
    (choice,) = whole.json()["choices"]
    message = choice["message"]
    calls = [
        [each["function"]["name"], each["function"]["arguments"]] for each in message.get("tool_calls") or []
    ]
    found: list[list[Any]] = [
        [message.get("reasoning_content"), message["content"], calls, choice["finish_reason"]]
    ]
    thoughts, content, reason, pieces = "", "", "", list[list[str]]()
    with client.stream("POST", "/v1/chat/completions", json=asked | {"stream": True}) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
    for line in lines:
        for event in json.loads(line)["choices"]:
            delta = event["delta"]
            thoughts += delta.get("reasoning_content") or ""
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                pieces += [[call["function"]["name"], ""]] if call.get("id") else []
                pieces[call["index"]][1] += call["function"]["arguments"]
            reason = event["finish_reason"] or reason
    found.append([thoughts or None, content or None, pieces, reason])
    return found


PRICE = {
    "type": "function",
    "function": {
        "name": "price",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>'


def test_a_call_in_an_open_thought_is_a_call(first: httpx.Client) -> None:
    """The marks of thoughts are control tokens here, which no answer shows and which are not lost."""
    answer = f"<think>\nI look up the lamp.\n{CALL}"
    for thoughts, content, calls, reason in said(first, answer, tools=[PRICE]):
        assert (thoughts or "").strip() == "I look up the lamp."
        assert (content, calls, reason) == (None, [["price", '{"item": "lamp"}']], "tool_calls")
    for found in said(first, "<think>\nSo.\n</think>\n\nIt is 2.", skip_special_tokens=True):
        assert found == ["So.", "It is 2.", [], "stop"]


def test_a_call_in_a_thought_is_a_thought_where_the_answer_is_held_to_calls(first: httpx.Client) -> None:
    """The grammar begins behind the thoughts: it holds no call in them, and asks for one behind them."""
    rehearsed = CALL.replace("lamp", "clock")
    answer = f"<think>\nI could say\n{rehearsed}\n</think>{CALL}"
    for thoughts, content, calls, reason in said(first, answer, tools=[PRICE], tool_choice="required"):
        assert thoughts == f"I could say\n{rehearsed}"
        assert (content, calls, reason) == (None, [["price", '{"item": "lamp"}']], "tool_calls")


def test_a_call_in_a_thought_is_a_call_where_none_must_follow(first: httpx.Client) -> None:
    """The grammar of a strict tool lets an answer end without a call, and that of a single call, too."""
    schema = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
    function = {"name": "price", "parameters": schema | {"additionalProperties": False}, "strict": True}
    held = {"type": "function", "function": function}
    once = ["price", '{"item": "lamp"}']
    for fields in ({"tools": [held]}, {"tools": [PRICE], "parallel_tool_calls": False}):
        for thoughts, content, calls, reason in said(first, f"<think>\nI call.\n{CALL}\n</think>", **fields):
            assert (thoughts or "").strip() == "I call."
            assert (content, calls, reason) == (None, [once], "tool_calls")
    for *_, calls, reason in said(
        first, f"<think>\n{CALL}\n{CALL}</think>{CALL}", tools=[PRICE], parallel_tool_calls=False
    ):
        assert (calls, reason) == ([once], "tool_calls")


def test_a_call_in_a_thought_is_a_thought_where_a_form_follows(first: httpx.Client) -> None:
    """The answer may be calls in its place, and then those stand behind the block."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for fields, answer in (
        ({"response_format": form}, '{"a":1}'),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes"),
    ):
        for found in said(first, f"<think>\nI call.\n{CALL}\n</think>{answer}", tools=[PRICE], **fields):
            assert found == [f"I call.\n{CALL}", answer, [], "stop"]


def test_a_call_whose_end_is_decided_last_is_one_call(pairs: httpx.Client) -> None:
    """Whole, as in a stream; the format's inner end, which the model forgets, is known to be missing then."""
    answer = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call>"
    for found in said(pairs, answer, tools=[TOOL]):
        assert found == [None, None, [["add", '{"a": 1}']], "tool_calls"]
