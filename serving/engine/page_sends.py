"""Compute prompts for other engines, and send them the pages.

A prompt that another engine wants becomes a request for one token, which nobody reads. While a step computes
a layer, the pages that the previous layer completed are already being sent. Pages that cannot be read at
once, because the other side receives slowly, are read later; until then they are held on a lease, for as long
as the other side waits.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty
from typing import Any

import numpy as np

from borders.refusal import BadRequest
from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine, Step
from continuous_batching.queueing import QueueFull
from continuous_batching.request import Request, SamplingParams
from kv_cache.device.storage import KVCache
from kv_cache.exchange.messages import AllSent, NotSent, PagesWanted, one_line
from kv_cache.exchange.page_server import PageLink, PageServer
from kv_cache.pages import Index
from models.decoder import Decoder

MOST_UNSENT_BYTES = 2**26  # most bytes read for one other engine and not yet sent
MOST_UNSENT_BYTES_OF_ALL = 2**29  # the same over all engines; beyond it, one part at a time is read for each
MOST_SENDINGS = 1024  # most prompts that are computed for one other engine
MOST_HEARD = 256  # most messages that are handled between two steps

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Sending:
    """The pages of one prompt, on their way to another engine."""

    link: PageLink
    number: int
    request: Request
    first_page: int
    num_pages: int
    next_page: list[int]  # indexed by layer: the first page that was not read
    until_s: float  # end of the lease: the other side waits no longer
    is_computed: bool = False
    num_bytes: int = 0

    @property
    def is_read(self) -> bool:
        """Whether all pages have been read."""
        return min(self.next_page) == self.num_pages


class PageSends:
    """A runner that also sends what it computes for others; it replaces the engine's runner and wraps it."""

    def __init__(
        self, engine: Engine, cache: KVCache, decoder: Decoder, server: PageServer, most_part_bytes: int
    ) -> None:
        self._engine, self._cache, self._server = engine, cache, server
        self._runner, engine.runner = engine.runner, self
        self._layer_bytes = cache.layer_bytes
        self._most_part_bytes = most_part_bytes
        self._sendings: dict[str, Sending] = {}  # keyed by the ids of their requests
        # One entry for each span of this step: the slot's pages, and how many of them will be full.
        self._spans: list[tuple[Sending, Index, int]] = []
        self._num_asked = 0
        self._num_of = Counter[PageLink]()  # number of sendings of each link
        decoder.after_layer = self._after_layer

    def __len__(self) -> int:
        return len(self._sendings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, batch: Batch) -> Sampled:
        """Run a batch as the wrapped runner does."""
        sampled: Sampled = self._tapped(batch, lambda: self._runner.run(batch))
        return sampled

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        """Start a batch as the wrapped runner does."""
        wait: Callable[[], Sampled] = self._tapped(batch, lambda: self._runner.start(batch))
        return wait

    def resize(self, num_pages: int, copies: Any) -> None:
        """Resize the cache as the wrapped runner does."""
        self._runner.resize(num_pages, copies)

    def take(self) -> None:
        """Handle the messages of other engines, read pages for which there is room by now, and end leases."""
        for _ in range(MOST_HEARD):
            try:
                asked = self._server.asked.get_nowait()
            except Empty:
                break
            asked.link.connection.handled(asked.num_held)
            if isinstance(asked.message, PagesWanted):
                self._begin(asked.link, asked.message)
                continue
            number = None if asked.message is None else asked.message.number
            for sending in self._of(asked.link, number):
                self._end(sending)
        else:
            self._server.wake.ring()  # more messages may be waiting
        now_s = self._engine.clock()
        for sending in [*self._sendings.values()]:
            if now_s >= sending.until_s:
                self._fail(sending, "its lease is over")
            elif sending.is_computed:
                self._read_leased(sending)

    def stepped(self, step: Step) -> None:
        """Handle the requests that a step has finished, some of which may be for other engines."""
        for request in step.finished if self._sendings else ():
            sending = self._sendings.get(request.id)
            if sending is None:
                continue
            if request.finish_reason in ("stop", "length"):
                sending.is_computed = True
                self._read_leased(sending)
            else:
                self._fail(sending, f"its prompt ended with {request.finish_reason}")

    def _of(self, link: PageLink, number: int | None) -> list[Sending]:
        return [
            each for each in self._sendings.values() if each.link is link and number in (None, each.number)
        ]

    def _begin(self, link: PageLink, wanted: PagesWanted) -> None:
        """Add a request for a wanted prompt, whose fields `PagesWanted` and `PageLink` have checked."""
        engine, size = self._engine, self._engine.slots.page_size
        if self._num_of[link] >= MOST_SENDINGS:
            link.conclude(NotSent(wanted.number, f"{MOST_SENDINGS} prompts of it wait here already"))
            return
        tokens = np.frombuffer(wanted.tokens, dtype="<i4").astype(np.int32)
        num_pages, now_s = len(tokens) // size, engine.clock()
        self._num_asked += 1
        request = Request(
            f"pages-{self._num_asked}",
            tokens,
            SamplingParams(max_tokens=1, temperature=0.0),
            tenant=wanted.tenant,
            cache_salt=wanted.cache_salt,
            priority=wanted.priority,
            arrival_s=now_s,
            timeout_s=wanted.lease_s,
            leases_pages=True,
        )
        try:
            engine.add(request)
        except (BadRequest, QueueFull) as refusal:
            link.conclude(NotSent(wanted.number, one_line(str(refusal))))
            return
        first = [wanted.first_page] * len(self._layer_bytes)
        until_s = now_s + wanted.lease_s
        self._num_of[link] += 1
        self._sendings[request.id] = Sending(
            link, wanted.number, request, wanted.first_page, num_pages, first, until_s
        )

    def _tapped(self, batch: Batch, run: Callable[[], Any]) -> Any:
        """Run a batch, and read from each layer the pages that it completes for others."""
        slots = self._engine.slots
        if self._sendings:
            self._spans = [
                (sending, slots.pages(row), stop // slots.page_size)
                for row, stop in zip(batch.slots.tolist(), batch.stops.tolist())
                if (sending := self._sendings.get(slots.requests[row].id)) is not None
            ]
        try:
            return run()
        finally:
            self._spans = []

    def _after_layer(self, layer: int) -> None:
        for sending, pages, num_full in self._spans:
            self._read(sending, layer, pages, num_full)

    def _read(self, sending: Sending, layer: int, pages: Index, num_full: int) -> None:
        """Send a layer's part of these pages up to the first page that is not full.

        What there is no room for is sent later.
        """
        each, link = self._layer_bytes[layer], sending.link
        most = max(1, self._most_part_bytes // each)
        stop, first = min(num_full, sending.num_pages), sending.next_page[layer]
        while first < stop and self._may_read(link):
            count = min(most, stop - first)
            wait = self._cache.read_layer(layer, pages[first : first + count])
            link.part(sending.number, layer, first, count, count * each, wait)
            sending.num_bytes += count * each
            first += count
        sending.next_page[layer] = first

    def _may_read(self, link: PageLink) -> bool:
        """Return whether another part may be read.

        A receiver that takes nothing cannot use up the memory for all others.
        """
        own = link.unsent_bytes
        return not own or (
            own < MOST_UNSENT_BYTES
            and sum(each.unsent_bytes for each in self._server.links) < MOST_UNSENT_BYTES_OF_ALL
        )

    def _read_leased(self, sending: Sending) -> None:
        """Send what could not be sent before the request ended, and conclude once everything is sent."""
        if not sending.is_read:
            pages = self._engine.leased_pages(sending.request.id)
            if pages is None:
                self._fail(sending, "its pages had to give way")
                return
            for layer in range(len(self._layer_bytes)):
                self._read(sending, layer, pages, sending.num_pages)
        if sending.is_read:
            sending.link.conclude(AllSent(sending.number, sending.num_bytes))
            self._engine.scheduler.counters.sent_pages += sending.num_pages - sending.first_page
            self._end(sending)

    def _fail(self, sending: Sending, why: str) -> None:
        sending.link.conclude(NotSent(sending.number, one_line(why)))
        log.info("pages of a prompt of %d tokens are not sent: %s", len(sending.request.prompt), why)
        self._end(sending)

    def _end(self, sending: Sending) -> None:
        """Forget a sending and release its pages, or abort its request."""
        del self._sendings[sending.request.id]
        self._num_of[sending.link] -= 1
        if not self._num_of[sending.link]:
            del self._num_of[sending.link]
        if sending.is_computed:
            self._engine.release_pages(sending.request.id)
        else:
            self._engine.abort(sending.request.id)
