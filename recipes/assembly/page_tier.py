"""Attach the tier in which an engine's pages rest below the host's memory.

The module also computes the identity of the pages: two engines may use the same pages only if everything that
their content depends on is equal.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from borders.files import in_one_line
from borders.shared_secret import read_secret
from continuous_batching.engine import Engine
from kv_cache.device.page_bytes import PageBytes
from kv_cache.device.storage import KVCache
from kv_cache.tier.disk import DiskStore
from kv_cache.tier.page_tier import PageTier
from kv_cache.tier.store import HEAD_BYTES, PageStore, identity_of
from models.checkpoint.files import checkpoint_files
from models.checkpoint.kept_weights import origin_of, remembered
from models.config import needs_long_factors
from models.parallel.group import Group
from models.step.runner import ModelRunner
from recipes.assembly.families import draft_config
from recipes.assembly.memory_plan import GIB, MemoryPlan
from recipes.schema.recipe import ROOT, Recipe
from recipes.schema.recipe_error import RecipeError
from recipes.schema.tier_section import NAME, TierSection, place_of, tier_of

_PIECE_BYTES, _READERS = 2**20, 4

log = logging.getLogger(__name__)


def attach_tier(engine: Engine, cache: KVCache, tier: PageTier) -> None:
    """Let an engine use a tier in place of the one that it has had, if any."""
    if cache.tier is not None:
        tier.follow(cache.tier)
    cache.tier = engine.tier = tier


def tier_of_rank(recipe: Recipe, runner: ModelRunner, memory: MemoryPlan, world: Group) -> PageTier:
    """Return the tier of one of several ranks, whose leader alone reads the weights for their digests."""
    weights = world.from_leader(lambda: digest_of_weights(recipe), "the wait for the weights' digests")
    runner.cache.tier = tier = tier_for(recipe, runner, memory, weights)
    return tier


def tier_for(recipe: Recipe, runner: ModelRunner, memory: MemoryPlan, weights: str | None = None) -> PageTier:
    """Return the tier that a recipe asks for, for pages of the recipe's weights.

    `weights` is their digest, where it is known.

    Raises RecipeError where that is not possible. A server that does not answer is no such reason: the engine
    runs without it until it answers.
    """
    asked = tier_of(recipe.cache.tier)
    assert asked is not None, "there is no tier"
    if not memory.num_host_pages:
        problem = "pages come from there by way of the host's memory, which has no room for any"
        raise RecipeError(
            (NAME, "cache.host_fraction"), problem, "raise cache.host_fraction, or leave this out"
        )
    began_s, cache = time.perf_counter(), runner.cache
    pages = PageBytes(cache)
    weights = digest_of_weights(recipe) if weights is None else weights
    identity = identity_of(_facts(recipe, runner, memory.longest_tokens, pages) | {"weights": weights})
    entry_bytes = max(pages.page_bytes) + HEAD_BYTES
    if entry_bytes > asked.gib * GIB:
        problem = f"{asked.gib:g} GiB hold no page, of which the largest takes {entry_bytes} bytes there"
        fix = f"raise it to at least {math.ceil(1000 * entry_bytes / GIB) / 1000:g}"
        raise RecipeError((f"{NAME}.gib", NAME), problem, fix, value=asked.gib)
    store, where = _store(asked, identity, entry_bytes)
    secret = None if asked.key_file is None else _secret(asked.key_file)
    tier = PageTier(store, pages, cache.apply, identity, asked.wait_s, where, secret=secret)
    took_s = time.perf_counter() - began_s
    log.info("tier of pages: %s, identity %s, known after %.1f s", where, identity.hex()[:16], took_s)
    return tier


def _facts(recipe: Recipe, runner: ModelRunner, longest_tokens: int, pages: PageBytes) -> dict[str, object]:
    """Return all that a page's content depends on besides its tokens and its salt.

    The salt includes the request's adapter.
    """
    config = runner.config
    draft, share = draft_config(recipe, config), runner.decoder.share
    # What others have computed has other bits; without that promise a page of either is as good
    promised = {"batch invariant": True} if recipe.device.batch_invariant else {}
    return promised | {
        "layout": pages.layout,
        "page size": recipe.cache.page_size,
        "model": repr(config),
        "draft": None if draft is None else [repr(draft), share.cached(draft)],
        "share": share.cached(config),
        "long factors": needs_long_factors(config.rope, longest_tokens),
        "attention": [type(runner.attention).__qualname__, runner.attention.device.type],
    }


def digest_of_weights(recipe: Recipe) -> str:
    """Return a digest of the numbers of a recipe's model, and of what drafts for it.

    Every file is read for it, except where an earlier start has kept the digest beside the weights.
    """

    def read() -> str:
        own: object = digests(recipe.model.path)
        if recipe.model.weights == "random":
            own = ["random", recipe.model.seed, str(torch.__version__)]
        return identity_of({"own": own, "draft": digests(recipe.speculation.draft_path)}).hex()

    folder, paths = recipe.model.kept_in, (recipe.model.path, recipe.speculation.draft_path)
    if folder is None:
        return read()
    return remembered(folder / "digest", "-".join(origin_of(path) for path in paths if path), read)


def digests(path: Path | None) -> list[str] | None:
    """Return the digests of all tensor files of a checkpoint.

    A checkpoint in which a single number differs is another model.
    """
    if path is None:
        return None
    with ThreadPoolExecutor(_READERS) as readers:
        return [*readers.map(_file_digest, sorted(checkpoint_files(path)))]


def _file_digest(file: Path) -> str:
    hashed = hashlib.sha256()
    with file.open("rb") as data:
        while piece := data.read(_PIECE_BYTES):
            hashed.update(piece)
    return hashed.hexdigest()


def _store(asked: TierSection, identity: bytes, entry_bytes: int) -> tuple[PageStore, str]:
    """Return the store, and its name in the log."""
    most_bytes = int(asked.gib * GIB)
    if asked.kind == "disk":
        folder = place_of(asked, ROOT)
        try:
            return DiskStore(folder, most_bytes, identity, entry_bytes), str(folder)
        except OSError as error:
            problem, fix = f"{folder} cannot be used: {error.strerror or error}", "choose another"
            raise RecipeError((f"{NAME}.path", NAME), problem, fix, value=asked.path) from error
    assert asked.url is not None, "a server has a url"
    try:
        from kv_cache.tier.redis_store import RedisStore
    except ImportError as error:
        problem, fix = f"needs {error.name}", "bash scripts/setup.sh redis installs it"
        raise RecipeError((f"{NAME}.kind", NAME), problem, fix, value=asked.kind) from error
    password = None if asked.password_file is None else _password(asked.password_file)
    store = RedisStore(asked.url, most_bytes, identity, asked.wait_s, password, entry_bytes)
    return store, asked.url


def _password(name: str) -> str:
    file = ROOT / Path(name).expanduser()
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{file} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise RecipeError((f"{NAME}.password_file", NAME), problem, value=name) from error


def _secret(name: str) -> bytes:
    try:
        return read_secret(ROOT / Path(name).expanduser())
    except (OSError, ValueError) as error:
        raise RecipeError((f"{NAME}.key_file", NAME), in_one_line(error), value=name) from error
