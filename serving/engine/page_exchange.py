"""Connect an engine to others for prompt pages: it computes pages for them, or has them computed there.

The recipe decides which of the two sides an engine has (`server.pages_at`, `server.prompt_replicas`).

A request whose prompt another engine computes waits here, before the engine's queue, until all its pages have
arrived, or until that is hopeless: the other engine refuses, is lost, or is late. Then it is added like any
other request. After a complete transfer it is a prefix hit; after one that failed it is a miss, so no request
is lost. Bytes are written to the pages between two steps, a bounded number each time, so that answers do not
wait.

On the other side, a prompt that another engine wants becomes a request for one token, which nobody reads.
While a step computes a layer, the pages that the previous layer completed are already being sent. Pages that
cannot be read at once, because the other side receives slowly, are read later; until then they are held on a
lease, for as long as the other side waits.

Of a layer that keeps a recurrent state, one page is sent: the state behind the last page of the prompt.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from borders.files import in_one_line
from borders.refusal import BadRequest, one_line
from borders.shared_secret import read_secret
from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine, Step
from continuous_batching.paging.held_pages import Leased
from continuous_batching.queueing import QueueFull
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.validation import is_here
from kv_cache.device.rank_pages import WholePages
from kv_cache.exchange.channel import Credentials, TlsContexts
from kv_cache.exchange.connection import Connection, Wake
from kv_cache.exchange.messages import AllSent, NotSent, PageIdentity, PagePart, PagesWanted
from kv_cache.exchange.mooncake import Mooncake
from kv_cache.exchange.page_server import PageLink, PageServer
from kv_cache.exchange.prompt_source import Came, PromptSource, taken, unwanted
from kv_cache.exchange.transports import TRANSPORTS, Transport
from kv_cache.page_keys import adapter_of
from models.config import needs_long_factors
from models.decoder import Decoder
from recipes.schema.recipe import Recipe
from recipes.schema.recipe_error import RecipeError
from recipes.schema.server_section import ServerSection
from serving import fingerprint

if TYPE_CHECKING:
    from recipes.assembly.engine import BuiltEngine


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
    """Fetches pages from `sources` (by endpoint), and waits for each prompt at most `most_wait_s`.

    Where requests may wait only for `max_queue_wait_s` from their arrival to their admission, a prompt is
    waited for no longer than half of it, and a quarter is left for the admission.
    """

    def __init__(
        self,
        engine: Engine,
        cache: WholePages,
        sources: Mapping[str, PromptSource],
        most_wait_s: float,
        wake: Wake,
        max_queue_wait_s: float = math.inf,
    ) -> None:
        self._engine, self._cache = engine, cache
        self._sources = sources
        self._turns = deque(sources.values())  # the first source's message is handled next
        self._most_wait_s, self._wake = min(most_wait_s, max_queue_wait_s / 2), wake
        self._oldest_s = max_queue_wait_s * 3 / 4  # the age at which a request is waited for no longer
        self._layer_bytes, self._are_states = cache.layer_bytes, cache.are_states
        self._fetches: dict[tuple[Connection, int], Fetch] = {}
        self._ready: list[Fetch] = []
        self._ids = set[str]()  # ids of all samples that wait here, of which the scheduler knows nothing

    def __len__(self) -> int:
        return len(self._fetches) + len(self._ready)

    @property
    def num_samples(self) -> int:
        """The number of samples of the requests that wait here."""
        return len(self._ids)

    @property
    def queued_tokens(self) -> int:
        """The tokens of waiting requests that are to be computed here once their pages have arrived."""
        page_size = self._engine.slots.page_size
        waiting = (*self._fetches.values(), *self._ready)
        return sum(len(each.leader.tokens) - each.num_pages * page_size for each in waiting)

    def begin(self, stream: int, leader: Request) -> bool:
        """Ask for the pages of a request, which `take_ready` returns later; False if it need not wait.

        Raises BadRequest for a request that could never be served, or whose id waits here.
        """
        for each in (leader, *leader.followers):
            if each.id in self._ids:
                raise is_here(each)
        source = self._sources.get(leader.prompt_replica)
        if source is None:
            return False
        # The salt tells the other engine which adapter it is, because its places have numbers of their own
        assert bool(leader.adapter) == bool(adapter_of(leader.cache_salt)), "a salt names its adapter"
        engine = self._engine
        engine.scheduler.check(leader)
        # What a request has waited since it arrived, such as for its grammar, counts
        age_s = engine.clock() - leader.arrival_s
        timeout_s = math.inf if leader.timeout_s is None else leader.timeout_s
        wait_s = min(self._most_wait_s, self._oldest_s - age_s, timeout_s - age_s)
        if wait_s <= 0:
            return False
        expected = engine.expect_pages(leader)
        if expected is None:
            return False
        arrival, copies = expected
        self._cache.apply(copies)
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
        num_pages = len(arrival.keys)
        first = _first_pages(self._are_states, arrival.num_found, num_pages)
        asked_s = time.monotonic()
        until_s = engine.clock() + wait_s  # read later: what ends then has waited so long since `asked_s`
        self._ids.update(each.id for each in (leader, *leader.followers))
        self._fetches[asked] = Fetch(stream, leader, source, asked_s, *asked, num_pages, first, until_s)
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
        while num_left > 0 and num_empty < len(self._turns) and not self._cache.is_behind:
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
        if num_left <= 0 or self._cache.is_behind:
            self._wake.ring()  # more messages may be waiting
        now_s = self._engine.clock()
        for fetch in [each for each in self._fetches.values() if now_s >= each.until_s]:
            unwanted(fetch.connection, fetch.number)
            self._miss(fetch, "it is late")
            is_heard = fetch.source.came.empty()  # otherwise its pages may lie in our own queue, unread
            # The request itself had less time, by its timeout or its age.
            is_own_limit = time.monotonic() - fetch.asked_s < self._most_wait_s
            if is_heard and not is_own_limit:
                fetch.source.was_late(fetch.asked_s)

    def take_ready(self) -> list[Fetch]:
        """Return the requests that wait no longer, in the order in which they became ready."""
        ready, self._ready = self._ready, []
        for fetch in ready:
            self._ids.difference_update(each.id for each in (fetch.leader, *fetch.leader.followers))
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
        is_state = self._are_states[part.layer]
        pages = arrival.state if is_state else arrival.pages[part.first_page : stop]
        self._cache.write_layer(part.layer, pages, fetch.connection.part(part))
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


def _first_pages(are_states: Sequence[bool], first_page: int, num_pages: int) -> list[int]:
    """Return the first page to be sent of each layer; a state counts as the last page, behind which it is."""
    return [num_pages - 1 if is_state else first_page for is_state in are_states]


MOST_UNSENT_BYTES = 2**26  # most bytes read for one other engine and not yet sent
MOST_UNSENT_BYTES_OF_ALL = 2**29  # the same over all engines; beyond it, one part at a time is read for each
MOST_SENDINGS = 1024  # most prompts that are computed for one other engine
MOST_HEARD = 256  # most messages that are handled between two steps
MOST_HEARD_BYTES = 2**20  # bytes of tokens after which no more are: the engine's thread hashes them


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
    """A runner that also sends what it computes for others; it replaces the engine's runner and wraps it.

    Without a `decoder`, because several ranks compute its layers, pages are read once their prompt is
    computed. `adapters` are the digests of the adapters here, by the numbers of their places.
    """

    def __init__(
        self,
        engine: Engine,
        cache: WholePages,
        decoder: Decoder | None,
        server: PageServer,
        most_part_bytes: int,
        adapters: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._engine, self._cache, self._server = engine, cache, server
        self._runner, engine.runner = engine.runner, self
        self._layer_bytes, self._are_states = cache.layer_bytes, cache.are_states
        # Those of a drafter lie behind them
        self._num_layers = len(self._layer_bytes) if decoder is None else decoder.part.num_layers
        self._most_part_bytes = most_part_bytes
        self._adapters = adapters
        self._sendings: dict[str, Sending] = {}  # keyed by the ids of their requests
        # One entry for each span of this step: what its slot holds, and how many pages will be full.
        self._spans: list[tuple[Sending, Leased, int]] = []
        self._num_asked = 0
        self._num_of = Counter[PageLink]()  # number of sendings of each link
        if decoder is not None:
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

    def resize(self, num_pages: Sequence[int], copies: Any) -> None:
        """Resize the cache as the wrapped runner does."""
        self._runner.resize(num_pages, copies)

    def take(self) -> None:
        """Handle the messages of other engines, read pages for which there is room by now, and end leases."""
        num_left, bytes_left = MOST_HEARD, MOST_HEARD_BYTES
        while num_left > 0 and bytes_left > 0:
            num_left -= 1
            try:
                asked = self._server.asked.get_nowait()
            except Empty:
                break
            asked.link.connection.handled(asked.num_held)
            if isinstance(asked.message, PagesWanted):
                bytes_left -= len(asked.message.tokens)
                self._begin(asked.link, asked.message)
                continue
            number = None if asked.message is None else asked.message.number
            for sending in self._of(asked.link, number):
                self._end(sending)
        else:
            self._server.wake.ring()  # more messages may be waiting
        now_s, full = self._engine.clock(), set[PageLink]()
        for sending in [*self._sendings.values()]:
            if now_s >= sending.until_s:
                self._fail(sending, "its lease is over")
            elif sending.is_computed and sending.link not in full and not self._read_leased(sending):
                full.add(sending.link)  # hundreds of its prompts may wait for room

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

    def leave_adapter(self, number: int) -> None:
        """Give up the prompts that are being computed with the adapter in this place, which goes."""
        for sending in [*self._sendings.values()]:
            if sending.request.adapter == number and not sending.is_computed:
                self._fail(sending, "its adapter is being replaced")

    def _of(self, link: PageLink, number: int | None) -> list[Sending]:
        return [
            each for each in self._sendings.values() if each.link is link and number in (None, each.number)
        ]

    def _begin(self, link: PageLink, wanted: PagesWanted) -> None:
        """Add a request for a wanted prompt, whose fields `PagesWanted` and `PageLink` have checked."""
        if not link.connection.is_open:
            return  # An engine's end may be heard before what it said last
        engine, size = self._engine, self._engine.slots.page_size
        if self._num_of[link] >= MOST_SENDINGS:
            link.conclude(NotSent(wanted.number, f"{MOST_SENDINGS} prompts of it wait here already"))
            return
        digest = adapter_of(wanted.cache_salt)
        number = next((each for each, other in self._adapters.items() if other == digest), None)
        if digest and number is None:
            link.conclude(NotSent(wanted.number, f"there is no adapter of the digest {digest[:16]}... here"))
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
            adapter=0 if number is None else number,
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
        first = _first_pages(self._are_states, wanted.first_page, num_pages)
        until_s = now_s + wanted.lease_s
        self._num_of[link] += 1
        self._sendings[request.id] = Sending(
            link, wanted.number, request, wanted.first_page, num_pages, first, until_s
        )

    def _tapped(self, batch: Batch, run: Callable[[], Any]) -> Any:
        """Run a batch, and read from each layer the pages that it completes for others."""
        slots = self._engine.slots
        if not self._sendings:
            return run()
        own = [
            (index, sending, Leased(slots.pages(row), slots.state_of(row)))
            for index, row in enumerate(batch.slots.tolist())
            if (sending := self._sendings.get(slots.requests[row].id)) is not None
        ]
        self._spans = [
            (sending, held, int(batch.stops[index]) // slots.page_size) for index, sending, held in own
        ]
        try:
            result = run()
        finally:
            self._spans = []
        # A drafter has computed its part by now, as far as the batch says
        for index, sending, held in own if len(batch.draft_stops) else ():
            for layer in range(self._num_layers, len(self._layer_bytes)):
                self._read(sending, layer, held, int(batch.draft_stops[index]) // slots.page_size)
        return result

    def _after_layer(self, layer: int) -> None:
        for sending, held, num_full in self._spans:
            self._read(sending, layer, held, num_full)

    def _read(self, sending: Sending, layer: int, held: Leased, num_full: int) -> bool:
        """Send a layer's part of these pages up to the first page that is not full.

        A state is sent once it stands behind the last page. What there is no room for is sent later; returns
        whether there was room for all.
        """
        each, link = self._layer_bytes[layer], sending.link
        most = max(1, self._most_part_bytes // each)
        stop, first = min(num_full, sending.num_pages), sending.next_page[layer]
        while first < stop and self._may_read(link):
            count = min(most, stop - first)
            pages = held.state if self._are_states[layer] else held.pages[first : first + count]
            wait = self._cache.read_layer(layer, pages)
            link.part(sending.number, layer, first, count, count * each, wait)
            sending.num_bytes += count * each
            first += count
        sending.next_page[layer] = first
        return first >= stop

    def _may_read(self, link: PageLink) -> bool:
        """Return whether another part may be read.

        A receiver that takes nothing cannot use up the memory for all others.
        """
        own = link.unsent_bytes
        return not own or (
            own < MOST_UNSENT_BYTES
            and sum(each.unsent_bytes for each in self._server.links) < MOST_UNSENT_BYTES_OF_ALL
        )

    def _read_leased(self, sending: Sending) -> bool:
        """Send what could not be sent before the request ended, and conclude once everything is sent.

        Returns whether there was room for it.
        """
        if not sending.is_read:
            held = self._engine.leased_pages(sending.request.id)
            if held is None:
                self._fail(sending, "its pages had to give way")
                return True
            has_room = self._may_read(sending.link) and all(
                self._read(sending, layer, held, sending.num_pages) for layer in range(len(self._layer_bytes))
            )
            if not has_room:
                return False
        sending.link.conclude(AllSent(sending.number, sending.num_bytes))
        self._engine.scheduler.counters.sent_pages += sending.num_pages - sending.first_page
        self._end(sending)
        return True

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


_MIB = 2**20
_MOST_PART_BYTES = 2**22  # most bytes of pages in one message, unless one layer's page is larger


class PageExchange:
    """Both sides of an engine's page exchange; messages from outside ring `wake`."""

    def __init__(self, wake: Wake, sends: PageSends | None, fetches: PageFetches | None) -> None:
        self.wake = wake
        self._sends, self._fetches = sends, fetches

    @property
    def waiting(self) -> tuple[int, int]:
        """The number of samples that wait for pages, and of their tokens that are to be computed here."""
        return (0, 0) if self._fetches is None else (self._fetches.num_samples, self._fetches.queued_tokens)

    def begin(self, stream: int, leader: Request) -> bool:
        """Return whether a request waits for its pages (see `PageFetches.begin`)."""
        return self._fetches is not None and self._fetches.begin(stream, leader)

    def end(self, stream: int, reason: str) -> bool:
        """Return whether a sample waits for its pages, and will therefore end as soon as it begins."""
        return self._fetches is not None and self._fetches.end(stream, reason)

    def leave_adapter(self, number: int) -> None:
        """Compute no more for others with the adapter in this place (see `PageSends.leave_adapter`)."""
        if self._sends is not None:
            self._sends.leave_adapter(number)

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
    cache: WholePages = built.runner.cache if built.pages is None else built.pages
    decoder, wake = None if built.pages is not None else built.runner.decoder, Wake()
    identity = PageIdentity(
        fingerprint.of_pages(recipe),
        recipe.cache.page_size,
        cache.layout,
        fingerprint.of_drafts(recipe),
        needs_long_factors(built.config.rope, built.engine.slots.max_tokens),
    )
    log.info("pages of model %s (%.2g s)", identity.model, time.perf_counter() - start_s)
    sends = fetches = None
    credentials, transports = credentials_of(asked), transports_of(asked)
    if asked.pages_at is not None:
        part_bytes = max(_MOST_PART_BYTES, *cache.layer_bytes)
        try:
            most_tokens = built.engine.slots.max_tokens
            server = PageServer(
                asked.pages_at,
                identity,
                wake,
                most_part_bytes=part_bytes,
                most_tokens=most_tokens,
                transports=transports,
                credentials=credentials,
            )
        except OSError as error:
            raise RecipeError(
                "server.pages_at", in_one_line(error), "choose another", value=asked.pages_at
            ) from error
        log.info("prompts for others: %s, port %d", asked.pages_at, server.port)
        adapters = {} if built.adapters is None else built.adapters.digests
        sends = PageSends(built.engine, cache, decoder, server, part_bytes, adapters)
    if asked.prompt_replicas:
        sources = {
            endpoint: PromptSource(
                endpoint,
                identity,
                wake,
                transport=asked.page_transport,
                window_bytes=int(asked.page_window_mib * _MIB),
                transports=transports,
                credentials=credentials,
            )
            for endpoint in asked.prompt_replicas
        }
        max_queue_wait_s = recipe.scheduler.max_queue_wait_s or math.inf
        fetches = PageFetches(built.engine, cache, sources, asked.page_wait_s, wake, max_queue_wait_s)
    return PageExchange(wake, sends, fetches)


