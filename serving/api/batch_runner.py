"""Run batches of requests beside clients that wait for their answers.

Each line is a request to the path that it names, answered in this process: it is checked and served like one
that came over HTTP. A line begins only while the engine has slots for its samples that no client asks for,
with at most `server.batch_requests` samples at a time, and with a priority below all others; one that asks
for more begins in what is free once no other line is in the engine, as it might wait for ever for more.
Batches take turns. A line whose engine was lost, or for which the server has no room, is tried again; a line
that was in the engine `MOST_ATTEMPTS` times when it was lost may be the cause, and is answered by its error;
so is one whose own prompts may keep each other waiting longer than the engine's queue allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import sqlite3
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.types import ASGIApp, Message

from serving.api.api_keys import ApiKeys, Client
from serving.api.errors import DEFECT, error_body
from serving.async_llm import IS_OF_BATCH, AsyncLLM
from serving.batches.lines import LineCheck, WrongLine, answered, expired, num_samples, read_line, refused
from serving.batches.store import BatchStore, StoredBatch
from serving.failures import EngineEnded, Overloaded, PartlyOverloaded, Unavailable

log = logging.getLogger("batches")

Value = TypeVar("Value")

PRIORITY = -100  # priority of the lines of batches; a client's default is 0
MOST_ATTEMPTS = 3  # attempts at a line that may be the cause of its failure itself
_LOOK_S = 0.1  # interval between checks for free slots
_AGAIN_S = 1.0  # delay before a line is tried again
_PAUSE_S = 10.0  # delay before a failed write to the store is tried again


class Batches:
    """The files and batches of a server, called by its routes and run by `run`.

    `client_of` finds the client of a batch by `Client.lasting`, or None for a key that the server does not
    have. The store is used in a thread of its own, since a disk may be slow.
    """

    app: ASGIApp  # answers the lines: the server behind its access control, which `application` makes

    def __init__(self, store: BatchStore, llm: AsyncLLM, client_of: Callable[[str], Client | None]) -> None:
        self._store = store
        self._llm = llm
        self._client_of = client_of
        self._thread = ThreadPoolExecutor(1, "batches")
        self._woken = asyncio.Event()
        self._active: deque[_Active] = deque()  # the first one has the next turn
        self._unknown: set[str] = set()  # ids of batches whose key is missing, which the log has reported

    @staticmethod
    def of(folder: Path, llm: AsyncLLM, keys: ApiKeys) -> Batches:
        """Return the batches kept in a folder; raises OSError."""
        return Batches(
            BatchStore(folder, llm.recipe.server.max_batch_store_mib * 2**20), llm, keys.of_lasting
        )

    async def call(self, work: Callable[[BatchStore], Value]) -> Value:
        """Run a client's `work` on the store, and return its result.

        Raises Unavailable where the disk does not do it now.
        """
        try:
            return await self._call(work)
        except sqlite3.OperationalError as error:
            log.error("the store of batches does not do what a client asks: %s", error)
            why = f"the server's store of files and batches fails: {error}; send the request again later"
            raise Unavailable(why, _PAUSE_S) from error

    async def _call(self, work: Callable[[BatchStore], Value]) -> Value:
        """Run `work` on the store in the store's thread, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._store)

    def wake(self) -> None:
        """Make `run` look for work at once."""
        self._woken.set()

    async def run(self) -> None:
        """Run batches until this task is cancelled."""
        try:
            while True:
                self._woken.clear()
                pause_s = await self._turn_or_pause()
                woken = asyncio.ensure_future(self._woken.wait())
                try:
                    # Not `wait_for`: Python 3.11 loses a cancellation there that comes with the event
                    await asyncio.wait([woken], timeout=pause_s)
                finally:
                    woken.cancel()
        finally:
            tasks = [task for each in self._active for task in each.tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._thread.shutdown()
            self._store.close()

    async def _turn_or_pause(self) -> float | None:
        """Take a turn, and return the time in s until the next one; None: until `wake` is called."""
        try:
            return _LOOK_S if await self._turn() else None
        except sqlite3.Error as error:
            log.error("batches pause for %g s: %s", _PAUSE_S, error)
        except Exception:
            log.exception("a defect of the server: batches pause for %g s", _PAUSE_S)
        await asyncio.sleep(_PAUSE_S)
        return _LOOK_S

    async def _turn(self) -> bool:
        """Begin and end batches, and begin as many lines as there is room for.

        Returns whether any batch is open.
        """
        found = {each.id: each for each in await self._call(BatchStore.open_batches)}
        for each in self._active:
            if each.batch.id in found:
                each.batch = found.pop(each.batch.id)
        begun = (self._begun(batch) for batch in found.values())
        self._active.extend(active for active in begun if active is not None)
        for each in list(self._active):
            if not each.pauses:
                await self._begin_or_end(each)
        await self._begin_lines()
        return bool(self._active)

    async def _begin_or_end(self, active: _Active) -> None:
        """Begin a batch, or end it, if it is time."""
        with self._failing_alone(active):
            if active.failure is not None and not active.tasks:
                active.begin_again()
            if active.batch.status == "validating":
                check = LineCheck(active.batch.endpoint, self._most_line_bytes)
                try:
                    await self._call(partial(BatchStore.begin, batch=active.batch, check=check))
                except sqlite3.OperationalError:
                    if not active.must_stop:
                        raise
                    # It has no room for what is said of its lines, and could not end before it has begun
                    begin = partial(BatchStore.begin, batch=active.batch, check=lambda *_: None)
                    await self._call(begin)
                self.wake()
            elif not active.tasks and (active.is_over or active.must_stop):
                await self._end(active)

    @contextlib.contextmanager
    def _failing_alone(self, active: _Active) -> Iterator[None]:
        """Let a batch whose part of a turn fails pause, and no other."""
        try:
            yield
        except sqlite3.Error as error:
            active.pause()
            log.error("%s pauses for %g s: %s", active.batch.id, _PAUSE_S, error)
        except Exception:
            active.pause()
            log.exception("a defect of the server: %s pauses for %g s", active.batch.id, _PAUSE_S)

    def _begun(self, batch: StoredBatch) -> _Active | None:
        client = self._client_of(batch.owner)
        if client is not None:
            most = PRIORITY if client.max_priority is None else min(PRIORITY, client.max_priority)
            return _Active(batch, dataclasses.replace(client, max_priority=most))
        if batch.id not in self._unknown:
            self._unknown.add(batch.id)
            log.warning("%s waits: the server does not have the key that it was made with", batch.id)
        return None

    async def _end(self, active: _Active) -> None:
        batch = active.batch
        if batch.status == "cancelling":
            await self._call(lambda store: store.end(batch, "cancelled", lambda *_: None))
        elif active.is_over and not active.lacks_answers:
            await self._call(lambda store: store.end(batch, "completed", lambda *_: None))
        else:
            try:
                await self._call(lambda store: store.end(batch, "expired", expired))
            except sqlite3.OperationalError as error:
                await self._call(lambda store: store.end(batch, "expired", lambda *_: None))
                log.error("lines of %s that did not begin get no answer: %s", batch.id, error)
        self._active.remove(active)
        log.info("%s has ended", batch.id)

    @property
    def _most_line_bytes(self) -> int:
        return int(self._llm.recipe.server.max_body_mib * 2**20)

    @property
    def _num_asking(self) -> int:
        """The number of samples of the lines whose requests are in the server."""
        lines = (line for each in self._active for line in each.tasks.values())
        return sum(line.num_samples for line in lines if line.is_asking)

    def _room(self) -> int:
        """Return how many samples of lines may begin now.

        Lines that are to be tried again, or whose answers are not stored yet, count against the limit of all
        lines, too: otherwise a server that refuses lines, or a full store, would collect all of a batch here.
        """
        facts = self._llm.facts
        if facts is None or not self._llm.accepts:
            return 0
        most = self._llm.recipe.server.batch_requests or max(1, facts.num_slots // 2)
        begun = sum(line.num_samples for each in self._active for line in each.tasks.values())
        return min(most - begun, facts.num_slots - self._num_asking - self._llm.num_client_slots)

    async def _begin_lines(self) -> None:
        """Begin one line of each batch in turn while there is room for all its samples, or no line asks."""
        room = self._room()
        idle = 0
        while room > 0 and idle < len(self._active):
            active = self._active[0]
            found = await self._next_line(active)
            if found is None:
                idle += 1
            else:
                number, text, asked_for = found
                if asked_for > room and self._num_asking:
                    break  # the turn stays with it, as lines with fewer samples would always take its room
                room, idle = room - asked_for, 0
                active.number = number
                begun = _BegunLine(number, text, asked_for)
                task = asyncio.create_task(self._answer(active, begun))
                active.tasks[task] = begun
                task.add_done_callback(partial(self._ended, active))
            self._active.rotate(-1)
        if any(each.is_over and not (each.tasks or each.pauses) for each in self._active):
            self.wake()

    async def _next_line(self, active: _Active) -> tuple[int, bytes, int] | None:
        """Return the number, the text and the samples of a batch's next line, or None if none may begin."""
        found = None
        if active.may_begin_lines:
            with self._failing_alone(active):
                found = await self._call(partial(_counted_line, batch=active.batch, after=active.number))
                active.is_over = found is None
        return found

    def _ended(self, active: _Active, task: asyncio.Task[None]) -> None:
        del active.tasks[task]
        self.wake()
        if not task.cancelled():
            active.failure = active.failure or task.exception()

    async def _answer(self, active: _Active, begun: _BegunLine) -> None:
        """Send a line's request until it is answered or the batch must stop, and store the answer."""
        IS_OF_BATCH.set(True)  # This task is the line's own, so that no other request sees it
        number = begun.number
        try:
            line = read_line(begun.text, active.batch.endpoint, self._most_line_bytes)
        except WrongLine as bad:  # the server was started again since the batch began, with other limits
            begun.is_asking = False
            await self._keep(active, number, refused(number, bad), is_error=True)
            return
        name = uuid.uuid4().hex
        num_attempts = 0
        while True:
            begun.is_asking = True
            status, body, failure = await asked(self.app, line.url, bytes(line.body), active.client, name)
            begun.is_asking = False
            num_attempts += isinstance(failure, (EngineEnded, PartlyOverloaded))
            if status not in (Overloaded.status, Unavailable.status) or num_attempts == MOST_ATTEMPTS:
                break
            if active.must_stop:
                active.lacks_answers = True
                return
            await asyncio.sleep(_AGAIN_S)
        record = answered(line.custom_id, status, name, body)
        await self._keep(active, number, record, is_error=status != 200)

    async def _keep(self, active: _Active, number: int, record: bytes, *, is_error: bool) -> None:
        """Store the answer to a line; a full store is tried again until the batch must stop."""
        keep = partial(BatchStore.answer, batch=active.batch, number=number, text=record, is_error=is_error)
        while True:
            try:
                await self._call(keep)
                return
            except sqlite3.OperationalError as error:
                if active.must_stop:
                    active.lacks_answers = True
                    log.error("an answer of %s is not stored before its end: %s", active.batch.id, error)
                    return
                log.error(
                    "an answer of %s cannot be stored, and is stored again in %g s: %s",
                    active.batch.id,
                    _PAUSE_S,
                    error,
                )
                await asyncio.sleep(_PAUSE_S)


def _counted_line(store: BatchStore, batch: StoredBatch, after: int) -> tuple[int, bytes, int] | None:
    """Return what `BatchStore.next_line` does, with the number of the line's samples."""
    found = store.next_line(batch=batch, after=after)
    return None if found is None else (*found, num_samples(found[1]))


class _BegunLine:
    """A line that is being answered, and has not ended."""

    def __init__(self, number: int, text: bytes, num_samples: int) -> None:
        self.number, self.text, self.num_samples = number, text, num_samples
        self.is_asking = True  # its request is in the server, and neither waits to be tried again nor is over


class _Active:
    """A batch that is being run."""

    def __init__(self, batch: StoredBatch, client: Client) -> None:
        self.batch = batch
        self.client = client
        self.number = 0  # number of the last line that was begun
        self.is_over = False  # every line was begun
        self.lacks_answers = False  # a line that was begun stays unanswered, as those that never begin
        self.failure: BaseException | None = None  # a defect in the task of a line
        self.tasks: dict[asyncio.Task[None], _BegunLine] = {}  # the lines that have begun and not ended
        self._pauses_until_s = 0.0

    def begin_again(self) -> None:
        """Start again from the first line without an answer at the next turn; raises the failure."""
        failure, self.failure = self.failure, None
        self.number, self.is_over = 0, False
        assert failure is not None, "nothing has failed"
        raise failure

    def pause(self) -> None:
        """Let others alone have turns for a while."""
        self._pauses_until_s = time.monotonic() + _PAUSE_S

    @property
    def pauses(self) -> bool:
        """Whether the batch has no turns now, because it has failed."""
        return time.monotonic() < self._pauses_until_s

    @property
    def may_begin_lines(self) -> bool:
        """Whether a line of the batch may begin, if it has any left."""
        stops = self.is_over or self.must_stop or self.pauses or self.failure is not None
        return self.batch.status == "in_progress" and not stops

    @property
    def must_stop(self) -> bool:
        """Whether no more lines of the batch may begin."""
        return self.batch.status == "cancelling" or time.time() >= self.batch.expires_s


async def asked(
    app: ASGIApp, path: str, body: bytes, client: Client, name: str
) -> tuple[int, bytes, Exception | None]:
    """Return the status and the body of the application's answer to a POST, and the failure that it tells.

    The client never disconnects.
    """
    status, pieces = 0, list[bytes]()
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError("nothing sets this event")

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        pieces.append(message.get("body", b""))

    state: dict[str, Any] = {"client": client, "request_id": name, "body_is_read": lambda: None}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "state": state,
    }
    try:
        await app(scope, receive, send)
    except Exception:
        log.exception("%s: a defect of the server", name)
        return 500, error_body(500, DEFECT), None
    return status, b"".join(pieces), state.get("failure")
