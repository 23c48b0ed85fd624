"""The first replica that is ready decides the model of a router.

Its claim ends when it has not been ready for long.
"""

from __future__ import annotations

import asyncio

import pytest

from serving.router import replicas as of_replicas
from serving.router.replicas import CLAIM_S, MOST_INFO_BYTES, MOST_METRICS_BYTES, FleetModel
from tests.serving.router.test_hostile_replicas import CHUNKED, DEEP, LONG, Watched, endless, models
from tests.serving.router.test_lost_replicas import answer
from tests.serving.router.test_proxy import Script, run
from tests.serving.router.waiting import until

LATE: dict[str, Script] = {"ready": answer(b"", 503)}
AGENT: dict[str, Script] = {"models": models("agent")}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_replicas, "POLL_S", 0.01)


async def abort(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@pytest.mark.parametrize(
    "broken", [{"server_info": answer(DEEP)}, {"metrics": abort}], ids=["info", "metrics"]
)
def test_a_replica_that_never_becomes_ready_does_not_decide_the_model(broken: dict[str, Script]) -> None:
    async def test() -> None:
        async with Watched(AGENT | broken, LATE, LATE) as fleet:
            await until(lambda: fleet.replicas[0].state in ("not ready", "lost"))
            for number in (1, 2):
                fleet.says(number)
            await until(lambda: fleet.is_sent() == [False, True, True])
            await until(lambda: fleet.replicas[0].state == "refused")
            assert fleet.members.model.name == "tiny"

    run(test)


def test_of_two_models_that_start_at_once_the_first_that_is_ready_decides() -> None:
    """Each may serve the model when it is asked, and only one still when it is ready."""
    goes_on, waiting = asyncio.Event(), list[asyncio.StreamWriter]()

    async def metrics(writer: asyncio.StreamWriter) -> None:
        waiting.append(writer)
        await goes_on.wait()
        await answer(b"")(writer)

    async def test() -> None:
        async with Watched(AGENT | {"metrics": metrics}, LATE) as fleet:
            await until(lambda: bool(waiting))
            fleet.says(1)
            await until(lambda: fleet.replicas[1].state == "ready")
            goes_on.set()
            await until(lambda: fleet.replicas[0].state == "refused")
            assert fleet.is_sent() == [False, True]

    run(test)


def test_a_replica_that_is_lost_is_asked_again_for_its_model() -> None:
    """It came back once, and went down again before it was ready."""

    async def test() -> None:
        down = {"ready": abort, "metrics": abort}
        async with Watched({}, LATE) as fleet:
            one, two = fleet.replicas
            await until(lambda: one.state == "ready")
            fleet.says(1, **down)
            await until(lambda: two.state == "lost")
            fleet.says(1, metrics=abort)
            asked = len(fleet.stubs[1].heads)
            await until(lambda: any(b"/metrics" in head for head in fleet.stubs[1].heads[asked:]))
            fleet.says(1, **down)
            asked = len(fleet.stubs[1].heads)
            await until(lambda: len(fleet.stubs[1].heads) > asked + 4)
            assert two.reader is None
            fleet.says(1, **AGENT)
            await until(lambda: two.state in ("ready", "refused"))
            assert fleet.is_sent() == [True, False]

    run(test)


def test_a_replica_that_does_not_say_what_it_serves_keeps_its_claim(caplog: pytest.LogCaptureFixture) -> None:
    """A server that is overloaded says nothing of its model; one that has no such list is taken as it is."""

    async def test() -> None:
        async with Watched({}, LATE) as fleet:
            one, two = fleet.replicas
            await until(lambda: one.state == "ready")
            for status, state in ((503, "not ready"), (429, "not ready"), (404, "ready"), (401, "ready")):
                fleet.says(0, **LATE)
                await until(lambda: one.state == "not ready" and "/ready" in one.trouble)
                fleet.says(0, models=answer(b"", status))
                await until(lambda: one.state == state and "/ready" not in one.trouble)  # noqa: B023
                fleet.says(1, **LATE)
                await until(lambda: two.state == "not ready")
                fleet.says(1, **AGENT)
                await until(lambda: two.state in ("ready", "refused"))
                assert two.state == "refused"
        unknown = [each for each in caplog.messages if "its model is unknown" in each]
        assert len(unknown) == 1, "told once"
        assert one.url in unknown[0]

    run(test)


def test_what_may_be_missing_may_be_too_long(caplog: pytest.LogCaptureFixture) -> None:
    long = endless(CHUNKED, LONG)

    async def test() -> None:
        async with Watched({"metrics": long}, {"models": long}) as fleet:
            await until(lambda: fleet.is_sent() == [True, True])
            asked = len(fleet.stubs[0].heads)
            await until(lambda: len(fleet.stubs[0].heads) > asked + 6)
            one, two = (each.url for each in fleet.replicas)
        assert sorted(each for each in caplog.messages if "answers with more" in each) == sorted(
            [
                f"{one}: its figures are ignored: /metrics answers with more than {MOST_METRICS_BYTES} bytes",
                f"{two}: its model is unknown, and is not checked: /v1/models answers with more than"
                f" {MOST_INFO_BYTES} bytes",
            ]
        ), "told once"

    run(test)


def test_a_bad_field_of_server_info_costs_that_field_alone() -> None:
    info = (
        b'{"num_slots": 7, "recipe": {"cache": {"events": "tcp://a b:1"},'
        b' "server": {"pages_at": "tcp://*:7", "prompt_replicas": ["tcp://x:1"]}}}'
    )
    learned = list[tuple[object, ...]]()

    async def test() -> None:
        async with Watched({"server_info": answer(info)}) as fleet:
            fleet.replicas[0]._learned = lambda *each: learned.append(each)
            await until(lambda: fleet.is_sent() == [True])
            assert learned == [(0, "tcp://127.0.0.1:7", ("tcp://x:1",), 7)]

    run(test)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_claim_ends_when_its_replica_has_not_been_ready_for_long() -> None:
    clock = Clock()
    model = FleetModel(clock)
    assert not model.claim("one", ["tiny"])
    clock.now_s = CLAIM_S
    assert "which one last served" in model.refusal("two", ["agent"]), "it may be starting again"
    assert not model.claim("one", [])
    clock.now_s = 2 * CLAIM_S
    assert model.claim("two", ["agent"]), "it was ready, and did not say that it serves another"
    clock.now_s += 1
    assert not model.refusal("two", ["agent"])
    assert not model.refusal("one", ["tiny"]), "nobody has taken the model yet"
    assert not model.claim("two", ["agent"])
    assert "which two last served" in model.claim("one", ["tiny"])


def test_a_claim_stays_with_a_replica_that_is_ready_however_long() -> None:
    clock = Clock()
    model = FleetModel(clock)
    for number in range(9):
        clock.now_s = number * CLAIM_S
        assert not model.claim("one", ["a", "b"])
        assert not model.claim("two", ["b", "a"]), "names in any order"
        assert model.claim("three", ["b"])
