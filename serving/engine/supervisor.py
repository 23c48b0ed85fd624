"""Keep an engine running: start one, watch it, and replace it when it ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from borders.refusal import without_paths
from borders.start_report import StartReport
from recipes.schema.server_section import ServerSection
from serving.engine.messages import (
    Beat,
    EngineFacts,
    FromEngine,
    Pause,
    Ready,
    Starting,
    Stepped,
    ToEngine,
    decode_from_engine,
    encode,
)
from serving.engine.process import EngineLost, EngineProcess
from serving.engine.silence import HUNG, Silence
from serving.failures import UNKNOWN_S, Unavailable

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "lost", "draining", "dead"]
_CHECKS_S = 0.1  # interval between checks whether the engine still answers
_LONGEST_PAUSE_S = 30.0  # longest pause between starts of engines that end before they have made a step
_SPARE_AFTER_S = 5.0  # undisturbed service after which a spare process is kept
LONGEST_HINT_S = 60.0  # longest delay after which a client is told to ask again, however long a start takes


class Supervisor:
    """Keeps an engine's process running, and passes messages to and from it.

    `state` is `starting` until the first engine is ready, `lost` from the end of one engine until another is
    ready, `draining` when the server is about to end, and `dead` when the first engine could not start, or at
    the end. `arguments` returns the worker's arguments for each life. `hear` receives the engines' messages,
    `lose` the reason why an engine ended.
    """

    def __init__(
        self,
        arguments: Callable[[int], Sequence[str]],
        limits: ServerSection,
        hear: Callable[[FromEngine], None],
        lose: Callable[[str], None],
        *,
        leads_others: bool = False,
    ) -> None:
        self._leads_others = leads_others  # the engine leads ranks of other machines
        self.state: State = "starting"
        self.facts: EngineFacts | None = None  # facts of the engine, while it is ready
        self.long_factors = False  # kept from the latest engine's facts, for answers that it began
        self.trouble = ""  # why the last engine ended
        self.starting = StartReport(say=lambda text: log.info("start: %s", text))  # what a start does
        self.has_failed = False  # there will be no engine, although nobody asked for that
        self.start_s = 0.0  # how long the last start took
        self._ready_s = math.inf  # when this engine became ready
        self._had_spare = False  # whether there was a spare process when this engine was started
        # How long the last start took, with a spare process and without.
        self._starts_s: dict[bool, float] = {}
        self._pause_s = 0.0  # pause before the next start
        self._due_s = 0.0  # when the next engine should be ready
        self._arguments = arguments
        self._limits = limits
        self._hear = hear
        self._lose = lose
        self._engine: EngineProcess | None = None
        self._spare: EngineProcess | None = None
        self._has_worked = False  # this engine has made a step
        self._learned = ""  # what the last engine has told its successor
        self._lives = itertools.count(1)
        self._life: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None  # the end of the last process
        # Silence of the engine, or of the next one.
        self.silence = Silence(time.monotonic(), limits.start_timeout_s)
        self._changed = asyncio.Event()

    def start(self) -> None:
        """Start the first engine, in the running event loop; `ready` waits for it."""
        self._life = asyncio.get_running_loop().create_task(self._live())
        self._life.add_done_callback(self._over)

    async def close(self) -> None:
        """End the engine; no other follows."""
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)
        if self._spare is not None:
            await self._spare.end()
        if self._ending is not None:
            await asyncio.gather(self._ending, return_exceptions=True)  # `_over` has told what failed
        self.become("dead")

    def send(self, message: ToEngine) -> None:
        """Send a message to the engine, which reads it after its current step.

        Without an engine, nothing is done.
        """
        if self._engine is not None and self.facts is not None:
            self._engine.socket.send(encode(message))

    @property
    def pid(self) -> int | None:
        """The id of the engine's process, if there is one."""
        return None if self._engine is None else self._engine.pid

    @property
    def silent_s(self) -> float:
        """How long the engine has sent nothing."""
        return time.monotonic() - self.silence.heard_s

    @property
    def status(self) -> str:
        """The state, or `slow` where the engine should have ended a step or sent a beat by now."""
        is_slow = self.state == "ready" and self.silent_s > self.silence.slow_s
        return "slow" if is_slow else self.state

    @property
    def stage(self) -> dict[str, str]:
        """What the engine does while it starts, as the field `doing`; nothing otherwise."""
        return {"doing": self.starting.text} if self.starting.text else {}

    @property
    def why_not(self) -> str:
        """The reason why there is no answer now."""
        doing = f" ({self.starting.text})" if self.starting.text else ""
        return {
            "starting": f"the engine is starting{doing}",
            "lost": f"the engine is being started anew{doing}: {self.trouble}",
            "draining": "the server is shutting down",
        }.get(self.state, f"there is no engine: {self.trouble or 'the server is shutting down'}")

    @property
    def ready_in_s(self) -> float:
        """The estimated time until another engine is ready, as a hint for clients.

        It follows from the duration of the last start.
        """
        if self.state != "lost":
            return UNKNOWN_S
        return min(max(0.0, self._due_s - time.monotonic()), LONGEST_HINT_S)

    async def ready(self) -> None:
        """Wait for an engine; raises Unavailable if there will be none."""
        await self.until(lambda: self.state in ("ready", "draining", "dead"))
        if self.state == "dead":
            raise Unavailable(self.why_not, self.ready_in_s)

    async def dead(self) -> None:
        """Wait until there can be no engine any more."""
        await self.until(lambda: self.state == "dead")

    def become(self, state: State) -> None:
        """Change the state."""
        self.state = state
        self.notify()

    def notify(self) -> None:
        """Let those who wait in `until` check their conditions again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until the condition holds."""
        while not holds():
            await self._changed.wait()

    async def _live(self) -> None:
        """Run one engine after the other."""
        while True:
            self._has_worked, self._ready_s = False, math.inf
            spare = asyncio.ensure_future(self._keep_spare())
            try:
                await self._live_once()
            finally:
                spare.cancel()
                [trouble] = await asyncio.gather(spare, return_exceptions=True)
                if isinstance(trouble, Exception):  # this engine has served without a spare process
                    log.error("a defect of the server: no spare process is kept", exc_info=trouble)
            if self.state in ("dead", "draining"):
                return
            await asyncio.sleep(self._pause_s)

    async def _live_once(self) -> None:
        """Run one engine to its end; those who wait for it hear of the end before anybody can ask again.

        They do not wait for the end of its process, which takes long where a driver hangs.
        """
        born_s, self._had_spare = time.monotonic(), self._spare is not None
        engine, in_order = None, True
        try:
            try:
                engine = self._engine = await self._next()
                await self._attend(engine, born_s)
            except EngineLost as error:
                # Another may follow, which needs those ranks, and they end for good where their leader closes
                in_order = self.state == "draining" or not self._leads_others
                log.error("%s", error)
                self.trouble = without_paths(str(error))
            finally:
                self._engine = self.facts = None
                self.starting.tell("")
            self._tell_end()
        finally:
            if engine is not None:
                self._ending = asyncio.ensure_future(engine.end(in_order=in_order))
                await asyncio.shield(self._ending)  # `close` waits for it.

    def _tell_end(self) -> None:
        """Say that the engine is lost, and decide when the next one is due."""
        if self._spare is not None:
            self._spare.hurry()  # also where a pause is due first
        # It ran for long, even if without requests.
        has_lasted = time.monotonic() - self._ready_s >= _LONGEST_PAUSE_S
        self._pause_s = (
            0.0 if self._has_worked or has_lasted else min(2 * self._pause_s + 1, _LONGEST_PAUSE_S)
        )
        self._due_s = time.monotonic() + self._pause_s + self._start_expected_s()
        self.has_failed = self.state == "starting"
        if self.state != "draining":
            self.become("dead" if self.has_failed else "lost")
        self._lose(self.trouble)

    def _start_expected_s(self) -> float:
        # A start with a spare process takes no longer than one without, so that time serves as an estimate.
        return self._starts_s.get(self._spare is not None, min([UNKNOWN_S, *self._starts_s.values()]))

    async def _attend(self, engine: EngineProcess, born_s: float) -> None:
        """Let a process serve, and pass on what it sends; raises EngineLost at its end, or if it must end."""
        self.silence = Silence(time.monotonic(), self._limits.start_timeout_s)
        engine.wake(self._learned)
        self.starting.stages_s.clear()
        self.starting.tell("importing")
        works = (self._listen(engine, born_s), engine.ended(), self._watch())
        tasks = [asyncio.ensure_future(each) for each in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await next(iter(done))  # each of them ends by raising
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self, engine: EngineProcess, born_s: float) -> None:
        while True:
            try:
                message = decode_from_engine(await engine.socket.recv())
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise EngineLost(f"the engine's process says what none says: {error}") from error
            if isinstance(message, Starting):  # the limit of a start counts from its beginning
                self.starting.tell(message.doing)
                continue
            self.silence.hear(time.monotonic())
            if isinstance(message, Ready):
                engine.note_ready()
                self._begin(message, self.silence.heard_s - born_s)
            elif isinstance(message, Pause):
                self.silence.allow(message.most_s)
            elif isinstance(message, Beat):
                self._learned = message.learned
            elif isinstance(message, Stepped) and message.times.num_spans > 0:
                self._has_worked = True
            self._hear(message)

    def _begin(self, message: Ready, start_s: float) -> None:
        self.facts, self.start_s = message.facts, start_s
        self.long_factors = message.facts.long_factors
        self.starting.tell("")
        self._starts_s[self._had_spare] = start_s
        self._ready_s = time.monotonic()
        expected_s = message.facts.expected_step_s
        self.silence = Silence(self.silence.heard_s, self._limits.step_timeout_s, expected_s)
        log.info("ready after %.1f s, process %s", start_s, self.pid)
        if self.state in ("starting", "lost"):
            self.become("ready")

    async def _watch(self) -> None:
        """Raise EngineLost when the engine has been silent for too long."""
        num_silent = 0  # checks in a row; between two of them, messages that waited for us can be read
        while num_silent < 2:
            due_s = time.monotonic() + _CHECKS_S
            await asyncio.sleep(_CHECKS_S)
            self.starting.show()
            now_s = time.monotonic()
            self.silence.excuse(max(0.0, now_s - due_s), now_s)
            num_silent = num_silent + 1 if self.silent_s > self.silence.limit_s else 0
        key = "start_timeout_s" if self.facts is None else "step_timeout_s"
        fixed_s, limit_s = self.silence.fixed_s, self.silence.limit_s
        why = f"{HUNG} times the longest silence to be expected; server.{key} can fix it"
        complaint = "" if self._engine is None else self._engine.complaint(self.silence.heard_s)
        raise EngineLost(
            f"the engine has sent nothing for {self.silent_s:.1f} s; it may be silent for {limit_s:.3g} s"
            f" ({f'server.{key}' if fixed_s else why}){complaint}"
        )

    async def _next(self) -> EngineProcess:
        """Return the spare process if it runs, or a new one.

        A spare process that still imports is ahead of a new one, by seconds on busy cores.
        """
        spare, self._spare = self._spare, None
        if spare is not None and spare.is_running:
            return spare
        if spare is not None:
            await spare.end()
        return await EngineProcess.started(self._arguments(next(self._lives)))

    async def _keep_spare(self) -> None:
        """Start the next engine's process once an engine has served for a while, and let it import.

        A slow engine may be hung: then there must be a spare process, and it stops yielding the processor.
        """
        if not self._limits.spare_engine:
            return
        await self.until(lambda: self.facts is not None)
        usual_s = time.monotonic() + _SPARE_AFTER_S
        earliest_s = 0.0  # when a slow engine may get another spare process, if one has ended
        while True:
            now_s, spare, is_slow = time.monotonic(), self._spare, self.status == "slow"
            if spare is not None and not spare.is_running:
                await spare.end()  # its group's number may be that of other processes later
                self._spare = spare = None
            if spare is not None:
                if is_slow:
                    spare.hurry()
            elif now_s >= (earliest_s if is_slow else usual_s):
                usual_s, earliest_s = math.inf, now_s + _SPARE_AFTER_S
                await self._start_spare()
                continue
            await asyncio.sleep(_CHECKS_S)

    async def _start_spare(self) -> None:
        try:
            arguments = self._arguments(next(self._lives))
            self._spare = await EngineProcess.started(arguments, is_spare=True)
        except EngineLost as error:
            log.warning("there is no spare process: %s", error)

    def _over(self, life: asyncio.Task[None]) -> None:
        """Handle a defect of the supervising task, after which there is no engine."""
        if not life.cancelled() and life.exception() is not None:
            log.error("a defect of the server", exc_info=life.exception())
            self.trouble = without_paths(f"a defect of the server: {life.exception()!r}")
            self.has_failed = True
            self.become("dead")
            self._lose(self.trouble)
