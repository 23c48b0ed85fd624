"""With a runner and a model, guessed drafts change no token and no log-probability, and not `min_tokens`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from continuous_batching.request import Request, SamplingParams
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Fixed
from continuous_batching.speculation.proposer import Guesses
from continuous_batching.speculation.speculation import Speculation
from kv_cache.pages import Index
from recipes.assembly.engine import build
from recipes.schema.reader import load
from tests.thorough import cases

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
    """Guesses up to four tokens of what it knows; a share of them is wrong."""

    def __init__(self, slots: SlotPool, stories: dict[str, list[int]], wrong: float = 0.25) -> None:
        self.slots, self.stories, self.random = slots, stories, np.random.default_rng(1)
        self.wrong = wrong

    def guess(self, rows: Index, most: int) -> Guesses:
        known = self.slots.num_tokens[rows]
        stories = [self.stories[self.slots.requests[row].id] for row in rows.tolist()]
        tokens = [(story[at : at + most] + [0] * most)[:most] for story, at in zip(stories, known.tolist())]
        wrong = self.random.random((len(rows), most)) < self.wrong
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


def test_min_tokens_holds_at_each_place_of_a_run() -> None:
    """Drafts say what comes without end tokens: at a place that is too early the model says another token."""
    engine = build(load("recipes/tiny/cpu.yaml", SETTINGS)).engine

    def answered(params: SamplingParams, stories: dict[str, list[int]] | None = None) -> list[int]:
        engine.scheduler.speculation = None
        if stories is not None:
            engine.scheduler.speculation = Speculation(
                engine.slots, Guesser(engine.slots, stories, wrong=0), Fixed(), 12
            )
        request = Request("a", np.arange(300, 320), params)
        engine.add(request)
        while engine.has_work:
            engine.step()
        return request.tokens.tolist()

    story = answered(KINDS[0])
    for place in range(3, 13, cases(3, 1)):
        for least in (place, place + 1):
            stop = story[20 + place]
            params = replace(KINDS[0], stop_token_ids=(stop,), min_tokens=least, logit_bias={5: -1.0})
            plain = answered(params)
            assert answered(params, {"a": story}) == plain
            assert len(plain) > 20 + least or plain[-1] == stop
    assert engine.scheduler.counters.accepted_tokens > 20
