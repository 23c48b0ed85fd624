"""Measure what pages cost to find, hash, publish, evict and take, and what keys and values in int8 change.

The latter are a text's log-probabilities, and attention's output over random numbers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.int8_pages import row_bytes
from attention.reference import Attention
from benchmark.options import markdown, verdict_line
from borders.files import read_bounded
from continuous_batching.batch import Batch
from devices.shapes import AttentionShape
from kv_cache.groups import DType
from kv_cache.page_keys import page_keys
from kv_cache.pages import PagePool
from kv_cache.prefix_cache import PrefixCache
from recipes.assembly.scoring import score
from recipes.schema.recipe import ROOT
from serving.text.tokenizer import Text

PROMPT_TOKENS = 32_768
TAKEN_PAGES = 1024
VOCAB_SIZE = 32_000
MOST_TEXT_BYTES = 2**20
WAYS: tuple[tuple[DType, bool], ...] = (
    ("float32", False),
    ("float32", True),
    ("bfloat16", False),
    ("bfloat16", True),
)
# Sizes of attention over random numbers.
HEADS, SMALL_KV_HEADS, SMALL_PAGE = 8, 2, 16
DIMS, LENGTHS = (64, 128), (128, 2048)
LARGE_CHANNELS, LARGE = 4, 20.0  # keys of language models have a few channels that are large for every token
TITLES = {
    "logprob": "log-probability a token",
    "perplexity": "perplexity",
    "distance": "distance from float32",
    "agreement": "likeliest token as in float32",
    "row_bytes": "bytes a token, head and layer",
}


def median_us(act: Callable[[], object], repeats: int) -> float:
    """Return the median of repeated calls, after one that is not counted."""
    act()
    return round(1e6 * float(np.median([seconds(act) for _ in range(repeats)])), 2)


def seconds(act: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def prefix(page_size: int, repeats: int) -> dict[str, float]:
    """Find, hash, publish and evict the pages of one long prompt, which are scattered in the pool."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCAB_SIZE, PROMPT_TOKENS).astype(np.int32)
    count = PROMPT_TOKENS // page_size
    pool = PagePool(1 + 2 * count)
    cache = PrefixCache(pool, page_size)
    pages = random.permutation(pool.take(2 * count))[:count]
    keys = page_keys(tokens, page_size, "")

    def publish() -> None:
        cache.publish(keys, tokens, pages, 0, "")

    published_s, evicted_s, looked_up_s = [], [], []
    for _ in range(repeats):
        published_s.append(seconds(publish))
        again = page_keys(tokens, page_size, "")  # a second request has key objects of its own
        looked_up_s.append(seconds(partial(cache.find, again, tokens, "")))
        assert len(cache.find(again, tokens, "")) == count, "not all pages were found"
        cache.release(pages)
        evicted_s.append(seconds(lambda: cache.evict(count)))
        taken = pool.take(count)  # takes the same pages again
        assert np.array_equal(np.sort(taken), np.sort(pages)), "other pages were evicted"
    hash_us = median_us(lambda: page_keys(tokens, page_size, ""), repeats)
    return {
        "page_size": page_size,
        "lookup_us": round(1e6 * float(np.median(looked_up_s)), 1),
        "hash_us": hash_us,
        "publish_us_per_page": round(1e6 * float(np.median(published_s)) / count, 3),
        "evict_us_per_page": round(1e6 * float(np.median(evicted_s)) / count, 3),
    }


def take_and_release_us(repeats: int) -> float:
    """Return the microseconds to take and release `TAKEN_PAGES` pages."""
    pool = PagePool(8 * TAKEN_PAGES)
    return median_us(lambda: pool.release(pool.take(TAKEN_PAGES)), repeats)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Return all figures; times are medians."""
    sizes, repeats = options.page_sizes, options.repeats
    return {
        "threads": torch.get_num_threads(),
        "prefix": [prefix(page_size, repeats) for page_size in sizes],
        f"take_and_release_{TAKEN_PAGES}_pages_us": take_and_release_us(10 * repeats),
    }


def print_table(result: dict[str, object]) -> None:
    """Print the figures, one row for each page size."""
    for name, value in result.items():
        if name == "digests":
            continue  # digests are for programs
        if name == "verdict" and isinstance(value, dict):
            print(verdict_line(value))
        elif isinstance(value, list):
            for row in value:
                figures = ", ".join(f"{key.replace('_', ' ')} {each}" for key, each in row.items())
                print(f"{name.replace('_', ' '):14} {figures}")
        else:
            print(f"{name.replace('_', ' ')}: {value}")


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
        torch.randn(length, heads, dim, generator=random) for heads in (SMALL_KV_HEADS, SMALL_KV_HEADS, HEADS)
    )
    if is_uneven:
        key[:, :, :LARGE_CHANNELS] += LARGE
    shape = AttentionShape(HEADS, SMALL_KV_HEADS, dim, SMALL_PAGE, dim**-0.5, torch.float32, (None,), int8)
    attention = Attention(shape)
    num_pages = length // SMALL_PAGE
    keys, values = attention.new_planes(num_pages)
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
    key, value = (each.double().repeat_interleave(HEADS // SMALL_KV_HEADS, 1) for each in (key, value))
    weights = torch.softmax(torch.einsum("hd,lhd->hl", query.double(), key) * scale, -1)
    return torch.einsum("hl,lhd->hd", weights, value)


def run_types(options: argparse.Namespace) -> dict[str, object]:
    """Score a text by a model, and compare attention over random numbers."""
    paths = [ROOT / each for each in (options.model, options.text)]
    return {"texts": texts(*paths), "attention": attention_errors()}


def print_types(result: Mapping[str, Any]) -> None:
    """Print both tables in Markdown."""
    for number, rows in enumerate((result["texts"], result["attention"])):
        heads = [TITLES.get(name, name.replace("_", " ")) for name in rows[0]]
        print("\n" * number + markdown(heads, [[*row.values()] for row in rows]))
