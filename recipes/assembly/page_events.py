"""Publish the events of an engine's pages where the recipe asks for it."""

from __future__ import annotations

import logging

from borders.files import in_one_line
from borders.shared_secret import read_secret
from kv_cache.prefix_cache import PrefixCache
from recipes.schema.recipe import CacheSection
from recipes.schema.recipe_error import RecipeError

log = logging.getLogger(__name__)


def events_secret(cache: CacheSection) -> bytes | None:
    """Return the secret that publishers and readers of events prove; raises RecipeError for its file."""
    if cache.events_key_file is None:
        return None
    try:
        return read_secret(cache.events_key_file)
    except (ValueError, OSError) as error:
        name = str(cache.events_key_file)
        raise RecipeError("cache.events_key_file", in_one_line(error), value=name) from error


def publish_pages(prefix: PrefixCache, cache: CacheSection) -> None:
    """Publish what a cache holds at `cache.events`; raises RecipeError where that is not possible."""
    assert cache.events is not None, "nothing is to be published"
    try:
        from kv_cache.events import PageEvents, replay_endpoint
    except ImportError as error:
        problem, fix = f"needs {error.name}", "bash scripts/setup.sh serve installs it"
        raise RecipeError("cache.events", problem, fix, value=cache.events) from error
    try:
        again = replay_endpoint(cache.events)
        secret = events_secret(cache)
        prefix.listener = PageEvents(prefix, cache.page_size, cache.events, cache.events_topic, secret)
    except (ValueError, OSError) as error:
        raise RecipeError("cache.events", str(error), "choose another", value=cache.events) from error
    log.info("events of pages: %s, and again from %s", cache.events, again)