def transports_of(asked: ServerSection) -> dict[str, Transport]:
    """Return the transports of an engine; raises RecipeError if Mooncake's is asked for and cannot be had."""
    if asked.page_transport != "mooncake" or asked.mooncake_host is None:
        return TRANSPORTS
    try:
        mooncake = Mooncake(asked.mooncake_host, asked.mooncake_protocol)
    except ImportError as error:
        fix = "bash scripts/setup.sh mooncake installs it, and the system libibverbs1 and libnl-3"
        raise RecipeError("server.page_transport", f"needs {error}", fix, value="mooncake") from error
    except OSError as error:
        name, fix = "server.mooncake_protocol", "choose another, such as tcp"
        raise RecipeError(name, in_one_line(error), fix, value=asked.mooncake_protocol) from error
    log.info("pages by Mooncake's transfer engine, %s at %s", asked.mooncake_protocol, asked.mooncake_host)
    return TRANSPORTS | {"mooncake": mooncake}


def credentials_of(asked: ServerSection) -> Credentials:
    """Read what the engine proves to others; raises RecipeError for files that cannot be used."""
    secret = tls = None
    if asked.pages_key_file is not None:
        try:
            secret = read_secret(asked.pages_key_file)
        except (OSError, ValueError) as error:
            raise RecipeError(
                "server.pages_key_file", in_one_line(error), value=asked.pages_key_file
            ) from error
    if asked.pages_tls is not None:
        try:
            tls = TlsContexts.of(*asked.pages_tls)
        except (OSError, ValueError) as error:
            keys = tuple(f"server.pages_tls_{each}" for each in ("certificate", "private_key", "authority"))
            fix = "name three PEM files that belong together"
            raise RecipeError(keys, in_one_line(error), fix, value=asked.pages_tls[0]) from error
    return Credentials(secret, tls)
