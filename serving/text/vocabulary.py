"""Map token ids to bytes, and text to token ids.

Two kinds of tokenizer have one interface: those of the `tokenizers` library, which a Hugging Face
`tokenizer.json`, a `vocab.json` with `merges.txt` or Mistral's `tekken.json` describes, and a sentencepiece
`tokenizer.model`. Both give every token's bytes, because bytes can be joined token by token and text cannot:
a Chinese character or an emoji may be split over several tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from borders.files import MOST_TOKENIZER_BYTES, check_regular, is_there, optional_json_object
from serving.text.token_decoder import TokenDecoder
from serving.text.tokenizer_settings import (
    more_special_tokens,
    read_settings,
    special_tokens,
    splits_control,
    templates_in,
    token_text,
)

MOST_TOKENS = 2**24  # each id up to the largest is looked at when a tokenizer is loaded


class Vocabulary(Protocol):
    """The interface of a tokenizer.

    `own_tokens` are the texts of control tokens that the vocabulary itself names, such as `eos_token`.
    `control` maps the text of each control token to its id, and `splits_control` says that a text has none,
    whatever it spells out; `num_lead_spaces` is the number of spaces at the start of a text that belong to
    the tokenizer and not to the text.
    """

    size: int
    control: dict[str, int]
    splits_control: bool
    own_tokens: dict[str, str]
    num_lead_spaces: int

    def encode(self, text: str, *, start: bool = True, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text, or of a continuation if not `start`.

        Control tokens in the text are recognised, unless `splits_control`.
        """
        ...

    def encode_literally(self, text: str) -> list[int]:
        """Return the ids of a text in which control tokens are ordinary text."""
        ...

    def find(self, token: str) -> int | None:
        """Return the id of a token by its name, or None."""
        ...

    def token_bytes(self, token: int, *, is_first: bool = False) -> bytes:
        """Return the bytes of a token, `is_first` in a text or behind others; none for an unknown id."""
        ...


