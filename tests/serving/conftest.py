"""Tokenizers of each kind, trained here in a second."""

from __future__ import annotations

import functools
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import sentencepiece
import zmq
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from serving.text.tokenizer import Text
from tests.lazy import openai
from tests.patience import PATIENCE_S
from tests.serving.server import TINY, Server, started

if TYPE_CHECKING:
    from openai import OpenAI

CORPUS = [f"What is {n} plus {n * 3}? It is {n * 4}, of course." for n in range(200)] + [
    f"你好，世界！今天是第{n}天，天气很好。" for n in range(150)
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_settings(folder: Path, **settings: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")


def byte_level(folder: Path) -> None:
    """As Qwen and Llama 3: byte-level BPE in tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_settings(
        folder, eos_token="<|im_end|>", add_bos_token=False, pad_token="<|endoftext|>", chat_template=CHATML
    )


def byte_fallback(folder: Path) -> None:
    """As Llama 2's tokenizer.json: pieces with spaces as ▁, rare signs as byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += sorted(set("".join(CORPUS[:200]).replace(" ", "▁") + "你好世界") - {"▁"})
    merges = [("▁", "W"), ("▁W", "h"), ("▁", "i"), ("▁i", "s"), ("p", "l"), ("你", "好"), ("▁", "▁")]
    pieces += [left + right for left, right in merges]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    bos = {"__type": "AddedToken", "content": "<s>", "normalized": False, "special": True}
    write_settings(folder, bos_token=bos, eos_token="</s>", unk_token="<unk>")


def sentence_pieces(folder: Path, *, add_dummy_prefix: bool = True) -> None:
    """As Llama 1 and 2, and as our tiny model: a sentencepiece model with byte fallback."""
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=460,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_dummy_prefix,
        user_defined_symbols=["<|user|>", "<|assistant|>", "\n"],
        pad_id=3,
        minloglevel=2,
    )
    write_settings(
        folder,
        tokenizer_class="LlamaTokenizer",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        add_bos_token=True,
        add_prefix_space=add_dummy_prefix,
        legacy=False,
        added_tokens_decoder={
            "4": {"content": "<|user|>", "special": True},
            "5": {"content": "<|assistant|>", "special": True},
        },
        chat_template="{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "<|assistant|>",
    )


KINDS = ("byte_level", "byte_fallback", "sentence_pieces", "sentence_pieces_bare")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    byte_level(folders["byte_level"])
    byte_fallback(folders["byte_fallback"])
    sentence_pieces(folders["sentence_pieces"])
    sentence_pieces(folders["sentence_pieces_bare"], add_dummy_prefix=False)
    return folders


@pytest.fixture(scope="session")
def texts(folders: dict[str, Path]) -> dict[str, Text]:
    loaded = {kind: Text.load(folder) for kind, folder in folders.items()}
    return {kind: text for kind, text in loaded.items() if text is not None}


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once() -> Iterator[None]:
    """Each client of HTTP that is made would read all of the system's for 20 ms, and none here needs any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session")
def shared() -> Iterator[Server]:
    """A server for all tests that leave it as it is: the tiny model, called tiny.

    The further ones end with their file: to wait until the end of the run would cost more than to start anew.
    """
    origin = ("--cors-origin", "https://page.example")
    server = started((TINY, "server.max_requests=64", "--log-requests", *origin))
    yield server
    assert server.close() == 0


Sockets = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """An engine's end of the socket between it and its server, and the server's."""
    context = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://engine")
    theirs.connect("inproc://engine")
    yield ours, theirs
    context.destroy(linger=0)


@pytest.fixture(scope="module")
def thinker() -> Iterator[Server]:
    """A server of the tiny model that may call tools and think."""
    server = started((TINY, "server.tool_format=hermes", "server.reasoning=think"))
    yield server
    assert server.close() == 0


@pytest.fixture(scope="module")
def pooled() -> Iterator[Server]:
    """A server of the tiny model that gives embeddings, of which none fits into a step."""
    few = ("scheduler.max_batch_tokens=16", "scheduler.num_slots=4")
    server = started((TINY, "model.pooling=mean", *few))
    yield server
    assert server.close() == 0


@pytest.fixture(scope="module")
def agent() -> Iterator[Server]:
    """A server of the model that was trained to call tools."""
    server = started(("recipes/tiny/agent.yaml", "server.drain_s=0"))
    yield server
    assert server.close() == 0


@pytest.fixture(scope="session")
def http(shared: Server) -> Iterator[httpx.Client]:
    """Sees what the server really sends."""
    with httpx.Client(base_url=shared.url, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="session")
def client(shared: Server) -> Iterator[OpenAI]:
    """OpenAI's own, as it comes, but that it does not hide a failure by trying again."""
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="any", max_retries=0) as client:
        yield client
