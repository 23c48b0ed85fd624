"""How is there always an engine? One is started, watched, and followed by another when it ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

from recipes.schema.server_section import ServerSection
from serving.answers.failures import Unavailable
from serving.engine.messages import Facts, FromEngine, Ready, Stepped, ToEngine
from serving.engine.process import EngineLost, EngineProcess
from serving.metrics.observer import Observer

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "lost", "draining", "dead"]
_LONGEST_PAUSE_S = 30.0  # between starts of engines that end before they have made a step
_SPARE_AFTER_S = 5.0  # that an engine serves undisturbed; then a process is kept ready to follow it


class Supervisor:
    """Keeps an engine's process.

    `state` is `starting` until the first engine is ready, `lost` from the end of one until another is ready,
    `draining` when the server is about to end, and `dead` when the first engine could not start, or at the
    end. `arguments` gives the worker's, for each life. `hear` is given what engines tell, `lose` why one
    ended.
    """

    def __init__(
        self,
        arguments: Callable[[int], Sequence[str]],
        limits: ServerSection,
        hear: Callable[[FromEngine], None],
        lose: Callable[[str], None],
        observer: Observer,
    ) -> None:
        self.state: State = "starting"
        self.facts: Facts | None = None  # of the engine that is ready
        self.trouble = ""  # what the last engine ended with
        self.has_failed = False  # there will be no engine, and nobody asked for that
        self._arguments = arguments
        self._limits = limits
        self._hear_rest = hear
        self._lose = lose
        self._observer = observer
        self._engine: EngineProcess | None = None
        self._spare: EngineProcess | None = None
        self._has_worked = False  # this engine, at a step
        self._lives = itertools.count(1)
        self._life: asyncio.Task[None] | None = None
        self._born_s = 0.0
        self._changed = asyncio.Event()

    def start(self) -> None:
        """Start the first engine, in the running event loop; it is ready later."""
        self._life = asyncio.get_running_loop().create_task(self._live())
        self._life.add_done_callback(self._over)

    async def close(self) -> None:
        """End the engine; no other follows."""
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)
        if self._spare is not None:
            await self._spare.end()
        self.become("dead")

    def send(self, message: ToEngine) -> None:
        """Tell the engine; without one, nobody needs to know."""
        if self._engine is not None and self.facts is not None:
            self._engine.send(message)

    @property
    def pid(self) -> int | None:
        """Of the engine's process, if there is one."""
        return None if self._engine is None else self._engine.pid

    @property
    def why_not(self) -> str:
        """Why there is no answer now."""
        return {
            "starting": "the engine is starting",
            "lost": f"the engine is being started anew: {self.trouble}",
            "draining": "the server is shutting down",
        }.get(self.state, f"there is no engine: {self.trouble or 'the server is shutting down'}")

    def check_ready(self) -> None:
        """Raise Unavailable unless requests are taken."""
        if self.state != "ready":
            self._observer.rejected(self.state)
            raise Unavailable(self.why_not)

    async def ready(self) -> None:
        """Wait for an engine; raises Unavailable if there will be none."""
        await self.until(lambda: self.state in ("ready", "draining", "dead"))
        if self.state == "dead":
            raise Unavailable(self.why_not)

    def become(self, state: State) -> None:
        """Change the state."""
        self.state = state
        self.notify()

    def notify(self) -> None:
        """Let those who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until it does."""
        while not holds():
            await self._changed.wait()

    async def _live(self) -> None:
        """One engine after the other."""
        pause_s = 0.0
        while True:
            self._born_s, self._has_worked = time.monotonic(), False
            spare = asyncio.ensure_future(self._keep_spare())
            try:
                await self._live_once()
            finally:
                spare.cancel()
                await asyncio.gather(spare, return_exceptions=True)
            if self.state in ("dead", "draining"):
                return
            pause_s = 0.0 if self._has_worked else min(2 * pause_s + 1, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _live_once(self) -> None:
        """One engine to its end, of which all are told before anybody can ask again."""
        try:
            self._engine = await self._next()
            await self._engine.live(self._hear, self._limits.start_timeout_s, self._limits.step_timeout_s)
        except EngineLost as error:
            self.trouble = str(error)
        finally:
            self._engine = self.facts = None
        log.error("%s", self.trouble)
        self._observer.lost(self.trouble)
        self.has_failed = self.state == "starting"
        if self.state != "draining":
            self.become("dead" if self.has_failed else "lost")
        self._lose(self.trouble)

    async def _next(self) -> EngineProcess:
        """The spare process, if it is there, or another."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.is_running and spare.is_prepared:
            return spare
        if spare is not None:
            await spare.end()
        return await EngineProcess.started(self._arguments(next(self._lives)))

    async def _keep_spare(self) -> None:
        """When an engine has served for a while, have the next one's process import what it needs."""
        if not self._limits.spare_engine:
            return
        await self.until(lambda: self.facts is not None)
        await asyncio.sleep(_SPARE_AFTER_S)
        try:
            arguments = self._arguments(next(self._lives))
            self._spare = await EngineProcess.started(arguments, is_spare=True)
        except EngineLost as error:
            log.warning("there is no spare process: %s", error)

    def _hear(self, message: FromEngine) -> None:
        if not isinstance(message, Ready):
            self._has_worked = self._has_worked or (
                isinstance(message, Stepped) and message.times.num_spans > 0
            )
            self._hear_rest(message)
            return
        self.facts = message.facts
        start_s = time.monotonic() - self._born_s
        log.info("ready after %.1f s, process %s", start_s, self.pid)
        self._observer.ready(message.facts, start_s)
        if self.state in ("starting", "lost"):
            self.become("ready")

    def _over(self, life: asyncio.Task[None]) -> None:
        """No engine comes after this."""
        if not life.cancelled() and life.exception() is not None:
            log.error("a defect of the server", exc_info=life.exception())
            self.trouble = f"a defect of the server: {life.exception()!r}"
            self.has_failed = True
            self.become("dead")
            self._lose(self.trouble)
