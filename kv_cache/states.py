"""Keep the recurrent states of requests as pages of one group, and copies from which others continue.

A page of this group is the state of all recurrent layers of one request. A row has one such page, its live
state, which stands at the position up to which the row has been computed, and which every step of the row
writes. A state that a step leaves behind at the end of a page of tokens is a *checkpoint*: once that page is
published, the checkpoint lies beside its entry of the prefix cache, and a request with the same beginning can
go on from there. Whoever writes to a state that others hold copies it first. An answer has a checkpoint on
trial, in a page of its own, to which the live state is copied at each page end.

What is kept for sharing never stands in the way of what runs: each row needs one state and no more, and a
pool of one state for each row serves them all. Where none is left to copy to, the cache gives up the state
that is about to be written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kv_cache.groups import BesideGroup
from kv_cache.pages import NULL_PAGE, Index, PageCopy, PagePool
from kv_cache.prefix_index import EMPTY
from kv_cache.returns import NOBODY, UNKNOWN, Returns

MOST_KNOWN = 8  # ends of conversations that are known for each state that fits
GRID = 64  # positions at whose multiples spans of prompts may be cut (see attention/recurrent.py)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state that a row's step leaves at a position of its prompt, until its page of tokens is published."""

    position: int
    page: int
    # Whether it stands at the end of its prompt, where prompts with a common beginning part only by chance
    is_end: bool = False
    # Whether it was left without a known use; it is evicted first until a request has found it
    is_on_the_way: bool = False


@dataclass(slots=True)
class End:
    """What is known of a state at the end of a prompt or an answer, from which one conversation goes on."""

    is_answer: bool
    num_hits: int = 0


