"""Give an operator's orders to the engine: pause, sleep, and other weights.

One order is carried out at a time. What was ordered holds for each further engine, too: one that starts in
the place of a lost one gets the weights, the sleep and the pause again before it gets requests. How an engine
carries orders out is left to `serving/engine/fence.py`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from borders.refusal import BadRequest
from borders.version import VERSION
from recipes.schema.recipe import Recipe
from serving import fingerprint
from serving.answers.answers import AnswerStream
from serving.engine.messages import (
    DropWeights,
    Halt,
    Order,
    OrderDone,
    PutWeights,
    ReadWeights,
    Sleep,
    WakeUp,
)
from serving.engine.supervisor import Supervisor
from serving.failures import Failure, SetAside, Unavailable
from serving.fingerprint import ServedWeights
from serving.roots import Root

Running = Literal["wait", "abort", "refuse"]
LONGEST_VERSION = 64  # characters
# A name of POSIX shared memory, without its slash
SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_READ = ("*.json", "*.safetensors")  # files of a checkpoint that are read

log = logging.getLogger(__name__)


class Orders:
    """The orders that an engine has been given, and the state that they leave.

    `requests` returns the answers that are open, and `abort` ends one of them.
    """

    def __init__(
        self,
        recipe: Recipe,
        engine: Supervisor,
        requests: Callable[[], Sequence[AnswerStream]],
        abort: Callable[[AnswerStream, Failure], None],
    ) -> None:
        folder = recipe.server.weights_root
        self.root = None if folder is None else Root(folder, "server.weights_root")
        self.weights = ServedWeights(fingerprint.of_weights(recipe), fingerprint.of(recipe, VERSION))
        self.is_paused = self.is_asleep = False
        self.num_updates = 0
        self.missing = ""  # why the engine has not the weights that were ordered; empty: it has
        self._recipe, self._engine, self._requests, self._abort = recipe, engine, requests, abort
        self._source: ReadWeights | None = None  # the weights' origin; None: the recipe
        self._tensors = ""  # digest of the tensors in its folder, if it is one
        self._is_closing = False  # requests are refused, although the engine does not sleep yet
        self._is_restoring = False
        self._is_given = False  # an operator's order is being carried out
        self._lock = asyncio.Lock()  # held by it, or while a new engine is given what was ordered
        # The order that the engine has, with what follows from it
        self._given: tuple[asyncio.Future[OrderDone], Callable[[], None]] | None = None
        self._works: set[asyncio.Task[Any]] = set()

    @property
    def why_not(self) -> str:
        """The reason why requests are refused; empty if they are not."""
        if self.missing:
            return f"the engine was started anew without the weights that were ordered: {self.missing}"
        if self._is_restoring:
            return "the engine was started anew, and is given the weights and the state that were ordered"
        if self.is_asleep or self._is_closing:
            return "the engine sleeps, until an operator wakes it"
        return ""

    @property
    def of_answers(self) -> ServedWeights | None:
        """The weights that answers name; None where they cannot change."""
        return None if self.root is None else self.weights

    async def pause(self, *, is_on: bool) -> None:
        """Let the engine begin no step, or go on; raises Unavailable where it ends meanwhile."""

        def done() -> None:
            self.is_paused = is_on

        await self._alone(self._carry_out(Halt(is_on), done))

    async def sleep(self, running: Running) -> int:
        """Give back the memory of the pages, and return its bytes; raises BadRequest or a Failure."""
        self._check_tier()
        if self.is_asleep:
            raise BadRequest(None, "the engine sleeps already", fix="wake it by POST /wake")
        num_bytes: int = await self._alone(self._fall_asleep(running))
        return num_bytes

    async def wake(self) -> int:
        """Allocate the pages again, and return their bytes; raises BadRequest or a Failure."""
        if not self.is_asleep:
            raise BadRequest(None, "the engine does not sleep")

        def done() -> None:
            self.is_asleep = False

        woken: OrderDone = await self._alone(self._carry_out(WakeUp(), done))
        return woken.num_bytes

    async def update_from_folder(self, path: str, version: str | None, running: Running) -> ServedWeights:
        """Replace the weights by those of a checkpoint's folder below the root.

        Raises BadRequest, with all weights as they were, or a Failure.
        """
        self._check_tier()
        assert self.root is not None, "there is no route without a root"
        root = self.root

        def look() -> tuple[Path, ServedWeights, str]:
            folder = root.within(path, "path")
            if not folder.is_dir():
                raise BadRequest("path", "is no folder", value=path)
            files = sorted(file for pattern in _READ for file in folder.glob(pattern))
            root.check_links(files, path, "path")
            model = replace(self._recipe.model, path=folder, config=None, weights="checkpoint")
            recipe = replace(self._recipe, model=model)
            name = version or fingerprint.of_weights(recipe)
            weights = ServedWeights(name, fingerprint.of(recipe, VERSION))
            return folder, weights, fingerprint.of_tensors(folder)

        try:
            folder, weights, tensors = await asyncio.to_thread(look)
        except OSError as error:
            raise BadRequest("path", f"cannot be read: {root.hidden(str(error))}", value=path) from error
        source = ReadWeights(str(folder), "", "")
        await self._alone(self._update(source, weights, running, "path", tensors))
        return weights

    async def update_from_segment(
        self, segment: str, sha256: str, version: str | None, running: Running
    ) -> ServedWeights:
        """Replace the weights by those in a segment of shared memory; raises as `update_from_folder`."""
        self._check_tier()
        if not SEGMENT.fullmatch(segment):
            raise BadRequest("shared_memory", "must be a name of letters, digits, _, - and .", value=segment)
        weights = ServedWeights(
            version or f"w_{sha256[:16]}", fingerprint.beside(self._recipe, VERSION, sha256)
        )
        source = ReadWeights("", segment, sha256)
        await self._alone(self._update(source, weights, running, "shared_memory"))
        return weights

    def begin(self) -> None:
        """Give a new engine what the one before it had been ordered."""
        if self._source is not None or self.is_asleep or self.is_paused:
            self._is_restoring = True
            self._keep(self._restore())

    def hear(self, done: OrderDone) -> None:
        """Handle the engine's answer to the order that it has."""
        assert self._given is not None, "an engine answers what it was ordered"
        (answer, follow), self._given = self._given, None
        if not done.problem:
            follow()  # now: the messages that follow this one are about the new state
        if not answer.done():
            answer.set_result(done)

    def lose(self, failure: Unavailable) -> None:
        """Fail the order that an engine did not complete before it ended."""
        given, self._given = self._given, None
        if given is not None and not given[0].done():
            given[0].set_exception(failure)

    def _check_tier(self) -> None:
        if self._recipe.parallel.ranks > 1 and self._recipe.cache.tier is not None:
            raise BadRequest(
                None,
                "several ranks (parallel) with a tier of pages (cache.tier) neither sleep nor take other"
                " weights while they serve",
                fix="leave cache.tier out, or start the server again",
            )

    async def _alone(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do what an order asks for unless another is being carried out, to its end even if nobody waits."""
        if self._is_given or self._lock.locked():
            work.close()
            raise BadRequest(None, "another order is being carried out", fix="wait for its answer")
        self._is_given = True
        task = self._keep(self._locked(work))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_tell_failure)
            raise

    def _keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._works.add(task)
        task.add_done_callback(self._works.discard)
        return task

    async def _locked(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            async with self._lock:
                return await work
        finally:
            self._is_given = False

    async def _ask(self, order: Order, follow: Callable[[], None] = lambda: None) -> OrderDone:
        """Return the engine's answer; raises Unavailable where the engine ends before."""
        if self._engine.facts is None:
            raise Unavailable(self._engine.why_not, self._engine.ready_in_s)
        answer: asyncio.Future[OrderDone] = asyncio.get_running_loop().create_future()
        self._given = answer, follow
        self._engine.send(order)
        return await answer

    async def _carry_out(self, order: Order, follow: Callable[[], None]) -> OrderDone:
        done = await self._ask(order, follow)
        if done.problem:
            raise BadRequest(None, done.problem)
        return done

    async def _fall_asleep(self, running: Running) -> int:
        def done() -> None:
            self.is_asleep = True

        self._make_room(running)
        self._is_closing = True
        try:
            return (await self._carry_out(Sleep(), done)).num_bytes
        finally:
            self._is_closing = False

    async def _update(
        self, source: ReadWeights, weights: ServedWeights, running: Running, field: str, tensors: str = ""
    ) -> None:
        def put() -> None:
            self.weights, self._source, self.missing = weights, source, ""
            self._tensors = tensors
            self.num_updates += 1
            log.info("weights: %s", weights.version)

        read = await self._ask(source)
        if read.problem:
            assert self.root is not None, "there is no route without a root"
            raise BadRequest(field, f"cannot be used: {self.root.hidden(read.problem)}")
        try:
            self._make_room(running)
        except BadRequest:
            self._engine.send(DropWeights())
            raise
        await self._carry_out(PutWeights(), put)

    def _make_room(self, running: Running) -> None:
        """Do with the requests that are open what an operator asks for; raises BadRequest for `refuse`."""
        open_answers = self._requests()
        if open_answers and running == "refuse":
            problem = f"{len(open_answers)} requests are open, and running is refuse"
            raise BadRequest(None, problem, fix="ask again once they have ended, or for wait or abort")
        for answer in open_answers if running == "abort" else ():
            self._abort(answer, SetAside("an operator's order has ended the request; send it again"))

    async def _restore(self) -> None:
        """Order again what was ordered.

        Requests are refused meanwhile, and afterwards too if the weights cannot be had again.
        """
        try:
            async with self._lock:
                if self.is_asleep:
                    await self._ask(Sleep())
                if self._source is not None:
                    self.missing = await self._put_again(self._source)
                    if self.missing:
                        log.error("weights: %s cannot be read again: %s", self.weights.version, self.missing)
                if self.is_paused:
                    await self._ask(Halt(True))
        except Unavailable:
            return  # another engine follows, for which this begins again
        self._is_restoring = False

    async def _put_again(self, source: ReadWeights) -> str:
        """Have the engine take the weights that were ordered, and return why it cannot."""
        read, has_room = await self._ask(source), self.is_asleep
        if read.problem and not has_room:
            # They may fit only where the pages are, which an operator had given back for them
            has_room = not (await self._ask(Sleep())).problem
            read = await self._ask(source) if has_room else read
        problem = read.problem or await self._put_read(source)
        if has_room and not self.is_asleep:
            self.is_asleep = bool((await self._ask(WakeUp())).problem)
        return problem

    async def _put_read(self, source: ReadWeights) -> str:
        """Have the engine put what it has read, if that is what was ordered; return why it does not."""
        # What is read of a segment has the digest that was ordered, but a folder may be written to again
        if not source.segment:
            facts = self._engine.facts
            is_other = await asyncio.to_thread(self._is_other, Path(source.folder))
            if self._engine.facts is not facts:  # another engine, if any, which has read nothing yet
                raise Unavailable(self._engine.why_not, self._engine.ready_in_s)
            if is_other:
                self._engine.send(DropWeights())
                return "the folder holds other weights by now"
        return (await self._ask(PutWeights())).problem

    def _is_other(self, folder: Path) -> bool:
        """Whether a folder holds other weights than those that were ordered."""
        try:
            return fingerprint.of_tensors(folder) != self._tensors
        except OSError:
            return True


def _tell_failure(task: asyncio.Task[Any]) -> None:
    """Log why an order failed whose client has gone: nobody else retrieves it."""
    if not task.cancelled() and (failure := task.exception()) is not None:
        log.warning("an order whose client has gone has failed: %s", failure)
