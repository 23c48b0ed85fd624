"""The supervisor never says that there is an engine where there is none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from borders.refusal import without_paths
from continuous_batching.counters import Counters
from recipes.schema.server_section import ServerSection
from serving.api.errors import response_of
from serving.async_llm import AsyncLLM
from serving.engine import supervisor
from serving.engine.messages import Beat, EngineFacts, FromEngine, Ready, Starting, encode
from serving.engine.process import EngineLost, EngineProcess
from serving.engine.supervisor import Supervisor
from serving.failures import Unavailable
from serving.metrics.server_stats import NO_GAUGES
from tests.patience import PATIENCE_S
from tests.serving.server import TINY

FACTS = EngineFacts(*[1, (2,)], *[64] * 6, "cpu", 1, 64, True, None, 1.0, 8)


class Short:
    """A life of an engine that is ready, and ends."""

    pid = 1

    def __init__(self) -> None:
        self.socket = self
        self._is_ready = asyncio.Event()

    def wake(self, learned: str) -> None:
        """Begin."""
        self.learned = learned

    def note_ready(self) -> None:
        """It has no file, and nobody ends it."""

    async def recv(self) -> bytes:
        if self._is_ready.is_set():
            await asyncio.Event().wait()
        self._is_ready.set()
        return encode(Ready(FACTS))

    async def ended(self) -> None:
        await self._is_ready.wait()
        await asyncio.sleep(0)
        raise EngineLost("it ended")

    async def end(self, *, in_order: bool = True) -> None:
        """Nothing is left."""
        self.ended_in_order = in_order


class Loading(Short):
    """A life of an engine that says how far it is, and then ends."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over = asyncio.Event()

    async def recv(self) -> bytes:
        if self._is_ready.is_set():
            await asyncio.Event().wait()
        self._is_ready.set()
        return encode(Starting("loading its weights: 9%"))

    async def ended(self) -> None:
        await self.is_over.wait()
        raise EngineLost("it ended")


def keeper_of(
    *lives: Short,
    heard: Callable[[FromEngine], None] = lambda message: None,
    lost: Callable[[str], None] = lambda reason: None,
    leads_others: bool = False,
) -> Supervisor:
    """A supervisor without a spare whose engines live these lives, the last of them again and again."""
    limits, left = ServerSection(spare_engine=False), [*lives]
    keeper = Supervisor(lambda life: [], limits, heard, lost, leads_others=leads_others)

    async def following() -> Short:
        return left.pop(0) if len(left) > 1 else left[0]

    keeper._next = following  # no process is started
    return keeper


def test_what_a_start_does_is_told_until_it_ends() -> None:
    async def stages() -> None:
        heard: list[FromEngine] = []
        engine = Loading()
        keeper = keeper_of(engine, heard=heard.append)
        keeper.start()
        while keeper.stage.get("doing", "importing").startswith("importing"):
            await asyncio.sleep(0)
        assert keeper.stage["doing"].startswith("loading its weights: 9%, ")
        assert keeper.why_not.startswith("the engine is starting (loading its weights: 9%, ")
        assert not heard
        engine.is_over.set()
        await keeper.until(lambda: keeper.state == "dead")
        assert keeper.stage == {}
        assert set(keeper.starting.stages_s) == {"importing", "loading its weights"}
        await keeper.close()

    asyncio.run(stages())


class Broken(Short):
    """A life of an engine that is ready, and then says what none says."""

    async def recv(self) -> bytes:
        if self._is_ready.is_set():
            return b"\x93\xa5Ready\x01\x02"
        self._is_ready.set()
        return encode(Ready(FACTS))

    async def ended(self) -> None:
        await asyncio.Event().wait()


class Full(Broken):
    """A life of an engine that ends with a path of this machine in its last words."""

    async def recv(self) -> bytes:
        if self._is_ready.is_set():
            raise EngineLost("it ended: '/srv/models/tiny/a.safetensors': no space left; see /etc/x")
        return await super().recv()


