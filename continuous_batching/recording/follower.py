"""Follow the leader's recording on another rank, and compute the same batches.

Both schedulers are functions of their inputs, so pages, copies, swaps and shared prefixes need no message of
their own: the follower replays the recorded inputs and compares the digest of each step. At the first
difference the rank ends.
"""

from __future__ import annotations

import contextlib
import io
import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from borders.framing import CutShort
from continuous_batching.batch import Batch
from continuous_batching.engine import Runner
from continuous_batching.recording.agreement import Answering, Work
from continuous_batching.recording.format import Entry, Header, RanksAsked, read_entries
from continuous_batching.recording.listeners import BEAT_S, LAST_WORDS, beat
from continuous_batching.recording.rank_tier import FollowersTier
from continuous_batching.recording.replay import replay
from continuous_batching.request import Request
from continuous_batching.scheduling.scheduler import Scheduler
from kv_cache.pages import Index, PageCopy
from kv_cache.tier.lookup import PageName

_READ_BYTES = 1 << 16  # most bytes that one read of the recording takes
_LAST_WORDS_S = 2.0  # time for the leader to read why a rank ends
_MOST_WORDS = 3500  # bytes of these words, which are less than the longest line that the leader takes


class LeaderLost(ConnectionError):
    """The leader ended without closing its recording: it was killed, or the network between is lost."""


class Beats:
    """Reports this rank's progress to the leader from a thread, at a fixed interval.

    `lose` is called from that thread if the leader is gone but this rank has not ended, because it waits in a
    collective for ranks that have.
    """

    def __init__(self, connection: socket.socket, lose: Callable[[], None] = lambda: None) -> None:
        self.connection = connection
        self.num_steps = 0  # steps that this rank has begun
        self.doing = "joining the other ranks"  # what the rank does while it starts; empty once it follows
        self.inside: Callable[[], str] = lambda: ""  # the collective that this rank is in, if any
        self.explain: Callable[[str], str] = lambda why: why  # what an error of the collectives means
        self._lose = lose
        self._has_ended = threading.Event()
        self._sending = threading.Lock()  # lines of several threads are sent one after the other
        self._thread = threading.Thread(target=self._tell, name="rank-beats", daemon=True)
        self._thread.start()

    def end(self, why: str = "") -> None:
        """Stop reporting; if `why` is given, tell the leader why this rank ends."""
        self._has_ended.set()
        self._thread.join()
        if not why:
            return
        with contextlib.suppress(OSError):  # the reader of the recording finds that the leader is gone
            self._send(LAST_WORDS + self.explain(why).encode().replace(b"\n", b" ")[:_MOST_WORDS])
        # Read what the leader still sends: a connection that is closed with unread data is reset, and the
        # last message would be lost.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_LAST_WORDS_S)
            while self.connection.recv(1 << 16):
                pass

    def answer(self, line: bytes) -> None:
        """Send an answer to what the leader asked; it is lost if the leader is gone."""
        if not self._has_ended.is_set():
            with contextlib.suppress(OSError):  # the reader of the recording finds that the leader is gone
                self._send(line)

    def _send(self, line: bytes) -> None:
        with self._sending:
            self.connection.sendall(line + b"\n")

    def _tell(self) -> None:
        while not self._has_ended.wait(BEAT_S):
            try:
                self._send(beat(self.num_steps, self.inside(), self.doing))
            except OSError:  # the reader of the recording finds it as well, and ends this rank
                if not self._has_ended.wait(_LAST_WORDS_S):
                    self._lose()
                return


