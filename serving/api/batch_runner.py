"""How are batches run beside clients who wait?

Each line is a request to the path that it names, in this process: so it is checked, served and answered as
one that came over HTTP. It begins only where a slot of the engine is free that no client asks for, so many
at a time (`server.batch_requests`), and with a priority below all others. Batches take turns. A line whose
engine is lost, or that the server has no room for, is tried again; one that has been tried so often that it
may be what ends the engine is answered by its error.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sqlite3
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.types import ASGIApp, Message

from serving.api.api_keys import ApiKeys, Client
from serving.api.errors import DEFECT, error_body
from serving.async_llm import AsyncLLM
from serving.batches.lines import LineCheck, answered, expired, read_line
from serving.batches.store import BatchStore, StoredBatch
from serving.failures import Overloaded, Unavailable

log = logging.getLogger("batches")

Value = TypeVar("Value")

PRIORITY = -100  # of the lines of batches; a client that asks for none has 0
MOST_ATTEMPTS = 3  # of a line that was in the engine when that was lost
_LOOK_S = 0.1  # between looks at whether there is room
_AGAIN_S = 1.0  # until a line is tried again
_PAUSE_S = 10.0  # after which what could not be written is tried again


class Batches:
    """The files and batches of a server: what its routes call, and what runs them.

    `client_of` finds whose a batch is, by `Client.lasting`, or None for a key that the server does not have.
    The store is used in a thread of its own, since a disk may be slow.
    """

    app: ASGIApp  # answers the lines: the server behind its access control, which `application` makes

    def __init__(self, store: BatchStore, llm: AsyncLLM, client_of: Callable[[str], Client | None]) -> None:
        self._store = store
        self._llm = llm
        self._client_of = client_of
        self._thread = ThreadPoolExecutor(1, "batches")
        self._woken = asyncio.Event()
        self._active: deque[_Active] = deque()  # the next to have its turn first
        self._unknown: set[str] = set()  # the batches whose key is not there, which the log has told

    @staticmethod
    def of(folder: Path, llm: AsyncLLM, keys: ApiKeys) -> Batches:
        """Those that are kept in a folder; raises OSError."""
        return Batches(
            BatchStore(folder, llm.recipe.server.max_batch_store_mib * 2**20), llm, keys.of_lasting
        )

    async def call(self, work: Callable[[BatchStore], Value]) -> Value:
        """What the store says."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._store)

    def wake(self) -> None:
        """There may be something to do."""
        self._woken.set()

    async def run(self) -> None:
        """Run what is to be run, until this is cancelled."""
        try:
            while True:
                self._woken.clear()
                pause_s = await self._turn_or_pause()
                try:
                    await asyncio.wait_for(self._woken.wait(), pause_s)
                except asyncio.TimeoutError:
                    continue
        finally:
            tasks = [task for each in self._active for task in each.tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._thread.shutdown()
            self._store.close()

    async def _turn_or_pause(self) -> float | None:
        """How long there is nothing to do; None: until somebody asks for something."""
        try:
            return _LOOK_S if await self._turn() else None
        except sqlite3.Error as error:
            log.error("batches stand still for %g s: %s", _PAUSE_S, error)
        except Exception:
            log.exception("a defect of the server: batches stand still for %g s", _PAUSE_S)
        await asyncio.sleep(_PAUSE_S)
        return _LOOK_S

    async def _turn(self) -> bool:
        """Begin and end batches, and begin as many lines as there is room for; whether any batch is open."""
        found = {each.id: each for each in await self.call(BatchStore.open_batches)}
        for each in self._active:
            if each.batch.id in found:
                each.batch = found.pop(each.batch.id)
        self._active.extend(each for batch in found.values() if (each := self._begun(batch)) is not None)
        for each in list(self._active):
            if each.failure is not None and not each.tasks:
                each.begin_again()
            if each.batch.status == "validating":
                check = LineCheck(each.batch.endpoint, self._most_line_bytes)
                await self.call(partial(BatchStore.begin, batch=each.batch, check=check))
                self.wake()
            elif not each.tasks and (each.is_over or each.must_stop):
                await self._end(each)
        await self._begin_lines()
        return bool(self._active)

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
            await self.call(lambda store: store.end(batch, "cancelled", lambda *_: None))
        elif active.is_over:
            await self.call(lambda store: store.end(batch, "completed", lambda *_: None))
        else:
            await self.call(lambda store: store.end(batch, "expired", expired))
        self._active.remove(active)
        log.info("%s has ended", batch.id)

    @property
    def _most_line_bytes(self) -> int:
        return int(self._llm.recipe.server.max_body_mib * 2**20)

    def _room(self) -> int:
        """How many lines may begin now."""
        facts, running = self._llm.facts, sum(len(each.tasks) for each in self._active)
        if facts is None or self._llm.state != "ready":
            return 0
        most = self._llm.recipe.server.batch_requests or max(1, facts.num_slots // 2)
        return min(most - running, facts.num_slots - max(running, self._llm.num_requests))

    async def _begin_lines(self) -> None:
        """Of each batch in turn one, while there is room."""
        room = self._room()
        idle = 0
        while room > 0 and idle < len(self._active):
            active = self._active[0]
            self._active.rotate(-1)
            batch = active.batch
            found = None
            if batch.status == "in_progress" and not (active.is_over or active.must_stop or active.failure):
                found = await self.call(partial(BatchStore.next_line, batch=batch, after=active.number))
                active.is_over = found is None
            if found is None:
                idle += 1
                continue
            room, idle = room - 1, 0
            active.number = found[0]
            task = asyncio.create_task(self._answer(active, *found))
            active.tasks.add(task)
            task.add_done_callback(partial(self._ended, active))
        if any(each.is_over and not each.tasks for each in self._active):
            self.wake()

    def _ended(self, active: _Active, task: asyncio.Task[None]) -> None:
        active.tasks.discard(task)
        self.wake()
        if not task.cancelled():
            active.failure = active.failure or task.exception()

    async def _answer(self, active: _Active, number: int, text: bytes) -> None:
        """Ask for a line until there is an answer, and keep it."""
        line = read_line(text, active.batch.endpoint, self._most_line_bytes)
        name = uuid.uuid4().hex
        num_attempts = 0
        while True:
            was_ready = self._llm.state == "ready"
            status, body = await asked(self.app, line.url, bytes(line.body), active.client, name)
            num_attempts += was_ready and status == Unavailable.status
            if status not in (Overloaded.status, Unavailable.status) or num_attempts == MOST_ATTEMPTS:
                break
            await asyncio.sleep(_AGAIN_S)
        record = answered(line.custom_id, status, name, body)
        keep = partial(
            BatchStore.answer, batch=active.batch, number=number, text=record, is_error=status != 200
        )
        while True:
            try:
                await self.call(keep)
                return
            except sqlite3.OperationalError as error:
                log.error("an answer of %s waits for %g s: %s", active.batch.id, _PAUSE_S, error)
                await asyncio.sleep(_PAUSE_S)


class _Active:
    """A batch that is run."""

    def __init__(self, batch: StoredBatch, client: Client) -> None:
        self.batch = batch
        self.client = client
        self.number = 0  # of the last line that was begun
        self.is_over = False  # every line was begun
        self.failure: BaseException | None = None  # of a line's task, a defect
        self.tasks: set[asyncio.Task[None]] = set()

    def begin_again(self) -> None:
        """Look for lines without an answer from the first on, next time; raises the failure."""
        failure, self.failure = self.failure, None
        self.number, self.is_over = 0, False
        assert failure is not None, "nothing has failed"
        raise failure

    @property
    def must_stop(self) -> bool:
        """Whether no more of its lines are to begin."""
        return self.batch.status == "cancelling" or time.time() >= self.batch.expires_s


async def asked(app: ASGIApp, path: str, body: bytes, client: Client, name: str) -> tuple[int, bytes]:
    """Status and body of the answer to a POST of this client's, which stays until it is answered."""
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
        return 500, error_body(500, DEFECT)
    return status, b"".join(pieces)
