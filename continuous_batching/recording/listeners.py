"""Send the leader's recording to the ranks that follow, and watch their progress.

The records go to one socket for each rank. Each rank sends lines of text back: its progress, several times a
second, or why it ends. A rank that is lost ends the engine; restarting it is left to the cluster's code.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue

from borders.numbers import integers
from borders.refusal import one_line
from continuous_batching.recording.agreement import ANSWER, RankAnswer, read_answer

MOST_UNSENT_BYTES = 64 << 20  # a rank that reads nothing is lost long before so much is unsent
BEAT_S = 0.25  # interval between two lines of a rank
SLOW_S = 1.0  # silence of a rank during a step after which a warning is logged
# Limit of a rank's silence while it starts. It is longer than that of a step, because a device's library
# holds Python's interpreter lock while it is initialised.
START_SILENCE_S = 120.0
START_NEWS_S = 60.0  # interval between two log lines that say what a long start waits for
_MOST_NAMES = 4  # how many ranks a message names of those that do the same
_LAST_WORDS_S = 2.0  # time for what is still unsent at the end
_SILENT_END_S = 0.1  # The time for the news of an end behind the words of a rank that has failed by it.
LAST_WORDS = b"!"  # a line that begins with this says why a rank ends
_LONGEST_LINE = 4096  # bytes of a rank's line
_STEPS, _PERCENT = integers(0, 2**63 - 1), integers(0, 100)

log = logging.getLogger(__name__)


class RankLost(ConnectionError):
    """A rank has ended or does not answer; nothing can be computed without it."""


def beat(num_steps: int, inside: str, doing: str) -> bytes:
    """Return the line by which a rank reports its progress.

    It holds the number of steps begun, the collective that the rank is in, and what it does while it starts;
    the last two may be empty.
    """
    return f"{num_steps}\t{inside}\t{doing}".encode()


def activity(inside: str, doing: str) -> str:
    """Describe what a rank does while the engine starts."""
    if not inside:
        return doing or "waiting for the first step"
    return f"waiting in {inside}" + (f" while {doing}" if doing else "")


def _percent(doing: str) -> float:
    """Return how far a rank says that it is, in percent; infinity where it says no number."""
    said = re.search(r"([0-9]+)%", doing)
    percent = None if said is None else _PERCENT.parse(said[1])
    return math.inf if percent is None else percent


class Heard:
    """The last report of a rank."""

    def __init__(self, name: str, connection: socket.socket, now_s: float) -> None:
        self.name, self.connection = name, connection
        self.heard_s = now_s
        self.step = 0  # number of steps that it has begun
        self.inside = ""  # the collective that it is in
        self.doing = "joining the other ranks"  # what it does while it starts; empty afterwards
        self.has_spoken = False  # whether it has said why it ends
        self._rest = b""

    def take(
        self, data: bytes, now_s: float, answered: Callable[[str, RankAnswer], None] = lambda _, __: None
    ) -> None:
        """Parse received data; raises RankLost with the reason if the rank says that it ends.

        `answered` receives its answers to what the leader asked, under the rank's name.
        """
        self.heard_s = now_s
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(LAST_WORDS):
                words = one_line(line[len(LAST_WORDS) :].decode("utf-8", "replace"))
                self.has_spoken = True
                raise RankLost(f"{self.name} has ended: {words}")
            if line.startswith(ANSWER) and len(line) <= _LONGEST_LINE and (said := read_answer(line)):
                answered(self.name, said)
            else:
                self._note(line)
        if len(self._rest) > _LONGEST_LINE:
            self._note(self._rest)

    def _note(self, line: bytes) -> None:
        """Take a line of `beat`; raises RankLost for any other."""
        step, _, rest = line.decode("utf-8", "replace").partition("\t")
        inside, tab, doing = rest.partition("\t")
        count = _STEPS.parse(step)
        if count is None or not tab or len(line) > _LONGEST_LINE or not (inside + doing).isprintable():
            raise RankLost(f"{self.name} says what no rank says: {line[:80]!r}")
        self.step, self.inside, self.doing = count, inside, doing

    @property
    def progress(self) -> str:
        """Describe how far the rank was in its last report."""
        where = f", in {self.inside}" if self.inside else ""
        return f"it had begun {self.step} steps{where}"


class Listeners:
    """A sink of a recording: the connections to the ranks that follow, by the ranks' names.

    No call waits for a rank to read: two threads send and receive. A rank is lost if its connection ends, if
    it is silent for `limit_s`, or if a step takes longer than that with it. Then `lose` is called once, from
    one of the threads, and each later `write` raises RankLost.

    With a `start_limit_s` the engine counts as starting until `begin` is called: for so long no rank may
    report anything new, and each may be silent for START_SILENCE_S. `doing` says what the leader does
    meanwhile, and `inside` which collective it is in. `answered` receives, in a thread, what ranks answer
    (see `agreement`).
    """

    def __init__(
        self,
        connections: Mapping[str, socket.socket],
        limit_s: float,
        lose: Callable[[str], None] = lambda _: None,
        start_limit_s: float | None = None,
    ) -> None:
        self.limit_s = limit_s
        self.doing = "joining the other ranks"
        self.inside: Callable[[], str] = lambda: ""
        self.answered: Callable[[str, RankAnswer], None] = lambda _, __: None
        self.has_started = start_limit_s is None
        self._start_limit_s = start_limit_s or 0.0
        self._began_s = time.monotonic()
        self._reported: list[tuple[str, str]] = []  # what each rank, the leader first, does
        self._progressed_s = self._began_s
        self._news_s = START_NEWS_S  # age of the start at which the log next says what it waits for
        self.lost: str | None = None
        self.busy_since_s: float | None = None  # start of the leader's current step, on the monotonic clock
        self._lose = lose
        now_s = time.monotonic()
        self._ranks = [Heard(name, each, now_s) for name, each in connections.items()]
        # Records to send; None ends the thread. A queue is used because taking the locks of a condition may
        # each switch between the two threads, which takes longer than what they wait for.
        self._records = SimpleQueue[bytes | None]()
        self._bytes_written = self._bytes_sent = 0
        self._ending = threading.Lock()
        self._is_closed = False
        self._has_warned = False  # whether the log has warned of the current step
        self._sending = threading.Thread(target=self._send, name="ranks-send", daemon=True)
        self._receiving = threading.Thread(target=self._receive, name="ranks-receive", daemon=True)
        self._sending.start()
        self._receiving.start()

    def write(self, record: bytes) -> None:
        """Queue a record for all ranks; raises RankLost if one of them is lost."""
        self.check()
        self._bytes_written += len(record)
        self._records.put(record)
        if (unsent := self._bytes_written - self._bytes_sent) > MOST_UNSENT_BYTES:
            self._end(f"a rank does not read: {unsent:,} bytes are to be sent; {self.report()}")
            self.check()

    @property
    def names(self) -> tuple[str, ...]:
        """The ranks' names, under which they answer."""
        return tuple(each.name for each in self._ranks)

    def begin(self) -> None:
        """Watch steps from now on: the engine has started."""
        now_s = time.monotonic()
        for rank in self._ranks:  # a start allows longer silences than a step does
            rank.heard_s = max(rank.heard_s, now_s - SLOW_S)
        self.has_started = True

    def check(self) -> None:
        """Raise RankLost if a rank is lost."""
        if self.lost is not None:
            raise RankLost(self.lost)

    def close(self, last: bytes = b"") -> None:
        """Send what is queued and the last record, as far as ranks still read, and end the connections."""
        with self._ending:
            if self._is_closed:
                return
            self._is_closed = True
        self._records.put(last)
        self._records.put(None)
        self._sending.join(_LAST_WORDS_S)
        # Keep reading what the ranks send: a connection that is closed with unread data is reset, and the
        # last records would be lost.
        self._shut(socket.SHUT_WR)
        self._receiving.join(_LAST_WORDS_S)
        self._shut(socket.SHUT_RDWR)
        self._receiving.join()
        for each in self._ranks:
            each.connection.close()

    def _shut(self, direction: int) -> None:
        for each in self._ranks:
            with contextlib.suppress(OSError):  # the other end has closed first
                each.connection.shutdown(direction)

    def report(self) -> str:
        """Describe which rank is behind, as far as that is known."""
        now_s = time.monotonic()
        silent = [each for each in self._ranks if now_s - each.heard_s > SLOW_S]
        if silent:
            return "; ".join(
                f"{each.name} has said nothing for {now_s - each.heard_s:.1f} s, {each.progress}"
                for each in silent
            )
        fewest = min(each.step for each in self._ranks)
        behind = [each for each in self._ranks if each.step == fewest and not each.inside]
        if behind and len(behind) < len(self._ranks):
            return "; ".join(f"{each.name} is behind, {each.progress}" for each in behind)
        return "; ".join(f"{each.name}: {each.progress}" for each in self._ranks)

    def start_report(self) -> str:
        """Describe what each rank does while the engine starts; ranks that do the same are grouped."""
        now_s = time.monotonic()
        found = {activity(self.inside(), self.doing): ["rank 0"]}
        loaded = {"rank 0": _percent(self.doing)}
        for each in self._ranks:
            does, silent_s = activity(each.inside, each.doing), now_s - each.heard_s
            if silent_s > SLOW_S:
                does += f", and has said nothing for {silent_s:.0f} s"
            found.setdefault(does, []).append(each.name)
            loaded[each.name] = _percent(each.doing)
        slowest = min(loaded, key=loaded.__getitem__)
        is_one = list(loaded.values()).count(loaded[slowest]) == 1 and loaded[slowest] < math.inf
        last = [f"{slowest} is the slowest"] if is_one else []
        return "; ".join([*(f"{_named(names)}: {does}" for does, names in found.items()), *last])

    def start_progress(self) -> str:
        """Describe how far the start is by its slowest rank, with the share that each rank has loaded."""
        ranks = [("rank 0", self.doing), *((each.name, each.doing) for each in self._ranks)]
        shares = [_percent(doing) for _, doing in ranks]
        if min(shares) == math.inf:
            return self.start_report()
        name, doing = ranks[shares.index(min(shares))]
        stage, _, far = doing.partition(":")
        is_one = shares.count(min(shares)) == 1
        slowest = f" {' '.join(name.split()[:2])} is the slowest," if is_one else ""
        each = ", ".join("done" if share == math.inf else f"{share:.0f}%" for share in shares)
        return f"{stage}:{slowest}{far}; by rank: {each}"

    def _send(self) -> None:
        while (record := self._records.get()) is not None:
            for each in self._ranks:
                try:
                    each.connection.sendall(record)
                # The receiving thread still reads the rank's last line, and then ends the rest
                except OSError:
                    return
            self._bytes_sent += len(record)

    def _receive(self) -> None:
        with selectors.DefaultSelector() as selector:
            for each in self._ranks:
                selector.register(each.connection, selectors.EVENT_READ, each)
            try:
                while selector.get_map():
                    self._receive_once(selector)
            except RankLost as error:
                has_spoken = any(each.has_spoken for each in self._ranks)
                self._end((self._silent_end(selector) if has_spoken else None) or str(error))

    def _silent_end(self, selector: selectors.BaseSelector) -> str | None:
        """Name a rank that has ended without a word, as one that is killed does.

        What another rank says of its own end then only follows from that, and may be heard first.
        """
        until_s = time.monotonic() + _SILENT_END_S
        while (left_s := until_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                rank: Heard = key.data
                try:
                    data = rank.connection.recv(1 << 16)
                except OSError:
                    data = b""
                if not data:
                    selector.unregister(rank.connection)
                    if not rank.has_spoken:
                        return f"{rank.name} has ended; {rank.progress}"
                with contextlib.suppress(RankLost):
                    rank.take(data, time.monotonic())
        return None

    def _receive_once(self, selector: selectors.BaseSelector) -> None:
        began_s = time.monotonic()
        for key, _ in selector.select(BEAT_S):
            rank: Heard = key.data
            try:
                data = rank.connection.recv(1 << 16)
            except OSError as error:
                data = b""
                log.info("%s: %s", rank.name, error.strerror or error)
            if not data and not self._is_closed:
                raise RankLost(f"{rank.name} has ended; {rank.progress}")
            if not data:
                selector.unregister(rank.connection)
            rank.take(data, time.monotonic(), self.answered)
        if self._is_closed:
            return
        now_s = time.monotonic()
        late_s = now_s - began_s - BEAT_S
        # This process did not run, perhaps like the whole machine, so the ranks were not silent
        if late_s > BEAT_S:
            for rank in self._ranks:
                rank.heard_s = min(now_s, rank.heard_s + late_s)
        if not self.has_started:
            self._check_start(now_s)
            return
        if any(now_s - rank.heard_s > self.limit_s for rank in self._ranks):
            raise RankLost(self.report())
        since_s = self.busy_since_s
        if since_s is None or now_s - since_s < SLOW_S:
            self._has_warned = False
            return
        waits = f"a step has not ended for {now_s - since_s:.1f} s: {self.report()}"
        if now_s - since_s > self.limit_s:
            raise RankLost(waits)
        if not self._has_warned and any(now_s - rank.heard_s > SLOW_S for rank in self._ranks):
            self._has_warned = True
            log.warning("%s", waits)

    def _check_start(self, now_s: float) -> None:
        """Raise RankLost if the start has not progressed, or a rank has been silent, for too long."""
        reported = [
            (self.inside(), self.doing),
            *((each.inside, each.doing) for each in self._ranks),
        ]
        if reported != self._reported:
            self._reported, self._progressed_s = reported, now_s
        if now_s - self._progressed_s > self._start_limit_s:
            raise RankLost(
                f"the start of the engine has not progressed for {self._start_limit_s:g} s"
                f" ({self.start_report()}); raise parallel.start_timeout_s if these ranks need longer"
            )
        took_s = now_s - self._began_s
        silent = [rank for rank in self._ranks if now_s - rank.heard_s > START_SILENCE_S]
        if silent:
            raise RankLost(f"a rank does not answer while the engine starts: {self.start_report()}")
        if took_s > self._news_s:
            self._news_s += START_NEWS_S
            log.warning("the engine has been starting for %.0f s: %s", took_s, self.start_report())

    def _end(self, why: str) -> None:
        with self._ending:
            if self.lost is not None or self._is_closed:
                return
            log.error("%s", why)  # log it before any other thread ends the process because of it
            self.lost = why
        self._records.put(None)
        self._shut(socket.SHUT_RDWR)  # this tells the other ranks that the engine has ended
        self._lose(why)


def _named(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
