"""How does a rank that does not lead come to the leader's decisions? It hears the recording, and decides.

Both schedulers are functions of what they are told, so pages, copies, swaps and shared prefixes need no
message of their own. The digest of each step is compared: where one differs, the rank ends.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from continuous_batching.batch import Batch
from continuous_batching.engine import Runner
from continuous_batching.recording.format import Entry, Header, read_entries
from continuous_batching.recording.framing import CutShort, DamagedRecording
from continuous_batching.recording.listeners import BEAT_S, LAST_WORDS
from continuous_batching.recording.replay import Divergence, replay
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.system_error import in_one_line
from kv_cache.pages import PageCopy


class LeaderLost(Exception):
    """The leader ended without a word: it was killed, or the network between is lost."""


class Follower:
    """A rank that follows the leader at the other end of `connection`.

    `facts` are what its own scheduler is made of; `inside` names the collective that it is in, if any.
    `overlap` as the leader's engine has it: both must call the same methods of their runners.
    """

    def __init__(
        self,
        connection: socket.socket,
        scheduler: Scheduler,
        runner: Runner,
        facts: dict[str, Any],
        *,
        overlap: bool = False,
        inside: Callable[[], str] = lambda: "",
    ) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.num_steps = 0  # that were begun
        self._connection = connection
        self._facts = facts
        self._overlap = overlap
        self._inside = inside
        self._has_ended = threading.Event()

    def follow(self) -> None:
        """Compute what the leader computes until it closes its recording.

        Raises Divergence at the first decision that differs from the leader's, ValueError where the leader's
        engine is made of something else, LeaderLost where the leader is gone.
        """
        beats = threading.Thread(target=self._tell, name="rank-beats", daemon=True)
        beats.start()
        try:
            with self._connection.makefile("rb") as file:
                entries = read_entries(file)
                self._compare(next(entries, None))
                for _ in replay(entries, self.scheduler, self):
                    pass
        except CutShort as error:
            raise LeaderLost("the leader has ended without closing its recording") from error
        except (DamagedRecording, Divergence, ValueError) as error:
            self._say(LAST_WORDS + in_one_line(error).encode())
            raise
        except ConnectionError as error:
            raise LeaderLost(f"the connection to the leader is lost: {error}") from error
        finally:
            self._has_ended.set()
            beats.join()

    def start(self, batch: Batch) -> Callable[[], object]:
        """Begin to compute a batch, as the leader does."""
        self.num_steps += 1
        if self._overlap:
            return self.runner.start(batch)
        self.runner.run(batch)
        return _nothing

    def resize(self, num_pages: int, copies: tuple[PageCopy, ...]) -> None:
        """As the leader does."""
        self.runner.resize(num_pages, copies)

    def _compare(self, header: Entry | None) -> None:
        """Raise unless the leader's engine is made of the same."""
        if not isinstance(header, Header):
            raise LeaderLost("the leader has ended before its engine was built")
        own = msgspec.msgpack.decode(msgspec.msgpack.encode(self._facts))
        for name, mine, leaders in differences(own, header.facts):
            raise ValueError(f"{name} is {mine!r} here, and {leaders!r} on the leader; make them equal")

    def _tell(self) -> None:
        """Say how far this rank is, again and again."""
        while not self._has_ended.wait(BEAT_S):
            self._say(f"{self.num_steps} {self._inside()}".encode())

    def _say(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # who reads the recording learns that the leader is gone
            self._connection.sendall(line.replace(b"\n", b" ") + b"\n")


def differences(ours: Any, theirs: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The values that differ in two nested mappings, by their dotted names."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            yield from differences(ours.get(key), theirs.get(key), f"{name}.{key}" if name else key)
    elif ours != theirs:
        yield name, ours, theirs


def _nothing() -> None:
    pass
