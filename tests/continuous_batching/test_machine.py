"""Any order of operations leaves the ledger right, the pages true and the answers whole.

A state machine over the real engine: requests come in families with common beginnings, followers, salts and
stop tokens; they are stepped, ended, made to fail, preempted, moved, evicted and cut short of pages in any
order, also between schedule and commit. After every operation all of it is checked against what each
request would have computed alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine
from continuous_batching.request import Request
from continuous_batching.scheduling.scheduler import Scheduler
from kv_cache.page_keys import page_keys
from tests.continuous_batching.checksum import ChecksumRunner, keys_of
from tests.continuous_batching.recount import recount
from tests.continuous_batching.test_schedules import (
    Arrival,
    arrivals,
    could_fit,
    expected,
    schedulers,
    try_resize,
)
from tests.thorough import cases

Words = np.ndarray


class SpoilingRunner(ChecksumRunner):
    """When a request fails, what its span wrote is as wrong as its logits."""

    def run(self, batch: Batch) -> Sampled:
        sampled = super().run(batch)
        for index, span in enumerate(batch.sampled.tolist()):
            row = int(batch.slots[span])
            if self.slots.requests[row].id in self.fail:
                positions = np.arange(batch.starts[span], batch.stops[span])
                size = self.slots.page_size
                pages = self.slots.page_table[row, positions // size].astype(np.int64)
                self.cache[pages * size + positions % size] ^= np.uint64(0xBAD)
                for group, cache in zip(self.groups, self.windows):
                    pages = group.table[row, positions // size].astype(np.int64)
                    cache[pages * size + positions % size] ^= np.uint64(0xBAD)
                sampled.tokens[index] = -1
        return sampled


class Engines(RuleBasedStateMachine):
    """Operations on one engine, and what must hold between any two of them."""

    num_operations = 0  # counts of all runs

    @initialize(made=schedulers())
    def start(self, made: tuple[Scheduler, ChecksumRunner]) -> None:
        self.scheduler, runner = made
        self.runner = SpoilingRunner(runner.slots, runner.pool, runner.host_pool, runner.groups)
        self.now_s = 0.0
        self.engine = Engine(self.scheduler, self.runner, clock=lambda: self.now_s)
        self.known: dict[str, Request] = {}  # all that were taken
        self.ended: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}  # what each request gets alone
        self.written: dict[str, Words] = {}  # what each request's tokens leave in the cache
        self.content: dict[bytes, Words] = {}  # keys are page keys
        self.counters = astuple(self.scheduler.counters)

    @rule(arrival=arrivals)
    def add(self, arrival: Arrival) -> None:
        leader = arrival.request(len(self.known))
        family = [leader, *leader.followers]
        fits = could_fit(self.engine, leader)
        try:
            self.engine.add(leader)
        except ValueError:
            assert not fits
            return
        assert fits
        for each in family:
            self.known[each.id] = each
            self._foresee(each)
            if arrival.fails:
                self.runner.fail.add(each.id)

    @rule()
    def step(self) -> None:
        self.now_s += 1
        step = self.engine.step()
        if step is None:
            assert not len(self.engine.slots.busy), "rows are busy, and nothing is computed"
            return
        self._check_batch(step.batch)
        self._end(step.finished)

    @rule(chosen=st.lists(st.integers(0, 50), max_size=4), arrival=st.none() | arrivals)
    def step_while_requests_come_and_go(self, chosen: list[int], arrival: Arrival | None) -> None:
        batch = self.scheduler.schedule(self.engine.clock())
        if batch.num_spans:
            sampled = self.runner.run(batch)
        for index in chosen:
            self.abort(index)
        if arrival is not None:
            self.add(arrival)
        recount(self.scheduler)
        if batch.num_spans:
            self._check_batch(batch)
            self._end(self.scheduler.commit(batch, sampled, self.engine.clock()).finished)

    @rule(index=st.integers(0, 50))
    def abort(self, index: int) -> None:
        name = self._name(index)
        request = self.engine.abort(name)
        assert (request is None) == (name in self.ended or name not in self.known)
        if request is not None and request.finish_reason is not None:
            self._end([request])

    @rule(index=st.integers(0, 50))
    def fail(self, index: int) -> None:
        self.runner.fail.add(self._name(index))

    @rule(index=st.integers(0, 50))
    def preempt(self, index: int) -> None:
        busy = self.engine.slots.busy
        if len(busy):
            self.scheduler.preemption.preempt(int(busy[index % len(busy)]))

    @rule()
    def compact(self) -> None:
        tables = self.scheduler.tables
        pools = [group.pool for group in tables.groups]
        tables.compact(max(pool.num_pages for pool in pools))
        assert all(pool.highest_held == pool.num_held for pool in pools)

    @rule(change=st.integers(-20, 20), give_up=st.sampled_from(["nothing", "cached", "running"]))
    def resize(self, change: int, give_up: str) -> None:
        try_resize(self.engine, change, give_up)

    @rule(count=st.integers(1, 40))
    def evict(self, count: int) -> None:
        scheduler = self.scheduler
        scheduler.tables.evict(min(count, scheduler.prefix.num_idle))

    @invariant()
    def the_ledger_is_right(self) -> None:
        type(self).num_operations += 1
        recount(self.scheduler)

    @invariant()
    def free_and_held_pages_are_all_pages(self) -> None:
        pool = self.scheduler.pool
        assert pool.num_free + pool.num_held == pool.num_pages - 1 == len(self.runner.cache) // self._size - 1
        assert pool.num_free == len(pool.free_pages)

    @invariant()
    def rows_know_what_they_would_know_alone(self) -> None:
        slots = self.engine.slots
        for row in slots.busy.tolist():
            request, count = slots.requests[row], int(slots.num_tokens[row])
            assert slots.token_ids[row, :count].tolist() == self._story(request)[:count]

    @invariant()
    def rows_find_in_their_pages_what_they_computed(self) -> None:
        slots, (pages, _) = self.engine.slots, self._settled()
        for row in slots.busy.tolist():
            count = int(slots.num_computed[row])
            found = pages[slots.pages(row)].ravel()[:count]
            assert np.array_equal(found, self.written[slots.requests[row].id][:count])
        for group in self.runner.groups:
            pages, _ = self._settled(group.number)
            for row in slots.busy.tolist():
                count = int(slots.num_computed[row])
                seen = np.arange(max(0, count - group.window + 1), count)
                found = pages[group.table[row, seen // self._size], seen % self._size]
                assert np.array_equal(found, self.written[slots.requests[row].id][seen])

    @invariant()
    def cached_pages_hold_what_their_key_stands_for(self) -> None:
        chains, (pages, host) = self.scheduler.prefix.index, self._settled()
        for name in chains.names.tolist():
            found = pages[name] if name > 0 else host[-name]
            assert np.array_equal(found, self.content[chains.key(name)]), f"page {name}"
        for group in self.runner.groups:
            pages, host = self._settled(group.number)
            for name in chains.names[group.beside[chains.names] != 0].tolist():
                page = int(group.beside[name])
                found = pages[page] if page > 0 else host[-page]
                assert np.array_equal(found, self.content[chains.key(name)]), f"what lies beside page {name}"

    @invariant()
    def the_host_holds_what_the_swapped_computed(self) -> None:
        size, (_, host) = self._size, self._settled()
        swapped = self.scheduler.lifecycle.swap.all_left
        for request in self.scheduler.waiting.requests:
            left = swapped.get(request.number)
            if left is not None:
                found = host[left.pages].ravel()
                wanted = self.written[request.id][left.first * size : left.num_computed]
                assert np.array_equal(found[: len(wanted)], wanted)
                assert -(-len(wanted) // size) == len(left.pages)
                for group, (first, pages) in zip(self.runner.groups, left.parts[1:]):
                    assert first * size <= max(0, left.num_computed - group.window + 1)
                    found = self._settled(group.number)[1][pages].ravel()
                    wanted = self.written[request.id][first * size : left.num_computed]
                    assert np.array_equal(found[: len(wanted)], wanted)

    @invariant()
    def a_request_is_in_one_place(self) -> None:
        slots, followers = self.engine.slots, self.scheduler._parallel_samples.leader_of
        places = Counter(slots.requests[row].id for row in slots.busy.tolist())
        places.update(request.id for request in self.scheduler.waiting.requests)
        places.update(name for name in self.known if name in followers)
        places.update(list(self.ended))
        assert places == Counter(self.known.keys())

    @invariant()
    def a_row_that_waits_for_a_page_took_none_for_it(self) -> None:
        slots, matching = self.engine.slots, self.scheduler.lifecycle.matching
        for row in slots.busy.tolist():
            if matching.is_blocked(row):
                assert slots.num_pages[row] == -(-slots.num_computed[row] // slots.page_size)

    @invariant()
    def free_rows_hold_nothing(self) -> None:
        slots, tables = self.engine.slots, self.scheduler.tables
        free = np.setdiff1d(np.arange(slots.num_slots), slots.busy)
        assert not slots.num_pages[free].any()
        assert not tables.forked & set(free.tolist())
        assert not any(self.scheduler.lifecycle.matching.is_blocked(row) for row in free.tolist())

    @invariant()
    def counters_grow_and_agree(self) -> None:
        counters = self.scheduler.counters
        assert all(now >= before for now, before in zip(astuple(counters), self.counters))
        self.counters = astuple(counters)
        assert counters.preemptions == sum(request.num_preemptions for request in self.known.values())
        left = self.scheduler.lifecycle.swap.all_left.values()
        assert counters.swapped_in_pages + sum(len(each.pages) for each in left) <= counters.swapped_out_pages
        assert bool(counters.refound_tokens) <= bool(counters.preemptions)

    def teardown(self) -> None:
        if not hasattr(self, "known") or len(self.scheduler.in_flight):
            return  # an operation failed midway
        for _ in range(200 * len(self.known) + 10):
            if not self.engine.has_work:
                break
            self.step()
            recount(self.scheduler)
        assert not self.engine.has_work, "no progress"
        pool, prefix = self.scheduler.pool, self.scheduler.prefix
        assert pool.num_free + prefix.num_idle == pool.num_pages - 1, "pages leaked"
        host = self.scheduler.host_pool
        assert host is None or host.num_held == prefix.num_resting, "host pages leaked"
        for group in self.runner.groups:
            assert group.num_available == group.pool.num_pages - 1, "pages of a window leaked"
            assert group.host is None or group.host.num_held == group.num_resting, "host pages leaked"
        for name, request in self.ended.items():
            want, got = self.answers[name], request.answer.tolist()
            if request.finish_reason in ("abort", "error"):
                assert got == want[: len(got)]
                assert request.finish_reason == "abort" or self._may_fail(name)
            else:
                assert got == want

    @property
    def _size(self) -> int:
        return self.engine.slots.page_size

    def _name(self, index: int) -> str:
        """One of the latest requests, or one that never was."""
        names = list(self.known)[-30:]
        return names[-1 - index] if index < len(names) else f"stranger {index}"

    def _may_fail(self, name: str) -> bool:
        """Whether the request, or the one whose prompt it shares, was made to fail."""
        return any(f"{name.split('.')[0]}." in each for each in self.runner.fail)

    def _foresee(self, request: Request) -> None:
        """What the request will know, write and publish, computed alone."""
        self.answers[request.id] = expected(request)
        written = self.written[request.id] = np.array(keys_of(self._story(request)), dtype=np.uint64)
        size = self._size
        story = np.array(self._story(request), dtype=np.int32)
        for index, name in enumerate(page_keys(story, size, request.cache_salt)):
            self.content[name] = written[index * size : (index + 1) * size]

    def _story(self, request: Request) -> list[int]:
        return [*request.prompt.tolist(), *self.answers[request.id]]

    def _settled(self, group: int = 0) -> tuple[Words, Words]:
        """Device and host pages as they will be when the copies asked for are made."""
        pages, host = (each.copy() for each in self.runner.pages_of(group))
        for copy in self.scheduler.tables._copies:
            if copy.group != group:
                continue
            source, target = {
                "within": (pages, pages),
                "to_host": (pages, host),
                "from_host": (host, pages),
            }[copy.way]
            target[copy.targets] = source[copy.sources]
        return pages, host

    def _check_batch(self, batch: Batch) -> None:
        assert len(set(batch.slots.tolist())) == len(batch.slots), "a row computes twice"
        assert batch.num_tokens <= self.scheduler.max_batch_tokens
        assert not any(self.scheduler.lifecycle.matching.is_blocked(row) for row in batch.slots.tolist())

    def _end(self, requests: list[Request]) -> None:
        for request in requests:
            assert request.id not in self.ended, "ended twice"
            assert request.finish_reason is not None
            self.ended[request.id] = request


def run(num_examples: int, num_steps: int) -> int:
    """Run random stories; returns the number of operations in them."""
    before = Engines.num_operations
    run_state_machine_as_test(
        Engines,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return Engines.num_operations - before


def test_any_order_of_operations_keeps_ledger_pages_and_answers_right() -> None:
    num_operations = run(num_examples=cases(30, 1_200), num_steps=cases(50, 100))
    print(f"{num_operations} operations")
    assert num_operations >= cases(1_000, 100_000)
