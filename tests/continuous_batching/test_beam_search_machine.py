"""Any order of operations leaves searches and their neighbours whole: the state machine, with beams in it."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from continuous_batching.request import Request
from continuous_batching.scheduling.scheduler import Scheduler
from tests.continuous_batching.checksum import ChecksumRunner, key
from tests.continuous_batching.test_beam_search import Hunt, check_search, expected, hunts, schedulers
from tests.continuous_batching.test_machine import Engines, Words
from tests.continuous_batching.test_schedules import could_fit
from tests.thorough import cases


class SearchingEngines(Engines):
    """The rows of a search are checked by the tokens that are in them, its answers when it ends."""

    @initialize(made=schedulers())
    def start(self, made: tuple[Scheduler, ChecksumRunner]) -> None:
        super().start(made=made)

    @rule(hunt=hunts)
    def search(self, hunt: Hunt) -> None:
        request = hunt.request(len(self.known))
        fits = could_fit(self.engine, request)
        try:
            self.engine.add(request)
        except ValueError:
            assert not fits
            return
        assert fits
        self.known[request.id] = request
        self.answers[request.id] = expected(request)[0][0]
        if hunt.fails:
            self.runner.fail.add(request.id)

    @rule(chosen=st.lists(st.integers(0, 50), max_size=4), hunt=hunts)
    def step_while_searches_come_and_go(self, chosen: list[int], hunt: Hunt) -> None:
        self.step_while_requests_come_and_go(chosen=chosen, arrival=None)
        self.search(hunt=hunt)

    @invariant()
    def rows_know_what_they_would_know_alone(self) -> None:
        slots = self.engine.slots
        for row in slots.busy.tolist():
            request, count = slots.requests[row], int(slots.num_tokens[row])
            known = request.num_prompt_tokens if slots.beam_width[row] else count
            assert slots.token_ids[row, :known].tolist() == self._story(request)[:known]

    @invariant()
    def rows_find_in_their_pages_what_they_computed(self) -> None:
        slots, (pages, _) = self.engine.slots, self._settled()
        for row in slots.busy.tolist():
            count = int(slots.num_computed[row])
            found = pages[slots.pages(row)].ravel()[:count]
            assert np.array_equal(found, words(slots.token_ids[row, :count].tolist()))

    @invariant()
    def cached_pages_hold_what_their_key_stands_for(self) -> None:
        chains, (pages, host) = self.scheduler.prefix.index, self._settled()
        for name in chains.names.tolist():
            _, tokens = chains.prefix(name)
            found = pages[name] if name > 0 else host[-name]
            assert np.array_equal(found, words(tokens)[-self._size :]), f"page {name}"

    @invariant()
    def a_request_is_in_one_place(self) -> None:
        slots, followers = self.engine.slots, self.scheduler._parallel_samples.leader_of
        rows = [row for row in slots.busy.tolist() if self.scheduler._beam_searches.rows_of(row)[0] == row]
        places = [slots.requests[row].id for row in rows]
        places += [request.id for request in self.scheduler.waiting.requests]
        places += [name for name in self.known if name in followers]
        assert sorted([*places, *self.ended]) == sorted(self.known)

    @invariant()
    def beams_have_equally_many_tokens(self) -> None:
        slots = self.engine.slots
        for search in self.scheduler._beam_searches._running():
            assert len(set(slots.num_tokens[search.rows].tolist())) == 1
            assert len(set(search.all_rows)) == search.leader.params.beam_width
            assert set(search.rows) <= set(search.all_rows) <= set(slots.busy.tolist())
            assert (np.diff(search.scores) <= 0).all()

    @invariant()
    def rows_that_wait_for_their_leader_hold_nothing(self) -> None:
        for row in self.scheduler.lifecycle.waiting_beams:
            assert row in self.scheduler._beam_searches
            assert not self.engine.slots.num_pages[row]

    def _end(self, requests: list[Request]) -> None:
        super()._end(requests)
        for request in requests:
            if request.params.beam_width and request.finish_reason != "error":
                check_search(request, set())


def words(tokens: list[int]) -> Words:
    """What these tokens leave in the cache."""
    written: list[int] = []
    for position, token in enumerate(tokens):
        written.append(key(token, position, written[-1] if written else 1))
    return np.array(written, dtype=np.uint64)


def run(num_examples: int, num_steps: int) -> int:
    """Run random stories; returns the number of operations in them."""
    before = SearchingEngines.num_operations
    run_state_machine_as_test(
        SearchingEngines,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return SearchingEngines.num_operations - before


def test_any_order_of_operations_keeps_searches_right() -> None:
    num_operations = run(num_examples=cases(16, 400), num_steps=cases(40, 100))
    print(f"{num_operations} operations")
    assert num_operations >= cases(500, 30_000)