class FastVocabulary:
    """A tokenizer of the `tokenizers` library, with the tokens that other files add to it."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._tokenizer = _read_tokenizer(path, settings)
        # The ids of a file may leave gaps
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.control = {token.content: index for index, token in added if token.special}
        self.own_tokens: dict[str, str] = {}
        self._tokenizer.encode_special_tokens = self.splits_control = splits_control(settings)
        self._decoder = TokenDecoder.of(self._tokenizer.decoder, path)
        self.num_lead_spaces = self._decoder.num_lead_spaces

    def encode(self, text: str, *, start: bool = True, add_special_tokens: bool = False) -> list[int]:
        # The library has no option for `start`; it matters only after a control token that a message spells
        # out.
        return _ids(self._tokenizer, text, add_special_tokens=add_special_tokens)

    def encode_literally(self, text: str) -> list[int]:
        return _ids(self._literal, text, add_special_tokens=False)

    def find(self, token: str) -> int | None:
        index: int | None = self._tokenizer.token_to_id(token)
        return index

    def token_bytes(self, token: int, *, is_first: bool = False) -> bytes:
        piece: str | None = self._tokenizer.id_to_token(token)
        return b"" if piece is None else self._decoder.spell(piece, is_first=is_first)

    @cached_property
    def _literal(self) -> Tokenizer:
        # This needs a second tokenizer, because the switch would also affect other threads that encode
        # meanwhile.
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        return tokenizer


def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    # `encode` would hold the interpreter's lock, and so block all other threads, until a long text is done.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


class SentencePieceVocabulary:
    """A sentencepiece `tokenizer.model`, with the tokens that other files add to it.

    With `legacy` in the settings, the space that may precede a text also follows each added token, but in
    CodeLlamaTokenizer, which takes a space from the beginning of an answer even where it puts none before a
    text.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        if OTHER_PIECES.fullmatch(named := _class_of(settings)):
            raise ValueError(
                f"tokenizer_config.json has tokenizer_class: {named}, whose ids are others than those of"
                f" {path}; take tokenizer.json of the same model"
            )
        try:
            proto = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
            self._model = SentencePieceProcessor(model_proto=proto.SerializeToString())
        except (DecodeError, RuntimeError) as error:
            check_ranks(path)
            raise ValueError(f"{path} is not a sentencepiece model: {_line(error)}") from error
        self.splits_control = splits_control(settings)
        if self.splits_control:
            _spell_out(proto, settings)
            self._model = SentencePieceProcessor(model_proto=proto.SerializeToString())
        # Llama's classes put a space before a text, and Gemma's does not, whatever the model says
        is_code = named == "CodeLlamaTokenizer"
        is_llama, is_gemma = named in LLAMAS, named == "GemmaTokenizer"
        puts_lead = is_llama or (proto.normalizer_spec.add_dummy_prefix and not is_gemma)
        has_lead = puts_lead and settings.get("add_prefix_space") is not False
        self.num_lead_spaces = int(has_lead or is_code)
        if is_llama or is_gemma:  # Both leave a text as it is
            proto.normalizer_spec.remove_extra_whitespaces = False
            proto.normalizer_spec.precompiled_charsmap = b""
            proto.normalizer_spec.add_dummy_prefix = has_lead
            self._model = SentencePieceProcessor(model_proto=proto.SerializeToString())
        proto.normalizer_spec.add_dummy_prefix = False
        self._without_lead = SentencePieceProcessor(model_proto=proto.SerializeToString())
        # transformers 5 gives Llamas no unknown token: without byte tokens, what cannot be spelt is left out
        self._left_out = self._model.unk_id() if is_llama else None
        self._with_lead = self._model if has_lead else self._without_lead
        self._legacy = bool(settings.get("legacy")) and not is_code

        ends = proto.trainer_spec
        pieces = {"bos": ends.bos_id, "eos": ends.eos_id, "unk": ends.unk_id}
        self.own_tokens = {
            f"{name}_token": self._model.id_to_piece(index)
            for name, index in pieces.items()
            if 0 <= index < self._model.vocab_size()
        }
        own = self._model.vocab_size()
        self._names = {index: self._model.id_to_piece(index) for index in range(own)}
        self._id_of = {name: index for index, name in self._names.items()}
        stored, special = _added_tokens(settings)
        for index, token in stored.items():
            self._place(token.content, index)
        for token in special:
            self._place(token.content, max(self._names) + 1)
        self.size = max(self._names) + 1
        added = [*stored.values(), *special]
        self.control = {each.content: self._id_of[each.content] for each in added if each.special}
        for index in range(own):
            if self._model.is_control(index) or self._model.is_unknown(index):
                self.control[self._names[index]] = index
        self._finder, self._found = self._make_finder(added)
        self._first, self._last = self._ends(settings)

    def encode(self, text: str, *, start: bool = True, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = [*self._first] if add_special_tokens else []
        (parts,) = self._finder.encode_batch([text], add_special_tokens=False)
        for found, (begin, end) in zip(parts.ids, parts.offsets, strict=True):
            if found in self._found:
                ids.append(self._found[found])
            else:
                has_lead = self._legacy if begin else start
                model = self._with_lead if has_lead else self._without_lead
                ids += (index for index in model.encode(text[begin:end]) if index != self._left_out)
        return [*ids, *self._last] if add_special_tokens else ids

    def _place(self, name: str, index: int) -> None:
        """Give a token its id, unless the vocabulary has it under another."""
        if name not in self._id_of:
            self._id_of.pop(self._names.get(index, ""), None)  # the name of a place kept for such tokens
            self._names[index], self._id_of[name] = name, index

    def _make_finder(self, added: Iterable[AddedToken]) -> tuple[Tokenizer, dict[int, int]]:
        """Return what finds added tokens in a text, and their ids here by those that it gives.

        The library finds them, as it does in a tokenizer.json: the longest first, with the white space that
        some take from around them. What lies between is one unknown word each.
        """
        finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        own = [AddedToken(name, normalized=False, special=True) for name in self.control]
        finder.add_tokens([*own, *added])
        finder.encode_special_tokens = self.splits_control
        found = {each.content: finder.token_to_id(each.content) for each in [*own, *added]}
        return finder, {index: self._id_of[name] for name, index in found.items() if index is not None}

    def _ends(self, settings: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """Return the ids that a text begins and ends with."""
        own = CLASS_TOKENS.get(_class_of(settings), self.own_tokens)
        # A token that is added and that the files do not name is that of the class
        adds = {"add_bos_token": _class_of(settings) == "CodeLlamaTokenizer"} | {**settings}
        named = {key: each for key, each in own.items() if adds.get(f"add_{key}")} | {**settings}
        names = {key: token_text(each) for key, each in special_tokens(named).items()}
        bos, eos = (self.find(names.get(key, "")) for key in ("bos_token", "eos_token"))
        adds_bos = settings.get("add_bos_token")
        adds_bos = True if adds_bos is None else adds_bos  # the first Llama releases do not say so
        return (
            [bos] if adds_bos and bos is not None else [],
            [eos] if settings.get("add_eos_token") and eos is not None else [],
        )

    def encode_literally(self, text: str) -> list[int]:
        ids: list[int] = []
        for character in text.replace(" ", "▁"):
            index = self._id_of.get(character)
            spelt = [self._id_of.get(f"<0x{byte:02X}>", self._model.unk_id()) for byte in character.encode()]
            ids += spelt if index is None else [index]
        return ids

    def find(self, token: str) -> int | None:
        return self._id_of.get(token)

    def token_bytes(self, token: int, *, is_first: bool = False) -> bytes:
        # The space that belongs to the tokenizer is no token's but the text's: see num_lead_spaces
        return _PIECES_DECODER.spell(self._names.get(token, ""), is_first=is_first)


def _spell_out(proto: Any, settings: Mapping[str, Any]) -> None:
    """Let a sentencepiece model spell control tokens by its pieces, which it would find in a text itself."""
    stored, special = _added_tokens(settings)
    names = {each.content for each in (*stored.values(), *special) if each.special}
    for piece in proto.pieces:
        if piece.type == proto.SentencePiece.USER_DEFINED and piece.piece in names:
            piece.type = proto.SentencePiece.NORMAL


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The contents of a model's tokenizer files; `templates` are the sources of chat templates, by name."""

    vocabulary: Vocabulary
    settings: dict[str, Any]
    templates: dict[str, str]


def read_tokenizer_files(folder: Path) -> TokenizerFiles | None:
    """Read the files of a Hugging Face directory: the first of KINDS that is there.

    Returns None if there is none. Raises ValueError, too, if all that there is cannot be read here.
    """
    settings = read_settings(folder)
    for name, kind in KINDS.items():
        if is_there(folder / name):
            check_regular(folder / name, MOST_TOKENIZER_BYTES)
            if name in (PAIRS, PIECES):
                settings = _with_class(folder, settings)
            if name == PAIRS:
                settings = CLASS_TOKENS.get(_class_of(settings), {}) | settings
            elif name == TEKKEN:
                settings = TEKKEN_TOKENS | settings
            vocabulary: Vocabulary = kind(folder / name, settings)
            if vocabulary.size > MOST_TOKENS:
                found = f"{folder / name} or a file beside it has the token id {vocabulary.size - 1}"
                raise ValueError(f"{found}; up to {MOST_TOKENS - 1} are read: download it again")
            defaults = CLASS_TOKENS.get(_class_of(settings), vocabulary.own_tokens)
            known = {key: each for key, each in defaults.items() if vocabulary.find(each) is not None}
            return TokenizerFiles(vocabulary, known | settings, templates_in(folder, settings))
    for path in sorted([*folder.glob("*.tiktoken"), *folder.glob("tiktoken.model")]):
        check_ranks(path)
    return None


def missing_in(folder: Path) -> str:
    """Return the warning of a folder without a vocabulary that describes one; the empty text for others."""
    if not is_there(folder / "tokenizer_config.json"):
        return ""
    lacks = f"has tokenizer_config.json but none of {', '.join(KINDS)}"
    return f"{folder} {lacks}: only token ids are served; download one"


def check_ranks(path: Path) -> None:
    """Raise ValueError for a file in tiktoken's format: a token in base64 and its rank in each line.

    Such a file does not say where a text is cut into words, which is code of the model's.
    """
    check_regular(path, MOST_TOKENIZER_BYTES)
    with path.open("rb") as file:
        if not _RANK.fullmatch(file.readline(_LONGEST_RANK)):
            return
    raise ValueError(
        f"{path} is a vocabulary of tiktoken, whose rule for words is code beside it, and no code of a"
        " checkpoint is run here; take tokenizer.json of the same model, or write it where you trust the"
        " code, by convert_tiktoken_to_fast of transformers.integrations.tiktoken"
    )


def _with_class(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the class that the model's family has, if the files do not name one."""
    if settings.get("tokenizer_class") is not None:
        return settings
    model_type = optional_json_object(folder / "config.json").get("model_type")
    return {**settings, "tokenizer_class": CLASS_OF_MODEL.get(str(model_type))}


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches, as one group, the longest of the names.

    Without names it never matches.
    """
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if longest_first else r"((?!))")


def _read_tokenizer(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a file as transformers uses it: with all added tokens, and without bounds.

    A file that was saved in training may hold a truncation and a padding, which are no part of a vocabulary.
    """
    tokenizer = _stored_tokenizer(path, settings)
    if tokenizer.padding is not None:
        settings = {"pad_token": tokenizer.padding["pad_token"], **settings}
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if path.name == "tokenizer.json" and _is_rebuilt(tokenizer, path.parent, settings):
        _rebuild(tokenizer, settings)
    by_id = tokenizer.get_added_tokens_decoder()
    own = by_id.values()
    stored, special = _added_tokens(settings, {token.content for token in own if token.special})
    named = {token_text(each) for each in special_tokens(settings).values()}
    for number, token in by_id.items():  # What has a name is special, whatever the file says of it
        if token.content in named and not token.special:
            token.special = True
            stored.setdefault(number, token)
    known = {token.content for token in own} | {token.content for token in stored.values()}
    # The library gives new tokens the next ids, in this order
    tokenizer.add_tokens([*stored.values(), *(each for each in special if each.content not in known)])
    if tokenizer.decoder is None and (decoder := CLASS_DECODERS.get(_class_of(settings))) is not None:
        tokenizer.decoder = decoder()
    names = {key: token_text(each) for key, each in special_tokens(settings).items()}
    bos, index = names.get("bos_token"), tokenizer.token_to_id(names.get("bos_token", ""))
    # The post-processor says which tokens begin and end a text. DeepSeek's files have one that adds none and
    # say add_bos_token, which transformers 4 followed for this class and transformers 5 does not
    is_said = settings.get("add_bos_token") and _class_of(settings) == "LlamaTokenizer" and index is not None
    if is_said and tokenizer.num_special_tokens_to_add(False) == 0:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, index)]
        )
    return tokenizer


