"""Connect an engine and its device to a page store.

The engine looks pages up and receives what was found; the device makes the copies that the scheduler
requests, in order: published pages are written to the store, and found pages are put into the host's pool.

Reading and writing happen in a thread each. Lookups run one after the other; what each reads is decided in
`lookup`. A request waits for a bounded time: what was found by then is used, and a store that has not
answered for so long is left alone. The queue of writes is bounded in bytes, and pages that do not fit are
dropped. It is processed in order, so that a page that turned out wrong is removed after it was written. At
the end what is left of it is not written, but still removed: other engines may find it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol, TypeVar

from borders.refusal import one_line
from kv_cache.page_keys import KEY_BYTES
from kv_cache.pages import Index, PageCopy
from kv_cache.tier.lookup import Lookup, PageName, Sought
from kv_cache.tier.store import HEAD_BYTES, PageStore, StoreFailed, WrongEntry, content_of, entry_of

PAUSE_S = 5.0  # time for which a store that failed is left alone

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


@dataclass(slots=True)
class TierCounters:
    """Totals that only grow, of pages unless a lookup or a failure is named."""

    written: int = 0
    known: int = 0  # not written, because the store had them
    dropped: int = 0  # not written, because too many are queued or the store fails
    found: int = 0
    refused: int = 0  # found and not used, because they are damaged or of another model
    hits: int = 0  # lookups that found something
    misses: int = 0
    # Lookups that exceeded their time; what they had found by then was used
    late: int = 0
    # Lookups that were not started, because the store fails, or those before them take too long
    skipped: int = 0
    read_failures: int = 0
    write_failures: int = 0


class StoreHealth:
    """Leaves a store alone for a while after a failure; logs the first failure, and the recovery.

    Reading and writing have a health of their own, because a full disk can still be read. `name` says which
    it is.
    """

    def __init__(self, name: str, pause_s: float = PAUSE_S) -> None:
        self._name, self._pause_s = name, pause_s
        self._lock = threading.Lock()
        self._until_s = 0.0
        self.is_well = True  # state after the last call to the store
        self.num_failures = 0

    @property
    def may_be_asked(self) -> bool:
        """Whether the store works, or has been left alone for long enough."""
        return self.is_well or time.monotonic() >= self._until_s

    def failed(self, why: str) -> None:
        """Note that the store could not be read or written."""
        with self._lock:
            self.num_failures += 1
            if self.is_well:
                log.warning("%s fails, and is done without: %s", self._name, why)
            self.is_well = False
            self._until_s = time.monotonic() + self._pause_s

    def worked(self) -> None:
        """Note that the store did what was asked."""
        with self._lock:
            if not self.is_well:
                log.warning("%s works again", self._name)
            self.is_well = True


def _asked(call: Callable[..., Answer], *arguments: object) -> Answer:
    """Ask a store, or for contents; raises StoreFailed also for what should not be raised.

    The threads here must outlive what a store or a device does: nobody would see that they have ended.
    """
    try:
        return call(*arguments)
    except StoreFailed:
        raise
    except Exception as error:
        raise StoreFailed(one_line(f"{type(error).__name__}: {error}")) from error


def _ignore(lookup: Lookup) -> None:
    """Ignore that a lookup has ended: its engine asks."""


MOST_LOOKUPS = 1024  # lookups that may be queued, with the one that is being read
READ_BYTES = 2**23  # bytes of the smallest pages requested at once, or one page if that is larger
NO_KEY = bytes(KEY_BYTES)


class PageReads:
    """Reads pages from a store, of `page_bytes` for each group of layers; a lookup may take `wait_s`.

    The keys of entries that must not be used are passed to `take_off`.
    """

    def __init__(
        self,
        store: PageStore,
        health: StoreHealth,
        counters: TierCounters,
        identity: bytes,
        page_bytes: Sequence[int],
        wait_s: float,
        take_off: Callable[[Sequence[bytes]], None],
        secret: bytes | None = None,
    ) -> None:
        self._store, self._health, self._counters = store, health, counters
        self._identity, self._page_bytes, self._secret = identity, page_bytes, secret
        self._wait_s, self._take_off = wait_s, take_off
        # The first is being read
        self._queue = deque[tuple[Lookup, Callable[[Lookup], None]]]()
        self._took_s = 0.0  # time that recent lookups took, without their waits
        # Start of the call that the store has not answered yet, on the monotonic clock
        self._asked_s: float | None = None
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="tier-reads", daemon=True)
        self._thread.start()

    def begin(self, sought: Sought, ended: Callable[[Lookup], None] = _ignore) -> Lookup | None:
        """Start a lookup; return None if it would be futile or take too long.

        `ended` is called, in any thread, when it has ended.
        """
        lookup = Lookup(sought, time.monotonic() + self._wait_s)
        if not lookup.next(1):
            return None
        if not self._health.may_be_asked or self._is_crowded() or self._is_stuck():
            self._counters.skipped += 1
            return None
        with self._changed:
            self._queue.append((lookup, ended))
            self._changed.notify()
        return lookup

    def is_over(self, lookup: Lookup) -> bool:
        """Whether a lookup has ended or reached its time limit, which ends it with what it has found."""
        if lookup.has_ended:
            return True
        if time.monotonic() < lookup.until_s:
            return False
        if self._is_stuck() and self._health.may_be_asked:  # only once, however many requests wait for it
            self._health.failed(f"no answer within {self._wait_s:g} s")
        self._end(lookup, is_late=True)
        return True

    def close(self, limit_s: float) -> None:
        """End the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(limit_s)

    def _is_crowded(self) -> bool:
        """Whether another lookup would not end in time, going by how long recent ones took."""
        num_ahead = len(self._queue)
        is_late = num_ahead > 0 and (num_ahead + 1) * self._took_s > self._wait_s
        return is_late or num_ahead >= MOST_LOOKUPS

    def _is_stuck(self) -> bool:
        asked_s = self._asked_s
        return asked_s is not None and time.monotonic() - asked_s >= self._wait_s

    def _end(self, lookup: Lookup, *, is_late: bool = False) -> None:
        with self._changed:  # either the thread or the waiting engine may end it
            if lookup.has_ended:
                return
            lookup.has_ended = True
            counters = self._counters
            counters.found += len(lookup.contents)
            counters.late += is_late
            counters.hits += not is_late and bool(lookup.contents)
            counters.misses += not is_late and not lookup.contents

    def _run(self) -> None:
        # Connect now, so that no request waits for a connection and a failure is logged at the start
        self._read([NO_KEY])
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closing)
                if self._is_closing:
                    return
                lookup, ended = self._queue[0]
            begun_s = time.monotonic()
            self._end(lookup, is_late=not lookup.has_ended and self._look(lookup))
            if begun_s < lookup.until_s:  # otherwise nothing was read
                self._took_s = (self._took_s + time.monotonic() - begun_s) / 2
            self._queue.popleft()
            ended(lookup)

    def _look(self, lookup: Lookup) -> bool:
        """Read until nothing more is sought or the lookup's time is over; return whether it is."""
        # States, which may be larger by far than pages, are asked for one at a time
        at_once = max(1, READ_BYTES // min((each for each in self._page_bytes if each), default=READ_BYTES))
        while pages := lookup.next(at_once):
            if time.monotonic() >= lookup.until_s:
                return True
            entries = self._read([lookup.key(page) for page in pages])
            if entries is None:
                return False
            contents = [self._content(lookup, page, entry) for page, entry in zip(pages, entries)]
            with self._changed:
                if lookup.has_ended:
                    return False
                lookup.take(pages, contents)
        return False

    def _read(self, keys: Sequence[bytes]) -> list[bytes | None] | None:
        """Return the entries of these keys, or None if the store fails."""
        self._asked_s = time.monotonic()
        try:
            entries = _asked(self._store.read, keys)
        except StoreFailed as error:
            self._health.failed(str(error))
            return None
        finally:
            self._asked_s = None
        self._health.worked()
        return entries

    def _content(self, lookup: Lookup, page: PageName, entry: bytes | None) -> bytes | None:
        """Return the content of an entry, or None if there is none or it must not be used."""
        if entry is None:
            return None
        key = lookup.key(page)
        try:
            return content_of(entry, key, self._identity, self._page_bytes[page.group], self._secret)
        except WrongEntry as error:
            if not self._counters.refused:
                log.warning("an entry of the tier is not used: %s; further ones are only counted", error)
            self._counters.refused += 1
            self._take_off([key])
            return None


MOST_QUEUED_BYTES = 2**28


Contents = Callable[[], Sequence[bytes]]  # waits until the contents are ready


class PageWrites:
    """Writes pages to a store, while at most `most_queued_bytes` of them are queued."""

    def __init__(
        self,
        store: PageStore,
        health: StoreHealth,
        counters: TierCounters,
        identity: bytes,
        most_queued_bytes: int = MOST_QUEUED_BYTES,
        secret: bytes | None = None,
    ) -> None:
        self._store, self._health, self._counters = store, health, counters
        self._identity, self._secret = identity, secret
        self._most_queued_bytes = most_queued_bytes
        self._queued_bytes = 0  # queued pages, including those being written
        self._num_removals = 0  # queued removals, including the one being made
        # Entries without contents are removals
        self._queue = deque[tuple[Sequence[bytes], Contents | None, int]]()
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="tier-writes", daemon=True)
        self._thread.start()

    def room(self, wanted: int, entry_bytes: int) -> int:
        """Return how many of `wanted` entries may be queued now; the others count as dropped.

        One may always be queued alone, however large it is.
        """
        with self._changed:
            left = max(self._most_queued_bytes, entry_bytes) - self._queued_bytes
            room = min(wanted, max(0, left // entry_bytes)) if self._health.may_be_asked else 0
            self._counters.dropped += wanted - room
        return room

    def put(self, keys: Sequence[bytes], contents: Contents, entry_bytes: int) -> None:
        """Queue pages, for which there is room, to be written when `contents` returns."""
        with self._changed:
            self._queued_bytes += len(keys) * entry_bytes
            self._queue.append((keys, contents, entry_bytes))
            self._changed.notify_all()

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove pages, after all writes queued so far."""
        with self._changed:
            self._num_removals += 1
            self._queue.append((keys, None, 0))
            self._changed.notify_all()

    def settle(self, limit_s: float) -> bool:
        """Wait until everything is written; return False if that takes longer than `limit_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._queued_bytes, limit_s)

    def close(self, limit_s: float, removals_s: float) -> None:
        """Write what is queued as far as the time allows, and end the thread, which closes the store.

        Waits up to `removals_s` for removals; the thread makes those that are left if the process goes on.
        """
        self.settle(limit_s)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_removals, removals_s)
        self._thread.join(limit_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closing)
                if not self._queue:
                    break
                keys, contents, entry_bytes = self._queue.popleft()
            if contents is None:
                self._take_off(keys)
                with self._changed:
                    self._num_removals -= 1
                    self._changed.notify_all()
                continue
            for key, content in zip(keys, self._ready(contents, len(keys))):
                is_new = None if content is None else self._written(key, content)
                with self._changed:
                    self._counters.written += is_new is True
                    self._counters.known += is_new is False
                    self._counters.dropped += is_new is None
                    self._queued_bytes -= entry_bytes
                    self._changed.notify_all()
        self._store.close()  # not before: a write may outlast the time that its engine waits for it

    def _ready(self, contents: Contents, num_pages: int) -> Sequence[bytes | None]:
        """Wait for the contents of pages; return None for each if they cannot be read, or at the end."""
        if self._is_closing:
            return [None] * num_pages
        try:
            return _asked(contents)
        except StoreFailed as error:
            self._health.failed(str(error))
            return [None] * num_pages

    def _written(self, key: bytes, content: bytes) -> bool | None:
        """Write a page; return False if the store has it or it is too large, and None if the store fails."""
        if self._is_closing or not self._health.may_be_asked:
            return None
        try:
            is_new = _asked(self._store.write, key, entry_of(content, key, self._identity, self._secret))
        except StoreFailed as error:
            self._health.failed(str(error))
            return None
        self._health.worked()
        return is_new

    def _take_off(self, keys: Sequence[bytes]) -> None:
        """Remove entries, even if the store is failing.

        A wrong page must not be found when the store works again.
        """
        try:
            _asked(self._store.remove, keys)
        except StoreFailed as error:
            self._health.failed(str(error))
            log.error("%d pages that turned out wrong could not be taken off the tier: %s", len(keys), error)


CLOSE_S = 0.2  # time for what is still queued at the end
REMOVALS_S = 1.0  # time for removals then: another engine would use a wrong page that stays


class PagesAsBytes(Protocol):
    """Converts pages of a group of layers, on the device and in the host's pool, to bytes."""

    @property
    def page_bytes(self) -> Sequence[int]:
        """Bytes of a page of each group."""
        ...

    def read(self, pages: Index, group: int) -> Contents:
        """Start to copy pages of the device to the host; the function returned waits for them."""
        ...

    def write_host(self, pages: Index, contents: Sequence[bytes], group: int) -> None:
        """Write contents to pages of the host's pool."""
        ...


class PageTier:
    """Keeps the pages of one engine in a store.

    `identity` stands for everything that pages depend on except their tokens and salt (see `identity_of`). A
    lookup takes at most `wait_s`. `make` makes copies as a step of the device does, and calls `apply` for
    those of the tier. `name` is the store's name in the log. With a `secret`, entries are signed.
    """

    def __init__(
        self,
        store: PageStore,
        pages: PagesAsBytes,
        make: Callable[[tuple[PageCopy, ...]], None],
        identity: bytes,
        wait_s: float,
        name: str,
        *,
        pause_s: float = PAUSE_S,
        most_queued_bytes: int = MOST_QUEUED_BYTES,
        secret: bytes | None = None,
    ) -> None:
        self.make = make
        self._store, self._pages = store, pages
        self._counters, self._earlier = TierCounters(), TierCounters()
        self._reading = StoreHealth(f"reading pages from {name}", pause_s)
        self._writing = StoreHealth(f"writing pages to {name}", pause_s)
        self._entry_bytes = [HEAD_BYTES + each for each in pages.page_bytes]
        what = self._counters, identity
        self._writes = PageWrites(store, self._writing, *what, most_queued_bytes, secret)
        reads = *what, pages.page_bytes, wait_s, self._writes.remove, secret
        self._reads = PageReads(store, self._reading, *reads)
        self._handed = deque[bytes]()

    @property
    def counters(self) -> TierCounters:
        """The totals so far, with those of the tier in whose place this one is."""
        own = replace(
            self._counters,
            read_failures=self._reading.num_failures,
            write_failures=self._writing.num_failures,
        )
        earlier = asdict(self._earlier)
        return TierCounters(**{name: count + earlier[name] for name, count in asdict(own).items()})

    def follow(self, before: PageTier) -> None:
        """Take the place of another tier, whose totals go on here."""
        before.close()
        self._earlier = before.counters

    @property
    def is_well(self) -> bool:
        """Whether the last uses of the store succeeded."""
        return self._reading.is_well and self._writing.is_well

    def look_up(self, sought: Sought, ended: Callable[[Lookup], None] = _ignore) -> Lookup | None:
        """Start a lookup; return None if nothing is lacking here, or the store is not used now.

        `ended` is called, in any thread, when the store has answered.
        """
        return self._reads.begin(sought, ended)

    def is_over(self, lookup: Lookup) -> bool:
        """Whether a lookup has ended or reached its time limit."""
        return self._reads.is_over(lookup)

    def hand_over(self, contents: Sequence[bytes]) -> None:
        """Take the content of found pages, in the order of their copies."""
        self._handed.extend(contents)

    def apply(self, copy: PageCopy) -> None:
        """Make a copy to or from the tier, without waiting for the store."""
        if copy.way == "to_tier":
            entry_bytes = self._entry_bytes[copy.group]
            room = self._writes.room(len(copy.keys), entry_bytes)
            if room:
                contents = self._pages.read(copy.sources[:room], copy.group)
                self._writes.put(copy.keys[:room], contents, entry_bytes)
        elif copy.way == "off_tier":
            self._writes.remove(copy.keys)
        else:
            assert copy.way == "from_tier", f"{copy.way} is no copy of a tier"
            handed = [self._handed.popleft() for _ in copy.targets.tolist()]
            self._pages.write_host(copy.targets, handed, copy.group)

    def settle(self, limit_s: float) -> bool:
        """Wait until everything queued is written; return False if that takes longer than `limit_s`."""
        return self._writes.settle(limit_s)

    def close(self) -> None:
        """Write what is queued within a short time limit, remove within a longer one, and end the threads."""
        self._reads.close(CLOSE_S)
        self._writes.close(CLOSE_S, REMOVALS_S)
