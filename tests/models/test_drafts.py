"""On the real device path, do drafts leave every token what it is without them?"""

from __future__ import annotations

import numpy as np
import pytest

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from recipes.build.engine import build
from recipes.schema.reader import load

SETTINGS = ["device.threads=1", "device.compile=false", "model.dtype=float32", "scheduler.num_slots=4"]
KINDS = [
    SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.8, top_k=40, seed=5, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=1.0, seed=7, frequency_penalty=0.5, min_tokens=12, logprobs=2),
]


def requests() -> list[Request]:
    random = np.random.default_rng(0)
    return [
        Request(str(number), random.integers(300, 900, 9 + 5 * number), params)
        for number, params in enumerate(KINDS)
    ]


def draft(engine: Engine, stories: dict[str, list[int]], random: np.random.Generator) -> None:
    """Guess up to four next tokens of each row that decodes; one guess in four is wrong."""
    slots = engine.slots
    for row in slots.busy.tolist():
        known = int(slots.num_tokens[row])
        if known == slots.num_prompt[row]:
            continue
        room = min(4, int(slots.limit[row]) - known - 1)
        guesses = stories[slots.requests[row].id][known : known + room]
        wrong = random.random(len(guesses)) < 0.25
        slots.set_drafts(row, np.where(wrong, 299, guesses).astype(np.int64))


@pytest.mark.parametrize("kind", ["fused", "reference"])
def test_every_token_and_logprob_is_that_without_drafts(kind: str) -> None:
    engine = build(load("recipes/tiny/cpu.yaml", [*SETTINGS, f"device.attention={kind}"])).engine
    plain = requests()
    for request in plain:
        engine.add(request)
    num_plain_steps = 0
    while engine.has_work:
        engine.step()
        num_plain_steps += 1
    stories = {each.id: each.tokens.tolist() for each in plain}
    random, num_steps, drafted = np.random.default_rng(1), 0, requests()
    for request in drafted:
        engine.add(request)
    while engine.has_work:
        draft(engine, stories, random)
        engine.step()
        num_steps += 1
    assert {each.id: each.tokens.tolist() for each in drafted} == stories
    assert num_steps < 0.6 * num_plain_steps
    for with_drafts, without in zip(drafted, plain):
        assert [each.token for each in with_drafts.logprobs] == [each.token for each in without.logprobs]
        found = np.array([each.logprob for each in with_drafts.logprobs])
        assert np.allclose(found, [each.logprob for each in without.logprobs], atol=1e-4)
