"""Measure what a tier of pages saves a restarted server, compared with computing the prompts again.

A server is asked for some prompts, ended when its pages are written, started again and asked for the same
prompts, in turns without a tier, with one in a folder and, where a URL is given, with one in Redis. Each
prompt is sent alone, with one token as its answer, so that the time of the answer is that to the first token.
Then entries of a page's size are written to the same stores and read again, 16 at a time.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmark.options import Column, named_rows, table
from benchmark.processes import started
from kv_cache.tier.disk import DiskStore
from kv_cache.tier.store import PageStore

PATIENCE_S = 300.0
TIER_BYTES = 2**32
AT_ONCE = 16  # entries that are read together
NUM_ENTRIES = 256
FIRST_ID = 10  # least id of a prompt's tokens; smaller ids may be special
COLUMNS = (
    Column("tier", "tier"),
    Column("name", "prompt tokens"),
    Column("first_ms", "first server", "{:.1f} ms"),
    Column("again_ms", "started again", "{:.1f} ms"),
    Column("found", "tokens found"),
)


def prompts_of(lengths: Sequence[int], count: int, vocabulary: int) -> list[list[int]]:
    """Return several prompts of each length."""
    random = np.random.default_rng(0)
    return [random.integers(FIRST_ID, vocabulary, each).tolist() for each in lengths for _ in range(count)]


def ask(http: httpx.Client, prompt: Sequence[int]) -> tuple[float, int]:
    """Return the seconds of an answer, and the tokens that were found; raises HTTPStatusError."""
    began_s = time.perf_counter()
    answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "temperature": 0})
    took_s = time.perf_counter() - began_s
    answer.raise_for_status()
    return took_s, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def counted(http: httpx.Client) -> int:
    """Return the number of pages that the tier has written."""
    line = r'^cb_kv_tier_pages_total\{.*result="written"\} (\S+)$'
    found = re.search(line, http.get("/metrics").text, re.MULTILINE)
    return 0 if found is None else int(float(found[1]))


def served(
    command: Sequence[str], prompts: Sequence[Sequence[int]], num_pages: int
) -> list[tuple[float, int]]:
    """Start a server, ask for all prompts, and end it when enough pages are written."""
    with (
        started("scripts.serve", *command) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
    ):
        for length in {*map(len, prompts)}:  # these warm up, and are found by no later request
            ask(http, [FIRST_ID + length % 7] * length)
        found = [ask(http, each) for each in prompts]
        until_s = time.monotonic() + PATIENCE_S
        while num_pages and counted(http) < num_pages:
            if time.monotonic() > until_s:
                raise OSError(f"{counted(http)} of {num_pages} pages were written")
            time.sleep(0.05)
        return found


def speeds(store: PageStore, entry_bytes: int) -> dict[str, float]:
    """Return the MB/s of writing and of reading entries, whose bytes all differ."""
    random = np.random.default_rng(1)
    entries = {random.bytes(32): random.bytes(entry_bytes) for _ in range(NUM_ENTRIES)}
    keys, moved = [*entries], NUM_ENTRIES * entry_bytes / 1e6
    began_s = time.perf_counter()
    for key, entry in entries.items():
        store.write(key, entry)
    wrote_s = time.perf_counter()
    found = [each for at in range(0, len(keys), AT_ONCE) for each in store.read(keys[at : at + AT_ONCE])]
    read_s = time.perf_counter()
    if found != [*entries.values()]:
        raise OSError("the store gave back other entries than it was given")
    store.remove(keys)
    store.close()
    return {
        "write_mb_s": round(moved / (wrote_s - began_s), 1),
        "read_mb_s": round(moved / (read_s - wrote_s), 1),
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return, by length and way, median ms of the first and the restarted server, and tokens found."""
    prompts = prompts_of(options.lengths, options.prompts, options.vocabulary)
    stores: dict[str, PageStore] = {"disk": DiskStore(folder / "speed", TIER_BYTES, b"speed")}
    asked = {"none": "null", "disk": f"{{kind: disk, path: {folder / 'pages'}, gib: 4, wait_s: 30}}"}
    if options.redis is not None:
        from kv_cache.tier.redis_store import RedisStore  # installed only where it is used

        stores["redis"] = RedisStore(options.redis, TIER_BYTES, b"speed", 30.0)
        asked["redis"] = f"{{kind: redis, url: '{options.redis}', gib: 4, wait_s: 30}}"
    ways, num_pages = {}, sum((len(each) - 1) // options.page_size for each in prompts)
    for way, tier in asked.items():
        settings = (f"cache.tier={tier}", f"cache.page_size={options.page_size}", "server.spare_engine=false")
        command = (options.recipe, *options.overrides, *settings, "--port", "0")
        first = served(command, prompts, num_pages if way != "none" else 0)
        again = served(command, prompts, 0)
        ways[way] = {
            str(length): {
                "first_ms": median_ms(first, prompts, length),
                "again_ms": median_ms(again, prompts, length),
                "found": sum(found for (_, found), each in zip(again, prompts) if len(each) == length),
            }
            for length in options.lengths
        }
    entry_bytes = 1024 * options.entry_kib
    return {"ways": ways, "stores": {name: speeds(each, entry_bytes) for name, each in stores.items()}}


def median_ms(asked: Sequence[tuple[float, int]], prompts: Sequence[Sequence[int]], length: int) -> float:
    """Return the median over the prompts of a length."""
    return round(1e3 * statistics.median(s for (s, _), each in zip(asked, prompts) if len(each) == length), 2)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="tier-") as folder:
        return {"tier": measure(options, Path(folder))}


def print_table(result: Mapping[str, Any]) -> None:
    """Print a row for each tier and length, and the speed of each store."""
    found = result["tier"]
    rows = [{"tier": way} | row for way, of_way in found["ways"].items() for row in named_rows(of_way)]
    print(table(COLUMNS, rows))
    for name, row in found["stores"].items():
        print(f"\n{name}: {row['write_mb_s']:.0f} MB/s written, {row['read_mb_s']:.0f} MB/s read", end="")
    print()
