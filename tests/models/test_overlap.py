"""With the host ahead of the device, every request gets the tokens that it gets without."""

from __future__ import annotations

import numpy as np
import pytest

from continuous_batching.request import Request, SamplingParams
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import Kind, Way, on_each, settings

SMALL = ["cache.num_pages=200", "scheduler.num_slots=6", "scheduler.max_batch_tokens=24"]


def requests() -> list[Request]:
    """Greedy and drawn ones, short and long, some that end by a stop token, one with penalties."""
    random = np.random.default_rng(3)
    made = []
    for number in range(14):
        params = SamplingParams(
            max_tokens=int(random.integers(1, 24)),
            temperature=0.0 if number % 2 else 0.8,
            top_p=0.9,
            seed=number,
            stop_token_ids=tuple(random.integers(0, 1024, 80).tolist()) if number % 3 == 0 else (),
            repetition_penalty=1.2 if number == 7 else 1.0,
        )
        prompt = random.integers(5, 1000, int(random.integers(1, 40)))
        made.append(Request(str(number), prompt, params))
    return made


@pytest.mark.parametrize("device", on_each("fused"))
def test_overlap_changes_no_answer(device: tuple[Kind, Way]) -> None:
    answers = []
    for overlap in ("true", "false"):
        overrides = [*settings(device[0]), *SMALL, f"scheduler.overlap={overlap}"]
        engine = build(load(ROOT / "recipes/tiny/cpu.yaml", overrides)).engine
        advance, times_ahead = engine.scheduler.in_flight.advance, 0

        def counted(advance=advance) -> None:
            nonlocal times_ahead
            times_ahead += 1
            advance()

        engine.scheduler.in_flight.advance = counted
        made = requests()
        for number, request in enumerate(made):
            engine.add(request)
            if number % 2:
                engine.step()
        while engine.has_work:
            engine.step()
        assert bool(times_ahead) == (overlap == "true")
        answers.append([(each.finish_reason, each.answer.tolist()) for each in made])
    assert answers[0] == answers[1]
    assert {reason for reason, _ in answers[0]} == {"stop", "length"}
