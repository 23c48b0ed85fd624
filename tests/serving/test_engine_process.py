"""An engine's process that has ended, or that cannot be ended, ends nothing but itself."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
import uvloop
import zmq

from serving.engine import process
from serving.engine.process import EngineLost, EngineProcess, EngineSocket
from tests.patience import PATIENCE_S
from tests.serving.warm import CODE, completed

LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
Run = Callable[[Coroutine[None, None, None]], None]


@LOOPS
@pytest.mark.parametrize("is_spare", [False, True])
def test_nothing_is_said_to_a_process_that_has_ended(
    run: Run, is_spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may end between its start and the first word to it: then the next engine's turn has come."""
    monkeypatch.setattr(process, "WORKER", "no_module_of_this_name")
    monkeypatch.setattr(process, "SPARE", "no_module_of_this_name")

    async def speak() -> None:
        engine = await EngineProcess.started([], is_spare=is_spare)
        with pytest.raises(EngineLost, match="ended with status 1"):
            await asyncio.wait_for(engine.ended(), PATIENCE_S)
        engine.hurry()
        engine.wake("")
        engine.socket.send(b"anything")
        await engine.end()

    run(speak())


@pytest.mark.parametrize("name", ["long" * 50, "\udcff"], ids=["long", "no UTF-8"])
def test_where_no_socket_can_be_it_is_said_what_to_change(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(EngineLost, match="set TMPDIR to a folder with a short path"):
        asyncio.run(start())
    assert not [*folder.iterdir()]


async def start() -> None:
    await EngineProcess.started([])


def echo(address: str) -> None:
    """Say hello, and return each message until an empty one comes."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as peer:
        peer.connect(address)
        peer.send(b"hello")
        while message := peer.recv():
            peer.send(message)


@LOOPS
def test_no_message_is_missed_while_others_are_sent(run: Run, tmp_path: Path) -> None:
    async def talk() -> None:
        address, socket = f"ipc://{tmp_path}/socket", EngineSocket()
        socket.bind(address)
        peer = asyncio.ensure_future(asyncio.to_thread(echo, address))
        assert await asyncio.wait_for(socket.recv(), PATIENCE_S) == b"hello"
        said = [str(number).encode() for number in range(3000)]
        heard: list[bytes] = []

        async def listen() -> None:
            while len(heard) < len(said):
                heard.append(await socket.recv())

        listening = asyncio.ensure_future(listen())
        for number, each in enumerate(said):
            socket.send(each)
            if number % 7 == 0:
                await asyncio.sleep(0)
        await asyncio.wait_for(listening, PATIENCE_S)
        assert heard == said
        socket.send(b"")
        await peer
        socket.close()
        socket.close()

    run(talk())


class Unkillable:
    """A process that the system keeps after its kill, as one within a driver that hangs."""

    pid = 1
    returncode: int | None = None

    def __init__(self) -> None:
        self.stdin = self
        self.kills: list[str] = []

    def close(self) -> None:
        """It reads nothing more."""

    def kill(self) -> None:
        self.kills.append("process")

    async def wait(self) -> int:
        return await asyncio.Event().wait()


def test_nobody_waits_for_a_process_that_cannot_be_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else its clients would never hear that their engine is lost, nor would the server end."""
    for name in ("_ENDING_S", "_KILLED_S", "_LAST_WORDS_S"):
        monkeypatch.setattr(process, name, 0.01)

    async def end() -> Unkillable:
        engine, kept = EngineProcess([]), Unkillable()
        monkeypatch.setattr(engine, "_process", kept)
        monkeypatch.setattr(engine, "_group", kept.pid)
        monkeypatch.setattr(process.os, "killpg", lambda *_: kept.kills.append("group"))
        monkeypatch.setattr(engine, "_relaying", asyncio.ensure_future(asyncio.sleep(0)), raising=False)
        await asyncio.wait_for(engine.end(), PATIENCE_S)
        return kept

    with caplog.at_level(logging.ERROR, "serving.engine.process"):
        assert asyncio.run(end()).kills == ["group", "process"], "further ranks do not wait for it either"
    assert "is still there" in caplog.text


class Closing(Unkillable):
    """A process that needs a moment to end once its input is closed, if it sees that at all."""

    def __init__(self, *, sees_close: bool) -> None:
        super().__init__()
        self.sees_close, self.ended = sees_close, asyncio.Event()

    def close(self) -> None:
        if self.sees_close:
            asyncio.get_running_loop().call_later(0.05, self.ended.set)

    def write(self, _: bytes) -> None:
        """It is told something."""

    def kill(self) -> None:
        super().kill()
        self.ended.set()

    async def wait(self) -> int:
        await self.ended.wait()
        self.returncode = 0
        return 0


@pytest.mark.parametrize("is_ready", [False, True])
def test_an_engine_that_serves_has_time_to_close(is_ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that starts does not see until its imports are done that it must end: it is not waited for."""
    monkeypatch.setattr(process, "_ENDING_S", 0.01)
    monkeypatch.setattr(process, "_CLOSING_S", 10 * PATIENCE_S)

    async def end() -> list[str]:
        engine, closing = EngineProcess([]), Closing(sees_close=is_ready)
        monkeypatch.setattr(engine, "_process", closing)
        monkeypatch.setattr(engine, "_relaying", asyncio.ensure_future(asyncio.sleep(0)), raising=False)
        engine.wake("")
        if is_ready:
            engine.note_ready()
        await asyncio.wait_for(engine.end(), PATIENCE_S)
        return closing.kills

    assert asyncio.run(end()) == ([] if is_ready else ["process"])


def test_an_engine_that_is_not_to_end_in_order_does_not_hear_of_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would close its recording, at which ranks of other machines end for good."""
    steps: list[str] = []

    class Hung(Closing):
        def close(self) -> None:
            steps.append("input closed")

        def kill(self) -> None:
            super().kill()
            steps.append("killed")

    async def end() -> None:
        engine = EngineProcess([])
        monkeypatch.setattr(engine, "_process", Hung(sees_close=False))
        monkeypatch.setattr(engine, "_relaying", asyncio.ensure_future(asyncio.sleep(0)), raising=False)
        engine.note_ready()
        await asyncio.wait_for(engine.end(in_order=False), PATIENCE_S)

    asyncio.run(end())
    assert steps == ["killed", "input closed"]


def test_who_is_cancelled_in_the_moment_in_which_a_process_ends_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor cancels who ends a spare process, and waits for that before it starts an engine."""

    async def end_and_go_on() -> None:
        engine, gone = EngineProcess([]), Closing(sees_close=False)
        gone.ended.set()
        monkeypatch.setattr(engine, "_process", gone)
        monkeypatch.setattr(engine, "_relaying", asyncio.ensure_future(asyncio.sleep(0)), raising=False)
        engine.note_ready()
        try:
            await engine.end()
            await asyncio.Event().wait()
        finally:
            engine.socket.close()

    async def cancel_after(num_turns: int) -> None:
        ending = asyncio.ensure_future(end_and_go_on())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        ending.cancel()
        for _ in range(30):
            await asyncio.sleep(0)
        is_cancelled = ending.cancelled()
        ending.cancel()
        assert is_cancelled, f"cancelled after {num_turns} turns, it went on"

    for num_turns in range(12):
        asyncio.run(cancel_after(num_turns))


def test_a_process_group_is_killed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be that of other processes afterwards."""
    monkeypatch.setattr(process, "WORKER", "no_module_of_this_name")
    killed: list[int] = []
    monkeypatch.setattr(process.os, "killpg", lambda group, signal: killed.append(group))

    async def end_twice() -> int | None:
        engine = await EngineProcess.started([])
        for _ in range(2):
            await engine.end()
        return engine.pid

    group = asyncio.run(end_twice())
    assert killed == [group]


def test_an_engine_that_fails_does_not_wait_for_what_its_threads_read() -> None:
    """A thread pool's work that never ends would otherwise hold the interpreter for ever."""
    brief = (
        "import threading\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from serving.engine import main\n"
        "def fail(argv):\n"
        "    ThreadPoolExecutor(1).submit(threading.Event().wait)\n"
        "    raise RuntimeError(f'{argv[0]} is broken')\n"
        "main.main = fail\n"
        "main.run(['a step'])\n"
    )
    done = completed(CODE, brief)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: a step is broken")


def test_a_program_that_fails_while_an_engine_starts_ends_and_leaves_no_process() -> None:
    """At its end, asyncio.run cancels the tasks of asyncio's own that connect a process, too."""
    brief = (
        "import asyncio, os\n"
        "from serving.engine.process import EngineProcess\n"
        "async def fail(num_turns):\n"
        "    starting = asyncio.ensure_future(EngineProcess.started([]))\n"
        "    for _ in range(num_turns):\n"
        "        await asyncio.sleep(0)\n"
        "    raise RuntimeError\n"
        "for num_turns in range(9):\n"
        "    try:\n"
        "        asyncio.run(fail(num_turns))\n"
        "    except RuntimeError:\n"
        "        print(num_turns, flush=True)\n"
        "try:\n"
        "    while True:\n"
        "        os.wait()\n"
        "except ChildProcessError:\n"
        "    print('none', flush=True)\n"
    )
    # A fork of the tests' own process would stand in for asyncio's way of creating one.
    command = [sys.executable, "-c", brief]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as program:
        try:
            said, _ = program.communicate(timeout=PATIENCE_S)
        finally:
            program.kill()
    assert said.decode().split() == [*map(str, range(9)), "none"]
