"""Measure what pages cost to find, hash, publish, evict and take."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmark.options import verdict_line
from kv_cache.page_keys import page_keys
from kv_cache.pages import PagePool
from kv_cache.prefix_cache import PrefixCache

PROMPT_TOKENS = 32_768
TAKEN_PAGES = 1024
VOCAB_SIZE = 32_000


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