class StateGroup(BesideGroup):
    """The states of all layers that keep one; `live` [N], the column of `table`, has each row's live state.

    A prefix can be resumed from only where a state lies beside its last page. States are kept at the ends of
    every `every_pages` pages, which lie on the grid at which spans end.
    """

    name = "states"
    is_of_rows = True
    gone = "no_state"
    window = 0

    def __init__(
        self,
        number: int,
        page_size: int,
        num_rows: int,
        pool: PagePool,
        host: PagePool | None,
        num_entries: int,
        num_host_entries: int,
    ) -> None:
        assert pool.num_pages > num_rows, f"{pool.num_pages - 1} states for {num_rows} rows"
        super().__init__(number, page_size, num_rows, 1, pool, host, num_entries, num_host_entries)
        self.live = self.table[:, 0]
        self.every_pages = math.lcm(page_size, GRID) // page_size
        self._left: dict[int, list[Checkpoint]] = {}  # the keys are rows
        self._num_left = np.zeros(pool.num_pages, dtype=np.int32)  # checkpoints of each page in `_left`
        # [N] the last state that each row has left in its answer, and its position; it is on trial: it gives
        # way first, and is the first to be evicted until a request has found it
        self._trial_page, self._trial_position = np.zeros_like(self.stop), np.zeros_like(self.stop)
        self._ends: dict[int, End] = {}  # the keys are pages, or -h of the host's pool
        # Pages that are evicted first: of states that later ones cover or will, or that were left on the way
        self._spent: set[int] = set()
        self.returns = Returns(MOST_KNOWN * pool.num_pages)
        # [P] the turn at which each state was used last, and how often its conversation was continued
        self._used = np.zeros(pool.num_pages, dtype=np.int64)
        self._times = np.full(pool.num_pages, UNKNOWN)
        self.answers_return = False  # whether prompts go on from answers as they were given
        self._is_crowded = False  # whether states are about to be written that checkpoints hold
        # [N] rows of requests without a state of their own, or that may share it: a step looks at no other
        self._is_open = np.zeros(num_rows, dtype=np.bool_)
        self.num_taken = self.num_hits = 0  # checkpoints since the start

    @property
    def num_available(self) -> int:
        num_trials = int(np.count_nonzero(self._trial_page))
        return self.pool.num_free + len(self._idle) + num_trials + len(self._loose())

    def first_seen(self, positions: Index) -> Index:
        return np.zeros_like(positions)

    def seen_after(self, num_pages: int) -> int:
        """See `PageGroup.seen_after`: of a prefix only the state beside its last page is needed."""
        return max(0, num_pages - 1)

    def needed(self, num_tokens: int) -> int:
        return min(num_tokens, 1)

    def promised(self, rows: Index, num_tokens: Index) -> Index:
        """See `PageGroup.promised`: rows that share a state will need all but one of its copies."""
        promised = np.ones_like(rows)
        pages, first = np.unique(self.live[rows], return_index=True)
        promised[first[pages != NULL_PAGE]] = 0
        return promised

    def missing(self, rows: Index, stops: Index) -> Index:
        """Return 1 for each row that needs another page to write its state to.

        A state that only checkpoints share is copied where pages are available, and given up otherwise.
        """
        missing: Index = np.zeros(len(rows), dtype=np.int64)
        self._is_crowded = False
        at = self._is_open[rows].nonzero()[0]
        if not len(at):
            return missing
        pages = self.live[rows[at]]
        is_shared, lacks = self.pool.holders[pages] > 1, pages == NULL_PAGE
        self._is_open[rows[at[~(is_shared | lacks)]]] = False
        self.is_settled = not self._is_open.any()
        missing[at[lacks]] = 1
        shared = is_shared.nonzero()[0]
        if len(shared):
            missing[at[self._copying(pages, shared, int(lacks.sum()))]] = 1
        return missing

    def _copying(self, pages: NDArray[np.int32], shared: Index, num_taken: int) -> Index:
        """Return which of the writers at `shared` write to a copy, beside so many new pages."""
        others = self.pool.holders[pages[shared]] - self._num_left[pages[shared]]
        by_one = others == 1  # which are held by one row, and by what it has just left
        if by_one.all() and num_taken + len(shared) <= self.pool.num_free:
            return shared
        may, must = shared[by_one], []
        left: dict[int, int] = {}  # rows that hold a page
        for at in shared[~by_one].tolist():
            page = int(pages[at])
            kept = int(self._num_left[page]) + (page in self._entry_of)
            left.setdefault(page, int(self.pool.holders[page]) - kept)
            if left[page] > 1:  # another row goes on with it
                left[page] -= 1
                must.append(at)
            elif kept:
                may = np.append(may, at)
        room = max(0, self.num_available - num_taken - len(must))
        self._is_crowded = room < len(may)
        return np.concatenate([np.array(must, dtype=np.int64), may[:room]])

    def least(self, rows: Index, stops: Index) -> Index:
        """See `PageGroup.least`: there is always one state for each row."""
        return np.zeros_like(rows)

    def num_shared(self, rows: Sequence[int], indexes: Sequence[int]) -> int:
        """See `PageGroup.num_shared`: copies are among what is `missing`, whatever was forked."""
        return 0

    def grow(
        self,
        rows: Index,
        counts: Index,
        forked: Sequence[int] = (),
        indexes: Sequence[int] = (),
    ) -> list[PageCopy]:
        growing = rows[counts.nonzero()[0]]
        copies = self._made_free(len(growing))
        old, new = self.live[growing].astype(np.int64), self.pool.take(len(growing))
        self.live[growing], self.stop[growing], self._is_open[growing] = new, 1, False
        self.is_settled = not self._is_open.any()
        copied = old != NULL_PAGE
        if copied.any():
            copies.append(PageCopy(old[copied], new[copied], group=self.number))
            self.counts.copied_pages += int(copied.sum())
            for pages in _distinct(old[copied]):
                self._release(pages)
        return copies

    def give_up(self, rows: Index) -> None:
        """Let no checkpoint hold the states that these rows are about to write; they have been grown."""
        if not self._is_crowded:
            return
        self._is_crowded = False
        pages = self.live[rows]
        for page in pages[self.pool.holders[pages] > 1].tolist():
            if page in self._entry_of:
                self._forget(np.array([page]))
            for row, left in list(self._left.items()):
                for each in [each for each in left if each.page == page]:
                    self._drop(row, each)

    def resumable(
        self, entries: Index, held: int = 0, first_held: int = 0, *, rests: bool = True
    ) -> NDArray[np.bool_]:
        able = np.zeros(held + len(entries) + 1, dtype=np.bool_)
        beside = self.beside[entries]
        able[held + 1 :] = beside != 0 if rests else beside > 0
        able[[0, held]] = True
        return able

    def wanted(self, entries: Index, num_tokens: int, *, comes_back: bool = False) -> int:
        return 1

    def resume(self, row: int, entries: Index, *, comes_back: bool = False) -> list[PageCopy]:
        """See `PageGroup.resume`: the row shares the state beside the last of these entries."""
        if comes_back or not len(entries):
            return []
        page = int(self.beside[entries[-1]])
        assert page != 0, f"row {row} resumes where no state is"
        self.num_hits += 1
        if page in self._ends:
            self._ends[page].num_hits += 1
        self._spent.discard(page)
        copies = []
        if page > 0:
            self._share(np.array([page]))
            self.clear(row)
        else:
            self.clear(row)
            del self._resting[page]  # it is kept while room is made
            copies = self._made_free(1)
            source, target = np.array([page]), self.pool.take(1)
            copies.append(PageCopy(-source, target, "from_host", group=self.number))
            self._rename_pages(source, target)
            self.pool.share(target)  # the row shares it with the prefix cache
            assert self.host is not None, "pages rest in a host pool"
            self.host.release(-source)
            self.counts.promoted_pages += 1
            page = int(target[0])
        self.live[row], self.stop[row] = page, 1
        self.open(row)
        return copies

    def to_swap(self, row: int, num_published: int, num_computed: int) -> tuple[int, Index]:
        """See `PageGroup.to_swap`: a row takes its live state along."""
        return 0, self.table[row, : int(self.stop[row])].astype(np.int64)

    def come_back(self, row: int, first: int, host_pages: Index) -> list[PageCopy]:
        copies = self._made_free(1)
        target = self.pool.take(1)
        self.live[row], self.stop[row] = target[0], 1
        self.counts.swapped_in_pages += 1
        return [*copies, PageCopy(host_pages, target, "from_host", group=self.number)]

    def keep(self, row: int, position: int, *, is_end: bool = False, is_on_the_way: bool = False) -> None:
        """Keep the row's live state, which the next batch leaves at `position`, as a checkpoint."""
        page = int(self.live[row])
        self._share(np.array([page]))
        self.open(row)
        self._add(row, Checkpoint(position, page, is_end, is_on_the_way))

    def try_to_keep(self, rows: Index, positions: Index) -> list[PageCopy]:
        """Keep the live states of answers, which stand at these positions, as far as pages are free.

        Returns the copies to make before the next batch, which may write these states. Each takes the place
        of the row's last one.
        """
        trial, copies = self._trial_page[rows], []
        if NULL_PAGE in trial.tolist():  # quicker than numpy for so few
            lacking = (trial == NULL_PAGE).nonzero()[0]
            short = len(lacking) - self.pool.num_free
            if short > 0 and self.answers_return:
                copy = self._evict_idle(min(short, len(self._idle)))
                copies += [] if copy is None else [copy]
            elif short > 0 and self._spent:
                self._evict_spent([page for page in self._spent if page in self._idle][:short])
            having = lacking[: self.pool.num_free]
            trial[having] = self._trial_page[rows[having]] = self.pool.take(len(having))
            is_kept = trial != NULL_PAGE
            rows, positions, trial = rows[is_kept], positions[is_kept], trial[is_kept]
            if not len(rows):
                return copies
        self._trial_position[rows] = positions
        self.counts.copied_pages += len(rows)
        return [*copies, PageCopy(self.live[rows].astype(np.int64), trial, group=self.number)]

    def keep_last(self, row: int, position: int) -> None:
        """Keep the live state of a row that ends, which stands at `position`, in place of its last one."""
        self._end_trials(np.array([row]))
        self._trial_page[row], self._trial_position[row] = self.live[row], position
        self.live[row], self.stop[row] = NULL_PAGE, 0

    def _end_trials(self, rows: Index) -> None:
        pages = self._trial_page[rows]
        self.pool.release(pages[pages != NULL_PAGE])
        self._trial_page[rows] = NULL_PAGE

    def take_one(
        self, row: int, position: int, *, is_end: bool = False, is_on_the_way: bool = False
    ) -> tuple[int, list[PageCopy]]:
        """Take a page for the state that the next batch leaves at `position` within a span of the row.

        Returns the page, and the copy that makes room for it. Returns page 0 if there is none: nobody is
        preempted for a checkpoint.
        """
        if not self.pool.num_free + len(self._idle):
            return NULL_PAGE, []
        copies = self._made_free(1)
        (page,) = self.pool.take(1).tolist()
        self._add(row, Checkpoint(position, page, is_end, is_on_the_way))
        return page, copies

    def is_left(self, row: int) -> list[int]:
        """Return the positions in its prompt at which a row leaves states that cannot be found yet."""
        return [each.position for each in self._left.get(row, ())]

    def publish(
        self, row: int, first: int, entries: Index, is_cached: NDArray[np.bool_]
    ) -> tuple[Index, Index]:
        """See `PageGroup.publish`: checkpoints at the ends of these pages lie beside them from now on.

        Those on the way, which nobody may ever want, are not among what is returned: no tier saves them.
        """
        new: dict[int, int] = {}
        on_the_way: list[int] = []
        trial = Checkpoint(int(self._trial_position[row]), int(self._trial_page[row]))
        if trial.page != NULL_PAGE:  # it is among the others from here on
            self._trial_page[row] = NULL_PAGE
            self._add(row, trial)
        for each in list(self._left.get(row, ())):
            at = each.position // self.page_size - 1 - first
            if not 0 <= at < len(entries):
                continue
            name = int(entries[at])
            if not is_cached[at] or self.beside[name] or each.page in self._entry_of:
                self._drop(row, each)
                continue
            self._remove(row, each)
            self.beside[name], self._entry_of[each.page] = each.page, name
            if each.is_on_the_way:
                on_the_way.append(at)
            else:
                new[at] = each.page
            is_unsure = each is trial and not self.answers_return
            self._used[each.page], self._times[each.page] = (
                self.returns.turn,
                NOBODY if is_unsure else UNKNOWN,
            )
            if each.is_end or each is trial:
                self._ends[each.page] = End(is_answer=each is trial)
            if each.is_on_the_way or (each.is_end and self.answers_return):
                self._spent.add(each.page)  # the state of its answer is expected to cover that of a prompt
            if self.pool.holders[each.page] == 1:
                self._idle[each.page] = None
                is_last = self.answers_return if each is trial else each.page not in self._spent
                self._idle.move_to_end(each.page, last=is_last)
        if new or on_the_way:
            self.num_taken += len(new) + len(on_the_way)
            self.changes += 1
            self.announce(True, entries[[*new, *on_the_way]])
        return np.array(list(new), dtype=np.int64), np.array(list(new.values()), dtype=np.int64)

    def share(self, pages: Index) -> None:
        """Give held states one more holder, which is no row."""
        self._share(pages)

    def release(self, pages: Index) -> None:
        """Remove the hold of one that is no row."""
        self._release(pages)

    def lay_beside(self, entry: int, page: int) -> None:
        """Let a held state be found beside an entry, unless one lies there.

        It was computed elsewhere, and nothing is known of what goes on from it.
        """
        if self.beside[entry]:
            return
        self.pool.share(np.array([page]))
        self.beside[entry], self._entry_of[page] = page, entry
        self._used[page], self._times[page] = self.returns.turn, UNKNOWN
        self.changes += 1
        self.announce(True, np.array([entry]))

    def end_behind(self, entry: int) -> End | None:
        """Return what is known of the state behind an entry, if it is one of an end."""
        return self._ends.get(int(self.beside[entry]))

    def has_returned(self, entry: int, times: int) -> None:
        """Record how often the conversation was continued that ends with the state beside an entry."""
        page = int(self.beside[entry])
        if page > 0:
            self._times[page] = times

    def least_expected(self) -> Index:
        """See `PagesBeside.least_expected`: of what a later state covers, the pages are that one's."""
        pages = np.fromiter(self._idle, dtype=np.int64, count=len(self._idle))
        pages = pages[self._times[pages] < UNKNOWN]
        kept = [page for page in self._by_wait(pages).tolist() if page not in self._spent]
        return np.array([self._entry_of[page] for page in kept], dtype=np.int64)

    def _by_wait(self, pages: Index) -> Index:
        """Sort pages by how soon they are expected to be continued, the latest first.

        The expected wait of a state is the mean wait of conversations that were continued as often, plus the
        time that it has waited already: the longer a conversation has not returned, the lower is the rate at
        which it is likely to return.
        """
        if len(pages) < 2:
            return pages
        order: Index = np.argsort(self._used[pages] - self.returns.waits()[self._times[pages]], kind="stable")
        return pages[order]

    def cover(self, entries: Index) -> None:
        """Let the last state before the end of these entries be evicted first, if the one there covers it.

        A state that was continued once was continued by the conversation that has left the later state. Where
        clients send answers back, nobody is expected to continue from the end of a prompt that was answered.
        """
        at = np.flatnonzero(self.beside[entries[:-1]] > 0)
        page = int(self.beside[entries[at[-1]]]) if len(at) else NULL_PAGE
        end, last = self._ends.get(page), self.end_behind(int(entries[-1]))
        if end is None or page not in self._idle:
            return
        is_answer = last is not None and last.is_answer
        if is_answer and not self.answers_return:
            return
        if (0 if is_answer else 1) <= end.num_hits <= 1:
            self._spent.add(page)
            self._idle.move_to_end(page, last=False)

    def renew(self, entry: int) -> None:
        """Let the state behind an entry, which no later one will cover, be evicted after all others."""
        page = int(self.beside[entry])
        if page in self._spent:
            self._spent.remove(page)
            if page in self._idle:
                self._idle.move_to_end(page)

    def clear(self, row: int) -> None:
        for each in list(self._left.get(row, ())):
            self._drop(row, each)
        self._end_trials(np.array([row]))
        super().clear(row)
        self._is_open[row] = False

    def fork(self, source: int, row: int, num_pages: int) -> None:
        super().fork(source, row, num_pages)
        self.open(source)
        self.open(row)

    def open(self, row: int) -> None:
        """Look at this row in the next step: it has no state, or may share it."""
        self._is_open[row], self.is_settled = True, False

    def evict(self, count: int) -> PageCopy | None:
        """See `PageGroup.evict`: states about to be published go last.

        Those of running answers go first, but where answers return: they are the next to be gone on from.
        """
        num_before = len(self._idle) if self.answers_return else 0
        tried = np.flatnonzero(self._trial_page)[: max(0, count - num_before)]
        self._end_trials(tried)
        count -= len(tried)
        num_idle = min(count, len(self._idle))
        copy = self._evict_idle(num_idle)
        self._drop_loose(count - num_idle)
        return copy

    def _evict_idle(self, count: int) -> PageCopy | None:
        # No page of the host is for what a later state covers
        spent = [page for page in islice(self._idle, count) if page in self._spent]
        self._evict_spent(spent)
        if count == len(spent):
            return None
        pages = np.fromiter(self._idle, dtype=np.int64, count=len(self._idle))
        for page in self._by_wait(pages)[: count - len(spent)][::-1].tolist():
            self._idle.move_to_end(page, last=False)
        return super().evict(count - len(spent))

    def _evict_spent(self, pages: Sequence[int]) -> None:
        self.counts.evicted_pages += len(pages)
        self._forget(np.array(pages, dtype=np.int64))

    def _release(self, pages: Index) -> None:
        super()._release(pages)
        self._used[pages] = self.returns.turn
        for page in pages.tolist() if self._spent else ():
            if page in self._spent and page in self._idle:
                self._idle.move_to_end(page, last=False)

    def resize(self, num_pages: int) -> None:
        super().resize(num_pages)
        for name in ("_num_left", "_used", "_times"):
            old = getattr(self, name)
            new = np.zeros(num_pages, dtype=old.dtype)
            new[: len(old)] = old[:num_pages]
            setattr(self, name, new)

    def users(self, rows: Index) -> Index:
        users: Index = super().users(rows) + self._num_left
        users[self._trial_page] += 1  # the null page is nobody's
        return users

    def _loose(self) -> Index:
        """Return the pages that only checkpoints in `_left` hold."""
        if not self._left:
            return EMPTY
        pages = np.flatnonzero(self._num_left)
        others = self.pool.holders[pages] - self._num_left[pages]
        near = others == 1
        if near.any():
            others[near] -= [page in self._entry_of for page in pages[near].tolist()]
        loose: Index = pages[others == 0]
        return loose

    def _drop_loose(self, count: int) -> None:
        """Drop checkpoints that cannot be found yet until `count` more pages are free."""
        if count <= 0:
            return
        wanted, loose = self.pool.num_free + count, set(self._loose().tolist())
        for row, left in list(self._left.items()):
            for each in list(left):
                if self.pool.num_free < wanted and each.page in loose:
                    self._drop(row, each)

    def _add(self, row: int, checkpoint: Checkpoint) -> None:
        self._left.setdefault(row, []).append(checkpoint)
        self._num_left[checkpoint.page] += 1

    def _remove(self, row: int, checkpoint: Checkpoint) -> None:
        left = self._left[row]
        left.remove(checkpoint)
        if not left:
            del self._left[row]
        self._num_left[checkpoint.page] -= 1

    def _drop(self, row: int, checkpoint: Checkpoint) -> None:
        self._remove(row, checkpoint)
        self._release(np.array([checkpoint.page]))

    def _forget(self, pages: Index) -> None:
        super()._forget(pages)
        for page in pages.tolist():
            self._ends.pop(page, None)
            self._spent.discard(page)

    def _rename_pages(self, sources: Index, targets: Index) -> None:
        super()._rename_pages(sources, targets)
        ends = {
            target: self._ends.pop(page, None) for page, target in zip(sources.tolist(), targets.tolist())
        }
        self._ends.update({page: end for page, end in ends.items() if end is not None})
        spent = [page in self._spent for page in sources.tolist()]
        self._spent.difference_update(sources.tolist())
        self._spent.update(targets[spent].tolist())
        on_device = targets > 0
        sources, targets = sources[on_device], targets[on_device]
        known = np.maximum(sources, NULL_PAGE)  # pages of the host have no entries, and may be more
        self._used[targets] = np.where(sources > 0, self._used[known], self.returns.turn)
        self._times[targets] = np.where(sources > 0, self._times[known], UNKNOWN)

    def _follow(self, sources: Index, targets: Index) -> None:
        super()._follow(sources, targets)
        target_of = dict(zip(sources.tolist(), targets.tolist()))
        for left in self._left.values():
            left[:] = [replace(each, page=target_of.get(each.page, each.page)) for each in left]
        moved = np.arange(self.pool.num_pages)
        moved[sources] = targets
        self._trial_page[:] = moved[self._trial_page]
        self._num_left[targets] = self._num_left[sources]
        self._num_left[sources] = 0


def _distinct(pages: Index) -> Iterator[Index]:
    """Yield the pages in parts without a page that stands twice, as `PagePool` takes them."""
    if len(set(pages.tolist())) == len(pages):
        yield pages
        return
    while len(pages):
        _, first = np.unique(pages, return_index=True)
        yield pages[first]
        pages = np.delete(pages, first)
