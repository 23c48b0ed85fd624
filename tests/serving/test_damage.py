"""Files of a checkpoint that are damaged so that no engine can serve them are refused.

Numbers that cannot be, in any file, are left to tests/scripts/test_forty_numbers.py and
tests/recipes/test_absurd_configs.py.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from recipes.assembly.engine import build
from recipes.schema.reader import load
from serving.text.tokenizer import Text
from tests.serving.server import TINY
from tests.test_imports import ROOT

Damage = Callable[[Path], Any]
WEIGHTS, CONFIG = "model.safetensors", "config.json"
TOKENIZER, SETTINGS = "tokenizer.model", "tokenizer_config.json"
QUERY = "model.layers.0.self_attn.q_proj.weight"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 3939696\n"


def kinds() -> Iterator[tuple[str, Damage]]:
    """All of which no engine can serve."""
    for file in (WEIGHTS, CONFIG, TOKENIZER, SETTINGS):
        for share in (0, 0.3, 0.9):
            yield f"{file} cut to {share}", cut(file, share)
        yield f"{file} noise", put(file, random.Random(1).randbytes(5000))
        yield f"{file} pointer", put(file, POINTER)
        yield f"{file} folder", folder_for(file)
    for file in (WEIGHTS, CONFIG):
        yield f"{file} missing", lambda folder, file=file: (folder / file).unlink()
    yield "weights cut to 0.999", cut(WEIGHTS, 0.999)
    for file, places in ((WEIGHTS, (0, 7, 9, 100)), (TOKENIZER, (0, 500)), (CONFIG, (0, 100))):
        for at in places:
            yield f"{file} flipped at {at}", flip(file, at)
    of_query: tuple[dict[str, Any], ...] = (
        *({"shape": shape} for shape in ([-1, 192], [], [192, 193], [2**40, 2**40])),
        *({"dtype": dtype} for dtype in ("F32", "U8", "X99")),
        *({"data_offsets": offsets} for offsets in ([0, 10**9], [100, 0])),
    )
    for values in of_query:
        yield f"header {values}", header(lambda head, values=values: head[QUERY].update(values))
    for name in (QUERY, "model.embed_tokens.weight"):
        yield f"without {name}", header(lambda head, name=name: head.pop(name))
    for data in (b'{"weight_map": {', b"[]", b'{"weight_map": {"a": "../../../etc/passwd"}}'):
        yield f"index {data!r}", index_for_weights(data)
    for key in ("hidden_size", "vocab_size", "model_type"):
        yield f"config without {key}", edit(CONFIG, lambda config, key=key: config.pop(key))
        yield f"config with {key} null", edit(CONFIG, lambda config, key=key: config.update({key: None}))
    for change in ({"chat_template": "{{ broken"}, {"chat_template": 5}, {"added_tokens_decoder": [1]}):
        yield f"settings {change}", edit(SETTINGS, lambda settings, change=change: settings.update(change))
    for data in (b'{"model": {"type": "BPE"', b"\x00\x01", b'{"version": "1.0", "model": null}'):
        yield f"tokenizer.json {data!r}", put("tokenizer.json", data)


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


def index_for_weights(data: bytes) -> Damage:
    """Put an index of shards in place of the weights."""

    def do(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / f"{WEIGHTS}.index.json").write_bytes(data)

    return do


def edit(file: str, change: Callable[[dict[str, Any]], Any]) -> Damage:
    def do(folder: Path) -> None:
        value = json.loads((folder / file).read_text())
        change(value)
        (folder / file).write_text(json.dumps(value))

    return do


def header(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Of the weights."""

    def do(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        head = json.loads(data[8 : 8 + size])
        change(head)
        new = json.dumps(head).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(new)) + new + data[8 + size :])

    return do


def refusal(folder: Path, damage: Damage) -> str:
    path = folder / "weights"
    shutil.copytree(ROOT / "recipes/tiny/weights", path)
    damage(path)
    try:
        recipe = load(TINY, [f"model.path={path}", "cache.num_pages=64"])
        Text.load(path)
        build(recipe)
    except (ValueError, OSError) as error:
        return str(error)
    finally:
        shutil.rmtree(path)
    return "served"


def test_sixty_kinds_of_damage_are_refused_in_words(tmp_path: Path) -> None:
    said = {name: refusal(tmp_path, damage) for name, damage in kinds()}
    assert len(said) >= 60
    assert not {name: line for name, line in said.items() if len(line) <= 20}
