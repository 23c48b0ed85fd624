"""What a checkpoint's tokenizer files say together means what it means to transformers' AutoTokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from serving.text.chat_options import ChatOptions
from serving.text.tokenizer import Text
from tests.lazy import transformers

SAMPLES = (
    "What is 12 plus 30?",
    "a <a> b<b>  c \t <c>\t\t d <d>e",
    "<|im_start|>user: ok<|im_end|> x<s>y</s> z",
    "<a><b>What is<x> <a>",
)
FIXED = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
NEW = [
    {"content": "<a>", **FIXED, "special": False},
    {"content": "<b>", **FIXED, "special": True},
    {"content": "<c>", **FIXED, "rstrip": True, "special": False},
    {"content": "<d>", **FIXED, "lstrip": True, "special": True},
]
LLAMA: dict[str, Any] = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}
LLAMA |= {"add_bos_token": True, "legacy": False}
CHATML: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
Files = dict[str, dict[str, Any]]


def cases() -> dict[str, tuple[str, Files]]:
    """Files beside a tokenizer of each kind; the ids of new tokens begin after its own, at `first`."""
    found: dict[str, tuple[str, Files]] = {}
    fast = LLAMA | {"tokenizer_class": "PreTrainedTokenizerFast"}
    for kind, base in (("sentence_pieces", LLAMA), ("byte_level", CHATML), ("byte_fallback", fast)):
        decoder = {"added_tokens_decoder": NEW}
        legacy = {"<a>": 0, "<b>": 1}
        files: dict[str, Files] = {
            "decoder": {"tokenizer_config": base | decoder},
            "json": {"tokenizer_config": base, "added_tokens": legacy},
            "json-special": {
                "tokenizer_config": base,
                "added_tokens": legacy,
                "special_tokens_map": {"eos_token": "<b>", "unk_token": "<a>"},
            },
            "map-only": {
                "tokenizer_config": {"tokenizer_class": base["tokenizer_class"], "add_bos_token": True},
                "special_tokens_map": {
                    "eos_token": {"content": base["eos_token"], **FIXED},
                    "bos_token": "<s>",
                    "unk_token": "<unk>",
                },
            },
            "map-ignored": {
                "tokenizer_config": base | decoder,
                "special_tokens_map": {"eos_token": "<b>", "additional_special_tokens": ["<x>"]},
            },
            "extra": {"tokenizer_config": base | {"extra_special_tokens": {"image_token": "<x>"}}},
            "more": {"tokenizer_config": base | {"additional_special_tokens": ["<x>", "<a>"]}},
            "eos": {"tokenizer_config": base | {"add_eos_token": True}},
            "no-bos": {"tokenizer_config": base | {"add_bos_token": False, "add_eos_token": True}},
        }
        found |= {f"{kind}-{name}": (kind, each) for name, each in files.items()}
    bare = {"tokenizer_config": LLAMA | {"add_prefix_space": False, "added_tokens_decoder": NEW}}
    found["sentence_pieces-without-prefix"] = ("sentence_pieces", bare)
    return found


def write(folder: Path, source: Path, files: Files) -> None:
    name = "tokenizer.model" if (source / "tokenizer.model").exists() else "tokenizer.json"
    shutil.copy(source / name, folder / name)
    first = Text.load(source).vocab_size  # type: ignore[union-attr]
    for stem, content in files.items():
        content = dict(content)
        if stem == "added_tokens":
            content = {each: first + index for each, index in content.items()}
        if "added_tokens_decoder" in content:
            listed = enumerate(content["added_tokens_decoder"])
            content["added_tokens_decoder"] = {str(first + index): token for index, token in listed}
        (folder / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")


def check_same(folder: Path, samples: tuple[str, ...] = SAMPLES) -> None:
    ours, theirs = Text.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    for sample in samples:
        for special in (True, False):
            ids = theirs(sample, add_special_tokens=special).input_ids
            assert ours.encode(sample, add_special_tokens=special) == ids, sample
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip
                )
    eos = theirs.eos_token_id
    assert ours.eos_token_ids == (() if eos is None else (eos,))


@pytest.mark.parametrize("case", cases())
def test_the_files_of_a_tokenizer_together_mean_what_they_mean_to_transformers(
    case: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    kind, files = cases()[case]
    write(tmp_path, folders[kind], files)
    check_same(tmp_path)


@pytest.mark.parametrize("legacy", [True, False])
def test_the_space_before_a_text_also_follows_added_tokens_in_older_files(
    legacy: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    settings = LLAMA | {"legacy": legacy, "added_tokens_decoder": NEW}
    write(tmp_path, folders["sentence_pieces"], {"tokenizer_config": settings})
    check_same(tmp_path, ("What<a>is 12<b>plus", "<c>What"))


def test_tokens_of_an_older_map_are_control_tokens(folders: dict[str, Path], tmp_path: Path) -> None:
    """As in transformers 4; transformers 5 reads a list of texts too late to leave them out of an answer."""
    for kind in ("sentence_pieces", "byte_level"):
        folder = tmp_path / kind
        folder.mkdir()
        more = ["<b>", {"content": "<x>", **FIXED}]
        files = {
            "added_tokens": {"<a>": 0, "<b>": 1},
            "special_tokens_map": {"additional_special_tokens": more},
        }
        write(folder, folders[kind], files)
        text = Text.load(folder)
        assert text is not None
        assert text.decode(text.encode("ok<a>ok<b>ok<x>")) == "ok<a>okok"


@pytest.mark.parametrize("adds", [None, True, False])
@pytest.mark.parametrize(
    "single", ["", "<|im_start|> $A", "<|im_start|> $A <|im_end|> <|endoftext|>", "$A:0"]
)
def test_the_post_processor_says_what_surrounds_a_text(
    single: str, adds: bool | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"bos_token": "<|im_start|>", "add_bos_token": adds, "add_eos_token": adds}
    write(tmp_path, folders["byte_level"], {"tokenizer_config": CHATML | settings})
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    if single:
        names = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
        ids = [(name, tokenizer.token_to_id(name)) for name in names]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    check_same(tmp_path)


def test_deepseeks_files_add_the_token_that_only_their_configuration_names(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """As transformers 4 did: their post-processor adds none, and their models were trained with it."""
    settings = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<|endoftext|>", "add_bos_token": True}
    write(tmp_path, folders["byte_level"], {"tokenizer_config": settings})
    text = Text.load(tmp_path)
    assert text is not None
    bos = text.control_tokens(["<|endoftext|>"])["<|endoftext|>"]
    assert text.encode("ok") == [bos, *text.encode("ok", add_special_tokens=False)]


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_truncation_and_a_padding_of_training_are_switched_off(
    kind: str, direction: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders[kind], tmp_path, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(4, direction=direction)
    tokenizer.enable_padding(direction=direction, length=64, pad_to_multiple_of=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    check_same(tmp_path)
    text = Text.load(tmp_path)
    assert text is not None
    said = "<|im_end|> in a message that is longer than that"
    assert text._vocabulary.encode_literally(said) != text._vocabulary.encode_literally(said[:20])
    assert text.decode(text._vocabulary.encode_literally(said)) == said


@pytest.mark.parametrize("named", [None, "PreTrainedTokenizerFast", "Qwen2Tokenizer", "LlamaTokenizerFast"])
def test_a_missing_decoder_is_that_of_the_class_or_joins_tokens_by_spaces(
    named: str | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    kind = "byte_fallback" if named == "LlamaTokenizerFast" else "byte_level"
    whole = json.loads((folders[kind] / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole | {"decoder": None}), encoding="utf-8")
    settings = {} if named is None else {"tokenizer_class": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    check_same(tmp_path, ("What is it, of course?", "你好，世界！"))


PLAIN, WITH_TOOLS = "{{ messages[0].content }}<|im_end|>", "{{ tools[0].function.name }}<|im_end|>"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
LISTED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": WITH_TOOLS}]


@pytest.mark.parametrize(
    ("settings", "files"),
    [
        ({"chat_template": LISTED}, {}),
        ({"chat_template": LISTED[::-1]}, {}),
        ({"chat_template": LISTED[:1]}, {}),
        ({"chat_template": LISTED[1:]}, {}),
        ({"chat_template": [*LISTED, {"name": "rag", "template": "{{ documents }}"}]}, {}),
        ({"chat_template": PLAIN}, {}),
        ({"chat_template": "unused"}, {"chat_template.jinja": PLAIN}),
        ({}, {"chat_template.jinja": PLAIN, "additional_chat_templates/tool_use.jinja": WITH_TOOLS}),
        (
            {"chat_template": LISTED},
            {"chat_template.jinja": "{{ tools }}\n", "additional_chat_templates/tool_use.jinja": "b"},
        ),
        ({}, {"additional_chat_templates/tool_use.jinja": WITH_TOOLS}),
    ],
    ids=str,
)
def test_conversations_with_tools_take_the_template_of_tools(
    settings: dict[str, Any], files: dict[str, str], folders: dict[str, Path], tmp_path: Path
) -> None:
    write(tmp_path, folders["byte_level"], {"tokenizer_config": CHATML | settings})
    (tmp_path / "additional_chat_templates").mkdir()
    for name, source in files.items():
        (tmp_path / name).write_text(source, encoding="utf-8")
    text, theirs = Text.load(tmp_path, "hermes"), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert text is not None
    messages = [{"role": "user", "content": "ok"}]
    for tools in (None, TOOLS):
        try:
            right = theirs.apply_chat_template(messages, tools=tools, return_dict=False)
        except ValueError:
            with pytest.raises(ValueError, match="this model has no chat template"):
                text.chat(messages, ChatOptions(tools=tools or (), add_generation_prompt=False))
            continue
        assert text.chat(messages, ChatOptions(tools=tools or (), add_generation_prompt=False)) == right
    again, right = text.describe()["chat_template"], theirs.chat_template
    right = right["default"] if isinstance(right, dict) and [*right] == ["default"] else right
    assert right == ({e["name"]: e["template"] for e in again} if isinstance(again, list) else again)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("added_tokens.json", '{"<a>": -1}', "added_tokens.json has '<a>': -1; it must be an id from 0"),
        ("added_tokens.json", '{"<a>": "x"}', "added_tokens.json has '<a>': 'x'; it must be an id"),
        ("added_tokens.json", "[]", "added_tokens.json must hold an object"),
        (
            "special_tokens_map.json",
            '{"eos_token": 7}',
            "special_tokens_map.json has eos_token: 7; it must be",
        ),
        ("special_tokens_map.json", "{", "special_tokens_map.json is not JSON"),
    ],
)
def test_an_older_file_that_cannot_be_used_is_named(
    name: str, content: str, said: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    write(tmp_path, folders["byte_level"], {"tokenizer_config": {}})
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=said):
        Text.load(tmp_path)
