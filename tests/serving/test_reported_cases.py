"""Conversations of public bug reports are answered over HTTP as their templates want them.

The right prompts are those of transformers' `apply_chat_template`, except where a template asks whether a
content is none, as transformers 4 gave it. The small models here have random weights, and say what a logits
processor makes them say.
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
CALLS = (
    "{% for c in m.tool_calls %}CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
)
PLAIN = EACH + TURN + SAY + LAST
# Templates of the reports, which the variable `case` chooses between; what one of them reads decides how
# messages are handed to all templates of a folder, so that those that read others are in another folder.
FIRST = {
    "prints": EACH + TURN + SAY + "{% if m.tool_calls %}" + CALLS + "{% endif %}" + LAST,
    "is_string": EACH
    + TURN
    + "{% if m.content is string %}"
    + SAY
    + "{% else %}"
    + CALLS
    + "{% endif %}"
    + LAST,
    "own": EACH
    + TURN
    + "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    + "{% if m.content %}{{ m.content }}{% endif %}"
    + "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
    + "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
    + "</tool_call>{% endfor %}"
    + LAST,
    "keys": EACH
    + TURN
    + "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}"
    + SAY
    + "{% endif %}"
    + LAST,
    "object": EACH
    + TURN
    + SAY
    + "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    + LAST,
    "thought": EACH
    + TURN
    + "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}"
    + "{% if m.content %}\n</think>\n\n{% endif %}{% endif %}"
    + SAY
    + LAST,
    "switch": PLAIN
    + "{% if add_generation_prompt %}{% if enable_thinking is defined and enable_thinking %}<think>"
    + "{% else %}</think>{% endif %}{% endif %}",
    "plain": PLAIN,
}
SECOND = {
    "is_none": EACH
    + "{% if m.role == 'assistant' and m.content is none %}<|im_start|>assistant\n"
    + CALLS
    + "{% else %}"
    + TURN
    + SAY
    + "{% endif %}"
    + LAST,
    "reasoning": EACH
    + TURN
    + "{% if m.reasoning is defined and m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}"
    + SAY
    + LAST,
    "parts": EACH
    + TURN
    + "{% if m.content is string %}"
    + SAY
    + "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    + LAST,
}
THIRD = {
    "thinking": EACH
    + TURN
    + "{% if m.thinking is defined and m.thinking %}<think>{{ m.thinking }}</think>{% endif %}"
    + SAY
    + LAST,
    "eos": "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
}
GO_ON = "<|im_start|>assistant\n"


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
        "cache.num_pages=300", "device.compile=false", "server.tool_format=hermes", CLASSES,
        *options,
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
    yield from served(folder, "server.reasoning=think")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = write_model(tmp_path_factory.mktemp("second"), chosen(SECOND), eos_token="<|im_end|>")
    yield from served(folder)


@pytest.fixture(scope="module")
def third(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Its end token is named by special_tokens_map.json alone."""
    folder = write_model(tmp_path_factory.mktemp("third"), chosen(THIRD))
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}', encoding="utf-8")
    yield from served(folder)


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
CALLED: list[dict[str, Any]] = [SUM, {"role": "assistant", "content": None, "tool_calls": [ADD]}, RESULT]
WITH_CALL = (
    "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\nCALL add {\"a\": 1}<|im_end|>\n"
    "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
)  # fmt: skip
ASKED = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@pytest.mark.parametrize("name", ["prints", "is_string"])
def test_a_call_stands_without_text(first: httpx.Client, name: str) -> None:
    check(first, case(name, CALLED), WITH_CALL)


def test_a_template_asks_whether_a_content_is_none(second: httpx.Client) -> None:
    check(second, case("is_none", CALLED), WITH_CALL)


def test_a_prompt_is_longer_than_the_truncation_of_training(first: httpx.Client) -> None:
    question = "Answer in one word: is the sky blue?"
    right = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    check(first, case("plain", [{"role": "user", "content": question}]), right)


