"""A store that is slow, dead, full or wrong is a miss: nobody waits for it, and it is told once."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from kv_cache.pages import Index, PageCopy
from kv_cache.tier import page_tier
from kv_cache.tier.lookup import FoundPages, Lookup, Sought
from kv_cache.tier.page_tier import MOST_LOOKUPS, PageTier
from kv_cache.tier.store import HEAD_BYTES, StoreFailed, entry_of
from tests.patience import PATIENCE_S

IDENTITY, OTHER = b"i" * 32, b"o" * 32
EMPTY = np.empty(0, dtype=np.int64)


class Store:
    """In memory; waits at `gate`, and fails while it `fails`."""

    def __init__(self, entries: dict[bytes, bytes] | None = None, *, fails: bool = False) -> None:
        self.entries: dict[bytes, bytes] = {} if entries is None else entries
        self.gate = threading.Event()
        self.gate.set()
        self.fails, self.is_full = fails, False
        self.calls: list[str] = []
        self.num_answered = 0

    def _call(self, name: str) -> None:
        self.calls.append(name)
        assert self.gate.wait(PATIENCE_S)
        self.num_answered += 1
        if self.fails or (self.is_full and name == "write"):
            raise StoreFailed("no answer from it")

    def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self._call("read")
        return [self.entries.get(key) for key in keys]

    def write(self, key: bytes, entry: bytes) -> bool:
        self._call("write")
        return self.entries.setdefault(key, entry) is entry

    def remove(self, keys: Sequence[bytes]) -> None:
        self._call("remove")
        for key in keys:
            self.entries.pop(key, None)

    def close(self) -> None:
        self.calls.append("close")


class Pages:
    """A page of the device holds its number."""

    page_bytes = (8,)

    def __init__(self) -> None:
        self.host: dict[int, bytes] = {}

    def read(self, pages: Index, group: int) -> Callable[[], list[bytes]]:
        contents = [content(page) for page in pages.tolist()]
        return lambda: contents

    def write_host(self, pages: Index, contents: Sequence[bytes], group: int) -> None:
        self.host.update(zip(pages.tolist(), contents))


def content(number: int) -> bytes:
    return number.to_bytes(8, "big")


def key(number: int) -> bytes:
    return hashlib.sha256(content(number)).digest()


Make = Callable[..., PageTier]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def make(store: Store) -> Iterator[Make]:
    made = []

    def start(wait_s: float = PATIENCE_S, pause_s: float = 0.0, **options: int) -> PageTier:
        tier = PageTier(
            store, Pages(), lambda _: None, IDENTITY, wait_s, "a store", pause_s=pause_s, **options
        )
        made.append(tier)
        return tier

    yield start
    store.gate.set()
    for tier in made:
        tier.close()


def save(tier: PageTier, *numbers: int) -> None:
    pages = np.array(numbers, dtype=np.int64)
    tier.apply(PageCopy(pages, pages, "to_tier", tuple(map(key, numbers))))


def ended(tier: PageTier, *numbers: int) -> list[int]:
    """Which of these pages a lookup finds, when it has ended."""
    lookup = tier.look_up(Sought([*map(key, numbers)]))
    assert lookup is not None
    until(lambda: tier.is_over(lookup))
    return [int.from_bytes(each, "big") for each in lookup.contents.values()]


def until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s, "it does not come"
        time.sleep(0.001)


def test_what_is_kept_is_found_up_to_the_first_page_that_is_not_there(make: Make) -> None:
    tier = make()
    save(tier, 1, 2, 3, 5)
    assert tier.settle(PATIENCE_S)
    assert ended(tier, 1, 2, 3, 4, 5) == [1, 2, 3]
    assert ended(tier, 4, 5) == []
    counters = tier.counters
    assert (counters.written, counters.found, counters.hits, counters.misses) == (4, 3, 1, 1)
    save(tier, 1, 6)
    assert tier.settle(PATIENCE_S)
    assert (tier.counters.written, tier.counters.known) == (5, 1)


def test_what_was_found_goes_to_the_pages_of_the_host_in_the_order_of_the_copies(make: Make) -> None:
    tier = make()
    tier.hand_over([content(1), content(2)])
    tier.hand_over([content(3)])
    tier.apply(PageCopy(np.array([7, 8]), np.array([7, 8]), "from_tier"))
    tier.apply(PageCopy(np.array([5]), np.array([5]), "from_tier"))
    pages = tier._pages
    assert isinstance(pages, Pages)
    assert pages.host == {7: content(1), 8: content(2), 5: content(3)}


def test_a_page_that_turned_out_wrong_is_taken_off_after_it_was_written(make: Make, store: Store) -> None:
    tier = make()
    store.gate.clear()
    save(tier, 1, 2)
    tier.apply(PageCopy(EMPTY, EMPTY, "off_tier", (key(1),)))
    store.gate.set()
    assert tier.settle(PATIENCE_S)
    until(lambda: "remove" in store.calls)
    until(lambda: set(store.entries) == {key(2)})


@pytest.mark.parametrize("what", ["damaged", "another model", "another page", "another size"])
def test_a_wrong_entry_is_never_used_and_taken_off(
    make: Make, store: Store, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make()
    good = entry_of(content(2), key(2), IDENTITY)
    store.entries = {number: entry_of(content(at), number, IDENTITY) for at, number in ((1, key(1)),)}
    store.entries[key(2)] = {
        "damaged": good[:-1] + bytes([good[-1] ^ 1]),
        "another model": entry_of(content(2), key(2), OTHER),
        "another page": entry_of(content(2), key(3), IDENTITY),
        "another size": entry_of(content(2) * 2, key(2), IDENTITY),
    }[what]
    assert ended(tier, 1, 2) == [1]
    until(lambda: key(2) not in store.entries)
    assert tier.counters.refused == 1
    assert [each.message for each in caplog.records if "not used" in each.message]
    save(tier, 2)
    assert tier.settle(PATIENCE_S)
    assert ended(tier, 1, 2) == [1, 2], "computed and kept again"


def test_nobody_waits_for_a_store_that_does_not_answer(
    make: Make, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(page_tier, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now_s[0])}))
    tier = make(wait_s=0.05, pause_s=PATIENCE_S)
    until(lambda: store.num_answered == 1)  # the state is that of the start
    store.gate.clear()
    lookups = [tier.look_up(Sought([key(1)])) for _ in range(3)]
    until(lambda: len(store.calls) == 2)
    assert not any(tier.is_over(each) for each in lookups if each is not None)
    now_s[0] += 0.1
    assert all(tier.is_over(each) for each in lookups if each is not None)
    assert tier.counters.late == 3
    assert tier.counters.read_failures == 1
    assert tier.look_up(Sought([key(1)])) is None, "it is left alone"
    assert tier.counters.skipped == 1
    store.gate.set()


def test_what_a_slow_store_has_found_in_time_is_used(make: Make, store: Store) -> None:
    tier = make(wait_s=0.2)
    lookup = Lookup(Sought([key(1), key(2)]), 0.0)
    lookup.take(lookup.next(2), [content(1)])
    assert tier.is_over(lookup)
    assert lookup.found() == FoundPages(0, 1)
    assert (tier.counters.late, tier.counters.found) == (1, 1)
    assert tier.is_well, "it has not been asked for long"


def test_a_dead_store_is_told_once_left_alone_and_asked_again(
    make: Make, store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    caplog.set_level(logging.WARNING)
    tier = make(pause_s=5.0)
    monkeypatch.setattr(page_tier, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now_s[0])}))
    store.fails = True
    assert ended(tier, 1) == []
    num_calls = len(store.calls)
    for _ in range(5):
        assert tier.look_up(Sought([key(1)])) is None
    save(tier, 1)
    assert tier.settle(PATIENCE_S)
    save(tier, 2)
    assert tier.settle(PATIENCE_S)
    assert store.calls[num_calls:] == ["write"], "what is written fails by itself"
    assert not tier.is_well
    assert tier.counters.dropped == 2
    now_s[0] += 5.0
    assert ended(tier, 1) == []
    store.fails = False
    assert tier.look_up(Sought([key(1)])) is None
    now_s[0] += 5.0
    assert ended(tier, 1) == []
    save(tier, 1)
    assert tier.settle(PATIENCE_S)
    assert ended(tier, 1) == [1]
    assert tier.is_well
    said = [each.message for each in caplog.records]
    assert sum("reading pages from a store fails" in each for each in said) == 1
    assert sum("writing pages to a store fails" in each for each in said) == 1
    assert sum("works again" in each for each in said) == 2


def test_what_a_store_should_not_raise_is_told_as_a_failure_and_its_threads_go_on(
    make: Make, store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("nobody foresaw this")

    tier = make()
    until(lambda: store.num_answered == 1)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_call", raises)
        assert ended(tier, 1) == []
        save(tier, 1)
        tier.apply(PageCopy(EMPTY, EMPTY, "off_tier", (key(1),)))
        assert tier.settle(PATIENCE_S)
        until(lambda: tier.counters.write_failures == 2)
    with monkeypatch.context() as patch:
        patch.setattr(tier._pages, "read", lambda *_: raises)
        save(tier, 1)
        assert tier.settle(PATIENCE_S)
    assert tier.counters.dropped == 2
    said = "fails, and is done without: RuntimeError: nobody foresaw this"
    assert [each.message.endswith(said) for each in caplog.records].count(True) == 2
    save(tier, 1)
    assert tier.settle(PATIENCE_S)
    assert ended(tier, 1) == [1]


def test_what_does_not_fit_into_the_queue_is_dropped_and_counted(make: Make, store: Store) -> None:
    tier = make(most_queued_bytes=5 * (HEAD_BYTES + 8))
    until(lambda: store.num_answered == 1)
    store.gate.clear()
    save(tier, 1, 2, 3)
    until(lambda: "write" in store.calls)
    save(tier, 4, 5, 6)
    save(tier, 7)
    assert tier.counters.dropped == 2
    store.gate.set()
    assert tier.settle(PATIENCE_S)
    assert set(store.entries) == {*map(key, (1, 2, 3, 4, 5))}
    save(tier, 8)
    assert tier.settle(PATIENCE_S)
    assert key(8) in store.entries


def test_lookups_that_wait_are_bounded(make: Make, store: Store) -> None:
    tier = make()
    until(lambda: store.num_answered == 1)
    store.gate.clear()
    first = tier.look_up(Sought([key(1)]))
    until(lambda: len(store.calls) == 2)
    lookups = [tier.look_up(Sought([key(1)])) for _ in range(MOST_LOOKUPS + 2)]
    assert lookups[MOST_LOOKUPS - 1 :] == [None] * 3
    assert tier.counters.skipped == 3
    store.gate.set()
    until(lambda: all(tier.is_over(each) for each in (first, *lookups) if each is not None))


def test_a_lookup_that_would_not_end_in_time_behind_others_is_skipped(
    make: Make, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, read = [1000.0], store.read

    def takes_a_while(keys: Sequence[bytes]) -> list[bytes | None]:
        found = read(keys)
        now_s[0] += 0.18
        return found

    monkeypatch.setattr(page_tier, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now_s[0])}))
    monkeypatch.setattr(store, "read", takes_a_while)
    tier = make(wait_s=0.5)
    for _ in range(6):
        assert ended(tier, 1) == []
    num_calls = len(store.calls)
    until(lambda: not tier._reads._queue)
    store.gate.clear()
    lookups = [tier.look_up(Sought([key(1)])) for _ in range(3)]
    assert [each is None for each in lookups] == [False, False, True]
    assert tier.counters.skipped == 1
    store.gate.set()
    until(lambda: not tier._reads._queue)
    assert len(store.calls) == num_calls + 2
    assert tier.counters.late == 0


def test_the_end_waits_a_moment_for_what_is_queued_and_no_longer(
    make: Make, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make()
    save(tier, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(page_tier, "CLOSE_S", PATIENCE_S)
        tier.close()
    assert set(store.entries) == {key(1), key(2)}
    stuck, num_calls = make(), len(store.calls)
    store.gate.clear()
    save(stuck, 3)
    stuck.close()
    assert key(3) not in store.entries
    assert "close" not in store.calls[num_calls:], "it is in use"
    store.gate.set()
    until(lambda: "close" in store.calls[num_calls:])


@pytest.mark.parametrize("goes_on", [False, True], ids=["the process ends", "the process goes on"])
def test_wrong_pages_are_taken_off_at_the_end_too(
    make: Make, store: Store, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """They would be found by other engines. What is not written yet is dropped."""
    tier = make()
    save(tier, 1, 2)
    assert tier.settle(PATIENCE_S)
    store.gate.clear()
    save(tier, 3)
    until(lambda: store.calls.count("write") == 3)
    for number in (1, 4, 2):
        tier.apply(PageCopy(EMPTY, EMPTY, "off_tier", (key(number),)))
        save(tier, number + 10)

    def open_the_gate() -> None:
        until(lambda: tier._writes._is_closing)
        store.gate.set()

    with monkeypatch.context() as patch:
        patch.setattr(page_tier, "CLOSE_S", 0.0)
        patch.setattr(page_tier, "REMOVALS_S", 0.0 if goes_on else PATIENCE_S)
        if not goes_on:
            threading.Thread(target=open_the_gate).start()
        tier.close()
    store.gate.set()
    if goes_on:
        until(lambda: store.calls[-1] == "close")
    assert set(store.entries) == {key(3)}
    assert store.calls.count("remove") == 3
    until(lambda: tier.counters.dropped == 3)
