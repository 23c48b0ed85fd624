"""A hostile engine ends at most its own connection, however it lies, floods or stalls."""

from __future__ import annotations

import itertools
import logging
import select
import socket
import struct
import threading
import zlib
from types import SimpleNamespace
from typing import Any

import pytest

from borders import field_types
from borders.refusal import one_line
from kv_cache.exchange import connection, page_server, prompt_source
from kv_cache.exchange.channel import Plain
from kv_cache.exchange.connection import UnhandledBytes
from kv_cache.exchange.messages import (
    HEAD,
    LONGEST_SHORT,
    VERSION,
    AllSent,
    Hello,
    NotSent,
    PagePart,
    PagesWanted,
    PartTaken,
    Unfit,
    Unwanted,
    Welcome,
    framed,
)
from serving.engine import page_exchange
from tests.kv_cache import device
from tests.patience import PATIENCE_S
from tests.serving.hostile_peer import AnswersPeer, Frame, PromptsPeer, framed_body
from tests.serving.page_pair import Pair, alone, prompts
from tests.thorough import cases

TOKENS = struct.pack("<16i", *range(5, 21))  # two pages
WISH = {"number": 1, "tokens": TOKENS, "cache_salt": "", "first_page": 0, "lease_s": 5.0}
BAD_WISHES: list[dict[str, Any]] = [
    {"tokens": b"abc"}, {"tokens": b""}, {"tokens": TOKENS + b"\1\0\0\0"},
    {"tokens": struct.pack("<16i", *[-1] * 16)}, {"tokens": struct.pack("<16i", *[2**31 - 1] * 16)},
    {"tokens": TOKENS * 2**14},
    {"priority": 2**64 - 1}, {"priority": 2**63 - 1}, {"priority": -(2**63)}, {"priority": 2**31},
    {"lease_s": float("inf")}, {"lease_s": float("nan")}, {"lease_s": 1e308}, {"lease_s": -1.0},
    {"lease_s": 0}, {"lease_s": 86_401}, {"lease_s": "5"},
    {"number": -1}, {"number": 2**64 - 1}, {"number": None},
    {"first_page": -1}, {"first_page": 2}, {"first_page": 2**31}, {"first_page": 2**64 - 1},
    {"tenant": "x" * (field_types.LONGEST_NAME + 1)}, {"cache_salt": "x" * (field_types.LONGEST_NAME + 1)},
    {"tenant": 3}, {"cache_salt": ["a"]},
]  # fmt: skip
NO_WISHES = [
    framed_body(b"\x91" * 60_000), framed_body(b"\xc1"), framed_body([]), framed_body(["Unknown", 1]),
    framed_body(b"\x92\xa8Unwanted\xa2\xff\xfe"), framed_body(["PagesWanted", 1, TOKENS, b"\xff", 0, 1.0]),
    b"\xff" * 4096, framed(Unwanted(2**64 - 1)), framed(PartTaken()), framed(Welcome()),
    framed(NotSent(1, "no")), framed(PagePart(1, 0, 0, 1, 0, 8, 0), 8) + b"x" * 8, HEAD.pack(2**26, 0, 0),
    framed(Hello(VERSION, "the model", device.PAGE_SIZE, [], "tcp", b"", 1)),
]  # fmt: skip


def test_a_wish_that_is_none_is_refused_and_the_engine_goes_on() -> None:
    """By a reason, or by the end of its connection; another engine's prompts are computed as ever."""
    pair = Pair()
    for wish in (*BAD_WISHES, *NO_WISHES):
        peer = AnswersPeer(pair)
        peer.say(wish if isinstance(wish, bytes) else PagesWanted(**(WISH | wish)))
        pair.until(peer.listen)
        assert peer.is_closed or isinstance(peer.heard[-1], NotSent), (repr(wish)[:40], peer.heard)
        assert not any(isinstance(each, PagePart | AllSent) for each in peer.heard), repr(wish)[:40]
        peer.close()
    assert pair.serve(prompts(1)) == alone(prompts(1))
    assert pair.answers.scheduler.counters.arrived_pages
    pair.settle()
    pair.close()


