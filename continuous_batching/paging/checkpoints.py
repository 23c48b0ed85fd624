"""Choose where prompts are cut, and at which positions recurrent states are kept for later requests.

A state is kept where a prompt ends, because its conversation goes on there; where prompts with one beginning
were found to part; where a request that waits for a running prompt parts from it; and, if there is room, at
the last page of an answer, and on the way of a long prompt that begins as none before. Pages and holders of
states are those of `kv_cache/states.py`. Everything here follows from what the scheduler knows, so that all
ranks decide the same.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence

import numpy as np

from continuous_batching.batch import StateCut
from continuous_batching.request import Request
from continuous_batching.slots import SlotPool
from kv_cache.pages import NULL_PAGE, Index, PageCopy
from kv_cache.prefix_cache import PrefixCache
from kv_cache.states import GRID, StateGroup

MOST_WANTED = 4  # states of a row at which it stops to look for more
MOST_ON_THE_WAY = 4  # states that a prompt leaves before its end because nothing of it was known
LEAST_ON_THE_WAY = 512  # tokens before the first of these: fewer are computed again sooner than kept
SURE = 8  # bound of the tally of prompts that contain answers as they were given, and of those that do not
NEVER = np.iinfo(np.int64).max


class Checkpoints:
    """The positions at which rows are to leave states behind, and the ends of their spans.

    Without `shares` no state is kept. `copy` is told of copies that make room for one.
    """

    def __init__(
        self,
        slots: SlotPool,
        group: StateGroup,
        prefix: PrefixCache,
        copy: Callable[[PageCopy], None],
        *,
        shares: bool,
    ) -> None:
        self._slots, self._group, self._prefix, self._shares = slots, group, prefix, shares
        self._copy = copy
        self.every = group.every_pages * slots.page_size  # tokens between positions where states are kept
        # It is above 0 if recent prompts continued answers as they were given more often than other texts
        self._returned = 0
        self._wanted: dict[int, list[int]] = {}  # ascending, by row
        self._on_the_way: dict[int, list[int]] = {}  # likewise, those that need a free page
        # The end of the conversation that each row continues, and how often that end was continued
        self._continued: dict[int, tuple[bytes | None, int]] = {}
        self._next = np.full(slots.num_slots, NEVER, dtype=np.int64)  # the first of both
        # [N] the page end at which each row is to keep the next state of its answer
        self._due = np.full(slots.num_slots, NEVER, dtype=np.int64)

    def usable(self, num_pages: int) -> int:
        """Return how many of a prefix's pages precede its last position where a state may be kept."""
        return num_pages // self._group.every_pages * self._group.every_pages

    def enter(self, row: int, keys: Sequence[bytes], found: Index, rows: Sequence[int]) -> None:
        """Want the states of a row that has just been given the pages and the state that it starts from.

        `keys` are those of the pages that it may share, and `found` the pages of these that are cached,
        whether or not it could start behind them. `rows` compute their prompts.
        """
        slots, size = self._slots, self._slots.page_size
        self._group.open(row)
        if self._shares and slots.requests[row].leases_pages:  # another engine goes on from its very end
            self.want(row, self.usable(int(slots.num_shareable[row])) * size)
        if not self._shares or not len(keys):
            return
        self.answers(row)
        if slots.num_computed[row] and not slots.requests[row].num_preemptions:
            self._learn(int(slots.num_pages[row]), int(slots.pages(row)[-1]), keys)
        if not slots.requests[row].num_preemptions:
            self._arrive(row, keys)
        # A prompt that comes again has to compute its last token
        end = self.usable(int(min(slots.num_shareable[row], len(keys)))) * size
        self.want(row, end)
        if not len(found) and not slots.num_computed[row]:
            self._want_on_the_way(row, end)
        elif len(found) * size > slots.num_computed[row] and (
            self._prefix.index.goes_on(int(found[-1])) or self._parts_from(keys, len(found), rows)
        ):
            self.want(row, self.usable(len(found)) * size)

    def _want_on_the_way(self, row: int, end: int) -> None:
        """Want states at a half of a prompt, a quarter and so on, as far as pages are free.

        Nobody knows where the next prompt with this beginning will part from it: wherever that is, it finds a
        state behind half of what both share.
        """
        positions = [end // 2**each // self.every * self.every for each in range(MOST_ON_THE_WAY, 0, -1)]
        positions = sorted({each for each in positions if each >= LEAST_ON_THE_WAY})
        if positions:
            self._on_the_way[row] = positions
            self._find_next(row)

    def _parts_from(self, keys: Sequence[bytes], num_found: int, rows: Sequence[int]) -> bool:
        """Whether one of these rows goes on otherwise behind these pages, and has not published how."""
        slots = self._slots
        others = (slots.requests[row].page_keys for row in rows if slots.num_shareable[row] > num_found)
        return any(
            len(other) > num_found
            and other[num_found - 1] == keys[num_found - 1]
            and other[num_found] not in keys[num_found : num_found + 1]
            for other in others
        )

    def answers(self, row: int) -> None:
        """Have a row keep a state at each end of a page that it reaches in its answer."""
        slots = self._slots
        if self._shares and slots.num_shareable[row] and not slots.beam_width[row]:
            first = max(int(slots.num_prompt[row]), int(slots.num_computed[row]))
            self._due[row] = first // self.every * self.every + self.every

    def _learn(self, num_pages: int, last: int, keys: Sequence[bytes]) -> None:
        """Learn from a row that resumes a prefix whether clients send answers back as they were given.

        The first request that continues from the end of a prompt belongs to its conversation. A client that
        strips the model's thoughts continues with other tokens than those of the answer.
        """
        end = self._group.end_behind(last)
        if end is None or end.num_hits != 1:
            return
        returns = end.is_answer or (num_pages < len(keys) and self._prefix.has_known(keys[num_pages]))
        self._returned = min(SURE, self._returned + 1) if returns else max(-SURE, self._returned - 1)
        self._group.answers_return = self._returned > 0

    def _arrive(self, row: int, keys: Sequence[bytes]) -> None:
        """Record which conversation a new row continues, whether that one's state is still kept or not."""
        end, times = self._continued[row] = self._group.returns.arrive(keys)
        num_pages = int(self._slots.num_pages[row])
        if num_pages and keys[num_pages - 1] == end:
            self._group.has_returned(int(self._slots.pages(row)[-1]), times)

    def _note_end(self, row: int, at: int, entry: int) -> None:
        """Record the state behind page `at` of a row if a conversation is expected to continue from it."""
        end, group = self._group.end_behind(entry), self._group
        if end is None or row not in self._continued or (end.is_answer and not group.answers_return):
            return
        before, times = self._continued[row]
        key = self._slots.requests[row].page_keys[at]
        group.returns.note(key, times, before)
        group.has_returned(entry, times)
        self._continued[row] = key, times

    def published(self, row: int, first: int, indexes: Index) -> None:
        """Let states of a row, which can be found from now on at these of its pages, cover earlier ones."""
        pages = self._slots.pages(row)
        for at in np.sort(indexes).tolist():
            self._note_end(row, first + at, int(pages[first + at]))
            self._group.cover(pages[: first + at + 1])

    def renew_last(self, row: int) -> None:
        """Let the state at the end of a row's prompt stay if its answer, which has ended, leaves none."""
        pages = self._slots.pages(row)
        behind = np.flatnonzero(self._group.is_here(pages))
        if len(behind):
            self._group.renew(int(pages[behind[-1]]))

    def num_useful(self, row: int) -> int:
        """Return how many pages of a row precede its last state from which others are expected to go on.

        Nobody is expected to continue from the state of an answer, unless answers return.
        """
        pages = self._slots.pages(row)
        behind = np.flatnonzero(self._group.is_here(pages))
        if len(behind) and not self._group.answers_return:
            end = self._group.end_behind(int(pages[behind[-1]]))
            if end is not None and end.is_answer and not end.num_hits:
                behind = behind[:-1]
        return int(behind[-1]) + 1 if len(behind) else 0

    def want(self, row: int, position: int) -> None:
        """Have a row leave its state at a position that it has not reached yet."""
        wanted = self._wanted.get(row, [])
        if position > self._slots.num_computed[row] and position not in wanted:
            insort(wanted, position)
            self._wanted[row] = wanted
            self._find_next(row)

    def leave(self, row: int) -> None:
        """Forget what was wanted of a row, which ends."""
        self._drop_wanted(row)
        self._continued.pop(row, None)
        self._due[row] = NEVER

    def _drop_wanted(self, row: int) -> None:
        self._wanted.pop(row, None)
        self._on_the_way.pop(row, None)
        self._next[row] = NEVER

    def _find_next(self, row: int) -> None:
        """Note the next position at which a row is to leave a state; what it wants no more is removed."""
        both = self._wanted, self._on_the_way
        for each in both:
            if not each.get(row, True):
                del each[row]
        self._next[row] = min((each[row][0] for each in both if row in each), default=NEVER)

    def aligned(self, rows: Index, starts: Index, stops: Index, most_tokens: int) -> Index:
        """Return the ends of spans, each on the grid unless all known tokens of its row end there.

        A span that would not reach the grid is left out, which its empty length says. If no prompt goes on
        then, the oldest takes as much of its block as the step's tokens allow.
        """
        known = self._slots.num_tokens[rows]
        aligned: Index = np.where(stops < known, stops // GRID * GRID, stops)
        aligned = np.maximum(aligned, starts)
        cut = np.flatnonzero(stops < known)
        if len(cut) and not (aligned[cut] > starts[cut]).any():
            at = cut[0]
            end = min(int(known[at]), int(starts[at]) // GRID * GRID + GRID)
            left = most_tokens - int((aligned - starts).sum())
            if end - starts[at] <= left:
                aligned[at] = end
        return aligned

    def keep_answers(self, rows: Index, positions: Index) -> None:
        """Keep the states of those answers that stand at the end of a page.

        The states of these rows, which a batch is about to write, stand at `positions`.
        """
        due = self._due[rows]
        at = (due <= positions).nonzero()[0]
        if not len(at):
            return
        rows, positions = rows[at], positions[at]
        if False in (due[at] == positions).tolist():
            # Accepted drafts and recomputed answers may leave out ends of pages
            beyond = positions % self.every
            self._due[rows] = positions - beyond + self.every
            rows, positions = rows[beyond == 0], positions[beyond == 0]
        self._due[rows] = positions + self.every
        for copy in self._group.try_to_keep(rows, positions):
            self._copy(copy)

    def keep_last(self, row: int) -> None:
        """Keep the state of an answer that ends where a page does."""
        position = int(self._slots.num_computed[row] - self._slots.state_lag[row])
        if position >= self._due[row] and position % self.every == 0:
            self._group.keep_last(row, position)

    def cuts(self, rows: Index, starts: Index, stops: Index) -> tuple[StateCut, ...]:
        """Keep the states that are wanted of these spans, whose rows have their pages, without their drafts.

        Returns the cuts within spans; a state at the end of a span needs none.
        """
        if not (self._wanted or self._on_the_way):
            return ()
        made: list[StateCut] = []
        for at in np.flatnonzero(self._next[rows] <= stops).tolist():
            made += self._cuts_of(at, int(rows[at]), int(starts[at]), int(stops[at]))
        return tuple(made)

    def _cuts_of(self, span: int, row: int, start: int, stop: int) -> list[StateCut]:
        made, group = [], self._group
        wanted, more = self._wanted.get(row, []), self._on_the_way.get(row, [])
        end = self.usable(int(self._slots.num_shareable[row])) * self._slots.page_size
        for position in sorted(each for each in {*wanted, *more} if each <= stop):
            needs_free = position not in wanted
            of_both = [each for each in (wanted, more) if position in each]
            for each in of_both:
                each.remove(position)
            if needs_free and not group.pool.num_free:
                continue
            if position == stop:
                group.keep(row, position, is_end=position == end, is_on_the_way=needs_free)
            elif position > start:
                page, copies = group.take_one(row, position, is_end=position == end, is_on_the_way=needs_free)
                for copy in copies:
                    self._copy(copy)
                if page != NULL_PAGE:
                    made.append(StateCut(span, position, page))
        self._find_next(row)
        return made

    def ask_leader(self, request: Request, keys: Sequence[bytes], num_held: int, rows: Sequence[int]) -> None:
        """Have the row that computes the most of a request's prefix leave a state where the two part."""
        if not self._shares:
            return
        best, leader, slots = 0, -1, self._slots
        for row in rows:
            other: Request = slots.requests[row]
            count = self.usable(num_equal(keys, other.page_keys, int(slots.num_shareable[row])))
            if other is not request and count > best and count * slots.page_size > slots.num_computed[row]:
                best, leader = count, row
        if best > num_held:
            self.want(leader, best * slots.page_size)

    def foresee(self, row: int, waiting: Sequence[tuple[Request, int]]) -> None:
        """Want states of a new row where waiting requests, which can use so many pages, part from it."""
        own: Request = self._slots.requests[row]
        keys, num_shareable = own.page_keys, int(self._slots.num_shareable[row])
        if not self._shares or not num_shareable:
            return
        for request, num_usable in waiting:
            if len(self._wanted.get(row, ())) >= MOST_WANTED:
                break
            if request is not own and request.page_keys[:1] == keys[:1]:
                count = num_equal(keys, request.page_keys, min(num_shareable, num_usable))
                self.want(row, self.usable(count) * self._slots.page_size)

    def awaited(
        self, request: Request, keys: Sequence[bytes], num_held: int, rows: Sequence[int]
    ) -> tuple[int, int] | None:
        """Return which of these rows will leave a state within a request's prefix, beyond what it has.

        With it comes how many pages precede that state. None if no row will.
        """
        slots, size = self._slots, self._slots.page_size
        for row in rows:
            other: Request = slots.requests[row]
            for position in (*self._wanted.get(row, ()), *self._group.is_left(row)):
                count = position // size
                is_known = count <= len(other.page_keys)  # a broken swap may leave fewer
                is_within = num_held < count <= len(keys) and is_known and other is not request
                if is_within and other.page_keys[count - 1] == keys[count - 1]:
                    return row, count
        return None

    def is_to_leave(self, row: int, num_pages: int) -> bool:
        """Whether a row will leave a state behind so many of its pages that cannot be found yet."""
        position = num_pages * self._slots.page_size
        return position in self._wanted.get(row, ()) or position in self._group.is_left(row)


def num_equal(keys: Sequence[bytes], others: Sequence[bytes], most: int) -> int:
    """Return how many of their first `most` keys two prefixes share; each key names all tokens before it."""
    low, high = 0, min(len(keys), len(others), most)
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
