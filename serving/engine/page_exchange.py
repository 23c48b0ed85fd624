"""Connect an engine to others for prompt pages: it computes pages for them, or has them computed there.

The recipe decides which of the two sides an engine has (`server.pages_at`, `server.prompt_replicas`).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from borders.files import in_one_line
from continuous_batching.engine import Step
from continuous_batching.request import Request
from kv_cache.exchange.connection import Wake
from kv_cache.exchange.messages import PageIdentity
from kv_cache.exchange.page_server import PageServer
from kv_cache.exchange.prompt_source import PromptSource
from recipes.schema.recipe import Recipe
from recipes.schema.recipe_error import RecipeError
from serving import fingerprint
from serving.engine.page_fetches import Fetch, PageFetches
from serving.engine.page_sends import PageSends

if TYPE_CHECKING:
    from recipes.assembly.engine import BuiltEngine

_MIB = 2**20
_MOST_PART_BYTES = 2**22  # most bytes of pages in one message, unless one layer's page is larger

log = logging.getLogger(__name__)


class PageExchange:
    """Both sides of an engine's page exchange; messages from outside ring `wake`."""

    def __init__(self, wake: Wake, sends: PageSends | None, fetches: PageFetches | None) -> None:
        self.wake = wake
        self._sends, self._fetches = sends, fetches

    @property
    def waiting(self) -> tuple[int, int]:
        """The number of requests that wait for pages, and of their tokens that are to be computed here."""
        return (0, 0) if self._fetches is None else (len(self._fetches), self._fetches.queued_tokens)

    def begin(self, stream: int, leader: Request) -> bool:
        """Return whether a request waits for its pages (see `PageFetches.begin`)."""
        return self._fetches is not None and self._fetches.begin(stream, leader)

    def end(self, stream: int, reason: str) -> bool:
        """Return whether a sample waits for its pages, and will therefore end as soon as it begins."""
        return self._fetches is not None and self._fetches.end(stream, reason)

    def take(self) -> list[Fetch]:
        """Do what is due between two steps, and return the requests that wait no longer."""
        self.wake.clear()
        if self._sends is not None:
            self._sends.take()
        if self._fetches is None:
            return []
        self._fetches.take()
        return self._fetches.take_ready()

    def stepped(self, step: Step) -> None:
        """Handle a computed step."""
        if self._sends is not None:
            self._sends.stepped(step)


def exchange_of(recipe: Recipe, built: BuiltEngine) -> PageExchange | None:
    """Return the exchange that a recipe asks for; raises RecipeError if its address cannot be listened on."""
    asked = recipe.server
    if asked.pages_at is None and not asked.prompt_replicas:
        return None
    start_s = time.perf_counter()
    cache, wake = built.runner.cache, Wake()
    identity = PageIdentity(fingerprint.of_pages(recipe), recipe.cache.page_size, cache.layout)
    log.info("pages of model %s (%.2g s)", identity.model, time.perf_counter() - start_s)
    sends = fetches = None
    if asked.pages_at is not None:
        part_bytes = max(_MOST_PART_BYTES, *cache.layer_bytes)
        try:
            most_tokens = built.engine.slots.max_tokens
            server = PageServer(
                asked.pages_at, identity, wake, most_part_bytes=part_bytes, most_tokens=most_tokens
            )
        except OSError as error:
            raise RecipeError(
                "server.pages_at", in_one_line(error), "choose another", value=asked.pages_at
            ) from error
        log.info("prompts for others: %s, port %d", asked.pages_at, server.port)
        sends = PageSends(built.engine, cache, built.runner.decoder, server, part_bytes)
    if asked.prompt_replicas:
        sources = {
            endpoint: PromptSource(
                endpoint,
                identity,
                wake,
                transport=asked.page_transport,
                window_bytes=int(asked.page_window_mib * _MIB),
            )
            for endpoint in asked.prompt_replicas
        }
        fetches = PageFetches(built.engine, cache, sources, asked.page_wait_s, wake)
    return PageExchange(wake, sends, fetches)
