"""Describe what layers remember, and keep the pages of the layers of each lifetime.

A layer states its cache: which tensors it keeps of each token (`Plane`), and for how long it needs them
(`Lifetime`). Layers of one lifetime form a group, which has a pool of pages and a page table of its own, and
answers the questions of `PageGroup`. A request's page i of any group holds the same tokens, i * B to
(i + 1) * B - 1. Group 0 is a `FullGroup`, of layers that need all tokens; the entries of the prefix cache are
its pages. Each further group is a `BesideGroup`: a `WindowGroup` gives pages back once no later query can see
them, and a `StateGroup` (states.py) has one page for each row, which holds its recurrent states.

Nothing here imports torch: the scheduler counts pages, the tensors are in `device/storage`.

Legend: N rows of the slot table, B tokens a page.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kv_cache.pages import NULL_PAGE, Index, PageCopy, PagePool
from kv_cache.prefix_cache import PrefixCache
from kv_cache.prefix_index import Lookup

DType = Literal["float32", "bfloat16", "float16"]
ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Lifetime:
    """How long a layer needs what it wrote of a token, and so which group its pages belong to."""

    kind: Literal["all", "window"] = "all"
    window: int = 0  # positions that a query sees, its own among them; 0 if it sees all


ALL_TOKENS = Lifetime()


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a layer's cache: `shape` numbers of each token, on one rank."""

    # "keys", "values", "latents", "rope_keys", "index_keys", "index_scales", "features"
    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of ITEM_BYTES
    # Bytes beside the numbers of each token in int8: their scales, and a rope key that lies in a latent's row
    scale_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype] + self.scale_bytes


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps, and for how long."""

    lifetime: Lifetime
    planes: tuple[Plane, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all planes."""
        return sum(each.token_bytes for each in self.planes)


