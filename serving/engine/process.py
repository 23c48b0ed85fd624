"""Start the engine's process with its socket, relay its log, report why it ended, and end it.

A spare process may be started beside an engine that serves: it imports at low priority, and builds its engine
after `wake`. Messages over the socket are defined in `messages`; replacing a lost engine is left to
`supervisor`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import zmq

from recipes.cluster import spare_process
from recipes.schema.recipe import ROOT
from serving.engine.messages import BEGIN, HURRY

log = logging.getLogger(__name__)

WORKER, SPARE = "serving.engine.main", "recipes.cluster.spare_process"
_LAST_WORDS_S = 1.0  # time to read its last lines after its end
_ENDING_S = 0.25  # time for it to end by itself
_CLOSING_S = 1.5  # the same for one that serves, to close its recording and take wrong pages off its tier
_KILLED_S = 10.0  # time for the system to remove a killed process
_LONGEST_LINE = 1 << 16


class EngineLost(Exception):
    """The process ended, or was ended because it did not answer; the message says how."""


class EngineSocket:
    """The server's end of the socket to an engine, for one event loop and one receiver.

    A turn of the loop takes all messages that have arrived. zmq.asyncio takes them one by one, each with a
    future and some looks at the socket, which costs more than all else that is done for a short message.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # the number of messages is bounded by the requests that the server accepts
        self._socket.setsockopt(zmq.LINGER, 0)
        self._loop: asyncio.AbstractEventLoop | None = None  # The loop of `bind`
        self._received: deque[bytes] = deque()
        self._receiver: asyncio.Future[None] | None = None

    def bind(self, address: str) -> None:
        """Wait for the engine at an address; raises zmq.ZMQError."""
        self._socket.bind(address)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._take)

    def send(self, message: bytes) -> None:
        """Send a message, which waits in memory until the engine reads it; one that has ended gets none."""
        with contextlib.suppress(zmq.Again):  # no peer: the end of its process is about to be noticed
            self._socket.send(message, zmq.NOBLOCK)
        self._take()  # the descriptor tells of a message once, and the socket may have heard it while it sent

    async def recv(self) -> bytes:
        """Wait for a message and return it."""
        while not self._received:
            self._receiver = asyncio.get_running_loop().create_future()
            await self._receiver
        return self._received.popleft()

    def close(self) -> None:
        """Close the socket, unless it is; what has not been sent or received is lost."""
        if self._socket.closed:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._context.term()

    def _take(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._received.append(self._socket.recv(zmq.NOBLOCK))
        if self._received and self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)