def test_the_largest_wish_of_a_request_is_taken() -> None:
    """The bounds of HTTP's fields are those of a peer: what a server lets in, it may have computed there."""
    name, last = "x" * field_types.LONGEST_NAME, field_types.LAST_ID
    pair = Pair()
    for priority in (last, -last):
        peer = AnswersPeer(pair)
        largest = {"tenant": name, "cache_salt": name, "priority": priority, "lease_s": 86_400.0}
        peer.say(PagesWanted(**(WISH | largest | {"number": 2**63 - 1})))
        pair.until(peer.listen)
        assert isinstance(peer.heard[1], PagePart)
        peer.close()
    pair.settle()
    pair.close()


def test_a_fault_is_counted_and_logged_in_one_bounded_line(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            peer = AnswersPeer(pair)
            peer.say(framed_body(["a\nforged line" * 4000]))
            pair.until(peer.listen)
            peer.close()
        pair.until(lambda: pair.server.num_faults == 3)
    lines = [each.getMessage() for each in caplog.records if "fault no." in each.getMessage()]
    assert 1 <= len(lines) <= 3
    assert all("127.0.0.1:" in each and "\n" not in each and len(each) < 1200 for each in lines)
    assert one_line("a\nb\x1b[0m" + "c" * 5000) == f"a b [0m{'c' * 990}..."
    pair.close()


@pytest.mark.parametrize("bound", ["MOST_HEARD", "MOST_HEARD_BYTES"])
def test_one_engine_has_so_many_prompts_computed_and_is_told_so(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_exchange, "MOST_SENDINGS", 3)
    monkeypatch.setattr(page_exchange, bound, 2 if bound == "MOST_HEARD" else 2 * len(TOKENS))
    pair = Pair()
    pair.is_stopped = True
    peer, other = AnswersPeer(pair), AnswersPeer(pair)
    for number in range(5):
        peer.say(PagesWanted(**(WISH | {"number": number, "cache_salt": str(number)})))
    pair.until(lambda: pair.server.asked.qsize() == 5)
    for num_left in (3, 1, 0):
        pair.sending.take()
        assert pair.server.asked.qsize() == num_left, "so many between two steps"
        assert bool(select.select([pair.sending.wake.fd], [], [], 0)[0]) == (num_left > 0)
    pair.is_stopped = False
    pair.until(lambda: peer.listen() and sum(isinstance(each, NotSent) for each in peer.heard) == 2)
    other.say(PagesWanted(**WISH))
    pair.until(lambda: other.listen() and isinstance(other.heard[-1], AllSent))
    refused = {each.number for each in peer.heard if isinstance(each, NotSent)}
    assert refused == {3, 4}
    pair.settle()
    assert not pair.sends._num_of
    pair.close()


def test_nothing_long_is_received_before_a_hello_and_no_longer_message_than_a_prompt_after_it() -> None:
    pair = Pair()
    for greets, length in ((False, LONGEST_SHORT + 1), (True, pair.server.longest_message + 1)):
        peer = AnswersPeer(pair, greets=greets)
        peer.say(HEAD.pack(length, 0, 0))
        pair.until(lambda peer=peer: peer.listen() and peer.is_closed)
        peer.close()
    pair.close()


def test_who_says_no_hello_is_dropped_in_time_and_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "GREETING_S", 3600.0)
    monkeypatch.setattr(page_server, "MOST_UNGREETED", 3)
    monkeypatch.setattr(page_server, "MOST_CONNECTIONS", 2)
    pair = Pair()
    silent = [AnswersPeer(pair, greets=False) for _ in range(5)]
    pair.until(lambda: silent[0].listen() and silent[1].listen())
    assert not any(each.listen() for each in silent[2:]), "the oldest give way"
    assert pair.serve(prompts(1)) == alone(prompts(1))
    assert pair.answers.scheduler.counters.arrived_pages
    second = AnswersPeer(pair)
    pair.until(lambda: second.listen() or bool(second.heard))
    third = AnswersPeer(pair)
    pair.until(third.listen)
    assert [type(each.heard[0]) for each in (second, third)] == [Welcome, Unfit]
    pair.close()
    monkeypatch.setattr(connection, "GREETING_S", 0.1)
    pair = Pair()
    silent = [AnswersPeer(pair, greets=False) for _ in range(2)]
    silent[1].say(framed(Hello(VERSION, "the model", 1, [], "tcp", b"", 1))[:20])
    pair.until(lambda: all(each.listen() for each in silent))
    pair.close()


