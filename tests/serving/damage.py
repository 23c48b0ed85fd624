"""Ways to damage a checkpoint's files, by name.

Files are cut, flipped, taken away, replaced by others, or edited to values that no engine can serve.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Damage = Callable[[Path], Any]
Change = Callable[[dict[str, Any]], Any]  # changes what a JSON file, or the header of the weights, holds
WEIGHTS, CONFIG, TOKENIZER, SETTINGS = (
    "model.safetensors",
    "config.json",
    "tokenizer.model",
    "tokenizer_config.json",
)
QUERY = "model.layers.0.self_attn.q_proj.weight"
_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 3939696\n"


def kinds() -> Iterator[tuple[str, Damage]]:
    """All of which no engine can serve."""
    for file in (WEIGHTS, CONFIG, TOKENIZER, SETTINGS):
        for share in (0, 0.001, 0.3, 0.9):
            yield f"{file} cut to {share}", cut(file, share)
        yield f"{file} noise", put(file, random.Random(1).randbytes(5000))
        yield f"{file} page", put(file, b"<!DOCTYPE html><html>404</html>")
        yield f"{file} pointer", put(file, _POINTER)
        yield f"{file} folder", folder_for(file)
    for file in (WEIGHTS, CONFIG):
        yield f"{file} missing", remove(file)
    yield "weights cut to 0.999", cut(WEIGHTS, 0.999)
    for at in (0, 3, 7, 8, 9, 20, 100, 1000):
        yield f"weights flipped at {at}", flip(WEIGHTS, at)
    for at in (0, 1, 500):
        yield f"tokenizer flipped at {at}", flip(TOKENIZER, at)
    for at in (0, 100):
        yield f"config flipped at {at}", flip(CONFIG, at)
    yield from _headers()
    yield from _configs()
    yield from _tokenizers()


def _headers() -> Iterator[tuple[str, Damage]]:
    yield "shape transposed", header(lambda head: head[QUERY]["shape"].reverse())
    for shape in ([-1, 192], [], [2**40, 2**40]):
        yield f"shape {shape}", header(of_query(shape=shape))
    for dtype in ("F32", "I64", "U8", "X99"):
        yield f"dtype {dtype}", header(of_query(dtype=dtype))
    for offsets in ([0, 10**9], [100, 0]):
        yield f"offsets {offsets}", header(of_query(data_offsets=offsets))
    yield "tensor missing", header(lambda head: head.pop(QUERY))
    yield "tensor renamed", header(lambda head: head.update(x=head.pop(QUERY)))
    yield "embedding missing", header(lambda head: head.pop("model.embed_tokens.weight"))
    for data in (
        b'{"weight_map": {',
        b"[]",
        b'{"weight_map": {"a": "b.safetensors"}}',
        b'{"weight_map": {"a": "../../../etc/passwd"}}',
        b'{"weight_map": {"a": 3}}',
    ):
        yield f"index {data!r}", index_for_weights(data)


def _configs() -> Iterator[tuple[str, Damage]]:
    sizes = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size")
    for key in (*sizes, "model_type"):
        yield f"config without {key}", edit(CONFIG, without(key))
        for value in (0, -1, "many", None, [1], 3):
            change: Mapping[str, object] = {key: value}
            yield f"config {change}", edit(CONFIG, updated(change))
    for change in (
        {"rms_norm_eps": -1},
        {"max_position_embeddings": "many"},
        {"rope_parameters": "x"},
        {"rope_parameters": {"rope_theta": -1, "rope_type": "default"}},
        {"hidden_act": "nonsense"},
    ):
        yield f"config {change}", edit(CONFIG, updated(change))


def _tokenizers() -> Iterator[tuple[str, Damage]]:
    for change in (
        {"chat_template": "{{ broken"},
        {"chat_template": 5},
        {"chat_template": [1]},
        {"added_tokens_decoder": {"x": 1}},
        {"added_tokens_decoder": [1]},
        {"additional_special_tokens": 3},
    ):
        yield f"settings {change}", edit(SETTINGS, updated(change))
    for data in (
        b'{"model": {"type": "BPE"',
        b"{}",
        b"\x00\x01",
        b"[]",
        b'{"version": "1.0", "model": null}',
        b'{"version": "1.0", "model": {"type": "Nonsense", "vocab": {}}}',
    ):
        yield f"tokenizer.json {data!r}", put("tokenizer.json", data)


def of_query(**values: object) -> Change:
    """Give the entry of one tensor in a header other values."""
    return lambda head: head[QUERY].update(values)


def without(key: str) -> Change:
    return lambda value: value.pop(key)


def updated(change: Mapping[str, object]) -> Change:
    return lambda value: value.update(change)


def remove(file: str) -> Damage:
    def do(folder: Path) -> None:
        (folder / file).unlink()

    return do


def index_for_weights(data: bytes) -> Damage:
    """Put an index of shards in place of the weights."""

    def do(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / f"{WEIGHTS}.index.json").write_bytes(data)

    return do


def put(file: str, data: bytes) -> Damage:
    return lambda folder: (folder / file).write_bytes(data)


def cut(file: str, share: float) -> Damage:
    def do(folder: Path) -> None:
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(data[: int(len(data) * share)])

    return do


def flip(file: str, at: int) -> Damage:
    def do(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        data[at] ^= 0x5A
        (folder / file).write_bytes(data)

    return do


def folder_for(file: str) -> Damage:
    def do(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    return do


def edit(file: str, change: Change) -> Damage:
    def do(folder: Path) -> None:
        value = json.loads((folder / file).read_text())
        change(value)
        (folder / file).write_text(json.dumps(value))

    return do


def header(change: Change) -> Damage:
    """Of the weights."""

    def do(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        head = json.loads(data[8 : 8 + size])
        change(head)
        new = json.dumps(head).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(new)) + new + data[8 + size :])

    return do