def test_what_no_engine_says_is_the_end_of_that_engine_and_clients_see_no_path(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def lives(engine: Short) -> str:
        lost = list[str]()
        keeper = keeper_of(engine, lost=lost.append)
        keeper.start()
        await keeper.until(lambda: keeper.state == "lost")
        await keeper.close()
        assert lost == [keeper.trouble]
        return keeper.trouble

    assert "the engine's process says what none says" in asyncio.run(lives(Broken()))
    said = asyncio.run(lives(Full()))
    assert said == "it ended: '.../a.safetensors': no space left; see .../x"
    assert "/srv/models/tiny/a.safetensors" in caplog.text
    kept = "application/json, https://host:80/a/b, 3/4, tcp://h:1, a/b/c and /health"
    assert without_paths(kept) == kept


class Beating(Short):
    """A life of an engine that is ready, tells what it has learned, and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.to_send = [Ready(FACTS), Beat(NO_GAUGES, Counters(), None, 0, 0, learned="1")]

    async def recv(self) -> bytes:
        if not self.to_send:
            self._is_ready.set()
            await asyncio.Event().wait()
        return encode(self.to_send.pop(0))


def test_an_engine_is_told_what_the_one_before_it_has_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lives() -> None:
        engines = [Beating(), Loading()]
        keeper = keeper_of(*engines)
        monkeypatch.setattr(supervisor, "_LONGEST_PAUSE_S", 0.0)
        keeper.start()
        await keeper.until(lambda: keeper.state == "lost")
        while not (hasattr(engines[1], "learned") and keeper.stage):
            await asyncio.sleep(0)
        assert [each.learned for each in engines] == ["", "1"]
        await keeper.close()

    asyncio.run(lives())


def test_who_asks_while_an_engine_is_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def states() -> list[tuple[str, bool]]:
        seen, keeper = [], keeper_of(Short())

        async def slow_to_end() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(10):
                    await asyncio.sleep(0)

        monkeypatch.setattr(keeper, "_keep_spare", slow_to_end)
        keeper.start()
        while keeper.state not in ("lost", "dead"):
            await asyncio.sleep(0)
            seen.append((keeper.state, keeper.facts is not None))
        await keeper.close()
        return seen

    assert ("ready", True) in (seen := asyncio.run(states()))
    assert ("ready", False) not in seen


class Kept(Short):
    """A life of an engine that is ready and ends, whose process does not, until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = asyncio.Event()
        self.ends: list[str] = []

    async def end(self, *, in_order: bool = True) -> None:
        self.ends.append("begun")
        await self.may_end.wait()
        self.ends.append("done")


def test_an_engine_is_lost_before_its_process_has_ended() -> None:
    """Which may take long; the next one starts afterwards, and the server's own end waits for it."""

    async def lives() -> None:
        lost, engine = list[str](), Kept()
        keeper = keeper_of(engine, lost=lost.append)
        keeper.start()
        await until(lambda: engine.ends)
        assert (keeper.state, keeper.facts, lost) == ("lost", None, ["it ended"])
        closing = asyncio.ensure_future(keeper.close())
        await until(lambda: keeper._life is not None and keeper._life.done())
        assert not closing.done()
        engine.may_end.set()
        await closing
        assert (engine.ends, lost) == (["begun", "done"], ["it ended"])

    asyncio.run(lives())


@pytest.mark.parametrize(
    ("leads_others", "is_lost", "drains", "in_order"),
    [
        (True, True, False, False),
        (True, True, True, True),
        (True, False, False, True),
        (False, True, False, True),
    ],
)
def test_a_lost_leader_of_other_machines_that_another_follows_does_not_end_in_order(
    leads_others: bool, is_lost: bool, drains: bool, in_order: bool
) -> None:
    """Their ranks would take that for the end of the server, and be missing in the next one."""

    async def ended_in_order() -> bool:
        engine = Loading()
        keeper = keeper_of(engine, leads_others=leads_others)
        keeper.start()
        await until(lambda: keeper.stage)
        if drains:
            keeper.become("draining")
        if is_lost:
            engine.is_over.set()
            await until(lambda: keeper.trouble)
        await keeper.close()
        return engine.ended_in_order

    assert asyncio.run(ended_in_order()) is in_order


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


class Spare:
    """A process that would be the next engine's."""

    def __init__(self) -> None:
        self.is_running = True
        self.num_hurried = self.num_ended = 0

    def hurry(self) -> None:
        self.num_hurried += 1

    async def end(self) -> None:
        self.is_running = False
        self.num_ended += 1


@pytest.fixture
def spares(monkeypatch: pytest.MonkeyPatch) -> list[Spare]:
    """The spare processes that were started; none is due by time."""
    made: list[Spare] = []

    async def started(arguments: object, *, is_spare: bool = False) -> Spare:
        assert is_spare
        made.append(Spare())
        return made[-1]

    monkeypatch.setattr(EngineProcess, "started", started)
    monkeypatch.setattr(supervisor, "_CHECKS_S", 0.001)
    return made


def serving(silent_s: float) -> Supervisor:
    """With an engine that has been silent for so long."""
    keeper = Supervisor(lambda life: [], ServerSection(), lambda message: None, lambda reason: None)
    keeper._begin(Ready(FACTS), 1.0)
    keeper.silence.heard_s = time.monotonic() - silent_s
    return keeper


async def until(holds: Callable[[], object]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s
        await asyncio.sleep(0.001)


def test_a_slow_engine_has_a_spare_at_once(monkeypatch: pytest.MonkeyPatch, spares: list[Spare]) -> None:
    async def run() -> None:
        monkeypatch.setattr(supervisor, "_SPARE_AFTER_S", 4 * PATIENCE_S)  # time of undisturbed service
        keeping = asyncio.ensure_future((keeper := serving(silent_s=1e9))._keep_spare())
        await until(lambda: spares and spares[0].num_hurried)
        assert keeper._spare is spares[0]
        keeping.cancel()

    asyncio.run(run())


def test_a_spare_that_ended_is_replaced_when_the_engine_is_slow(
    monkeypatch: pytest.MonkeyPatch, spares: list[Spare]
) -> None:
    async def run() -> None:
        monkeypatch.setattr(supervisor, "_SPARE_AFTER_S", 0.0)
        keeping = asyncio.ensure_future((keeper := serving(silent_s=-1e9))._keep_spare())
        await until(lambda: spares)
        assert not spares[0].num_hurried, "it gives way to an engine that works"
        spares[0].is_running = False
        keeper.silence.heard_s = time.monotonic() - 1e9
        await until(lambda: len(spares) == 2 and spares[1].num_hurried)
        keeping.cancel()

    asyncio.run(run())


def test_a_spare_that_ended_by_itself_is_cleared_away_before_another_is_due(
    monkeypatch: pytest.MonkeyPatch, spares: list[Spare]
) -> None:
    async def run() -> None:
        monkeypatch.setattr(supervisor, "_SPARE_AFTER_S", 4 * PATIENCE_S)
        keeping = asyncio.ensure_future((keeper := serving(silent_s=1e9))._keep_spare())
        await until(lambda: spares and spares[0].num_hurried)
        spares[0].is_running = False
        await until(lambda: keeper._spare is None)
        assert (len(spares), spares[0].num_ended) == (1, 1)
        keeping.cancel()

    asyncio.run(run())


def test_an_engine_that_was_ready_for_long_is_followed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although nobody asked it for anything: it does not fail at its start."""

    async def pauses() -> list[float]:
        now_s, lives_s, found = 1000.0, [1.0, 1.0, 60.0, 1.0], []
        monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now_s))
        keeper = keeper_of(Short())

        async def ends(engine: object, born_s: float) -> None:
            nonlocal now_s
            keeper._begin(Ready(FACTS), 1.0)
            now_s += lives_s[len(found)]
            raise EngineLost("it ended")

        monkeypatch.setattr(keeper, "_attend", ends)
        for _ in lives_s:
            await keeper._live_once()
            found.append(keeper._pause_s)
        return found

    assert asyncio.run(pauses()) == [1.0, 3.0, 0.0, 1.0]


def test_a_client_is_told_how_long_a_start_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def told() -> list[int]:
        now_s, hints = 1000.0, []
        monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now_s))
        llm = AsyncLLM(TINY)
        keeper = llm.engine

        def ask() -> None:
            with pytest.raises(Unavailable) as refused:
                llm.check_ready()
            hints.append(int(response_of(refused.value).headers["retry-after"]))

        async def ends(engine: object, born_s: float) -> None:
            raise EngineLost("it ended")

        async def engine() -> Short:
            return Short()

        monkeypatch.setattr(keeper, "_attend", ends)
        monkeypatch.setattr(keeper, "_next", engine)
        ask()  # while the first starts
        for start_s in (21.5, 400.0):
            keeper._begin(Ready(FACTS), start_s)
            keeper._has_worked = True
            await keeper._live_once()
            ask()
            now_s += 10.0
            ask()
        return hints

    assert asyncio.run(told()) == [5, 22, 12, 60, 60]