def _is_rebuilt(tokenizer: Tokenizer, folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether transformers 5 takes of a tokenizer.json the pairs alone, and cuts texts by its class.

    It does so for Llama's classes, unless the file is byte-level or the model's family has another class.
    """
    if _class_of(settings) not in LLAMAS or not isinstance(tokenizer.model, models.BPE):
        return False
    if optional_json_object(folder / "config.json").get("model_type", "llama") != "llama":
        return False
    steps = (each for each in (tokenizer.pre_tokenizer, tokenizer.decoder) if each is not None)
    return not any(b'"ByteLevel"' in each.__getstate__() for each in steps)


def _rebuild(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Cut texts as Llama's classes of transformers 5 do: the space before a text is put where it begins.

    With `legacy` in the settings of LlamaTokenizer it also follows each added token. CodeLlamaTokenizer takes
    a space from the beginning of an answer even where it puts none before a text.
    """
    has_lead = settings.get("add_prefix_space") is not False
    is_code = _class_of(settings) == "CodeLlamaTokenizer"
    scheme = ("always" if settings.get("legacy") and not is_code else "first") if has_lead else "never"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    strips = [decoders.Strip(" ", 1, 0)] if has_lead or is_code else []
    tokenizer.decoder = decoders.Sequence([*_PIECES, *strips])


def _stored_tokenizer(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a file as such."""
    try:
        match path.name:
            case "vocab.json":
                return _of_pairs(path, settings)
            case "tekken.json":
                return _of_tekken(path, settings)
            case _:
                return Tokenizer.from_file(str(path))
    except Exception as error:
        raise ValueError(f"{path} is not a tokenizer: {_line(error)}") from error


def _of_pairs(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """Return the byte-level BPE of a vocab.json and the merges.txt beside it, as its class builds it."""
    name, merges = _class_of(settings), path.with_name("merges.txt")
    if name not in WORDS_OF_CLASS:
        known = " and ".join(WORDS_OF_CLASS)
        raise ValueError(
            f"tokenizer_config.json has tokenizer_class: {name}, and a vocab.json without tokenizer.json is"
            f" read for {known}; take tokenizer.json of the same model"
        )
    check_regular(merges, MOST_TOKENIZER_BYTES)
    tokenizer = Tokenizer(models.BPE.from_file(str(path), str(merges)))
    has_lead, pattern = settings.get("add_prefix_space") is True, WORDS_OF_CLASS[name]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_lead, use_regex=pattern is None)
    if pattern is not None:
        cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, tokenizer.pre_tokenizer])
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _of_tekken(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """Return the byte-level BPE of a tekken.json by transformers' converter.

    It begins texts with the BOS token, as mistral-common does, unless the settings say otherwise.
    """
    try:  # imported here because it takes seconds
        from transformers.integrations.mistral.tokenizer import MistralConverter
    except ImportError as error:
        raise ValueError(
            "this version of transformers does not convert it; take tokenizer.json of the same model, or"
            " install transformers 5.23"
        ) from error
    tokenizer: Tokenizer = MistralConverter(str(path)).converted()
    bos = token_text(settings["bos_token"])
    index = tokenizer.token_to_id(bos)
    if settings.get("add_bos_token") is not False and index is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, index)]
        )
    return tokenizer


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _class_of(settings: Mapping[str, Any]) -> str:
    """Return the class that tokenizer_config.json names, by the name that transformers 5 has for it."""
    return str(settings.get("tokenizer_class")).removesuffix("Fast")


LLAMAS = ("LlamaTokenizer", "CodeLlamaTokenizer")
PIECES, PAIRS, TEKKEN = "tokenizer.model", "vocab.json", "tekken.json"
KINDS: dict[str, Callable[[Path, Mapping[str, Any]], Vocabulary]] = {
    "tokenizer.json": FastVocabulary,
    PIECES: SentencePieceVocabulary,
    PAIRS: FastVocabulary,
    TEKKEN: FastVocabulary,
}
TEKKEN_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
_RANK, _LONGEST_RANK = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n"), 2**16
# How classes cut texts into words before pairs are joined; None: as GPT-2 does
WORDS_OF_CLASS = {
    "GPT2Tokenizer": None,
    "Qwen2Tokenizer": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
# The class of models whose files do not name one
CLASS_OF_MODEL = {"gpt2": "GPT2Tokenizer"} | dict.fromkeys(
    ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"), "Qwen2Tokenizer"
)
CLASS_OF_MODEL |= dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer")
# Classes of transformers that number or cut the pieces of a tokenizer.model in their own ways, or read none
OTHER_PIECES = re.compile(
    r"(Albert|Barthez|Bartpho|BertGeneration|BertJapanese|BigBird|Camembert|Cohere|Cpm|DebertaV2|FNet|GPT2"
    r"|GPTSw3|Lasr|LayoutXLM|M2M100|MBart|MBart50|MLuke|Marian|Nllb|PLBart|Parakeet|Pegasus|Qwen2|Qwen3_5|Reformer"
    r"|RemBert|SeamlessM4T|Siglip|Speech2Text|SpeechT5|T5|Tipsv2|Udop|VideoPrism|XGLM|XLMRoberta|XLNet)Tokenizer"
)
# What transformers' classes of tokenizers assume where the files say nothing
CLASS_TOKENS = {
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GemmaTokenizer": {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad")},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
}
_PIECES = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())
_PIECES_DECODER = TokenDecoder.of(decoders.Sequence([*_PIECES]), Path("tokenizer.model"))
CLASS_DECODERS: dict[str, Callable[[], Any]] = {
    "LlamaTokenizer": lambda: decoders.Sequence([*_PIECES, decoders.Strip(" ", 1, 0)]),
    "GemmaTokenizer": lambda: decoders.Sequence([*_PIECES]),
    "Qwen2Tokenizer": decoders.ByteLevel,
}


def _added_tokens(
    settings: Mapping[str, Any], control: Collection[str] = ()
) -> tuple[dict[int, AddedToken], list[AddedToken]]:
    """Return the tokens that are stored with an id, in order of it, and all control tokens that have none.

    What the vocabulary itself calls `control` stays so.
    """
    named, more = special_tokens(settings).values(), more_special_tokens(settings)
    special = {text: _added(token, special=True) for token in (*named, *more) if (text := token_text(token))}
    told = {token_text(token) for token in named} | {*control}
    stored = {
        int(index): _added(token, special=token.get("special") is True or token["content"] in told)
        for index, token in (settings.get("added_tokens_decoder") or {}).items()
        if token["content"]
    }
    kept = {token.content for token in stored.values()}
    return dict(sorted(stored.items())), [each for text, each in special.items() if text not in kept]


def _added(token: Any, *, special: bool) -> AddedToken:
    flags = token if isinstance(token, dict) else {}
    said = {
        key: flags[key] is True for key in ("lstrip", "rstrip", "single_word", "normalized") if key in flags
    }
    return AddedToken(token_text(token), special=special, **{"normalized": not special, **said})
