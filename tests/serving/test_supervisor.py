"""Is it never said that there is an engine where there is none?"""

from __future__ import annotations

import asyncio

import pytest

from recipes.schema.server_section import ServerSection
from serving.engine.messages import EngineFacts, Ready, encode
from serving.engine.process import EngineLost, EngineProcess
from serving.engine.supervisor import Supervisor

FACTS = EngineFacts(*[1, (2,)], *[64] * 6, "cpu", 1, 64, True, None, 1.0)


class Short:
    """A life of an engine that is ready, and ends."""

    pid = 1

    def __init__(self) -> None:
        self.socket = self
        self._is_ready = asyncio.Event()

    def wake(self) -> None:
        """Begin."""

    def hide(self) -> None:
        """Nothing is there."""

    async def recv(self) -> bytes:
        if self._is_ready.is_set():
            await asyncio.Event().wait()
        self._is_ready.set()
        return encode(Ready(FACTS))

    async def ended(self) -> None:
        await self._is_ready.wait()
        await asyncio.sleep(0)
        raise EngineLost("it ended")

    async def end(self) -> None:
        """Nothing is left."""


def test_who_asks_while_an_engine_is_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def states() -> list[tuple[str, bool]]:
        seen = []
        keeper = Supervisor(lambda life: [], ServerSection(), lambda message: None, lambda reason: None)

        async def engine() -> Short:
            return Short()

        async def slow_to_end() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(10):
                    await asyncio.sleep(0)

        monkeypatch.setattr(keeper, "_next", engine)
        monkeypatch.setattr(keeper, "_keep_spare", slow_to_end)
        keeper.start()
        while keeper.state not in ("lost", "dead"):
            await asyncio.sleep(0)
            seen.append((keeper.state, keeper.facts is not None))
        await keeper.close()
        return seen

    assert ("ready", True) in (seen := asyncio.run(states()))
    assert ("ready", False) not in seen


def test_a_spare_process_that_still_imports_takes_over() -> None:
    async def taken() -> list[bool]:
        keeper = Supervisor(lambda life: [], ServerSection(), lambda message: None, lambda reason: None)
        spare = keeper._spare = await EngineProcess.started([], is_spare=True)
        engine = await keeper._next()
        same = [engine is spare, spare.is_running]
        await engine.end()
        spare = keeper._spare = await EngineProcess.started([], is_spare=True)
        await spare.end()
        other = await keeper._next()
        same += [other is not spare, other.is_running]
        await other.end()
        return same

    assert all(asyncio.run(taken()))