class EngineProcess:
    """One life of an engine, and the socket to it; `arguments` are the worker's, after its socket.

    The process may be started long before it is used: it then imports what it needs, and waits for `wake`.
    """

    def __init__(self, arguments: Sequence[str], *, is_spare: bool = False) -> None:
        self._arguments = arguments
        self._is_spare = is_spare
        self._is_hurried = self._is_ready = False
        self._folder = Path(tempfile.mkdtemp(prefix="engine-"))  # only this user can enter it
        self.socket = EngineSocket()
        self._process: asyncio.subprocess.Process | None = None
        self._group: int | None = (
            None  # process group of this process and those that it starts, such as further ranks
        )
        # The last warning or error of its log, and when it came.
        self._complaints: list[tuple[float, str]] = []

    @staticmethod
    async def started(arguments: Sequence[str], *, is_spare: bool = False) -> EngineProcess:
        """Return a process that waits for `wake`; raises EngineLost where the system has no room for it.

        A spare process prepares beside an engine that serves, and yields the processor to it until `wake`.
        """
        engine, is_started = None, False
        try:
            engine = EngineProcess(arguments, is_spare=is_spare)
            await engine._start()
            is_started = True
            return engine
        except (OSError, zmq.ZMQError) as error:
            raise EngineLost(f"the engine's process cannot be started: {error}") from error
        finally:
            if engine is not None and not is_started:
                await engine.end()

    @property
    def pid(self) -> int | None:
        """The id of the process, once it runs."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process is not None and self._process.returncode is None

    async def _start(self) -> None:
        address = f"ipc://{self._folder}/socket"
        try:
            self.socket.bind(address)
        except (zmq.ZMQError, UnicodeEncodeError) as error:  # the system takes some 100 bytes, ZeroMQ UTF-8
            why = os.strerror(error.errno or 0) if isinstance(error, zmq.ZMQError) else "it is not UTF-8"
            there = f"there can be no socket in {str(self._folder)!r}"
            raise OSError(f"{there}: {why}; set TMPDIR to a folder with a short path") from error
        creation = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *((SPARE,) if self._is_spare else ()),
                WORKER,
                address,
                *self._arguments,
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE,  # the pipe closes when this process ends, however it ends
                # A pipe, since the engine must not wait where our own log cannot be written.
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # a terminal's ctrl-C is for the server
            )
        )
        creation.add_done_callback(self._adopt)  # also where this is cancelled at the same time
        try:
            await asyncio.wait([creation])
        except asyncio.CancelledError:
            # Cancelled once, asyncio kills the process and waits for its pipes. It would wait for ever at the
            # end of asyncio.run, which has cancelled the task that connects them as well.
            creation.cancel()
            await asyncio.wait([creation], timeout=_ENDING_S)
            creation.cancel()
            raise
        creation.result()

    def _adopt(self, creation: asyncio.Future[asyncio.subprocess.Process]) -> None:
        """Hold the process that was created, if it was, so that `end` ends it."""
        if creation.cancelled() or creation.exception() is not None:
            return
        self._process = creation.result()
        self._group = self._process.pid  # it is the first process of its session
        self._relaying = asyncio.ensure_future(self._relay())

    def hurry(self) -> None:
        """Let a spare process that still imports stop yielding the processor, since it may be needed soon."""
        if not self._is_hurried:
            self._is_hurried = True
            self._say(HURRY)

    def wake(self, learned: str) -> None:
        """Let the process build its engine and serve; a spare one stops yielding the processor.

        `learned` is from the last beat of the engine whose place it takes; empty if there was none.
        """
        self._say(BEGIN + learned.encode() + b"\n")

    def _say(self, word: bytes) -> None:
        """Write a word to the process; one that has ended gets none, because uvloop's pipe would raise."""
        if not self.is_running:
            return
        assert self._process is not None, "not started"
        assert self._process.stdin is not None
        self._process.stdin.write(word)
        if self._is_spare:
            spare_process.restore_priority(self._process.pid)

    def note_ready(self) -> None:
        """Note that the engine serves, and remove the socket's file, so that a kill leaves no file behind.

        Both ends hold the socket. Its file may already have been removed by whatever cleans temporary
        folders.
        """
        self._is_ready = True
        shutil.rmtree(self._folder, ignore_errors=True)

    async def ended(self) -> None:
        """Wait for the end of the process, and raise EngineLost."""
        assert self._process is not None, "not started"
        status = await self._process.wait()
        since_s = time.monotonic() - _LAST_WORDS_S
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        await asyncio.wait([self._relaying], timeout=_LAST_WORDS_S)
        raise EngineLost(f"the engine's process ended {how}{self.complaint(since_s)}")

    def complaint(self, since_s: float) -> str:
        """Return its last warning or error since then, if any, as a suffix for a message about its end."""
        return "".join(f": {text}" for at_s, text in self._complaints if at_s >= since_s)

    async def end(self, *, in_order: bool = True) -> None:
        """Let the process end, kill it if it does not, and remove its files.

        Where it is not to end `in_order`, it is killed at once: ranks of other machines, which end for good
        where their leader closes its engine, are then started again for the next one.
        """
        if self._process is not None:
            assert self._process.stdin is not None
            if in_order:
                self._process.stdin.close()
                await self._has_ended(_CLOSING_S if self._is_ready else _ENDING_S)
            if self._group is not None:  # Further ranks must not wait for one that a driver keeps.
                with contextlib.suppress(ProcessLookupError):  # it and all that it has started have ended
                    os.killpg(self._group, signal.SIGKILL)
                self._group = None  # other processes may get its number from now on
            await self._killed()
            self._process.stdin.close()
            await asyncio.wait([self._relaying], timeout=_LAST_WORDS_S)
            self._relaying.cancel()
        self.socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _killed(self) -> None:
        """Kill the process if it has not ended.

        A driver that hangs may keep it even so; that is not waited for.
        """
        assert self._process is not None, "not started"
        if self._process.returncode is None:
            self._process.kill()
        if not await self._has_ended(_KILLED_S):
            log.error(
                "the engine's process %s was killed %g s ago and is still there: the system keeps it, perhaps"
                " in a device's driver, with the memory that it holds",
                self._process.pid,
                _KILLED_S,
            )

    async def _has_ended(self, limit_s: float) -> bool:
        """Wait for the end of the process, and return whether it came in time."""
        assert self._process is not None, "not started"
        # Not `wait_for`: Python 3.11 loses a cancellation there that comes with the end
        ending = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait([ending], timeout=limit_s)
            return ending.done()
        finally:
            ending.cancel()

    async def _relay(self) -> None:
        """Copy its log lines into ours; its own lines begin with a level, those of libraries do not."""
        assert self._process is not None
        assert self._process.stderr is not None
        rest = b""
        while chunk := await self._process.stderr.read(1 << 16):
            *lines, rest = re.split(rb"[\r\n]+", rest[-_LONGEST_LINE:] + chunk)
            for line in filter(None, lines):
                level, _, message = line.decode("utf-8", "replace").partition(" ")
                if level in ("INFO", "WARNING", "ERROR"):
                    log.log(getattr(logging, level), "%s", message)
                    if level != "INFO":
                        self._complaints = [(time.monotonic(), message.removeprefix("engine: "))]
                else:
                    log.warning("engine: %s", line.decode("utf-8", "replace"))