def test_a_message_that_was_begun_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MESSAGE_S", 0.1)
    pair = Pair()
    peer, patient = AnswersPeer(pair), AnswersPeer(pair)
    pair.until(lambda: not peer.listen() and bool(peer.heard))
    peer.say(framed(PagesWanted(**WISH))[:-1])
    pair.until(peer.listen)
    assert peer.is_closed
    assert not patient.listen(), "between messages there is time"
    pair.close()


def test_a_drip_is_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MESSAGE_S", 0.1)
    pair = Pair()
    peer = AnswersPeer(pair)
    peer.say(HEAD.pack(LONGEST_SHORT, 0, 0))

    def has_ended() -> bool:
        peer.say(b"x")
        return peer.listen() and peer.is_closed

    pair.until(has_ended)
    pair.close()


def test_bytes_that_are_there_came_in_time_however_late_this_side_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MESSAGE_S", -60.0)
    pair = Pair()
    peer = AnswersPeer(pair)
    pair.until(lambda: not peer.listen() and bool(peer.heard))
    peer.say(PagesWanted(**(WISH | {"tokens": b"abc"})))
    pair.until(peer.listen)
    assert isinstance(peer.heard[-1], NotSent)
    assert not pair.server.num_faults
    pair.close()


def test_a_wait_is_charged_no_longer_than_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is stopped for an hour in a wait for bytes, which come afterwards."""
    ours, theirs = socket.socketpair()
    incoming = connection._Incoming(ours, Plain(ours))
    incoming.left_s = 5.0
    hours = itertools.count(0, 3600)
    answers = [[], [], [(ours.fileno(), select.POLLIN)]]

    def poll(_: int) -> list[tuple[int, int]]:
        if len(answers) == 1:
            theirs.sendall(b"abc")
        return answers.pop(0)

    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: next(hours)))
    monkeypatch.setattr(incoming, "_poll", SimpleNamespace(poll=poll))
    room = bytearray(3)
    incoming.fill(memoryview(room))
    assert bytes(room) == b"abc"
    assert 4.0 < incoming.left_s < 5.0
    ours.close()
    theirs.close()


def test_what_is_only_announced_takes_no_memory_of_others() -> None:
    """An honest engine says hello, and has prompts of any length computed, beside many long messages that
    are never sent.
    """
    pair = Pair()
    longest = pair.server.longest_message
    liars = [AnswersPeer(pair) for _ in range(page_server.MOST_UNHANDLED_BYTES // longest + 2)]
    pair.until(lambda: all(not each.listen() and each.heard for each in liars))
    for each in liars:
        each.say(HEAD.pack(longest, 0, 0))
    pair.until(lambda: len(pair.server.unhandled._num_of) == len(liars))
    honest = AnswersPeer(pair)
    honest.say(PagesWanted(**(WISH | {"tokens": b"abc" * LONGEST_SHORT})))
    pair.until(honest.listen)
    assert isinstance(honest.heard[-1], NotSent)
    assert not any(each.listen() for each in liars), "no liar had to be ended for it"
    pair.close()


def test_messages_wait_for_the_memory_that_others_hold_and_one_is_always_completed() -> None:
    memory = UnhandledBytes(10, most_of_one=8)
    memory.take("first", 6, lambda: True)
    memory.take("second", 4, lambda: True)
    memory.take("second", 3, lambda: True)  # the first that lacks memory completes its message
    for holder, count in (("first", 1), ("second", 2)):
        with pytest.raises(ConnectionError):
            memory.take(holder, count, lambda: False)  # another is being completed; more than a share
    memory.complete("second")
    with pytest.raises(ConnectionError):
        memory.take("first", 1, lambda: False)  # what it overdrew is not paid back
    memory.give_back("second", 7)
    memory.take("first", 2, lambda: True)
    memory.give_back("first", 8)
    assert not memory._num_of


def test_a_flood_of_short_messages_waits_in_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that nobody wanted are dropped at once; of wishes, another engine's waits behind few."""
    monkeypatch.setattr(connection, "SHORT_BYTES", 2**17)
    pair = Pair()
    pair.is_stopped = True
    flood, honest = AnswersPeer(pair), AnswersPeer(pair)
    flood.say(framed(Unwanted(1)) * 3000 + framed(PagesWanted(**(WISH | {"tokens": b"abc"}))))
    pair.until(flood.listen)
    assert isinstance(flood.heard[-1], NotSent)
    assert not pair.server.asked.qsize()
    flood.say(framed(PagesWanted(**WISH)) * 300)
    pair.until(lambda: any(each.connection._short._may_take(each.connection, 1200) is False
                           for each in pair.server.links))  # fmt: skip
    honest.say(PagesWanted(**(WISH | {"number": 7})))
    numbers = [1]
    while numbers[-1] != 7:
        asked = pair.server.asked.get(timeout=PATIENCE_S)
        assert asked.message is not None
        numbers.append(asked.message.number)
    assert len(numbers) < 2**17 // 2**10 + 2
    pair.close()


