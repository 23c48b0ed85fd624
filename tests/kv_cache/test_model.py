"""In every state that two or three requests and six pages can be brought into, what must always hold does.

The host's pool has fewer pages than come to rest there, so that some of them go in every order.

The states are explored exhaustively, breadth first, by the real classes; two states are one if they differ
only in the numbers of pages and rows. Beside them stands what plain tuples of tokens predict: what each place
holds, and what each request would find.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from tests.kv_cache.short_keys import shorten_keys
from tests.kv_cache.world import Setting, World, written
from tests.thorough import THOROUGH, cases

SHARED = Setting(prompts=((1, 2, 3), (1, 2, 3), (1, 2, 4)), max_tokens=2)
FORKED = Setting(prompts=((1, 2, 3), (1, 2, 3), (1, 2, 3)), follows={1: 0}, max_tokens=2)
COLLIDING = Setting(prompts=((1, 2, 3), (1, 2, 3), (4, 5, 6)), salts=("", "b", ""), max_tokens=2)
LEAST_PAGES = cases(7, 6)  # tenants' pool is resized in every state; with --thorough those of all are

in_full = pytest.mark.skipif(not THOROUGH, reason="minutes each: THOROUGH=1 asks for them")


def check(world: World) -> None:
    """What must hold in every state."""
    world.recount()
    pages, host = world.settled()
    _check_rows(world, pages)
    _check_cache(world, pages, host)
    _check_host(world, host)


def _check_rows(world: World, pages: np.ndarray) -> None:
    slots = world.slots
    for row in slots.busy.tolist():
        story, count = world.story(slots.requests[row].number), int(slots.num_computed[row])
        assert slots.token_ids[row, : slots.num_tokens[row]].tolist() == list(story[: slots.num_tokens[row]])
        held = slots.pages(row)
        wanted = [written(story[: position + 1]) for position in range(count)]
        assert pages[held].ravel()[:count].tolist() == wanted, "a row's pages hold something else"
    free = np.ones(slots.num_slots, bool)
    free[slots.busy] = False
    assert not slots.num_pages[free].any()
    lifecycle = world.lifecycle
    assert not any(
        row in lifecycle.tables.forked or lifecycle.matching.is_blocked(row)
        for row in np.flatnonzero(free).tolist()
    )


def _check_cache(world: World, pages: np.ndarray, host: np.ndarray) -> None:
    """Every cached page holds what it is found for, and every request finds all that is there for it."""
    prefix, size = world.lifecycle.prefix, world.setting.page_size
    page_of: dict[tuple[str, tuple[int, ...]], int] = {}
    for page in prefix.index.names.tolist():
        salt, known = prefix.index.prefix(page)
        tokens = tuple(known)
        assert (salt, tokens) not in page_of, "one prefix is cached twice"
        page_of[salt, tokens] = page
        wanted = [written(tokens[: len(tokens) - size + at + 1]) for at in range(size)]
        held = pages[page] if page > 0 else host[-page]
        assert held.tolist() == wanted, "a page was published before it was computed"
    for request, place in zip(world.requests, world.place):
        if place != "waits":
            continue
        found, known = [], tuple(request.tokens.tolist())
        for stop in range(size, len(known), size):  # the last token is always computed
            if (request.cache_salt, known[:stop]) not in page_of:
                break
            found.append(page_of[request.cache_salt, known[:stop]])
        left = world.lifecycle.swap.left(request)
        found = found if left is None else found[: left.first]
        assert world.lifecycle.find(request).tolist() == found


def _check_host(world: World, host: np.ndarray) -> None:
    size = world.setting.page_size
    for number, left in world.lifecycle.swap.all_left.items():
        story = world.story(number)
        wanted = [written(story[: at + 1]) for at in range(left.first * size, left.num_computed)]
        assert host[left.pages].ravel()[: len(wanted)].tolist() == wanted


def essence(world: World) -> tuple[object, ...]:
    """The state but for the numbers of pages, rows and serials."""
    slots, lifecycle = world.slots, world.lifecycle
    prefix, tables = lifecycle.prefix, lifecycle.tables
    names: dict[int, int] = {}

    def name(page: int) -> int:
        return names.setdefault(page, len(names))

    rows = {slots.requests[row].number: row for row in slots.busy.tolist()}
    lives: list[object] = []
    for index, (request, place) in enumerate(zip(world.requests, world.place)):
        row, left = rows.get(index), lifecycle.swap.left(request)
        lives.append((place, len(request.tokens), left and (left.first, left.num_computed)))
        if row is not None:
            waits = lifecycle.matching._blocked.get(row)
            lives.append(
                (
                    *(int(column[row]) for column in (slots.num_tokens, slots.num_computed)),
                    int(slots.num_published[row]),
                    None if waits is None else waits == prefix.version,
                    row in tables.forked,
                    tuple(name(page) for page in slots.pages(row).tolist()),
                )
            )
    idle = [name(page) for page in prefix.idle_pages.tolist()]
    resting = [name(page) for page in (-prefix.resting_pages).tolist()]
    parents = prefix.index.parents()
    cached = {
        prefix.index.key(page): (name(page), name(parents[page]) if page in parents else -1)
        for page in sorted(prefix.index.names.tolist(), key=prefix.index.key)
    }
    layout = world.pool.holders.astype(bool).tobytes() if world.setting.sees_layout else b""
    return (*lives, tuple(idle), tuple(resting), tuple(sorted(cached.items())), world.pool.num_pages, layout)


def explore(setting: Setting) -> tuple[int, int]:
    """Check every state that can be reached; returns how many there are, and how many moves between them."""
    start_s = time.monotonic()
    first = World(setting)
    check(first)
    seen = {essence(first): 0}
    frontier = deque([(0, first)])
    before: list[list[int]] = [[]]  # states that lead to each, but for aborts
    ends, num_moves = [], 0
    while frontier:
        number, world = frontier.popleft()
        moved = False
        for move in list(world.moves()):
            after = world.copy()
            try:
                if not after.make(move):
                    continue
                num_moves += 1
                check(after)
            except (AssertionError, KeyError, IndexError, ValueError) as error:
                raise AssertionError(f"{move} in {essence(world)}: {error!r}") from error
            state = essence(after)
            if state not in seen:
                seen[state] = len(seen)
                before.append([])
                frontier.append((seen[state], after))
            if move[0] not in ("drop", "abort") and "is aborted" not in move and "fails" not in move:
                before[seen[state]].append(number)
            moved = True
        if set(world.place) == {"ended"}:
            ends.append(number)
        assert moved or number in ends, f"nothing can happen in {essence(world)}"
    stuck = len(seen) - len(_reaching(ends, before))
    assert not stuck, f"{stuck} states from which not all requests can finish"
    print(f"{len(seen)} states, {num_moves} moves, {time.monotonic() - start_s:.1f} s")
    return len(seen), num_moves


def _reaching(ends: list[int], before: list[list[int]]) -> set[int]:
    reached, todo = set(ends), list(ends)
    while todo:
        for number in before[todo.pop()]:
            if number not in reached:
                reached.add(number)
                todo.append(number)
    return reached


@pytest.fixture
def one_bit_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_keys(monkeypatch, bits=1)


@pytest.mark.slow
def test_requests_that_share_a_beginning_in_every_order() -> None:
    prompts, host = cases((((1, 2, 3), (1, 2, 3), (1, 2)), 2), (SHARED.prompts, 3))
    shared = replace(SHARED, prompts=prompts, max_tokens=1, num_host_pages=host, least_pages=LEAST_PAGES)
    num_states, _ = explore(shared)
    assert num_states > 800


@pytest.mark.slow
def test_samples_of_one_prompt_in_every_order() -> None:
    prompts = cases(((1, 2, 3), (1, 2, 3)), ((1,), (1,), (7,)))
    num_states, _ = explore(replace(FORKED, prompts=prompts, num_host_pages=2, least_pages=LEAST_PAGES))
    assert num_states > 300


@pytest.mark.slow
@pytest.mark.usefixtures("one_bit_keys")
def test_tenants_and_colliding_keys_in_every_order_and_size() -> None:
    prompts = ((1, 2, 3), (1, 2, 3), cases((4,), (4, 5)))
    num_states, _ = explore(replace(COLLIDING, prompts=prompts, max_tokens=1, num_host_pages=2))
    assert num_states > 1_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
@in_full
def test_answers_of_two_tokens_that_share_a_beginning_in_every_order() -> None:
    explore(SHARED)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@in_full
def test_samples_of_one_prompt_and_its_equal_in_every_order() -> None:
    explore(FORKED)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@in_full
def test_samples_of_one_prompt_in_every_order_and_layout() -> None:
    explore(replace(FORKED, max_tokens=1, sees_layout=True, least_pages=5))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@in_full
@pytest.mark.usefixtures("one_bit_keys")
def test_answers_of_two_tokens_of_tenants_in_every_order() -> None:
    explore(COLLIDING)
