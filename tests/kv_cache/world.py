"""All that holds pages, at its smallest: the real tables, and a device that knows only what was written.

`World` is one state: three requests, their rows, the pool, the prefix cache, the host pool, and what the
device's pages hold. `moves` lists all that may happen next, in any order that an engine could choose.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np

from continuous_batching.counters import Counters
from continuous_batching.paging.slot_lifecycle import SlotLifecycle, Swapped
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.in_flight import InFlight
from continuous_batching.slots import SlotPool
from kv_cache.pages import PageCopy, PagePool
from tests.continuous_batching.recount import recount

UNCHANGING = {int, float, str, bytes, bool, type(None), SamplingParams, Swapped, PageCopy}
NOTHING = -1  # content of a place that nobody wrote since its page was free
Move = tuple[object, ...]


@dataclass(frozen=True)
class Setting:
    """What a world is made of."""

    prompts: tuple[tuple[int, ...], ...]
    salts: tuple[str, ...] = ("", "", "")
    follows: dict[int, int] = field(default_factory=dict)  # request -> the one whose prompt it shares
    max_tokens: int = 2
    num_pages: int = 7  # the null page among them
    least_pages: int = 6
    num_host_pages: int = 4
    page_size: int = 2
    sees_layout: bool = False  # tell states apart by which pages are free


# What is one for all states: it does not change, or nothing depends on it
UNCHANGING |= {Setting, Counters}
SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "seed"}
SAMPLING |= {"frequency_penalty", "min_total", "ignore_eos", "own_stops", "plain"}


def written(tokens: tuple[int, ...]) -> int:
    """What the last of these tokens leaves in its place: all before it has a part in it."""
    return hash(tokens) & (1 << 62) - 1


def clone(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy, several times as fast as the general one, of what a world is made of."""
    kind: Any = type(value)
    if kind in UNCHANGING:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind is np.ndarray:
        copied = memo[id(value)] = value.copy()
        if value.dtype == object:
            copied[:] = [clone(each, memo) for each in value]
        return copied
    if kind in (tuple, list, set, deque):
        return kind([each if type(each) in UNCHANGING else clone(each, memo) for each in value])
    if kind in (dict, OrderedDict, Counter):
        return kind(
            {key: each if type(each) in UNCHANGING else clone(each, memo) for key, each in value.items()}
        )
    twin = memo[id(value)] = kind.__new__(kind)
    names = value.__dict__ if hasattr(value, "__dict__") else kind.__slots__
    for name in names:
        each = getattr(value, name)
        shared = type(each) in UNCHANGING or name in SAMPLING
        setattr(twin, name, each if shared else clone(each, memo))
    return twin


