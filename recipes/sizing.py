"""How much does a recipe need, and does it fit?"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

from kv_cache.storage import KVCache
from models.config import DecoderConfig
from models.huggingface import DTYPES
from recipes import families
from recipes.keys import RecipeError
from recipes.recipe import Recipe

GIB = 2**30
RESERVE_BYTES = GIB // 2  # for the process and a step's activations
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class Sizing:
    """What a recipe takes of the machine, and what it gives to a request."""

    num_parameters: int
    weight_bytes: int
    page_bytes: int  # keys and values of all layers
    num_pages: int  # allocated, the null page among them
    num_pages_fitting: int  # that would fit beside the weights
    cache_tokens: int  # the longest request that the cache alone would allow
    longest_tokens: int  # a request's prompt and answer
    longest_because: str  # what sets this limit
    slot_bytes: int
    memory_bytes: int

    @property
    def cache_bytes(self) -> int:
        return self.num_pages * self.page_bytes


def model_config(recipe: Recipe) -> DecoderConfig:
    """The decoder that a recipe names; raises ValueError for one that is not supported."""
    model = recipe.model
    hf = families.read(model.path) if model.path is not None else model.config
    assert hf is not None, "a recipe has a model.path or a model.config"
    config = families.decoder_config(hf)
    for token in config.eos_token_ids:
        if not 0 <= token < config.vocab_size:
            raise ValueError(
                f"the model's configuration has eos_token_id: {token}; its vocabulary goes from 0 to"
                f" {config.vocab_size - 1}"
            )
    return config if model.dtype == "auto" else replace(config, dtype=DTYPES[model.dtype])


def size(recipe: Recipe, config: DecoderConfig, memory_bytes: int | None = None) -> Sizing:
    """Raises RecipeError, with what is missing and the key to change, if it cannot fit.

    `memory_bytes` None: of this machine.
    """
    cache, scheduler = recipe.cache, recipe.scheduler
    memory_bytes = machine_memory_bytes() if memory_bytes is None else memory_bytes
    page_bytes = KVCache.page_bytes(
        config.num_layers, cache.page_size, config.num_kv_heads, config.head_dim, config.dtype
    )
    num_pages = _num_pages(recipe, page_bytes)
    cache_tokens = (num_pages - 1) * cache.page_size + 1  # the last token is never cached
    longest_tokens, longest_because = _longest(recipe, config, cache_tokens)
    weight_bytes = config.num_parameters * config.dtype.itemsize
    slot_bytes = scheduler.num_slots * 4 * (longest_tokens + -(-longest_tokens // cache.page_size))
    spare_bytes = memory_bytes - weight_bytes - slot_bytes - RESERVE_BYTES
    sizing = Sizing(
        num_parameters=config.num_parameters,
        weight_bytes=weight_bytes,
        page_bytes=page_bytes,
        num_pages=num_pages,
        num_pages_fitting=max(0, spare_bytes // page_bytes),
        cache_tokens=cache_tokens,
        longest_tokens=longest_tokens,
        longest_because=longest_because,
        slot_bytes=slot_bytes,
        memory_bytes=memory_bytes,
    )
    _check_fits(recipe, sizing)
    return sizing


def machine_memory_bytes() -> int:
    """What this process may use: the machine's memory, or less where its control group says so."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [path.read_text().strip() for path in map(Path, CGROUP_LIMITS) if path.is_file()]
    return min([whole, *(int(limit) for limit in limits if limit.isdigit())])


def max_positions(config: DecoderConfig) -> int:
    """The positions that a model reaches with its rotary embedding stretched as its configuration says."""
    rope = config.rope
    if rope.kind == "yarn":
        return max(config.max_positions, int(rope.original_max_positions * rope.factor))
    if rope.kind in ("linear", "dynamic"):
        return int(config.max_positions * rope.factor)
    return config.max_positions