def test_a_host_that_vanished_keeps_no_place() -> None:
    pair = Pair()
    peer = AnswersPeer(pair)
    pair.until(lambda: not peer.listen() and bool(peer.heard))
    (link,) = pair.server.links
    sock = link.connection._socket
    assert sock is not None
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    pair.close()


def test_without_descriptors_there_is_one_line_a_second(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page_server, "_ACCEPT_AGAIN_S", 0.0)
    monkeypatch.setattr(page_server, "_LOG_S", 3600.0)
    server = object.__new__(page_server.PageServer)
    server._is_closed = False
    failures = iter(range(50))

    def accept() -> Any:
        if next(failures, None) is None:
            server._is_closed = True
        raise OSError("Too many open files")

    monkeypatch.setattr(server, "_listener", SimpleNamespace(accept=accept), raising=False)
    server._accept()
    assert sum("can be taken" in each.getMessage() for each in caplog.records) == 1


def test_a_connection_without_threads_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "pages":
            raise RuntimeError("can't start new thread")
        start(thread)

    silent = PromptsPeer(lambda _: b"")
    pair = Pair(between=silent)
    monkeypatch.setattr(threading.Thread, "start", fail)
    assert pair.serve(prompts(1)) == alone(prompts(1))
    assert pair.answers.scheduler.counters.missed_pages
    pair.close()


def part_of(wish: PagesWanted, **changes: Any) -> bytes:
    """The first part of a layer as it should be, but for the changes."""
    fields = {"number": wish.number, "layer": 0, "first_page": wish.first_page, "num_pages": 1, "offset": 0}
    data = b"\0" * changes.pop("behind", device_layer_bytes())
    fields |= {"num_bytes": len(data), "check": zlib.crc32(data)} | changes
    return framed(PagePart(**fields), len(data)) + data


def device_layer_bytes() -> int:
    return int(device.make("fused").runner.cache.layer_bytes[0])


