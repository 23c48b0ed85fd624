"""An answer that one engine has begun goes on in another, token for token as it would have there.

The tokens of an answer that was never interrupted are what the continued one is compared with; the engines
batch differently, because the continued requests arrive together with others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from borders.refusal import BadRequest
from continuous_batching.engine import Engine
from continuous_batching.recording.recorder import Recorder
from continuous_batching.recording.replay import request_of
from continuous_batching.request import Request, SamplingParams
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import Recipe
from serving.grammars.matching import Grammars
from serving.text.request_fields import parse_request
from serving.text.tokenizer import Text
from tests.serving.server import TINY
from tests.thorough import cases, first_quick

RECIPE = load(TINY, ["cache.num_pages=256"])
TEXT = Text.load(RECIPE.model.path) if RECIPE.model.path else None
NUM_TOKENS = 24
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1, "seed": 7, "top_p": 0.9},
    "penalties": {"temperature": 1, "seed": 8, "presence_penalty": 1.5, "repetition_penalty": 1.3},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "of the prompt": {"temperature": 0, "logprobs": 1, "prompt_logprobs": 2},
    "least": {"temperature": 1, "seed": 9, "min_tokens": 20},
    "grammar": {"temperature": 1, "seed": 10, "guided_regex": "[a-f0-9]{3,40}(-[a-f0-9]{3,40})*"},
    "words": {"temperature": 1, "seed": 11, "bad_words": ["e", "the"]},
}


def engine_of(recipe: Recipe) -> Engine:
    return build(recipe).engine


def asked(name: str, number: int = 0, prompt: str = "Once upon a time there was a ") -> Request:
    fields = {"id": f"{name} {number}", "prompt": prompt, "max_tokens": NUM_TOKENS, **ASKED[name]}
    if "guided_regex" not in fields:
        fields["ignore_eos"] = True
    return parse_request(fields, TEXT)


def run(engine: Engine, *requests: Request) -> None:
    scheduler = engine.scheduler
    grammars = Grammars(lambda: TEXT, scheduler.vocab_size, scheduler.eos_token_ids)
    for each in requests:
        if each.params.grammar is not None:
            grammars.constrain(each)
        engine.add(each)
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize(
    "overrides", first_quick(1, [((),), (("cache.prefix_sharing=false", "scheduler.max_batch_tokens=64"),)])
)
def test_an_answer_goes_on_as_it_would_have(overrides: tuple[str, ...]) -> None:
    whole = {name: asked(name) for name in ASKED}
    run(engine_of(RECIPE), *whole.values())
    random = np.random.default_rng(5)
    for turn in range(cases(1, 40)):
        engine, again = engine_of(load(TINY, ["cache.num_pages=256", *overrides])), {}
        for name, before in whole.items():
            cut = int(random.integers(1, len(before.answer)))
            again[name] = Request(f"{name} {turn}", before.prompt, before.params, known=before.answer[:cut])
        run(engine, *again.values())
        for name, found in again.items():
            before, num_known = whole[name], len(found.known)
            assert found.answer.tolist() == before.answer.tolist(), (name, num_known)
            assert found.finish_reason == before.finish_reason
            assert found.first_token_s is not None
            assert [each.token for each in found.logprobs] == [
                each.token for each in before.logprobs[num_known:]
            ]
            assert np.allclose(
                [each.logprob for each in found.logprobs],
                [each.logprob for each in before.logprobs[num_known:]],
                atol=1e-4,
            )
            assert [each.token for each in found.prompt_logprobs] == [
                each.token for each in before.prompt_logprobs
            ]


def test_a_continuation_is_preempted_like_any_request() -> None:
    """It returns with its tokens, and with the log-probabilities of those that were sampled here."""
    whole = [asked("logprobs", at, f"{at}: once upon a time there was ") for at in range(3)]
    run(engine_of(RECIPE), *whole)
    engine = engine_of(RECIPE)
    again = [Request(each.id, each.prompt, each.params, known=each.answer[:9]) for each in whole]
    for each in again:
        engine.add(each)
    while engine.has_work:
        engine.step()
        if engine.scheduler.counters.steps == 4:
            engine.drain()
            engine.scheduler.preemption.preempt(int(engine.slots.busy[-1]))
    assert engine.scheduler.counters.preemptions > 0
    for before, found in zip(whole, again):
        assert found.answer.tolist() == before.answer.tolist()
        assert [each.token for each in found.logprobs] == before.answer[9:].tolist()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"known": [1] * NUM_TOKENS}, "known_token_ids holds 24 tokens, and the answer ends at 24"),
        ({"known": [1, 2**20]}, "known_token_ids holds the token id 1048576"),
        ({"known": [-1]}, "known_token_ids holds the token id -1"),
        ({"known": [1], "params": SamplingParams(beam_width=2)}, "known_token_ids go on in one sample"),
        ({"known": [1], "followers": True}, "known_token_ids go on in one sample"),
    ],
)
def test_what_cannot_go_on_is_refused(changed: dict[str, Any], message: str) -> None:
    params = changed.get("params", SamplingParams(max_tokens=NUM_TOKENS))
    request = Request("a", np.array([1, 2]), params, known=np.array(changed["known"]))
    if "followers" in changed:
        request.followers = [Request("b", np.array([1, 2]), params)]
    with pytest.raises(BadRequest, match=message):
        engine_of(RECIPE).add(request)


def test_a_recording_holds_the_tokens_that_were_known() -> None:
    entries: list[Any] = []
    engine = engine_of(RECIPE)
    engine.observer = recorder = Recorder({})
    recorder._write = entries.append
    run(engine, Request("a", np.array([3, 4]), SamplingParams(max_tokens=9), known=np.array([5, 6])))
    assert request_of(entries[0]).tokens.tolist() == [3, 4, 5, 6]
