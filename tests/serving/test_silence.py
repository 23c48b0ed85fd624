"""An engine that hangs is noticed soon, and one that is only slow is left alone."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from recipes.schema.server_section import ServerSection
from serving.api.api_keys import ApiKeys
from serving.api.app import application
from serving.async_llm import AsyncLLM
from serving.engine import supervisor
from serving.engine.messages import EngineFacts, Ready
from serving.engine.process import EngineLost
from serving.engine.silence import HUNG, Silence
from serving.engine.supervisor import Supervisor
from tests.patience import PATIENCE_S
from tests.serving.server import TINY


def test_the_limit_follows_the_longest_silence_and_forgets_it() -> None:
    silence = Silence(0.0, None, expected_s=1.0)
    assert (silence.slow_s, silence.limit_s) == (1.0, HUNG)
    now_s = 0.0
    for silent_s in (0.2, 3.0, 0.2):
        silence.hear(now_s := now_s + silent_s)
    assert silence.limit_s == pytest.approx(3 * HUNG, rel=1e-3)
    assert silence.slow_s == pytest.approx(3.0, rel=1e-3)
    while now_s < 1800:
        silence.hear(now_s := now_s + 0.25)
    assert silence.limit_s == HUNG


def test_a_silence_in_which_nobody_listened_is_none() -> None:
    silence = Silence(0.0, None, expected_s=1.0)
    silence.hear(100.0)  # the server was stopped itself: an engine that hangs so long is ended
    assert silence.limit_s == HUNG


def test_a_silence_that_was_announced_may_be_as_long_and_says_nothing_of_steps() -> None:
    for fixed_s in (None, 2.0):
        silence = Silence(0.0, fixed_s, expected_s=1.0)
        before_s = silence.limit_s
        silence.allow(300.0)
        assert silence.limit_s == 300
        silence.hear(250.0)
        assert (silence.limit_s, silence.heard_s) == (before_s, 250.0)


def test_a_step_that_was_measured_long_may_take_long() -> None:
    assert Silence(0.0, None, expected_s=30.0).limit_s == 30 * HUNG


def test_the_recipe_fixes_the_limit() -> None:
    silence = Silence(0.0, 2.0, expected_s=30.0)
    silence.hear(1.5)
    assert (silence.slow_s, silence.limit_s) == (1.0, 2.0)


def facts(expected_step_s: float = 1.0) -> EngineFacts:
    return EngineFacts(*[1, (2,)], *[64] * 6, "cpu", 1, 64, True, None, expected_step_s, 8)


def test_by_default_a_hung_engine_is_ended_after_seconds() -> None:
    async def reason() -> str:
        keeper = Supervisor(lambda life: [], ServerSection(), lambda message: None, lambda reason: None)
        keeper._begin(Ready(facts()), 0.0)
        keeper.silence.heard_s = time.monotonic() - 10
        with pytest.raises(EngineLost) as lost:
            await asyncio.wait_for(keeper._watch(), PATIENCE_S)
        return str(lost.value)

    assert "it may be silent for 5 s (5 times the longest" in asyncio.run(reason())


def test_a_pause_of_the_whole_machine_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a container is frozen, or a virtual machine moved, while the engine is in a step."""
    now_s, checks = 1000.0, 0

    async def sleep(for_s: float) -> None:
        nonlocal now_s, checks
        now_s += 60.0 if checks == 3 else for_s
        checks += 1

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    keeper = Supervisor(lambda life: [], ServerSection(), lambda message: None, lambda reason: None)
    keeper._begin(Ready(facts()), 0.0)
    with pytest.raises(EngineLost):
        asyncio.run(keeper._watch())
    assert checks == pytest.approx(HUNG / supervisor._CHECKS_S, abs=4), "none is lost by the pause"


def test_health_and_metrics_say_since_when_a_step_goes_on() -> None:
    async def told(silent_s: float) -> tuple[int, dict[str, Any], dict[str, float]]:
        llm = AsyncLLM(TINY)
        llm.engine._begin(Ready(facts()), 0.0)
        llm.engine.state = "ready"
        llm.engine.silence.heard_s = time.monotonic() - silent_s
        app = application(llm, "tiny", ApiKeys({}), is_local=True)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            health, metrics = await client.get("/health"), await client.get("/metrics")
        lines = [line.split() for line in metrics.text.splitlines() if line.startswith("cb_engine_step_age")]
        return (
            health.status_code,
            health.json(),
            {line[0].partition("{")[0]: float(line[-1]) for line in lines},
        )

    status, health, metrics = asyncio.run(told(1000.0))
    assert (status, health["status"], health["limit_s"]) == (200, "slow", HUNG)
    assert health["silent_s"] >= 1000
    assert metrics["cb_engine_step_age_limit_seconds"] == HUNG
    status, health, _ = asyncio.run(told(-1000.0))  # the slowest machine has just been heard
    assert (status, health["status"]) == (200, "ready")
