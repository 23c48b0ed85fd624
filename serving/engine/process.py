"""How is the engine's process started, watched and ended?"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
import zmq.asyncio

from recipes.schema.recipe import ROOT
from serving.engine.messages import FromEngine, Ready, ToEngine, decode_from_engine, encode

log = logging.getLogger(__name__)

WORKER, SPARE = "serving.engine.worker", "serving.engine.spare"
_LOOKS_S = 0.1  # between looks whether it still answers
_LAST_WORDS_S = 1.0  # to read them, after its end
_LONGEST_LINE = 1 << 16


class EngineLost(Exception):
    """The process ended, or was ended because it did not answer; says how."""


class EngineProcess:
    """One life of an engine: `arguments` are the worker's, after its socket.

    It may be started long before it is to live: it then imports what it needs, and waits.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._folder = Path(tempfile.mkdtemp(prefix="engine-"))  # that only this user can enter
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # bounded by the requests that are let in
        self._socket.setsockopt(zmq.LINGER, 0)
        self._process: asyncio.subprocess.Process | None = None
        self._done: Path | None = None  # a spare process makes it
        self._heard_s = time.monotonic()
        self._is_ready = False

    @staticmethod
    async def started(arguments: Sequence[str], *, is_spare: bool = False) -> EngineProcess:
        """A process that waits to live, a spare one beside an engine that serves; raises EngineLost where the
        system has no room for it.
        """
        engine = None
        try:
            engine = EngineProcess(arguments)
            engine._done = engine._folder / "imported" if is_spare else None
            await engine._start()
            return engine
        except (OSError, zmq.ZMQError) as error:
            raise EngineLost(f"the engine's process cannot be started: {error}") from error
        finally:
            if engine is not None and engine._process is None:
                await engine.end()

    @property
    def pid(self) -> int | None:
        """Of the process, once it runs."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def is_prepared(self) -> bool:
        """Whether a spare process has imported what it is to; until then it gives way to all others."""
        return self._done is None or self._done.exists()

    def send(self, message: ToEngine) -> None:
        """Tell the engine; it hears it after the step that it is at."""
        self._socket.send(encode(message), zmq.NOBLOCK)

    async def _start(self) -> None:
        address = f"ipc://{self._folder}/socket"
        self._socket.bind(address)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *((SPARE, str(self._done)) if self._done else ()),
            WORKER,
            address,
            *self._arguments,
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,  # closes when this process ends, however it does
            stderr=asyncio.subprocess.PIPE,  # it must not wait where our own log cannot be written
            start_new_session=True,  # a terminal's ctrl-C is for the server
        )
        self._relaying = asyncio.ensure_future(self._relay())

    async def live(
        self, hear: Callable[[FromEngine], None], start_timeout_s: float, step_timeout_s: float
    ) -> None:
        """Let it live, and hand over what it tells, for as long as it does; then raises EngineLost."""
        assert self._process is not None, "not started"
        assert self._process.stdin is not None
        self._heard_s = time.monotonic()
        self._process.stdin.write(b"!")
        tasks = [
            asyncio.ensure_future(each)
            for each in (self._hear(hear), self._ended(), self._silent(start_timeout_s, step_timeout_s))
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await next(iter(done))  # each ends by raising
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.end()

    async def end(self) -> None:
        """Kill it, if it still runs, and leave nothing behind."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
            await asyncio.wait([self._relaying], timeout=_LAST_WORDS_S)
            self._relaying.cancel()
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _relay(self) -> None:
        """Put what it says into our log; it begins a line with the level, and who else writes does not."""
        assert self._process is not None
        assert self._process.stderr is not None
        rest = b""
        while chunk := await self._process.stderr.read(1 << 16):
            *lines, rest = re.split(rb"[\r\n]+", rest[-_LONGEST_LINE:] + chunk)
            for line in filter(None, lines):
                level, _, message = line.decode("utf-8", "replace").partition(" ")
                if level in ("INFO", "WARNING", "ERROR"):
                    log.log(getattr(logging, level), "%s", message)
                else:
                    log.warning("engine: %s", line.decode("utf-8", "replace"))

    async def _hear(self, hear: Callable[[FromEngine], None]) -> None:
        while True:
            message = decode_from_engine(await self._socket.recv())
            self._heard_s = time.monotonic()
            if isinstance(message, Ready):
                self._is_ready = True
                shutil.rmtree(self._folder)  # both ends hold the socket; a kill leaves no file behind
            hear(message)

    async def _ended(self) -> None:
        assert self._process is not None
        status = await self._process.wait()
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        raise EngineLost(f"the engine's process ended {how}")

    async def _silent(self, start_timeout_s: float, step_timeout_s: float) -> None:
        num_silent = (
            0  # looks; after the first of them, what this process has slept through can still be heard
        )
        while num_silent < 2:
            await asyncio.sleep(_LOOKS_S)
            silent_s = time.monotonic() - self._heard_s
            limit_s = step_timeout_s if self._is_ready else start_timeout_s
            num_silent = num_silent + 1 if silent_s > limit_s else 0
        key = "step_timeout_s" if self._is_ready else "start_timeout_s"
        raise EngineLost(f"the engine has told nothing for {silent_s:.1f} s (server.{key} is {limit_s:g})")