class World:
    """One state. Requests are known by their index; `place` says where each of them is."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        size = setting.page_size
        longest = max(map(len, setting.prompts)) + setting.max_tokens
        self.slots = SlotPool(len(setting.prompts), longest, size)
        self.pool = PagePool(setting.num_pages)
        host = PagePool(setting.num_host_pages)
        self.lifecycle = SlotLifecycle(
            self.slots, self.pool, Counters(), prefix_sharing=True, max_shared_tokens=None, host=host
        )
        self.requests: list[Request] = []
        self.place: list[str] = []
        for index, (prompt, salt) in enumerate(zip(setting.prompts, setting.salts)):
            params = SamplingParams(max_tokens=setting.max_tokens)
            request = Request(str(index), np.array(prompt), params, cache_salt=salt, number=index, seed=index)
            request.page_keys = self.lifecycle.matching.keys(request)
            self.requests.append(request)
            self.place.append("follows" if index in setting.follows else "waits")
        self.pages = np.full((setting.num_pages, size), NOTHING)
        self.host = np.full((setting.num_host_pages, size), NOTHING)

    def copy(self) -> World:
        """The same state again, to be changed."""
        copied: World = clone(self, {})
        return copied

    def row(self, index: int) -> int:
        """The row of a running request."""
        row: int
        (row,) = (each for each in self.slots.busy.tolist() if self.slots.requests[each].number == index)
        return row

    def story(self, index: int) -> tuple[int, ...]:
        """All that a request will ever know: its prompt, and an answer of its own."""
        answer = [10 + index + number for number in range(self.setting.max_tokens)]
        return (*self.setting.prompts[index], *answer)

    def moves(self) -> Iterator[Move]:
        """All that may happen next."""
        slots, prefix = self.slots, self.lifecycle.prefix
        for index, place in enumerate(self.place):
            if place == "waits":
                yield "drop", index
                if self._may_enter(index):
                    yield "enter", index
            elif place == "runs":
                yield "abort", index
                yield "preempt", index
                yield "swap", index
        busy = slots.busy.tolist()
        runnable = [row for row in busy if not self.lifecycle.matching.is_blocked(row)] or busy[:1]
        for count in range(1, len(runnable) + 1):
            for rows in combinations(runnable, count):
                names = tuple(slots.requests[row].number for row in rows)
                for length in (1, slots.max_tokens):
                    yield "step", names, length, "goes on"
                    if count == 1:
                        yield "step", names, length, "fails"
                        yield "step", names, length, "is aborted"
        if prefix.num_idle:
            yield ("evict",)
        if self.pool.highest_held > self.pool.num_held:
            yield "compact", 1
            yield "compact", self.pool.num_pages
        for num_pages in (self.pool.num_pages - 1, self.pool.num_pages + 1):
            is_allowed = self.setting.least_pages <= num_pages <= self.setting.num_pages
            if is_allowed and self.pool.num_held <= num_pages - 1:
                yield "resize", num_pages

    def make(self, move: Move) -> bool:
        """Let it happen; False if there is no page for it, so that it cannot."""
        name, *arguments = move
        return bool(getattr(self, f"_{name}")(*arguments) is not False)

    def _may_enter(self, index: int) -> bool:
        request = self.requests[index]
        matched, left = self.lifecycle.find(request), self.lifecycle.swap.left(request)
        shared = matched[matched > 0]
        idle = int((self.pool.holders[shared] == 1).sum())
        wanted = len(matched) - len(shared) + (0 if left is None else len(left.pages))
        return wanted <= self.lifecycle.tables.groups[0].num_available - idle

    def _enter(self, index: int) -> None:
        request = self.requests[index]
        self.lifecycle.enter(request, self.lifecycle.find(request), len(request.tokens))
        self.place[index] = "runs"

    def _drop(self, index: int) -> None:
        self.lifecycle.swap.forget(self.requests[index])
        self._end(index)

    def _abort(self, index: int) -> None:
        self.lifecycle.leave(self.row(index))
        self._end(index)

    def _preempt(self, index: int) -> None:
        self.lifecycle.leave(self.row(index))
        self.place[index] = "waits"

    def _swap(self, index: int) -> bool:
        swapped = self.lifecycle.swap_out(self.row(index)) is not None
        if swapped:
            self.requests[index].num_preemptions = 1  # or more: only whether there were any is asked
            self.place[index] = "waits"
        return swapped

    def _evict(self) -> None:
        self.lifecycle.tables.evict(1)

    def _compact(self, max_pages: int) -> None:
        self.lifecycle.tables.compact(max_pages)

    def _resize(self, num_pages: int) -> None:
        tables = self.lifecycle.tables
        tables.compact(self.pool.num_pages)
        tables.resize([num_pages])
        self._apply(tables.take_copies())
        pages = np.full((num_pages, self.setting.page_size), NOTHING)
        kept = min(num_pages, len(self.pages))
        pages[:kept] = self.pages[:kept]
        self.pages = pages

    def _step(self, names: tuple[int, ...], length: int, outcome: str) -> bool:
        """Schedule, run and commit one batch of these requests, as the engine does."""
        slots, lifecycle, tables = self.slots, self.lifecycle, self.lifecycle.tables
        runnable = lifecycle.runnable().tolist()
        rows = np.array([row for row in map(self.row, names) if row in runnable], dtype=np.int64)
        if not len(rows):
            return False
        stops = np.minimum(slots.num_computed[rows] + length, slots.num_tokens[rows])
        if not tables.grow_to(rows, stops):
            return False
        sampled = rows[stops == slots.num_tokens[rows]]
        if outcome != "goes on" and not len(sampled):
            return False
        forked = [fork for row in sampled.tolist() for fork in self._fork(row)]
        self._apply(tables.take_copies())
        self._write(rows, stops)
        slots.num_computed[rows] = stops
        owners = np.append(sampled, np.array(forked, dtype=np.int64))
        lifecycle.matching.publish_prompts(np.union1d(rows, owners))
        for row in owners.tolist():
            self._answer(row, outcome)
        return True

    def _fork(self, row: int) -> Iterator[int]:
        leader = self.slots.requests[row].number
        for index, followed in self.setting.follows.items():
            if followed == leader and self.place[index] == "follows":
                self.place[index] = "runs"
                yield self.lifecycle.fork(row, self.requests[index])

    def _write(self, rows: np.ndarray, stops: np.ndarray) -> None:
        size, slots = self.setting.page_size, self.slots
        for row, stop in zip(rows.tolist(), stops.tolist()):
            tokens = tuple(slots.token_ids[row, :stop].tolist())
            for position in range(slots.num_computed[row], stop):
                page = slots.page_table[row, position // size]
                holders = self.pool.holders[page]
                forks = [each for each in slots.busy.tolist() if page in slots.pages(each)]
                assert holders == len(forks), "wrote to a cached page"
                assert all(slots.num_computed[each] >= stop for each in forks if each != row), "overwrote"
                self.pages[page, position % size] = written(tokens[: position + 1])

    def _answer(self, row: int, outcome: str) -> None:
        slots, index = self.slots, self.slots.requests[row].number
        at = int(slots.num_tokens[row])
        slots.token_ids[row, at] = self.story(index)[at]
        slots.num_tokens[row] += 1
        if outcome == "is aborted":
            slots.num_tokens[row] -= 1
        if outcome != "goes on" or slots.num_tokens[row] == slots.limit[row]:
            self.lifecycle.leave(row, failed=outcome == "fails")
            self._end(index)

    def _end(self, index: int) -> None:
        self.place[index] = "ended"
        for follower, leader in self.setting.follows.items():
            if leader == index and self.place[follower] == "follows":
                self.place[follower] = "waits"

    def _apply(self, copies: tuple[PageCopy, ...]) -> None:
        self.pages, self.host = self.settled(copies)
        self.pages[self.pool.free_pages[self.pool.free_pages < len(self.pages)]] = NOTHING
        host = self.lifecycle.tables.groups[0].host
        assert host is not None
        self.host[host.free_pages] = NOTHING

    def settled(self, copies: tuple[PageCopy, ...] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """What device and host pages hold once the copies that were asked for are made."""
        pages, host = self.pages.copy(), self.host.copy()
        for copy in self.lifecycle.tables._copies if copies is None else copies:
            here, there = {
                "within": (pages, pages),
                "to_host": (pages, host),
                "from_host": (host, pages),
            }[copy.way]
            assert copy.way != "within" or not np.intersect1d(copy.sources, copy.targets).size
            there[copy.targets] = here[copy.sources]
        return pages, host

    def recount(self) -> None:
        """The engine's own ledger check, on this state."""
        waiting = [each for each, place in zip(self.requests, self.place) if place == "waits"]
        recount(
            # It stands in for the scheduler, of which `recount` reads no more
            SimpleNamespace(  # type: ignore[arg-type]
                slots=self.slots,
                pool=self.pool,
                prefix=self.lifecycle.prefix,
                tables=self.lifecycle.tables,
                host_pool=self.lifecycle.tables.groups[0].host,
                lifecycle=self.lifecycle,
                waiting=SimpleNamespace(requests=waiting),
                in_flight=InFlight(self.slots),
            )
        )
