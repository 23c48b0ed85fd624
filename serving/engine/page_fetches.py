"""Fetch the pages of prompts that other engines compute.

A request whose prompt another engine computes waits here, before the engine's queue, until all its pages have
arrived, or until that is hopeless: the other engine refuses, is lost, or is late. Then it is added like any
other request. After a complete transfer it is a prefix hit; after one that failed it is a miss, so no request
is lost.

Bytes are written to the pages between two steps, a bounded number each time, so that answers do not wait.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import Empty

from continuous_batching.engine import Engine
from continuous_batching.request import Request
from kv_cache.device.storage import KVCache
from kv_cache.exchange.connection import Connection, Wake
from kv_cache.exchange.messages import AllSent, NotSent, PagePart, one_line
from kv_cache.exchange.prompt_source import Came, PromptSource, taken, unwanted

MOST_WRITTEN_BYTES = 2**24  # most bytes written between two steps
_HEARD_BYTES = 2**16  # what a message without pages counts as, which bounds their number between two steps

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Fetch:
    """A request that waits for pages; its streams in `ends` are to end as soon as they begin."""

    stream: int
    leader: Request
    source: PromptSource
    asked_s: float  # time.monotonic() at the request
    connection: Connection
    number: int  # the transfer's number on the connection
    num_pages: int
    next_page: list[int]  # indexed by layer: the next page to write
    until_s: float
    num_bytes: int = 0
    ends: dict[int, str] = field(default_factory=dict)


class PageFetches:
    """Fetches pages from `sources` (by endpoint), and waits for each prompt at most `most_wait_s`."""

    def __init__(
        self,
        engine: Engine,
        cache: KVCache,
        sources: Mapping[str, PromptSource],
        most_wait_s: float,
        wake: Wake,
    ) -> None:
        self._engine, self._cache = engine, cache
        self._sources = sources
        self._turns = deque(sources.values())  # the first source's message is handled next
        self._most_wait_s, self._wake = most_wait_s, wake
        self._layer_bytes = cache.layer_bytes
        self._fetches: dict[tuple[Connection, int], Fetch] = {}
        self._ready: list[Fetch] = []

    def __len__(self) -> int:
        return len(self._fetches) + len(self._ready)

    @property
    def queued_tokens(self) -> int:
        """The tokens of waiting requests that are to be computed here once their pages have arrived."""
        page_size = self._engine.slots.page_size
        waiting = (*self._fetches.values(), *self._ready)
        return sum(each.leader.num_prompt_tokens - each.num_pages * page_size for each in waiting)

    def begin(self, stream: int, leader: Request) -> bool:
        """Ask for the pages of a request, which `take_ready` returns later; False if it need not wait.

        Raises BadRequest for a request that could never be served.
        """
        source = self._sources.get(leader.prompt_replica)
        if source is None or leader.adapter:  # another engine numbers its adapters differently
            return False
        engine = self._engine
        engine.scheduler.check(leader)
        expected = engine.expect_pages(leader)
        if expected is None:
            return False
        arrival, copies = expected
        self._cache.apply(copies)
        wait_s = self._most_wait_s if leader.timeout_s is None else min(self._most_wait_s, leader.timeout_s)
        asked = source.want(
            arrival.tokens.astype("<i4").tobytes(),
            leader.cache_salt,
            arrival.num_found,
            wait_s,
            leader.priority,
            leader.tenant,
        )
        if asked is None:
            engine.pages_arrived(leader.id, is_whole=False)
            return False
        first = [arrival.num_found] * len(self._layer_bytes)
        until_s = engine.clock() + wait_s
        asked_s = time.monotonic()
        self._fetches[asked] = Fetch(
            stream, leader, source, asked_s, *asked, len(arrival.keys), first, until_s
        )
        return True

    def end(self, stream: int, reason: str) -> bool:
        """Let a sample end as soon as it begins; returns False if it does not wait here."""
        for each in (*self._fetches.values(), *self._ready):
            if each.stream <= stream <= each.stream + len(each.leader.followers):
                each.ends[stream] = reason
                if (
                    len(each.ends) > len(each.leader.followers)
                    and (each.connection, each.number) in self._fetches
                ):
                    unwanted(each.connection, each.number)
                    self._miss(each, "nobody waits for it")
                return True
        return False

    def take(self) -> None:
        """Write the bytes that have arrived to their pages, and give up transfers that are late."""
        num_left, num_empty = MOST_WRITTEN_BYTES, 0
        # One message of each source in turn, so that none starves.
        while num_left > 0 and num_empty < len(self._turns):
            source = self._turns[0]
            self._turns.rotate(-1)
            try:
                came = source.came.get_nowait()
            except Empty:
                num_empty += 1
                continue
            num_empty = 0
            came.connection.handled(came.num_held)
            num_left -= max(_HEARD_BYTES, self._hear(came))
        if num_left <= 0:
            self._wake.ring()  # more messages may be waiting
        now_s = self._engine.clock()
        for fetch in [each for each in self._fetches.values() if now_s >= each.until_s]:
            unwanted(fetch.connection, fetch.number)
            self._miss(fetch, "it is late")
            is_heard = fetch.source.came.empty()  # otherwise its pages may lie in our own queue, unread
            # The request's own timeout was shorter.
            is_own_limit = time.monotonic() - fetch.asked_s < self._most_wait_s
            if is_heard and not is_own_limit:
                fetch.source.was_late(fetch.asked_s)

    def take_ready(self) -> list[Fetch]:
        """Return the requests that wait no longer, in the order in which they became ready."""
        ready, self._ready = self._ready, []
        return ready

    def _hear(self, came: Came) -> int:
        """Handle one message, and return how many bytes were written."""
        connection, message = came.connection, came.message
        if message is None:
            for lost in [each for each in self._fetches.values() if each.connection is connection]:
                self._miss(lost, "the engine is lost")
            return 0
        fetch = self._fetches.get((connection, message.number))
        if isinstance(message, PagePart):
            if fetch is not None:
                self._write(fetch, message)
            taken(connection)
            return message.num_bytes
        if fetch is None:
            return 0
        match message:
            case AllSent(_, num_bytes):  # the last message of a transfer: what is missing will not arrive
                if min(fetch.next_page) == fetch.num_pages and num_bytes == fetch.num_bytes:
                    self._engine.pages_arrived(fetch.leader.id, is_whole=True)
                    fetch.source.has_arrived()
                    self._settle(fetch)
                else:
                    self._miss(fetch, f"{fetch.num_bytes} of {num_bytes} bytes came")
            case NotSent(_, why):
                self._miss(fetch, one_line(why))
        return 0

    def _write(self, fetch: Fetch, part: PagePart) -> None:
        """Write a part to the cache if it is the next one expected; otherwise give the transfer up."""
        arrival = self._engine.arriving_pages(fetch.leader.id)
        is_next = (
            0 <= part.layer < len(self._layer_bytes)
            and part.first_page == fetch.next_page[part.layer]
            and 0 < part.num_pages <= fetch.num_pages - part.first_page
            and part.num_bytes == part.num_pages * self._layer_bytes[part.layer]
        )
        if arrival is None or not is_next:
            unwanted(fetch.connection, fetch.number)
            self._miss(fetch, "its pages had to give way" if arrival is None else "another part was next")
            return
        stop = part.first_page + part.num_pages
        self._cache.write_layer(
            part.layer, arrival.pages[part.first_page : stop], fetch.connection.part(part)
        )
        fetch.next_page[part.layer] = stop
        fetch.num_bytes += part.num_bytes

    def _miss(self, fetch: Fetch, why: str) -> None:
        """Give a transfer up: none of its pages will be found, and the prompt is computed here."""
        log.info("a prompt of %d tokens is computed here: %s", fetch.leader.num_prompt_tokens, why)
        self._engine.pages_arrived(fetch.leader.id, is_whole=False)
        self._settle(fetch)

    def _settle(self, fetch: Fetch) -> None:
        del self._fetches[fetch.connection, fetch.number]
        self._ready.append(fetch)
