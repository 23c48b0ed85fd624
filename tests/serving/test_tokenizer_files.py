"""A checkpoint's tokenizer files are read together as transformers' AutoTokenizer reads them."""

from __future__ import annotations

import base64
import functools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, ByteLevelBPETokenizer, Tokenizer, models, processors

from serving.text.chat_options import ChatOptions
from serving.text.request_fields import parse_request
from serving.text.tokenizer import Detokenizer, Text
from tests.each_of import each_of
from tests.lazy import transformers
from tests.serving.conftest import CORPUS

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
            "both-lists": {
                "tokenizer_config": base | {"additional_special_tokens": ["<x>"]},
                "special_tokens_map": {"additional_special_tokens": ["<x>", "<y>"]},
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
    first = Text.load(source).vocab_size
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


@pytest.mark.parametrize("model_type", [None, "llama", "mistral", "phi3"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"legacy": True}, {"legacy": None}, {"legacy": False, "add_prefix_space": False}],
    ids=str,
)
def test_a_llamas_class_says_where_the_space_before_a_text_goes(
    settings: dict[str, Any], model_type: str | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    """transformers 5 takes the pairs of a tokenizer.json and this class's rules, but for some families."""
    base = {name: each for name, each in LLAMA.items() if name != "legacy"}
    write(tmp_path, folders["byte_fallback"], {"tokenizer_config": base | settings})
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    check_same(tmp_path, ("What is 12?", "  Wh</s>What is</s> ok", "<s>What", "你好  🎉\n x"))


CODE_LLAMA = LLAMA | {"tokenizer_class": "CodeLlamaTokenizer"}
CODE_LLAMA |= dict.fromkeys(f"{name}_token" for name in ("prefix", "middle", "suffix", "eot", "fill"))


@pytest.mark.parametrize("kind", ["byte_fallback", "sentence_pieces"])
@each_of("settings", [{"legacy": None}, {"legacy": True}, {"legacy": True, "add_prefix_space": False}])
def test_code_llamas_class_puts_the_space_before_a_text_alone(
    settings: dict[str, Any], kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Whatever `legacy` says, and it takes one from a text even where it puts none."""
    write(tmp_path, folders[kind], {"tokenizer_config": CODE_LLAMA | settings})
    check_same(tmp_path, ("What is 12?", "<s>What is</s>ok", "ok</s>What"))
    text, theirs = Text.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert text is not None
    ids = text.encode_within(" What is")
    assert text.decode(ids) == theirs.decode(ids) == "What is"


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": False}, {"bos_token": None}], ids=str)
def test_code_llamas_class_begins_texts_where_its_files_do_not_say_so(
    settings: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    unnamed = {name: each for name, each in CODE_LLAMA.items() if name not in ("bos_token", "add_bos_token")}
    write(tmp_path, folders["sentence_pieces"], {"tokenizer_config": unnamed | settings})
    text, theirs = Text.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert text is not None
    assert text.encode("What is 12?") == theirs("What is 12?").input_ids


@each_of("added", [("bos",), ("eos",), ("bos", "eos")])
@each_of("named", [{}, {"bos_token": None}, {"eos_token": "<unk>"}])
def test_a_token_that_is_added_without_a_name_is_that_of_the_class(
    named: dict[str, Any], added: tuple[str, ...], folders: dict[str, Path], tmp_path: Path
) -> None:
    adds = {f"add_{name}_token": name in added for name in ("bos", "eos")}
    settings = {"tokenizer_class": "LlamaTokenizer"} | adds | named
    write(tmp_path, folders["sentence_pieces"], {"tokenizer_config": settings})
    text, theirs = Text.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert text is not None
    assert text.encode("What is 12?") == theirs("What is 12?").input_ids


def test_a_llamas_text_keeps_all_its_spaces(folders: dict[str, Path], tmp_path: Path) -> None:
    """Llama's classes pass over what a sentencepiece model says of normalising texts."""
    write(tmp_path, folders["sentence_pieces"], {"tokenizer_config": LLAMA | {"added_tokens_decoder": NEW}})
    path = tmp_path / "tokenizer.model"
    proto = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    proto.normalizer_spec.remove_extra_whitespaces = True
    path.write_bytes(proto.SerializeToString())
    check_same(tmp_path, ("What  is 12 plus <a> 30  ", "What <b>  is"))


def test_what_a_llama_without_byte_tokens_cannot_spell_is_left_out(tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=220,
        character_coverage=0.98,
        minloglevel=2,
    )
    template = "{% for m in messages %}<a>{{ m.role }}\n{{ m.content }}<b>\n{% endfor %}"
    added = {str(220 + index): token for index, token in enumerate(NEW)}
    settings = LLAMA | {"added_tokens_decoder": added, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    check_same(tmp_path, ("What is 龘 it?", "<a>What\nis Žit<unk><b>"))
    messages = [{"role": "user", "content": "What\nis it?"}]
    text, theirs = Text.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert text is not None
    assert text.chat(messages, ChatOptions(add_generation_prompt=False)) == theirs.apply_chat_template(
        messages, return_dict=False
    )


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
    text = Text.load(tmp_path)
    assert text is not None
    ended = [*text.encode("ok 1", add_special_tokens=False), *text.closing_ids()]
    assert text.encode("ok 1")[-len(ended) :] == ended
    assert len(text.closing_ids()) >= single.count(" <")


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
    tokenizer.enable_padding(direction=direction, length=64, pad_to_multiple_of=8, pad_token="<padding>")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": ["<x>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    check_same(tmp_path, (*SAMPLES, "a<padding>b<x>"))
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


SPACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
BYTES, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
WORD_PIECE = {"type": "WordPiece", "prefix": "##", "cleanup": True}
# Pieces that decoders treat in their own ways; the bytes of a character are drawn together, since the library
# writes a sign of its own for each byte of a run that is not UTF-8
PIECES = [
    ["<unk>"],
    ["</s>"],
    ["▁"],
    ["▁▁"],
    ["▁a"],
    ["▁▁b"],
    ["a▁b"],
    ["c▁"],
    ["##c"],
    ["#"],
    ["do"],
    ["n't"],
]
PIECES += [["."], ["é"], ["Ġq"], ["ä½ł"], ["aab"], ["x</w>"]]
PIECES += [[" x"], ["  y "], ["<0x41>"], ["<0x20>"], ["<0x0a>"], ["<0x4>"], ["<0xE4>", "<0xBD>", "<0xA0>"]]


def strip(start: int = 1, stop: int = 0, sign: str = " ") -> dict[str, Any]:
    return {"type": "Strip", "content": sign, "start": start, "stop": stop}


def metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}


def replacing(kind: str, sign: str, text: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: sign}, "content": text}


def decoding(folder: Path, *steps: dict[str, Any]) -> Path:
    """Write a tokenizer whose decoder has these steps."""
    names = [name for unit in PIECES for name in unit]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, "<unk>"))
    tokenizer.add_special_tokens([AddedToken("</s>", normalized=False)])
    whole = json.loads(tokenizer.to_str())
    decoder = steps[0] if len(steps) == 1 else {"type": "Sequence", "decoders": steps}
    (folder / "tokenizer.json").write_text(json.dumps(whole | {"decoder": decoder}), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@each_of(
    "steps",
    [
        (SPACE, BYTES, FUSE),
        (SPACE, BYTES, FUSE, strip()),
        (SPACE, BYTES, FUSE, strip(2)),
        (BYTES, SPACE, FUSE, strip(), strip()),
        (BYTES, FUSE, SPACE),
        (SPACE, BYTES),
        (SPACE, FUSE, strip()),
        (SPACE, strip()),
        (strip(1, 1), SPACE, BYTES, FUSE),
        (strip(0, 1, "▁"), SPACE, FUSE),
        (SPACE,),
        (replacing("String", "▁", ""), BYTES, FUSE),
        (replacing("String", "▁a", "A"), SPACE, FUSE),
        (replacing("Regex", "a+|▁$", "_"), BYTES, FUSE),
        (FUSE,),
        (BYTES,),
        (BYTES, {"type": "Sequence", "decoders": [SPACE, FUSE]}, strip()),
        *((metaspace(scheme),) for scheme in ("always", "first", "never")),
        *((BYTES, metaspace(scheme), FUSE) for scheme in ("always", "first", "never")),
        (metaspace("always"), BYTES, FUSE, strip()),
        (FUSE, metaspace("never")),
        (WORD_PIECE,),
        (WORD_PIECE | {"cleanup": False},),
        (WORD_PIECE, FUSE, strip(2)),
        (BYTE_LEVEL,),
        (SPACE, BYTE_LEVEL),
        (BYTE_LEVEL, FUSE, strip()),
    ],
)
def test_a_decoder_gives_the_text_of_the_library_however_tokens_come(
    steps: tuple[dict[str, Any], ...], tmp_path: Path
) -> None:
    ours = Text.load(decoding(tmp_path, *steps))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    draw = random.Random(7)
    for _ in range(150):
        units = draw.choices(PIECES, k=draw.randint(0, 6))
        ids = theirs.convert_tokens_to_ids([name for unit in units for name in unit])
        for skip in (True, False):
            wanted = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == wanted, units
            detokenizer, at, shown = Detokenizer(ours, skip_special_tokens=skip), 0, ""
            while at < len(ids):
                size = draw.randint(1, 3)
                shown += detokenizer.push(ids[at : at + size])
                assert wanted.startswith(shown), units
                at += size
            assert shown + detokenizer.flush() == wanted, units


@each_of(
    "steps",
    [
        ({"type": "BPEDecoder", "suffix": "</w>"},),
        ({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},),
        (BYTES, strip(), FUSE),
        (BYTES, WORD_PIECE),
        (SPACE, FUSE, BYTES),
        (SPACE, FUSE, strip(1, 1)),
        (SPACE, FUSE, strip(1, 0, "▁")),
        (FUSE, strip(), SPACE),
        (FUSE, replacing("String", "ab", "c")),
        (FUSE, replacing("Regex", "a", "c")),
        (FUSE, metaspace("first")),
        (FUSE, WORD_PIECE),
        (BYTE_LEVEL, SPACE),
        (BYTES, BYTE_LEVEL),
    ],
)
def test_a_decoder_whose_tokens_depend_on_each_other_is_refused_by_its_step(
    steps: tuple[dict[str, Any], ...], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json decodes by .*; supported are Replace") as refused:
        Text.load(decoding(tmp_path, *steps))
    assert "\n" not in str(refused.value)


def test_a_control_token_of_the_vocabulary_stays_one(folders: dict[str, Path], tmp_path: Path) -> None:
    """Whatever tokenizer_config.json says of it."""
    write(tmp_path, folders["byte_level"], {})
    index = transformers.AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids("<|im_start|>")
    token = {"content": "<|im_start|>", **FIXED, "special": False}
    settings = CHATML | {"added_tokens_decoder": {str(index): token}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    check_same(tmp_path)


@pytest.mark.parametrize("key", ["eos_token", "extra_special_tokens", "additional_special_tokens"])
def test_a_plain_token_with_a_name_of_its_own_is_a_control_token(
    key: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Though tokenizer.json calls it plain; one of a list without names stays so, as in transformers."""
    write(tmp_path, folders["byte_level"], {})
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    index = 1 + max(content["model"]["vocab"].values(), default=0)
    index = max(index, *(1 + each["id"] for each in content["added_tokens"]))
    content["added_tokens"].append({"id": index, "content": "<|eot|>", **FIXED, "special": False})
    path.write_text(json.dumps(content), encoding="utf-8")
    value = {"extra_special_tokens": {"eot_token": "<|eot|>"}, "additional_special_tokens": ["<|eot|>"]}
    settings = CHATML | {key: value.get(key, "<|eot|>")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    text, expected = Text.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = expected.encode("a<|eot|>b", add_special_tokens=False)
    assert index in ids
    shown = expected.decode(ids, skip_special_tokens=True)
    assert text.decode(ids) == shown == ("a<|eot|>b" if key == "additional_special_tokens" else "ab")


GEMMA: dict[str, Any] = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad")}
GEMMA |= {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True}


@pytest.mark.parametrize("puts_lead", [True, False])
@pytest.mark.parametrize(
    ("settings", "model_type"),
    [(GEMMA, None), (GEMMA | {"tokenizer_class": None}, "gemma3_text"), (None, "gemma2")],
    ids=["class", "family", "bare"],
)
def test_gemmas_pieces_are_read_as_its_class_does(
    settings: dict[str, Any] | None, model_type: str | None, puts_lead: bool, tmp_path: Path
) -> None:
    """Without a space before a text, whatever the file says, and with its class's names of control tokens."""
    pieces = {f"{name}_piece": f"<{name}>" for name in ("bos", "eos", "unk", "pad")}
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=460,
        byte_fallback=True,
        character_coverage=0.98,
        add_dummy_prefix=puts_lead,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        minloglevel=2,
        **pieces,
    )
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    check_same(tmp_path, ("What is 12?", "  two  spaces ", "<bos>What<eos> is", "你好 🎉\n x"))


@each_of("named", ["BaichuanTokenizer", "InternLM3Tokenizer", "PreTrainedTokenizerFast", None])
def test_pieces_of_a_class_of_the_checkpoints_own_are_read_as_sentencepiece_reads_them(
    named: str | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    """With the space before a text, which transformers 5 leaves out, and the control tokens of the file."""
    shutil.copy(folders["sentence_pieces"] / "tokenizer.model", tmp_path)
    settings = {"tokenizer_class": named, "auto_map": {"AutoTokenizer": ["tokenization.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    text = Text.load(tmp_path)
    pieces = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    assert text is not None
    for sample in WORDS[4:-1]:
        assert text.encode(sample) == pieces.encode(sample)
        assert text.decode(pieces.encode(sample)) == pieces.decode(pieces.encode(sample))
    assert text.eos_token_ids == (pieces.eos_id(),)


@each_of(
    "named", ["T5Tokenizer", "XLNetTokenizer", "XLMRobertaTokenizerFast", "XGLMTokenizer", "Qwen2Tokenizer"]
)
def test_pieces_that_a_class_numbers_in_its_own_way_are_refused_by_the_class(
    named: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copy(folders["sentence_pieces"] / "tokenizer.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    pieces = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    assert theirs("What is 龘 it?").input_ids != pieces.encode("What is 龘 it?")
    with pytest.raises(
        ValueError, match=rf"tokenizer_class: {named.removesuffix('Fast')}, whose ids are"
    ) as told:
        Text.load(tmp_path)
    assert str(told.value).endswith("tokenizer.model; take tokenizer.json of the same model")


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "sentence_pieces"])
def test_control_tokens_are_spelt_out_where_the_files_say_so(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Those of a chat template, too, as transformers encodes what it has rendered."""
    base = CHATML if kind == "byte_level" else LLAMA
    template = "{% for m in messages %}<|im_start|><|user|>{{ m.content }}</s><a>{% endfor %}<b>"
    settings = base | {"added_tokens_decoder": NEW, "chat_template": template}
    messages = [{"role": "user", "content": "What</s> is<a> it<|user|>?<b>"}]
    options = ChatOptions(add_generation_prompt=False)
    for said in (True, False, None):
        more = {} if said is None else {"split_special_tokens": said}
        write(tmp_path, folders[kind], {"tokenizer_config": settings | more})
        check_same(tmp_path, (*SAMPLES, "</s>What<|user|>is<unk> 你好<d>", "<b>"))
        text, theirs = Text.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert text is not None
        rendered = theirs.apply_chat_template(messages, return_dict=False)
        assert (text.chat(messages, options) == rendered) == (said is True), "messages hold no control tokens"
    write(tmp_path, folders[kind], {"tokenizer_config": settings | {"split_special_tokens": "yes"}})
    with pytest.raises(ValueError, match="has split_special_tokens: 'yes'; it must be true or false"):
        Text.load(tmp_path)


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
        ({"chat_template": {"default": PLAIN, "tool_use": WITH_TOOLS}}, {}),
        ({"chat_template": LISTED}, {"chat_template.jinja": PLAIN}),
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
    ("model", "further"),
    [
        ({"eos_token_id": 1}, True),
        ({"eos_token_id": [1, 2]}, False),
        ({"eos_token_id": None}, True),
        ({}, False),
        ({"text_config": {"eos_token_id": 1}}, True),
        ({"text_config": {"eos_token_id": 1}, "eos_token_id": 2}, False),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_token_that_only_the_tokenizer_names_ends_an_answer(
    name: str, model: dict[str, Any], further: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    """As in vLLM; what a configuration does not mention is its family's default."""
    files = {"tokenizer_config": {}, "special_tokens_map": {"eos_token": "<|im_end|>"}}
    write(tmp_path, folders["byte_level"], files)
    (tmp_path / name).write_text(json.dumps(model))
    text = Text.load(tmp_path)
    assert text is not None
    assert text.eos_token_ids == (2,)
    asked = {"id": "a", "prompt": "ok", "stop_token_ids": [7]}
    ends = (7, 2) if further else (7,)
    assert parse_request(asked, text).params.stop_token_ids == ends
    assert parse_request(asked | {"ignore_eos": True}, text).params.stop_token_ids == (7,)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("added_tokens.json", '{"<a>": -1}', "added_tokens.json has '<a>': -1; it must be an id from 0"),
        ("added_tokens.json", '{"<a>": "x"}', "added_tokens.json has '<a>': 'x'; it must be an id"),
        ("added_tokens.json", "[]", "added_tokens.json holds no JSON object"),
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


@functools.cache
def trained() -> ByteLevelBPETokenizer:
    found = ByteLevelBPETokenizer()
    found.train_from_iterator(CORPUS, vocab_size=500, special_tokens=["<|endoftext|>"], show_progress=False)
    return found


def pairs(folder: Path) -> None:
    """vocab.json and merges.txt alone, as a slow tokenizer was saved."""
    trained().save_model(str(folder))


WORDS = (
    *SAMPLES,
    "It's DON'T we'LL 12345 3.14",
    " two  spaces  ",
    "def f(x):\n    return x\r\n\n\tend ",
    "e\u0301 \u212b 你好，世界！👩‍👩‍👧‍👦",
    "<|endoftext|>x<|im_start|>",
)


@pytest.mark.parametrize(
    ("files", "config"),
    [
        ({"tokenizer_class": "GPT2Tokenizer"}, {}),
        ({"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}, {}),
        ({"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "<b>", "unk_token": None}, {}),
        ({"tokenizer_class": "Qwen2Tokenizer"}, {}),
        ({"tokenizer_class": "Qwen2TokenizerFast", "add_prefix_space": False, "bos_token": None}, {}),
        (
            {
                "tokenizer_class": "Qwen2Tokenizer",
                "added_tokens_decoder": {
                    "500": {"content": "<|im_start|>", **FIXED, "special": True},
                    "501": {"content": "<think>", **FIXED, "special": False},
                },
                "additional_special_tokens": ["<|im_start|>"],
                "eos_token": "<|im_start|>",
                "pad_token": "<|endoftext|>",
            },
            {},
        ),
        ({}, {"model_type": "qwen2"}),
        ({}, {"model_type": "qwen3_moe"}),
        ({}, {"model_type": "gpt2"}),
        (None, {"model_type": "qwen3"}),
    ],
)
def test_a_vocabulary_with_its_merges_is_read_as_its_class_does(
    files: dict[str, Any] | None, config: dict[str, Any], tmp_path: Path
) -> None:
    pairs(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    if files is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(files))
    check_same(tmp_path, WORDS)


def test_a_vocabulary_of_another_class_or_without_merges_is_refused_by_name(tmp_path: Path) -> None:
    pairs(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CohereTokenizer"}')
    with pytest.raises(ValueError, match=r"vocab\.json is not a tokenizer: .*CohereTokenizer, and a vocab"):
        Text.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ValueError, match=r"vocab\.json is not a tokenizer: .*merges\.txt"):
        Text.load(tmp_path)


def tekken(folder: Path, *, special: bool = True) -> Path:
    """A vocabulary in Mistral's form: bytes and pairs by rank, and control tokens in front of them."""
    listed = [bytes([each]) for each in range(256)] + [
        b"Wh",
        b"at",
        b"What",
        b" i",
        b" is",
        b"12",
        b"\xe4\xbd",
    ]
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
    content = {
        "config": {
            "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            "num_vocab_tokens": len(listed),
            "default_vocab_size": len(listed) + 9,
            "default_num_special_tokens": 10,
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(each).decode(), "token_str": None}
            for rank, each in enumerate(listed)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)
        ],
    }
    if not special:
        del content["special_tokens"]
    file = folder / "tekken.json"
    file.write_text(json.dumps(content))
    return file


def test_mistrals_vocabulary_is_read_as_transformers_converts_it(tmp_path: Path) -> None:
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    theirs = convert_tekken_tokenizer(str(tekken(tmp_path)))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}[INST]{{ messages[0].content }}[/INST]")
    ours = Text.load(tmp_path)
    assert ours is not None
    for sample in (*WORDS, "[INST]What is<s>"):
        ids = theirs(sample, add_special_tokens=False).input_ids
        assert ours.encode(sample, add_special_tokens=False) == ids, sample
        assert ours.encode(sample, add_special_tokens=True) == [1, *ids]  # mistral-common begins texts so
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    without = Text.load(tmp_path)
    assert without is not None
    assert without.encode("is", add_special_tokens=True) == ours.encode("is", add_special_tokens=False)


def test_an_old_vocabulary_of_mistrals_says_what_reads_it(tmp_path: Path) -> None:
    file = tekken(tmp_path, special=False)
    with pytest.raises(ValueError, match=r"tekken\.json is not a tokenizer: .*mistral-common") as refused:
        Text.load(tmp_path)
    assert str(refused.value).startswith(str(file))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["qwen.tiktoken", "tiktoken.model", "tokenizer.model"])
def test_a_vocabulary_whose_rule_is_code_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    ranks = [base64.b64encode(bytes([each])) + b" %d\n" % each for each in range(256)]
    (tmp_path / name).write_bytes(b"".join(ranks))
    with pytest.raises(ValueError, match=rf"{name} is a vocabulary of tiktoken, .*; take tokenizer\.json"):
        Text.load(tmp_path)


def test_ids_may_leave_gaps_up_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    vocab = {"a": 0, "b": 1, "1": 20}
    Tokenizer(models.BPE(vocab=vocab, merges=[])).save(str(path))
    text = Text.load(tmp_path)
    assert text is not None
    assert (text.vocab_size, text.decode([20])) == (21, "1")

    Tokenizer(models.BPE(vocab=vocab | {"c": 2**24}, merges=[])).save(str(path))
    with pytest.raises(ValueError, match="token id 16777216; up to 16777215 are read"):
        Text.load(tmp_path)
