"""On the real device path, do drafts leave every token what it is without them?"""

from __future__ import annotations

import numpy as np
import pytest

from continuous_batching.request import Request, SamplingParams
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Fixed
from continuous_batching.speculation.proposer import Guesses
from continuous_batching.speculation.speculation import Speculation
from kv_cache.pages import Index
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


class Guesser:
    """Guesses up to four tokens of what it knows; one guess in four is wrong."""

    def __init__(self, slots: SlotPool, stories: dict[str, list[int]]) -> None:
        self.slots, self.stories, self.random = slots, stories, np.random.default_rng(1)

    def guess(self, rows: Index, most: int) -> Guesses:
        known = self.slots.num_tokens[rows]
        stories = [self.stories[self.slots.requests[row].id] for row in rows.tolist()]
        tokens = [(story[at : at + most] + [0] * most)[:most] for story, at in zip(stories, known.tolist())]
        wrong = self.random.random((len(rows), most)) < 0.25
        return Guesses(np.where(wrong, 299, tokens).astype(np.int32), np.full(len(rows), most))


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
    num_steps, drafted = 0, requests()
    guesser = Guesser(engine.slots, stories)
    engine.scheduler.speculation = Speculation(engine.slots, guesser, Fixed(), 4)
    for request in drafted:
        engine.add(request)
    while engine.has_work:
        engine.step()
        num_steps += 1
    assert {each.id: each.tokens.tolist() for each in drafted} == stories
    assert num_steps < 0.6 * num_plain_steps
    for with_drafts, without in zip(drafted, plain):
        assert [each.token for each in with_drafts.logprobs] == [each.token for each in without.logprobs]
        found = np.array([each.logprob for each in with_drafts.logprobs])
        assert np.allclose(found, [each.logprob for each in without.logprobs], atol=1e-4)
