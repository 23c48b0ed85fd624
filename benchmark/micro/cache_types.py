"""Measure how keys and values in int8 change a text's log-probabilities and attention's output."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.int8_pages import row_bytes
from attention.reference import Attention
from benchmark.options import add_json, show
from borders.file_bounds import read_bounded
from continuous_batching.batch import Batch
from devices.shapes import AttentionShape
from kv_cache.groups import DType
from recipes.assembly import versions
from recipes.assembly.scoring import score
from recipes.schema.recipe import ROOT
from serving.text.tokenizer import Text

MODEL = ROOT / "recipes/tiny/weights"
TEXT = ROOT / "recipes/tiny/held_out.txt"
MOST_TEXT_BYTES = 2**20
WAYS: tuple[tuple[DType, bool], ...] = (
    ("float32", False),
    ("float32", True),
    ("bfloat16", False),
    ("bfloat16", True),
)
# Sizes of attention over random numbers.
HEADS, KV_HEADS, PAGE_SIZE = 8, 2, 16
DIMS, LENGTHS = (64, 128), (128, 2048)
LARGE_CHANNELS, LARGE = 4, 20.0  # keys of language models have a few channels that are large for every token
TITLES = {
    "logprob": "log-probability a token",
    "perplexity": "perplexity",
    "distance": "distance from float32",
    "agreement": "likeliest token as in float32",
    "row_bytes": "bytes a token, head and layer",
}


def texts(model: Path, text: Path) -> list[dict[str, object]]:
    """Score each way of storing keys and values against float32 without rounding."""
    tokenizer = Text.load(model)
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer, so that no text can be scored; name another model")
    content = read_bounded(text, MOST_TEXT_BYTES).decode("utf-8")
    lines = [tokenizer.encode(line) for line in content.splitlines()]
    scores = {way: score(model, lines, way[0], int8_cache=way[1]) for way in WAYS}
    exact = scores["float32", False]
    return [
        {
            "type": f"{dtype}, cache in int8" if int8 else dtype,
            "logprob": round(found.mean_logprob, 5),
            "perplexity": round(found.perplexity, 5),
            "distance": round(found.distance(exact), 5),
            "agreement": round(found.agreement(exact), 5),
        }
        for (dtype, int8), found in scores.items()
    ]


def attention_errors() -> list[dict[str, object]]:
    """Return the error of attention's output against float64, relative to the output, root mean square."""
    return [
        {
            "head_dim": dim,
            "tokens": length,
            "keys": "a few large channels" if is_uneven else "normal",
            "bfloat16": round(_error(dim, length, is_uneven, int8=False), 5),
            "int8": round(_error(dim, length, is_uneven, int8=True), 5),
            "row_bytes": row_bytes(dim),
        }
        for dim, length, is_uneven in product(DIMS, LENGTHS, (False, True))
    ]


def _error(dim: int, length: int, is_uneven: bool, *, int8: bool) -> float:
    """Return the error for the last query; only keys and values are rounded."""
    random = torch.Generator().manual_seed(0)
    key, value, query = (
        torch.randn(length, heads, dim, generator=random) for heads in (KV_HEADS, KV_HEADS, HEADS)
    )
    if is_uneven:
        key[:, :, :LARGE_CHANNELS] += LARGE
    shape = AttentionShape(HEADS, KV_HEADS, dim, PAGE_SIZE, dim**-0.5, torch.float32, (None,), int8)
    attention = Attention(shape)
    num_pages = length // PAGE_SIZE
    keys, values = attention.new_pages(num_pages), attention.new_pages(num_pages)
    one, places = np.zeros(1, np.int64), np.arange(length)
    batch = Batch(one, one, np.array([length]), one, one, one)
    metadata = attention.plan(batch, np.arange(num_pages, dtype=np.int32)[None], places)
    kept = (key, value) if int8 else (key.bfloat16().float(), value.bfloat16().float())
    attention.write(*kept, keys, values, metadata)
    found = attention.attend(query, keys, values, metadata, 0)[-1]
    exact = _exact(query[-1], key, value, shape.scale)
    return float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def _exact(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute attention of one query [H, D] over all keys and values [L, K, D] in float64."""
    key, value = (each.double().repeat_interleave(HEADS // KV_HEADS, 1) for each in (key, value))
    weights = torch.softmax(torch.einsum("hd,lhd->hl", query.double(), key) * scale, -1)
    return torch.einsum("hl,lhd->hd", weights, value)


def print_table(result: Mapping[str, Any]) -> None:
    """Print both tables in Markdown."""
    print("\n".join(table(result["texts"])))
    print()
    print("\n".join(table(result["attention"])))


def table(rows: list[dict[str, object]]) -> Iterator[str]:
    """Yield a Markdown row for each way."""
    yield f"| {' | '.join(TITLES.get(name, name.replace('_', ' ')) for name in rows[0])} |"
    yield f"|{'---|' * len(rows[0])}"
    for row in rows:
        yield f"| {' | '.join(str(value) for value in row.values())} |"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `cache-types`."""
    add = parser.add_argument
    add("--model", type=Path, default=MODEL, metavar="DIR", help="a checkpoint in the Hugging Face layout")
    add("--text", type=Path, default=TEXT, metavar="FILE", help="a text, each line scored by itself")
    add_json(parser)


def main(options: argparse.Namespace) -> None:
    result = {
        "benchmark": "cache-types",
        "machine": versions.describe(),
        "texts": texts(options.model, options.text),
        "attention": attention_errors(),
    }
    show(result, options, print_table)
