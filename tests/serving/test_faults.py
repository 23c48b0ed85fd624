"""A fault ends only the requests that it concerns: five checks surround each fault (see faults.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from serving.engine import process, supervisor
from tests.serving import broken_engine
from tests.serving.broken_engine import NAN, ONCE
from tests.serving.faults import PROMPTS, Served, ask, events
from tests.thorough import cases

pytestmark = pytest.mark.in_order

SMALL = ("scheduler.num_slots=8", "scheduler.max_batch_tokens=64", "server.step_timeout_s=300")
LONG = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """How the engine breaks, see broken_engine.py."""
    folder = tmp_path_factory.mktemp("break")
    (folder / "ahead").write_text("0")
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "_SPARE_AFTER_S", 0.0)
        patch.setattr(process, "WORKER", "tests.serving.broken_engine")
        patch.setenv("BREAK", str(folder))
        with Served(*SMALL) as served:
            yield served


@contextlib.contextmanager
def no_other_engine(served: Served) -> Iterator[None]:
    """The next engine waits until it has been asked what there is to say of the lost one."""
    engine, asked = served.llm.engine, threading.Event()
    following = engine._next

    async def when_asked() -> process.EngineProcess:
        await asyncio.to_thread(asked.wait)
        return await following()

    engine._next = when_asked
    try:
        yield
    finally:
        asked.set()
        del engine._next


async def lose(served: Served, number: signal.Signals, said: str) -> None:
    """The engine gets a signal while four streams are open, whose clients are told why they end."""
    async with aiohttp.ClientSession() as session:
        body = LONG | {"prompt": "One day", "stream": True, "max_tokens": 1500}
        opened = [await session.post(f"{served.url}/v1/completions", json=body) for _ in range(4)]
        for each in opened:
            assert "choices" in await anext(events(each))
        pid = served.llm.engine.pid
        assert pid is not None
        if number == signal.SIGSTOP:  # whose silence is not mistaken for that of a busy machine
            served.llm.engine.silence.fixed_s = 0.5
        with no_other_engine(served):
            os.kill(pid, number)
            for each in opened:
                *_, last = [event async for event in events(each)]
                assert last["error"]["type"] == "service_unavailable_error"
                assert said in last["error"]["message"]
            async with session.get(f"{served.url}/health") as health:
                assert health.status == 503
            refused = await ask(session, served.url, prompt="1+1=")
            assert (refused.status, "started anew" in str(refused.error)) == (503, True)
    served.call(served.llm.ready())


NUM_LOST = cases(1, 20)


def test_a_killed_engine_is_told_at_once(served: Served) -> None:
    with served.five_checks(survives=False):
        for _ in range(NUM_LOST):
            asyncio.run(lose(served, signal.SIGKILL, "the engine's process ended by signal 9"))


def test_a_stopped_engine_is_ended(served: Served) -> None:
    with served.five_checks(survives=False):
        for _ in range(NUM_LOST):
            asyncio.run(lose(served, signal.SIGSTOP, "it may be silent for 0.5 s"))


@pytest.mark.slow
def test_a_spare_that_still_imports_serves_next(served: Served) -> None:
    engine = served.llm.engine

    async def begun() -> int | None:
        await engine.until(lambda: engine.state == "ready")
        while engine._spare is None:  # its process is started at once, and imports for seconds
            await asyncio.sleep(0.01)
        return engine._spare.pid

    def kill() -> None:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        while engine.state == "ready":
            time.sleep(0.01)
        served.call(served.llm.ready())

    with served.five_checks(survives=False):
        if served.engines is not None:
            served.engines.forks_spares = False
            kill()  # whose spare has done its imports
        spare = served.call(begun())
        if served.engines is not None:
            served.engines.forks_spares = True
        kill()
        assert engine.pid == spare


def test_a_tokenizer_that_fails_fails_its_request_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = served.llm.text
    assert text is not None
    encode = text.encode

    def fail(prompt: str, **more: Any) -> list[int]:
        if "break" in prompt:
            raise RuntimeError("the tokenizer is broken")
        return encode(prompt, **more)

    monkeypatch.setattr(text, "encode", fail)

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            assert (await ask(session, served.url, prompt="break")).status == 500
            lone = await ask(session, served.url, prompt="\ud800")
            assert lone.status == 400

    with served.five_checks():
        asyncio.run(run())


@pytest.mark.slow
def test_the_wall_clock_may_be_set(served: Served, folder: Path) -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            body = LONG | {"prompt": PROMPTS[1], "timeout_s": 60, "stream": True, "max_tokens": 100}
            for hours in (1, -1, 0):
                async with session.post(f"{served.url}/v1/completions", json=body) as response:
                    stream = events(response)
                    assert "choices" in await anext(stream)
                    (folder / "ahead").write_text(str(3600 * hours))
                    *_, last = [event async for event in stream]
                    assert last["choices"][0]["finish_reason"] == "length"

    num_engines = served.llm.stats.num_engines
    undo = broken_engine.set_clock(folder)
    try:
        with served.five_checks():
            asyncio.run(run())
    finally:
        undo()
    assert served.llm.stats.num_engines == num_engines


def test_logits_that_are_no_numbers_fail_their_request_alone(served: Served) -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            for status, stream in ((200, True), (500, False)):  # the head of a stream has been sent
                told = await ask(session, served.url, prompt=[300, NAN, 301], stream=stream)
                assert (told.status, "logits were not finite" in str(told.error)) == (status, True)

    with served.five_checks():
        asyncio.run(run())


def test_a_step_that_raises_ends_the_engine(served: Served) -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            told = await ask(session, served.url, prompt=[300, ONCE, 301], stream=False)
            assert (told.status, "ended with status 1" in str(told.error)) == (503, True)
            await asyncio.to_thread(served.call, served.llm.ready())
            assert (await ask(session, served.url, prompt=[300, ONCE, 301])).is_whole

    with served.five_checks(survives=False):
        asyncio.run(run())
