"""What does an engine do with others about pages, as its recipe says: compute for them, have them compute?"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from continuous_batching.engine import Step
from continuous_batching.request import Request
from continuous_batching.system_error import in_one_line
from kv_cache.exchange.connection import Wake
from kv_cache.exchange.identity import PageIdentity
from kv_cache.exchange.page_server import PageServer
from kv_cache.exchange.prompt_source import PromptSource
from recipes.schema.recipe import Recipe
from recipes.schema.recipe_error import RecipeError
from serving import fingerprint
from serving.engine.page_fetches import Fetch, PageFetches
from serving.engine.page_sends import PageSends

if TYPE_CHECKING:
    from recipes.build.engine import BuiltEngine

_MIB = 2**20
_MOST_PART_BYTES = 2**22  # of pages, in a message

log = logging.getLogger(__name__)


class PageExchange:
    """Both sides of an engine; what comes from outside rings `wake`."""

    def __init__(self, wake: Wake, sends: PageSends | None, fetches: PageFetches | None) -> None:
        self.wake = wake
        self._sends, self._fetches = sends, fetches

    @property
    def waiting(self) -> tuple[int, int]:
        """How many requests wait for pages, and what is to be computed here of them, in tokens."""
        return (0, 0) if self._fetches is None else (len(self._fetches), self._fetches.queued_tokens)

    def begin(self, stream: int, leader: Request) -> bool:
        """Whether a request waits for its pages (see `PageFetches.begin`)."""
        return self._fetches is not None and self._fetches.begin(stream, leader)

    def end(self, stream: int, reason: str) -> bool:
        """Whether a sample waits for its pages, and will end as it begins."""
        return self._fetches is not None and self._fetches.end(stream, reason)

    def take(self) -> list[Fetch]:
        """Do what is due between two steps; returns the requests that wait no longer."""
        self.wake.clear()
        if self._sends is not None:
            self._sends.take()
        if self._fetches is None:
            return []
        self._fetches.take()
        return self._fetches.take_ready()

    def stepped(self, step: Step) -> None:
        """A step was computed."""
        if self._sends is not None:
            self._sends.stepped(step)


def exchange_of(recipe: Recipe, built: BuiltEngine) -> PageExchange | None:
    """What a recipe asks for; raises RecipeError for an address that cannot be listened at."""
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