def most_pages(window: int, page_size: int) -> int:
    """Return the most pages that hold what one query sees, wherever its window begins."""
    return -(-(window - 1) // page_size) + 1


@dataclass(slots=True)
class PageCounts:
    """Numbers of a group's pages since the start."""

    evicted_pages: int = 0
    rested_pages: int = 0  # evicted pages that were copied to the host pool
    promoted_pages: int = 0  # pages copied back from the host pool because a request found them
    copied_pages: int = 0  # pages copied on write, by a row that forked
    compacted_pages: int = 0
    swapped_out_pages: int = 0
    swapped_in_pages: int = 0


class PageGroup(ABC):
    """The pages of all layers of one lifetime: who holds them, and which each row has.

    A row holds pages `first` to `stop` - 1 of its request; other entries of its `table` are the null page.
    The prefix cache is a holder of pages like any row. A page with no other holder is idle, and is evicted
    least recently used first; it then comes to rest in the host's pool, if there is one.

    The methods are the questions that paging asks of every group, in the same way of each. A class for
    another lifetime answers the abstract ones.
    """

    name = "pages"  # what messages call them
    # Whether rows give pages back while they run, so that a prefix may be cached and not resumable
    gives_back = False
    # Whether each row has one page, however many tokens it has, which its steps write anew
    is_of_rows = False
    # Whether no row is `missing` a page, whatever it computes
    is_settled = False

    def __init__(
        self,
        number: int,
        page_size: int,
        pool: PagePool,
        host: PagePool | None,
        table: NDArray[np.int32],
        stop: Index,
        counts: PageCounts,
    ) -> None:
        self.number, self.page_size = number, page_size
        self.pool, self.host, self.counts = pool, host, counts
        self.table, self.stop = table, stop
        self.first = np.zeros_like(stop)
        # Returns the pages that must not be moved; asked when pages are
        self.pinned: Callable[[], Index] = lambda: np.empty(0, dtype=np.int64)

    @property
    @abstractmethod
    def num_idle(self) -> int:
        """Number of pages that only the prefix cache holds."""

    @property
    @abstractmethod
    def num_resting(self) -> int:
        """Number of pages of the host's pool that the prefix cache holds."""

    @property
    @abstractmethod
    def cached_pages(self) -> Index:
        """The pages that the prefix cache holds on the device, idle or in use."""

    @property
    def num_used(self) -> int:
        """Number of pages that the prefix cache alone does not hold."""
        return self.pool.num_held - self.num_idle

    @property
    def num_available(self) -> int:
        """Number of pages that can be handed out without preempting a row."""
        return self.pool.num_free + self.num_idle

    @abstractmethod
    def first_seen(self, positions: Index) -> Index:
        """Return the first page that a query at each of these positions sees."""

    def seen_after(self, num_pages: int) -> int:
        """Return the first page that the query behind so many pages sees."""
        return int(self.first_seen(np.array(num_pages * self.page_size)))

    @abstractmethod
    def needed(self, num_tokens: int) -> int:
        """Return the most pages that a decoding request of so many cached tokens holds."""

    @abstractmethod
    def promised(self, rows: Index, num_tokens: Index) -> Index:
        """Return how many pages each row will still need while it decodes up to `num_tokens` tokens."""

    def missing(self, rows: Index, stops: Index) -> Index:
        """Return the number of pages that each row lacks for its first `stops` tokens."""
        lacking: Index = np.maximum(-(-stops // self.page_size) - self.stop[rows], 0)
        return lacking

    @abstractmethod
    def least(self, rows: Index, stops: Index) -> Index:
        """Return the number of pages that each row must get to go on towards its first `stops` tokens."""

    def fitting(self, rows: Index, starts: Index, stops: Index, num_copies: int) -> Index:
        """Return how far each span from `starts` to `stops` may go, beside so many copies on write.

        Where rows keep all of their pages, others are preempted for a span that lacks some.
        """
        return stops

    def num_shared(self, rows: Sequence[int], indexes: Sequence[int]) -> int:
        """Return how many copies rows need that are about to write to page `indexes[i]` of row `rows[i]`."""
        if not rows:
            return 0
        pages = Counter(self.table[rows, indexes].tolist())
        return sum(min(count, int(self.pool.holders[page]) - 1) for page, count in pages.items())

    def grow(
        self,
        rows: Index,
        counts: Index,
        forked: Sequence[int] = (),
        indexes: Sequence[int] = (),
    ) -> list[PageCopy]:
        """Give each row `counts` more pages, and rows that `forked` copies of shared pages at `indexes`.

        These they are about to write to. Returns the copies to make, the first of which makes room.
        """
        total = int(counts.sum())
        copies = self._made_free(total + self.num_shared(forked, indexes))
        copies += self._copy_on_write(forked, indexes)
        if not total:
            return copies
        growing = counts > 0
        rows, counts = rows[growing], counts[growing]
        held = self.stop[rows]
        if total == len(rows):  # one page each, the usual case of decodes
            self.table[rows, held] = self.pool.take(total)
        else:
            self.table[np.repeat(rows, counts), _ranges(held, counts)] = self.pool.take(total)
        self.stop[rows] = held + counts
        return copies

    def free_behind(self, rows: Index, firsts: Index) -> None:
        """Release the pages of rows before page `firsts`, which no query of these rows will see."""
        firsts = np.minimum(firsts, self.stop[rows])
        due = firsts > self.first[rows]
        if not due.any():
            return
        rows, firsts = rows[due], firsts[due]
        counts = firsts - self.first[rows]
        owners, indexes = np.repeat(rows, counts), _ranges(self.first[rows], counts)
        pages = self.table[owners, indexes].astype(np.int64)
        self.table[owners, indexes] = NULL_PAGE
        self.first[rows] = firsts
        if len(set(pages.tolist())) == len(pages):
            self._release(pages)
        else:  # rows that share pages release them one after the other
            for of_row in np.split(pages, np.cumsum(counts)[:-1]):
                self._release(of_row)

    def fork(self, source: int, row: int, num_pages: int) -> None:
        """Share the first `num_pages` pages of a row's request, as far as it holds them, with another row."""
        stop = min(num_pages, int(self.stop[source]))
        first = min(int(self.first[source]), stop)
        new = self.table[source, first:stop].astype(np.int64)
        self._share(new)
        self.clear(row)
        self.table[row, first:stop] = new
        self.first[row], self.stop[row] = first, stop

    def clear(self, row: int) -> None:
        """Release all pages of a row."""
        held = slice(int(self.first[row]), int(self.stop[row]))
        self._release(self.table[row, held].astype(np.int64))
        self.table[row, held] = NULL_PAGE
        self.first[row] = self.stop[row] = 0

    @abstractmethod
    def resumable(
        self, entries: Index, held: int = 0, first_held: int = 0, *, rests: bool = True
    ) -> NDArray[np.bool_]:
        """Return for each length of a prefix, in pages, whether its next query finds all that it sees.

        The prefix consists of `held` pages of a row, which holds those from `first_held` on, and of the pages
        of these cached `entries` (see `PrefixCache.find`); they may rest in the host's pool if `rests`.
        [held + entries + 1], of which 0 pages are always enough.
        """

    @abstractmethod
    def wanted(self, entries: Index, num_tokens: int, *, comes_back: bool = False) -> int:
        """Return how many of the available pages a new row takes to go on after these entries.

        It is to decode up to `num_tokens` cached tokens. Pages that rest in the host's pool need a page of
        the device each, and idle pages are available only until they are shared. What a row that `comes_back`
        left in the host's pool is not found.
        """

    @abstractmethod
    def resume(self, row: int, entries: Index, *, comes_back: bool = False) -> list[PageCopy]:
        """Let a row go on after these entries, which continue the pages that it holds.

        Returns the copies that bring resting pages back. If the row `comes_back`, it shares only what it did
        not leave in the host's pool.
        """

    @abstractmethod
    def publish(
        self, row: int, first: int, entries: Index, is_cached: NDArray[np.bool_]
    ) -> tuple[Index, Index]:
        """Let the row's pages from page `first` on be found by these entries of the prefix cache.

        Returns which of these entries are found with a page of the row from now on, and these pages.
        """

    @abstractmethod
    def evict(self, count: int) -> PageCopy | None:
        """Free the `count` least recently used idle pages; as many as fit come to rest in the host's pool.

        Returns the copy that takes them there, which must be made before they are written to.
        """

    def can_yield_host(self, count: int) -> bool:
        """Whether `count` host pages are free, or would be if resting pages were dropped."""
        return self.host is not None and count <= self.host.num_free + self.num_resting

    @abstractmethod
    def yield_host(self, count: int) -> bool:
        """Drop resting pages until `count` host pages are free.

        Returns False, with none dropped, if impossible.
        """

    @abstractmethod
    def to_swap(self, row: int, num_published: int, num_computed: int) -> tuple[int, Index]:
        """Return the pages that a row takes along when it is swapped out, and the index of the first."""

    def swap_out(self, count: int) -> Index:
        """Take host pages, which `yield_host` has freed, for the pages of a row that leaves."""
        assert self.host is not None, "there is no host pool"
        self.counts.swapped_out_pages += count
        return self.host.take(count)

    def release_host(self, pages: Index) -> None:
        """Free the host pages of a row that has come back, or will not."""
        assert self.host is not None, "there is no host pool"
        self.host.release(pages)

    def come_back(self, row: int, first: int, host_pages: Index) -> list[PageCopy]:
        """Give a row its swapped pages from page `first` on, and return the copies that fill them."""
        assert self.stop[row] == first, f"row {row} holds {self.stop[row]} pages before its page {first}"
        copies = self.grow(np.array([row]), np.array([len(host_pages)]))
        targets = self.table[row, first : first + len(host_pages)].astype(np.int64)
        self.counts.swapped_in_pages += len(host_pages)
        return [*copies, PageCopy(host_pages, targets, "from_host", group=self.number)]

    def compact(self, max_pages: int) -> PageCopy | None:
        """Move at most `max_pages` held pages to the low end, and return the copy to make."""
        sources, targets = self.pool.scattered(max_pages)
        may_move = ~np.isin(sources, self.pinned())
        sources, targets = sources[may_move], targets[may_move]
        if not len(sources):
            return None
        self.pool.move(sources, targets)
        self._follow(sources, targets)
        target_of = np.arange(self.pool.num_pages, dtype=np.int32)
        target_of[sources] = targets
        rows, width = np.flatnonzero(self.stop), int(self.stop.max())
        self.table[rows, :width] = target_of[self.table[rows, :width]]
        self.counts.compacted_pages += len(sources)
        return PageCopy(sources, targets, group=self.number)

    def resize(self, num_pages: int) -> None:
        """Change the number of pages; the held pages must fit, and must have been moved to the low end."""
        self.pool.resize(num_pages)

    def num_wrong(self, rows: Index, others: Index) -> int:
        """Recount the holders of all pages, and return how many pages are wrong.

        A page is wrong if it is both free and held, or neither, or if its holders are not these `rows`, the
        prefix cache and those that hold `others`, a page for each hold.
        """
        pool, holders = self.pool, self.users(rows)
        holders[self.cached_pages] += 1
        holders += np.bincount(others, minlength=pool.num_pages)
        holders[NULL_PAGE] = 1
        is_free = np.zeros(pool.num_pages, dtype=np.bool_)
        is_free[pool.free_pages] = True
        return int(((holders != pool.holders) | (is_free != (holders == 0))).sum())

    def users(self, rows: Index) -> Index:
        """Return how many of these rows hold each page."""
        table = self.table[rows, : int(self.stop[rows].max(initial=0))]
        users: Index = np.bincount(table[table > NULL_PAGE], minlength=self.pool.num_pages)
        return users

    @abstractmethod
    def _share(self, pages: Index) -> None:
        """Give each of these held pages, cached or not, one more holder."""

    @abstractmethod
    def _release(self, pages: Index) -> None:
        """Remove a row's hold, in the order of its tokens; pages that only the cache holds become idle."""

    @abstractmethod
    def _follow(self, sources: Index, targets: Index) -> None:
        """Let cached pages be found where they were moved; each keeps its place in the order of eviction."""

    def _made_free(self, count: int) -> list[PageCopy]:
        """Evict idle pages until `count` pages are free."""
        short = count - self.pool.num_free
        copy = self.evict(short) if short > 0 else None
        return [] if copy is None else [copy]

    def _copy_on_write(self, rows: Sequence[int], indexes: Sequence[int]) -> list[PageCopy]:
        """Give each row a copy of its page at `indexes[i]` if others hold it; the last keeps the original."""
        sources, targets = [], []
        for row, index in zip(rows, indexes):
            page = int(self.table[row, index])
            if self.pool.holders[page] > 1:
                (own,) = self.pool.take(1).tolist()
                sources.append(page)
                targets.append(own)
                self.table[row, index] = own
                self._release(np.array([page]))
        self.counts.copied_pages += len(sources)
        return [PageCopy(np.array(sources), np.array(targets), group=self.number)] if sources else []


class FullGroup(PageGroup):
    """The pages of all layers that need all tokens: group 0, in a model without such layers, too.

    A row holds all pages of its tokens while it runs. The entries of the prefix cache are pages of this
    group, which therefore lets the cache keep the order in which idle pages are evicted. `table` and `stop`
    are columns of the slot table, because the pages of a row are read from there.
    """

    def __init__(
        self,
        page_size: int,
        pool: PagePool,
        host: PagePool | None,
        cached: PrefixCache,
        table: NDArray[np.int32],
        stop: Index,
        counts: PageCounts,
    ) -> None:
        super().__init__(0, page_size, pool, host, table, stop, counts)
        self._cached = cached

    @property
    def num_idle(self) -> int:
        return self._cached.num_idle

    @property
    def num_resting(self) -> int:
        return self._cached.num_resting

    @property
    def cached_pages(self) -> Index:
        return self._cached.pages

    def first_seen(self, positions: Index) -> Index:
        return np.zeros_like(positions)

    def needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def promised(self, rows: Index, num_tokens: Index) -> Index:
        return self.missing(rows, num_tokens)

    def least(self, rows: Index, stops: Index) -> Index:
        """See `PageGroup.least`: a row keeps all pages, and its spans are not shortened for them."""
        return self.missing(rows, stops)

    def resumable(
        self, entries: Index, held: int = 0, first_held: int = 0, *, rests: bool = True
    ) -> NDArray[np.bool_]:
        """See `PageGroup.resumable`: every page that was found continues those before it."""
        able = np.ones(held + len(entries) + 1, dtype=np.bool_)
        if not rests:
            able[1 + held :] = np.logical_and.accumulate(entries > 0)
        return able

    def wanted(self, entries: Index, num_tokens: int, *, comes_back: bool = False) -> int:
        if not len(entries):
            return self.needed(num_tokens)
        shared = entries[entries > 0]
        idle = int((self.pool.holders[shared] == 1).sum())
        return self.needed(num_tokens) - len(shared) + idle

    def resume(self, row: int, entries: Index, *, comes_back: bool = False) -> list[PageCopy]:
        """See `PageGroup.resume`; pages on the device precede those that rest."""
        held, on_device = int(self.stop[row]), entries[entries > 0]
        resting = entries[len(on_device) :]
        self._share(on_device)
        self.table[row, held : held + len(on_device)] = on_device
        self.stop[row] = held + len(on_device)
        if not len(resting):
            return []
        self._cached.keep(resting)
        copies = self.grow(np.array([row]), np.array([len(resting)]))
        targets = self.table[row, held + len(on_device) : held + len(entries)].astype(np.int64)
        self.counts.promoted_pages += len(resting)
        return [*copies, self._cached.bring_back(resting, targets)]

    def publish(
        self, row: int, first: int, entries: Index, is_cached: NDArray[np.bool_]
    ) -> tuple[Index, Index]:
        """See `PageGroup.publish`: the row holds entries in place of pages that are equal to them."""
        own = self.table[row, first : first + len(entries)].astype(np.int64)
        doubles = np.flatnonzero(own != entries)
        if len(doubles):
            self._share(entries[doubles])
            self.table[row, first + doubles] = entries[doubles]
            self._release(own[doubles])
        new = np.flatnonzero((own == entries) & is_cached)
        return new, entries[new]

    def evict(self, count: int) -> PageCopy | None:
        copy = self._cached.evict(count)
        self.counts.evicted_pages += count
        if copy is not None:
            self.counts.rested_pages += len(copy.sources)
        return copy

    def yield_host(self, count: int) -> bool:
        return self.host is not None and self._cached.yield_host(count)

    def to_swap(self, row: int, num_published: int, num_computed: int) -> tuple[int, Index]:
        """See `PageGroup.to_swap`: published pages are found again, on the device or at rest."""
        stop = -(-num_computed // self.page_size)
        return num_published, self.table[row, num_published:stop].astype(np.int64)

    def resize(self, num_pages: int) -> None:
        super().resize(num_pages)
        self._cached.resize(num_pages)

    def _share(self, pages: Index) -> None:
        self._cached.share(pages)

    def _release(self, pages: Index) -> None:
        self._cached.release(pages)

    def _follow(self, sources: Index, targets: Index) -> None:
        self._cached.move(sources, targets)


class BesideGroup(PageGroup):
    """The pages of layers that do not need all tokens; they lie beside the entries of the prefix cache.

    An entry is a page of group 0, by its name in `PrefixIndex`. `beside` says which page of this group
    belongs to the same tokens, -h if that is page h of the host's pool, and 0 if there is none any more.
    """

    gone: Lookup = "window_evicted"  # why a lookup ends before an entry that lacks its page here
    window: int  # positions that a query sees; 0 if that is not what bounds what is kept

    def __init__(
        self,
        number: int,
        page_size: int,
        num_rows: int,
        max_pages: int,
        pool: PagePool,
        host: PagePool | None,
        num_entries: int,
        num_host_entries: int,
    ) -> None:
        table, stop = np.zeros((num_rows, max_pages), dtype=np.int32), np.zeros(num_rows, dtype=np.int64)
        super().__init__(number, page_size, pool, host, table, stop, PageCounts())
        self._num_host_entries = num_host_entries
        self.beside = np.zeros(num_entries + num_host_entries, dtype=np.int64)
        self._entry_of: dict[int, int] = {}  # page here, or -h, -> name of the entry beside which it lies
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._resting: OrderedDict[int, None] = OrderedDict()  # pages -h of the host's pool, in that order
        self.changes = 0  # counts what changes what can be found
        self.announce: Callable[[bool, Index], None] = _tell_nobody  # see `PagesBeside`

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_resting(self) -> int:
        return len(self._resting)

    @property
    def cached_pages(self) -> Index:
        return np.array([page for page in self._entry_of if page > 0], dtype=np.int64)

    def publish(
        self, row: int, first: int, entries: Index, is_cached: NDArray[np.bool_]
    ) -> tuple[Index, Index]:
        """See `PageGroup.publish`: the row keeps its own page where another lies beside the entry."""
        held = np.arange(first, first + len(entries))
        is_held = (held >= self.first[row]) & (held < self.stop[row])
        new = np.flatnonzero(is_cached & (self.beside[entries] == 0) & is_held)
        pages = self.table[row, held[new]].astype(np.int64)
        free = [page not in self._entry_of for page in pages.tolist()]
        new, pages = new[free], pages[free]
        names = entries[new]
        self.pool.share(pages)
        self.beside[names] = pages
        self._entry_of.update(zip(pages.tolist(), names.tolist()))
        self.changes += 1
        self.announce(True, names)
        return new, pages

    def is_here(self, entries: Index) -> NDArray[np.bool_]:
        """Which of these entries have a page of this group beside them, on the device or at rest."""
        here: NDArray[np.bool_] = self.beside[entries] != 0
        return here

    def least_expected(self) -> Index:
        """See `PagesBeside.least_expected`: nothing is known of these."""
        return np.empty(0, dtype=np.int64)

    def take_in(self, prefix: Index, indexes: Index) -> tuple[Index, Index]:
        """Let pages rest in the host's pool beside the entries of a prefix at `indexes`.

        Their content comes from elsewhere. Returns the indexes at which none lay, and the host's pages taken
        for them, which must be written before they are read: either all of them, or none if they do not fit
        beside what the prefix has at rest.
        """
        none = np.empty(0, dtype=np.int64)
        indexes = indexes[self.beside[prefix[indexes]] == 0]
        at_rest = self.beside[prefix[self.beside[prefix] < 0]]
        if self.host is None or len(indexes) > self.host.num_free + len(self._resting) - len(at_rest):
            return none, none
        for page in at_rest.tolist():
            self._resting.move_to_end(page)
        has_room = self.yield_host(len(indexes))
        assert has_room, f"{len(indexes)} pages find no room in the host's pool"
        pages, names = self.host.take(len(indexes)), prefix[indexes]
        self.beside[names] = -pages
        self._entry_of.update(zip((-pages).tolist(), names.tolist()))
        self._resting.update(dict.fromkeys((-pages).tolist()))
        self.changes += 1
        self.announce(True, names)
        return indexes, pages

    def removed(self, entries: Sequence[int]) -> None:
        """See `PagesBeside.removed`."""
        names = np.array(entries, dtype=np.int64)
        self._forget(self.beside[names[self.is_here(names)]])

    def renamed(self, sources: Index, targets: Index) -> None:
        """See `PagesBeside.renamed`."""
        pages = self.beside[sources]
        self.beside[sources] = 0
        self.beside[targets] = pages
        for page, name in zip(pages.tolist(), targets.tolist()):
            if page:
                self._entry_of[page] = name

    def resize_entries(self, num_entries: int) -> None:
        """See `PagesBeside.resize_entries`."""
        num_host, old = self._num_host_entries, self.beside
        self.beside = np.zeros(num_entries + num_host, dtype=np.int64)
        kept = min(num_entries, len(old) - num_host)
        self.beside[:kept], self.beside[num_entries:] = old[:kept], old[len(old) - num_host :]

    def evict(self, count: int) -> PageCopy | None:
        assert count <= len(self._idle), f"asked to evict {count} pages, {len(self._idle)} are idle"
        room = 0 if self.host is None else min(count, self.host.num_free + len(self._resting))
        pages = np.array(list(islice(self._idle, count)), dtype=np.int64)
        self.counts.evicted_pages += count
        self._forget(pages[: count - room])
        resting = pages[count - room :]
        if not room:
            return None
        self.changes += 1
        has_room = self.yield_host(room)
        assert has_room, f"{room} pages find no room in the host's pool"
        assert self.host is not None, "pages rest in a host pool"
        targets = self.host.take(room)
        for page in resting.tolist():
            del self._idle[page]
        self._rename_pages(resting, -targets)
        self._resting.update(dict.fromkeys((-targets).tolist()))
        self.pool.release(resting)
        self.counts.rested_pages += room
        return PageCopy(resting, targets, "to_host", group=self.number)

    def yield_host(self, count: int) -> bool:
        if self.host is None or not self.can_yield_host(count):
            return False
        short = count - self.host.num_free
        if short > 0:
            self._forget(np.array(list(islice(self._resting, short)), dtype=np.int64))
        return True

    def _share(self, pages: Index) -> None:
        for page in pages[self.pool.holders[pages] == 1].tolist():
            self._idle.pop(page, None)
        self.pool.share(pages)

    def _release(self, pages: Index) -> None:
        pages = pages[::-1]
        self.pool.release(pages)
        for page in pages[self.pool.holders[pages] == 1].tolist():
            if page in self._entry_of:
                self._idle[page] = None

    def _forget(self, pages: Index) -> None:
        """Let pages, or resting pages -h, no longer lie beside their entries, and release them."""
        names = np.array([self._entry_of[page] for page in pages.tolist()], dtype=np.int64)
        if not len(names):
            return
        self.beside[names] = 0
        self.announce(False, names)
        self.changes += 1
        for page in pages.tolist():
            del self._entry_of[page]
            self._idle.pop(page, None)
            self._resting.pop(page, None)
        self.pool.release(pages[pages > 0])
        if self.host is not None:
            self.host.release(-pages[pages < 0])

    def _follow(self, sources: Index, targets: Index) -> None:
        cached = np.array([page in self._entry_of for page in sources.tolist()], dtype=np.bool_)
        self._rename_pages(sources[cached], targets[cached])
        moved = dict(zip(sources.tolist(), targets.tolist()))
        if not self._idle.keys().isdisjoint(moved):
            self._idle = OrderedDict((moved.get(page, page), None) for page in self._idle)

    def _rename_pages(self, sources: Index, targets: Index) -> None:
        """Let target pages lie where the source pages lay, beside the same entries."""
        names = [self._entry_of.pop(page) for page in sources.tolist()]
        self._entry_of.update(zip(targets.tolist(), names))
        self.beside[names] = targets


class WindowGroup(BesideGroup):
    """The pages of all layers that see a window of one size.

    A prefix can be resumed from only if all pages are here that its next query sees.
    """

    gives_back = True

    def __init__(
        self,
        number: int,
        window: int,
        page_size: int,
        num_rows: int,
        max_pages: int,
        pool: PagePool,
        host: PagePool | None,
        num_entries: int,
        num_host_entries: int,
    ) -> None:
        super().__init__(number, page_size, num_rows, max_pages, pool, host, num_entries, num_host_entries)
        self.window, self.name = window, f"pages of the layers that see {window} tokens"
        self.most_of_a_row = most_pages(window, page_size)  # most pages of a row that decodes

    def first_seen(self, positions: Index) -> Index:
        pages: Index = np.maximum(positions - (self.window - 1), 0) // self.page_size
        return pages

    def needed(self, num_tokens: int) -> int:
        return min(-(-num_tokens // self.page_size), self.most_of_a_row)

    def promised(self, rows: Index, num_tokens: Index) -> Index:
        wanted = np.minimum(-(-num_tokens // self.page_size), self.most_of_a_row)
        lacking: Index = np.maximum(wanted - (self.stop[rows] - self.first[rows]), 0)
        return lacking

    def least(self, rows: Index, stops: Index) -> Index:
        """See `PageGroup.least`: spans are shortened to the pages that fit, and take at least one page."""
        return np.minimum(self.missing(rows, stops), 1)

    def fitting(self, rows: Index, starts: Index, stops: Index, num_copies: int) -> Index:
        """See `PageGroup.fitting`: a span may go as far as the available pages allow.

        Each row is allowed one token first, then the oldest rows get what is left: a long chunk of a prompt
        needs more pages for one step than it keeps after it, and preempts nobody for them.
        """
        missing = self.missing(rows, stops)
        left = self.num_available - num_copies
        if int(missing.sum()) <= left:
            return stops
        least = self.missing(rows, starts + 1)
        extra = missing - least
        spare = max(0, left - int(least.sum()))
        granted = np.clip(spare - (np.cumsum(extra) - extra), 0, extra)
        shorter: Index = np.minimum(stops, (self.stop[rows] + least + granted) * self.page_size)
        return shorter

    def resumable(
        self, entries: Index, held: int = 0, first_held: int = 0, *, rests: bool = True
    ) -> NDArray[np.bool_]:
        count, beside = held + len(entries), self.beside[entries]
        lacks = np.zeros(count + 1, dtype=np.bool_)
        lacks[1 : 1 + first_held] = True
        lacks[1 + held :] = beside == 0 if rests else beside <= 0
        # One past the last page that is lacking, 0 if none is
        last_lacking = np.maximum.accumulate(np.where(lacks, np.arange(count + 1), 0))
        able: NDArray[np.bool_] = last_lacking <= self.first_seen(np.arange(count + 1) * self.page_size)
        return able

    def wanted(self, entries: Index, num_tokens: int, *, comes_back: bool = False) -> int:
        if comes_back:
            return self.needed(num_tokens)
        first = self.seen_after(len(entries))
        pages = self.beside[entries[first:]]
        shared = pages[pages > 0]
        idle = int((self.pool.holders[shared] == 1).sum())
        return max(self.needed(num_tokens), len(pages)) - len(shared) + idle

    def resume(self, row: int, entries: Index, *, comes_back: bool = False) -> list[PageCopy]:
        """See `PageGroup.resume`: what a row that comes back sees has been swapped as a whole."""
        if comes_back:
            return []
        before = int(self.stop[row])
        stop = before + len(entries)
        first = self.seen_after(stop)
        self.free_behind(np.array([row]), np.array([first]))
        own = max(first, before)  # the first page that it does not hold itself
        names = entries[own - before :]
        pages = self.beside[names]
        assert (pages != 0).all(), f"row {row} resumes from pages that are gone"
        self._share(pages[pages > 0])
        resting, copies = pages[pages < 0], []
        if len(resting):
            for page in resting.tolist():  # they are kept while room is made
                del self._resting[page]
            copies = self._made_free(len(resting))
            targets = self.pool.take(len(resting))
            copies.append(PageCopy(-resting, targets, "from_host", group=self.number))
            self._rename_pages(resting, targets)
            self.pool.share(targets)  # the row shares them with the prefix cache
            assert self.host is not None, "pages rest in a host pool"
            self.host.release(-resting)
            self.counts.promoted_pages += len(resting)
            pages = self.beside[names]
        self.table[row, own:stop] = pages
        self.first[row], self.stop[row] = max(first, int(self.first[row])), stop
        return copies

    def to_swap(self, row: int, num_published: int, num_computed: int) -> tuple[int, Index]:
        """See `PageGroup.to_swap`: these are the pages that the row's next query sees."""
        first = int(self.first_seen(np.array(num_computed)))
        stop = -(-num_computed // self.page_size)
        return first, self.table[row, first:stop].astype(np.int64)

    def come_back(self, row: int, first: int, host_pages: Index) -> list[PageCopy]:
        self.first[row] = self.stop[row] = first
        return super().come_back(row, first, host_pages)


def _tell_nobody(is_stored: bool, entries: Index) -> None:
    """Tell nobody: these pages lie beside the entries of no prefix cache."""


def _ranges(starts: Index, counts: Index) -> Index:
    """Concatenate the `counts[i]` integers from each of `starts`."""
    ends = np.cumsum(counts)
    ranges: Index = np.arange(int(ends[-1])) + np.repeat(starts - (ends - counts), counts)
    return ranges