HUGE = cases((-1, 2**31, 2**64 - 1), (-1, -5, -(2**40), -(2**63), 2**31, 2**63, 2**64 - 1))
LIES = {
    **{f"layer {each}": lambda wish, each=each: part_of(wish, layer=each) for each in (*HUGE, 2, 99)},
    **{f"first {each}": lambda wish, each=each: part_of(wish, first_page=each) for each in (*HUGE, 1)},
    **{f"pages {each}": lambda wish, each=each: part_of(wish, num_pages=each) for each in (*HUGE, 0, 2)},
    **{f"offset {each}": lambda wish, each=each: part_of(wish, offset=each) for each in HUGE},
    **{f"bytes {each}": lambda wish, each=each: part_of(wish, num_bytes=each) for each in (*HUGE, 0, 3)},
    "no bytes": lambda wish: part_of(wish, behind=0),
    "few bytes": lambda wish: part_of(wish, behind=8),
    "check -1": lambda wish: part_of(wish, check=-1),
    "check": lambda wish: part_of(wish, check=1),
    "early end": lambda wish: framed(AllSent(wish.number, 0)),
    **{f"end {each}": lambda wish, each=each: framed(AllSent(wish.number, each)) for each in HUGE},
    "long reason": lambda wish: framed(NotSent(wish.number, "x\nforged " * 10**6)),
    "reason": lambda wish: framed(NotSent(wish.number, "x\nforged")),
    "deep": lambda wish: framed_body(b"\x91" * 60_000),
    "long message": lambda wish: HEAD.pack(LONGEST_SHORT + 1, 0, 0),
    "hello": lambda wish: framed(Hello(VERSION, "x", 1, [], "tcp", b"", 1)),
    "garbage": lambda wish: b"\xff" * 4096,
}


@pytest.mark.parametrize("lie", [*LIES])
def test_a_lie_of_an_engine_of_prompts_is_a_miss(lie: str, caplog: pytest.LogCaptureFixture) -> None:
    """At once, and not when the prompt is late."""
    liar = PromptsPeer(LIES[lie])
    pair = Pair(between=liar, most_wait_s=3600)
    with caplog.at_level(logging.INFO):
        assert pair.serve(prompts(1)) == alone(prompts(1))
    assert pair.answers.scheduler.counters.missed_pages
    assert not pair.answers.scheduler.counters.arrived_pages
    assert not any("\n" in each.getMessage() or len(each.getMessage()) > 1200 for each in caplog.records)
    pair.settle()
    pair.close()


def hangs(wish: PagesWanted) -> Frame:
    """A part that is never ended."""
    return part_of(wish)[:-1]


@pytest.mark.parametrize("way", ["in a part", "before the welcome", "before any part"])
def test_who_stalls_is_a_miss_once_and_then_left_alone(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt waits for so long as the bound says, and the next ones do not wait at all."""
    monkeypatch.setattr(connection, "MESSAGE_S", 0.1)
    monkeypatch.setattr(connection, "GREETING_S", 0.1 if way == "before the welcome" else 60.0)
    monkeypatch.setattr(prompt_source, "LOST_S", 0.0)
    monkeypatch.setattr(prompt_source, "STALLED_S", 3600.0)
    liar = PromptsPeer(hangs if way == "in a part" else lambda _: b"", greets=way != "before the welcome")
    pair = Pair(between=liar, most_wait_s=0.1 if way == "before any part" else 3600)
    first, *others = prompts(3)
    assert pair.serve([first]) == alone([first])
    assert pair.answers.scheduler.counters.missed_pages
    assert pair.source.came.empty()
    for each in others:
        assert not pair.fetching.begin(1, each)
    if way != "before the welcome":
        pair.until(lambda: liar.num_asked > 0)
    assert liar.num_asked <= 1
    monkeypatch.setattr(pair.source, "_not_before_s", 0.0)  # the pause is over
    assert pair.fetching.begin(1, others[0])
    pair.close()


def test_who_was_late_once_and_answers_others_is_asked_on() -> None:
    pair = Pair()
    pair.source.has_arrived()
    pair.source.was_late(since_s=0.0)
    assert pair.fetching.begin(0, prompts(1)[0])
    pair.close()
