"""Ranks of one engine believe nothing of each other that is out of bounds.

Beats that no rank sends make that rank lost, with words; a recording that no leader writes ends the rank that
follows with words, and never otherwise. Each border gets some hundred mutated messages, and 10,000 in a
thorough run.
"""

from __future__ import annotations

import io
import socket
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from borders.framing import framed
from continuous_batching.recording.agreement import Agreement, PreparedWork, RankAnswer
from continuous_batching.recording.format import (
    BEGIN,
    Fetched,
    Forgotten,
    PagesArrived,
    PagesExpected,
    PagesMoved,
    PagesReleased,
    RanksAsked,
    RanksTold,
    packed,
    read_entries,
)
from continuous_batching.recording.listeners import LAST_WORDS, Heard, Listeners, RankLost, _percent, beat
from continuous_batching.recording.replay import Divergence, NoDevice, replay
from tests.continuous_batching.test_recorder import record, scheduler
from tests.mutated import Mutator, encoded
from tests.thorough import cases

FEW = cases(300, 10_000)


def test_beats_that_no_rank_sends_make_it_lost() -> None:
    mutator = Mutator(1)
    said = [
        beat(3, "all_reduce", "loading weights: 41% of 12 GiB"),
        beat(4, "", "compiling"),
        LAST_WORDS + b"no memory",
        beat(2**62, "broadcast", ""),
        RankAnswer("weights", "1", 3, "no room").line,
    ]
    agreement = Agreement(["rank 0", "rank 1"])
    agreement.expect("weights", "1", float("inf"))
    for _ in range(FEW):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            listeners = object.__new__(Listeners)
            rank = Heard("rank 1", ours, 0.0)
            listeners._ranks, listeners.doing, listeners.inside = [rank], "", lambda: ""
            words = ""
            try:
                for _ in range(4):
                    rank.take(mutator.data(mutator.one_of(said) + b"\n"), 0.0, agreement.answered)
            except RankLost as lost:
                words = str(lost)
            assert words.isprintable()
            assert len(words) < 1100
            if words:
                continue
            for words in (listeners.start_report(), listeners.start_progress(), listeners.report()):
                assert len(words) < 10_000
            assert 0 <= rank.step < 2**63
            assert len(rank._rest) < 10_000
    assert not agreement.take(0.0), "rank 0 has not answered, whatever rank 1 said"


def test_a_percent_of_any_length_is_read() -> None:
    assert _percent("loading: 41% of 2 GiB") == 41
    for said in ("9" * 5000, "101", "٣", ""):
        assert _percent(f"loading: {said}% of 2 GiB") == float("inf")


@pytest.fixture(scope="module")
def bodies(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The entries of a whole recording."""
    path = tmp_path_factory.mktemp("recording") / "file"
    record(path, scheduler(), seed=2, num_requests=6)
    data, found, at = path.read_bytes(), list[bytes](), 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        found.append(data[at + 12 : at + 12 + length])
        at += 12 + length
    return found


def recorded(bodies: list[bytes]) -> io.BytesIO:
    """A recording of these entries, with right checksums."""
    data, before = b"", BEGIN
    for body in bodies:
        frame, before = framed(body, before)
        data += frame
    return io.BytesIO(data)


def test_a_recording_that_no_leader_writes_is_refused(bodies: list[bytes]) -> None:
    """Its entries are read: each error is one of what they say."""
    mutator, entries = Mutator(2), [msgspec.msgpack.decode(each) for each in bodies]
    num_read = 0
    while num_read < FEW:
        changed = {mutator.random.randrange(len(entries)) for _ in range(mutator.random.randint(1, 3))}
        spoilt = [
            encoded(mutator.message(entry), msgspec.msgpack.encode) if at in changed else body
            for at, (entry, body) in enumerate(zip(entries, bodies))
        ]
        num_read += len(changed)
        with suppress(ValueError):
            for _ in replay(read_entries(recorded(spoilt)), scheduler()):
                pass


def test_pages_that_are_expected_twice_are_refused(bodies: list[bytes]) -> None:
    entry = msgspec.msgpack.encode(PagesExpected("a", packed(np.arange(9)), ""))
    with pytest.raises(Divergence, match="expected twice for a"):
        list(replay(read_entries(recorded([bodies[0], entry, entry])), scheduler(), Deciding()))


def test_what_ranks_agree_on_and_move_is_refused_where_no_leader_says_it(bodies: list[bytes]) -> None:
    """Entries of pages from other engines, and of what all ranks are asked and told, at any place."""
    mutator = Mutator(5)
    tokens, pages = packed(np.arange(9)), packed(np.array([1, 2]))
    said = [
        PagesExpected("a", tokens, ""),
        PagesArrived("a", is_whole=True),
        PagesReleased("a"),
        RanksAsked("topic", "1", b"body"),
        RanksTold("topic", "1", is_agreed=True),
        PagesMoved(0, pages, to_leader=True),
        Forgotten(),
        Fetched("a", 0, 1),
    ]
    trees = [msgspec.msgpack.decode(msgspec.msgpack.encode(each)) for each in said]
    for _ in range(cases(100, 10_000)):
        inserted = [encoded(each, msgspec.msgpack.encode) for each in trees[: mutator.random.randint(1, 4)]]
        inserted.append(encoded(mutator.message(mutator.one_of(trees)), msgspec.msgpack.encode))
        at = mutator.random.choice([1, mutator.random.randrange(1, len(bodies))])
        spoilt = [*bodies[:at], *inserted, *bodies[at:]]
        with suppress(ValueError):
            for _ in replay(read_entries(recorded(spoilt)), scheduler(), Deciding()):
                pass


class Deciding(NoDevice):
    """A rank that has been asked nothing, and decides as it is told."""

    def __init__(self) -> None:
        self._work = PreparedWork[bool](lambda name, body: True, lambda made: None)

    def told(self, topic: str, name: str, is_agreed: bool) -> None:
        self._work.decide(name, is_agreed)