class Follower:
    """A rank that follows the leader to which `beats` is connected.

    `facts` describe how its own scheduler is built and must equal the leader's. `overlap` is that of the
    leader's engine, because both must call the same methods of their runners. `apply` makes page copies that
    no batch carries. `works` do what the leader asks for, by topic, each in a thread; `between` takes what
    threads have finished: it is called between two entries after `wake`, also while the leader says nothing.
    `tier` is that of this rank's pages, if the engine has one.
    `move` exchanges parts of pages with the leader, in an engine that exchanges pages with others.
    """

    def __init__(
        self,
        beats: Beats,
        scheduler: Scheduler,
        runner: Runner,
        facts: dict[str, Any],
        *,
        apply: Callable[[tuple[PageCopy, ...]], object],
        overlap: bool = False,
        works: Mapping[str, Work] | None = None,
        between: Callable[[], None] = lambda: None,
        move: Callable[[int, Index, bool], None] | None = None,
        tier: FollowersTier | None = None,
    ) -> None:
        self._beats = beats
        self._scheduler, self._runner = scheduler, runner
        self._facts = facts
        self._overlap = overlap
        self._apply, self._move = apply, move
        self._tier = tier
        self._works = works or {}
        self._answering = Answering(self._works, lambda answer: beats.answer(answer.line))
        self._reader = _Reader(beats.connection, between)
        self.wake = self._reader.wake

    def follow(self) -> None:
        """Compute what the leader computes until it closes its recording, and close the tier.

        Raises Divergence at the first decision that differs from the leader's, ValueError if the leader's
        engine is built differently, LeaderLost if the leader is gone.
        """
        why = ""
        try:
            with io.BufferedReader(self._reader, _READ_BYTES) as file:
                entries = read_entries(file)
                self._compare(next(entries, None))
                for _ in replay(self._heard(entries), self._scheduler, self):
                    pass
        except LeaderLost:
            raise
        except CutShort as error:
            raise LeaderLost("the leader has ended without closing its recording") from error
        except ConnectionError as error:
            raise LeaderLost(f"the connection to the leader is lost: {error}") from error
        except Exception as error:
            why = str(error)
            raise
        finally:
            self._answering.end()
            self._beats.end(why)
        if self._tier is not None:
            self._tier.close()

    def start(self, batch: Batch) -> Callable[[], object]:
        """Start a batch, as the leader does."""
        self._beats.num_steps += 1
        if self._overlap:
            return self._runner.start(batch)
        self._runner.run(batch)
        return _nothing

    def resize(self, num_pages: Sequence[int], copies: tuple[PageCopy, ...]) -> None:
        """Resize the cache, as the leader does."""
        self._runner.resize(num_pages, copies)

    def copy(self, copies: tuple[PageCopy, ...]) -> None:
        """Make page copies that no batch carries, as the leader does."""
        if copies:
            self._apply(copies)

    def told(self, topic: str, name: str, is_agreed: bool) -> None:
        """Use what this rank has made ready for a question, or drop it, as the leader does."""
        if topic in self._works:
            self._works[topic].decide(name, is_agreed)

    def move(self, layer: int, pages: Index, to_leader: bool) -> None:
        """Send the leader this rank's part of some pages of a layer, or receive it from there."""
        if self._move is None:
            raise ValueError("the leader exchanges pages, and this rank has no part of them")
        self._move(layer, pages, to_leader)

    def look_up(self, request: Request) -> None:
        """Look up pages for a request in this rank's tier, and answer the leader."""
        if self._tier is not None:
            waiting, matching = self._scheduler.waiting, self._scheduler.lifecycle.matching
            self._tier.look_up(request, matching.sought(request), lambda each: waiting.find(each.id) is each)

    def hand_over(self, request: Request, taken: Sequence[PageName]) -> None:
        """Hand over the pages that all ranks have found for a request."""
        if self._tier is not None:
            self._tier.hand_over(request, taken)

    def _heard(self, entries: Iterator[Entry]) -> Iterator[Entry]:
        """Yield the entries, and start what the leader asks for among them."""
        for entry in entries:
            self._reader.work()
            if isinstance(entry, RanksAsked):
                self._answering.ask(entry)
            yield entry

    def _compare(self, header: Entry | None) -> None:
        """Raise unless the leader's engine is built in the same way."""
        if not isinstance(header, Header):
            raise LeaderLost("the leader has ended before its engine was built")
        own = msgspec.msgpack.decode(msgspec.msgpack.encode(self._facts))
        for name, mine, leaders in differences(own, header.facts):
            raise ValueError(f"{name} is {mine!r} here, and {leaders!r} on the leader; make them equal")


class _Reader(io.RawIOBase):
    """Reads the leader's recording, and works between two entries whenever a thread asks for it.

    An entry is read when the one before it has been applied, so whatever is called here is called between.
    """

    def __init__(self, connection: socket.socket, between: Callable[[], None]) -> None:
        self._connection, self._between = connection, between
        self._is_asked = threading.Event()
        self._woken, self._waking = os.pipe()
        self._lock = threading.Lock()  # a thread may wake a reader that is being closed
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def wake(self) -> None:
        """Let `between` be called soon, in the thread that follows; called from any thread."""
        with self._lock:
            if not self.closed and not self._is_asked.is_set():
                self._is_asked.set()
                os.write(self._waking, b"w")

    def work(self) -> None:
        """Call `between` if a thread has asked for it."""
        if self._is_asked.is_set():
            with self._lock:
                self._is_asked.clear()
                os.read(self._woken, 1)
            self._between()

    def readable(self) -> bool:
        """Whether this can be read: yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Wait for data, and read what there is."""
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            self.work()
            if self._connection in ready:
                return self._connection.recv_into(buffer)

    def close(self) -> None:
        """Close the pipe; the connection is its owner's."""
        with self._lock:
            if not self.closed:
                self._selector.close()
                os.close(self._woken)
                os.close(self._waking)
            super().close()


def differences(ours: Any, theirs: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the values that differ in two nested mappings, with their dotted names."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            yield from differences(ours.get(key), theirs.get(key), f"{name}.{key}" if name else key)
    elif ours != theirs:
        yield name, ours, theirs


def _nothing() -> None:
    pass