def report(recipe: Recipe, config: DecoderConfig, sizing: Sizing) -> list[tuple[str, str]]:
    """The sizing table, in words."""
    page_size, num_slots = recipe.cache.page_size, recipe.scheduler.num_slots
    pages_each = -(-(sizing.longest_tokens - 1) // page_size)
    wanted = num_slots * pages_each
    dtype = str(config.dtype).removeprefix("torch.")
    return [
        ("model", f"{config.family}, {sizing.num_parameters / 1e6:,.1f} M parameters, {dtype}"),
        ("weights", _size(sizing.weight_bytes)),
        (
            "a page",
            f"{page_size} tokens, {sizing.page_bytes / 1024:,.1f} KiB over {config.num_layers} layers",
        ),
        (
            "pages",
            f"{sizing.num_pages:,}; {sizing.num_pages_fitting:,} would fit into {_size(sizing.memory_bytes)}",
        ),
        ("cache", f"{_size(sizing.cache_bytes)}, {sizing.cache_tokens - 1:,} tokens"),
        ("slot table", _size(sizing.slot_bytes)),
        ("longest request", f"{sizing.longest_tokens:,} tokens ({sizing.longest_because})"),
        (
            "all slots at longest",
            f"{num_slots} x {pages_each:,} pages; the cache holds {(sizing.num_pages - 1) / wanted:.0%}",
        ),
    ]


def _num_pages(recipe: Recipe, page_bytes: int) -> int:
    cache = recipe.cache
    if cache.num_pages is not None:
        return cache.num_pages
    assert cache.memory_gib is not None, "a recipe has cache.num_pages or cache.memory_gib"
    num_pages = int(cache.memory_gib * GIB) // page_bytes
    if num_pages < 2:
        least = math.ceil(2000 * page_bytes / GIB) / 1000
        raise RecipeError(
            f"cache.memory_gib: {cache.memory_gib} GiB hold {num_pages} pages of {page_bytes} bytes, and 2 is"
            f" the least; set at least {least}, or a smaller cache.page_size",
            "cache.memory_gib",
            "cache.page_size",
        )
    return min(num_pages, 2**31 - 1)


def _longest(recipe: Recipe, config: DecoderConfig, cache_tokens: int) -> tuple[int, str]:
    """The most tokens of a request, and what sets this limit."""
    asked, positions = recipe.scheduler.max_request_tokens, max_positions(config)
    if asked is None:
        limits = ((positions, "the model's positions"), (cache_tokens, "what the cache holds"))
        return min(limits, key=lambda limit: limit[0])
    for limit, what in ((positions, "positions of the model"), (cache_tokens, "tokens that the cache holds")):
        if asked > limit:
            raise RecipeError(
                f"scheduler.max_request_tokens: {asked} is more than the {limit} {what}; lower it to {limit}"
                + ("" if limit == positions else ", or give the cache more pages"),
                "scheduler.max_request_tokens",
            )
    return asked, "scheduler.max_request_tokens"


def _check_fits(recipe: Recipe, sizing: Sizing) -> None:
    if sizing.num_pages <= sizing.num_pages_fitting:
        return
    name = "cache.num_pages" if recipe.cache.num_pages is not None else "cache.memory_gib"
    missing = (sizing.num_pages - sizing.num_pages_fitting) * sizing.page_bytes
    text = (
        f"{name}: {_size(sizing.weight_bytes)} of weights, {_size(sizing.cache_bytes)} of cache and"
        f" {_size(RESERVE_BYTES + sizing.slot_bytes)} beside are {_size(missing)} more than the"
        f" {_size(sizing.memory_bytes)} of this machine; "
    )
    fitting = sizing.num_pages_fitting
    if fitting < 2:
        raise RecipeError(f"{text}choose a smaller model or model.dtype", "model.path", "model.config")
    mend = fitting if name == "cache.num_pages" else int(1000 * fitting * sizing.page_bytes / GIB) / 1000
    raise RecipeError(f"{text}set at most {mend}", name)


def _size(count: int) -> str:
    return f"{count / GIB:,.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:,.1f} MiB"