def test_tools_have_a_template_of_their_own(first: httpx.Client) -> None:
    right = f"<|im_start|>system\nTools: add<|im_end|>\n{ASKED}"
    check(first, {"messages": [SUM], "tools": [TOOL]}, right)
    check(first, case("plain", [SUM]), ASKED)


def test_an_end_token_of_the_map_is_known(third: httpx.Client) -> None:
    check(third, case("eos", [{"role": "user", "content": "ok"}]), "ok<|im_end|>")


def test_a_server_takes_back_its_thoughts(first: httpx.Client) -> None:
    answer = {"role": "assistant", "content": None, "reasoning_content": "I add one", "tool_calls": None}
    right = f"{ASKED}<think>I add one</think><|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n"
    right += GO_ON
    check(first, case("own", [SUM, answer, {"role": "user", "content": "go on"}]), right)


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


def test_text_parts_are_joined_by_the_template(second: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    right = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    check(second, case("parts", [{"role": "user", "content": parts}]), right)


@pytest.mark.parametrize(("name", "sent"), [("reasoning", "reasoning"), ("thinking", "reasoning_content")])
def test_thoughts_reach_the_template_under_its_name(
    name: str, sent: str, request: pytest.FixtureRequest
) -> None:
    client = request.getfixturevalue("second" if name == "reasoning" else "third")
    talk = [
        SUM,
        {"role": "assistant", "content": "2", sent: "I add"},
        {"role": "user", "content": "and 2+2?"},
    ]
    right = f"{ASKED}<think>I add</think>2<|im_end|>\n<|im_start|>user\nand 2+2?<|im_end|>\n{GO_ON}"
    check(client, case(name, talk), right)


def test_the_keys_of_a_call_keep_their_order(first: httpx.Client) -> None:
    function = {"arguments": '{"b": 2, "a": 1}', "name": "add"}
    call = {"function": function, "id": "call_1", "type": "function"}
    talk = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        RESULT | {"tool_call_id": "call_1"},
    ]
    right = (
        '<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n[{"function": {"arguments": {"b": 2, "a": 1},'
        ' "name": "add"}, "id": "call_1", "type": "function"}]<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n'
        + GO_ON
    )
    check(first, case("keys", talk), right)


def test_arguments_may_be_an_object(first: httpx.Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 75, "b": 50}}}
    talk = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        RESULT | {"tool_call_id": "1"},
    ]
    right = (
        '<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n{"a": 75, "b": 50}<|im_end|>\n'
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )
    check(first, case("object", talk), right)


def test_a_thought_that_was_cut_goes_on(first: httpx.Client) -> None:
    talk = [SUM, {"role": "assistant", "content": None, "reasoning_content": "I add one"}]
    fields = case("thought", talk, add_generation_prompt=False, continue_final_message=True)
    check(first, fields, f"{ASKED}<think>\nI add one")


def test_an_effort_switches_thinking_on(first: httpx.Client) -> None:
    check(first, case("switch", [SUM], reasoning_effort="high"), f"{ASKED}<think>")


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


def test_a_call_in_an_open_thought_is_a_call(first: httpx.Client) -> None:
    """The marks of thoughts are control tokens here, which no answer shows and which are not lost."""
    price = {
        "type": "function",
        "function": {"name": "price", "parameters": {"type": "object", "properties": {}}},
    }
    call = '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>'
    answer = f"<think>\nI look up the lamp.\n{call}"
    for thoughts, content, calls, reason in said(first, answer, tools=[price]):
        assert (thoughts or "").strip() == "I look up the lamp."
        assert (content, calls, reason) == (None, [["price", '{"item": "lamp"}']], "tool_calls")
    for found in said(first, "<think>\nSo.\n</think>\n\nIt is 2.", skip_special_tokens=True):
        assert found == ["So.", "It is 2.", [], "stop"]
