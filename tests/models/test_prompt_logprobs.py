"""The log-probability of each prompt token is the one that transformers finds, and so are pooled states.

Neither depends on how the prompt was computed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams, Vector
from models.sampling import prompt_outputs
from models.step.runner import ModelRunner
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from serving.text.tokenizer import Text
from tests.device_kinds import Kind, Way, npu, on_each, settings
from tests.lazy import transformers
from tests.thorough import first_quick

WEIGHTS = ROOT / "recipes/tiny/weights"
SETTINGS = {
    "chunks": ["scheduler.num_slots=6", "scheduler.max_batch_tokens=24"],
    "ones": ["scheduler.num_slots=5", "scheduler.max_batch_tokens=5"],
    "swap": [
        *("cache.num_pages=30", "cache.page_size=4", "cache.host_gib=0.01"),
        "scheduler.max_request_tokens=112",
    ],
    "whole": [],
    "overlap": ["scheduler.num_slots=6", "scheduler.max_batch_tokens=24", "scheduler.overlap=true"],
    "few pages": ["cache.num_pages=16", "cache.page_size=8", "scheduler.max_request_tokens=112"],
}
TEXT = Text.load(WEIGHTS)
PROMPTS = [
    "348+275=623. Ben has 506 books and gets 3 more. How many books does Ben have now? " * 2,
    "348+275=623. Ben has 506 books. 狐狸是红色的，跑得很快。在两座山之间可以看到小河。 One day",
    "狐狸",
]
ASKED = (None, 0, 1, 5, 20)


@cache
def expected(tokens: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities [T, V] after each token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        WEIGHTS, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


@cache
def states(tokens: tuple[int, ...]) -> Vector:
    """Behind the last norm, [T, hidden]."""
    model = transformers.AutoModel.from_pretrained(WEIGHTS, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        found: Vector = model(torch.tensor([tokens])).last_hidden_state[0].numpy()
    return found


def requests(seed: int = 0) -> list[Request]:
    """The same few prompts again and again, so that their pages are cached, and some prompts of one token.

    The last nine are pooled.
    """
    assert TEXT is not None
    random = np.random.default_rng(seed)
    made = []
    for number in range(15):
        prompt = [7] if number % 7 == 6 else TEXT.encode(PROMPTS[number % 3])
        params = SamplingParams(
            max_tokens=int(random.integers(1, 12)),
            temperature=0.0 if number % 2 else 0.8,
            seed=number,
            prompt_logprobs=ASKED[number % len(ASKED)],
            logprobs=2 if number % 4 == 0 else None,
        )
        request = Request(str(number), np.array(prompt), params)
        if number % 4 == 1:
            request.followers = [Request(f"{number}#{n}", request.prompt, params) for n in range(2)]
        made.append(request)
    for number in range(9):
        params = SamplingParams(max_tokens=1, temperature=0, pooling="mean" if number % 3 else "last")
        made.append(Request(f"pooled {number}", np.array(TEXT.encode(PROMPTS[number // 3])), params))
    return made


def engine_of(overrides: list[str]) -> Engine:
    return build(load(ROOT / "recipes/tiny/cpu.yaml", overrides)).engine


def serve(engine: Engine, made: list[Request]) -> None:
    for number, request in enumerate(made):
        engine.add(request)
        if number % 2:
            engine.step()
    while engine.has_work:
        engine.step()


def check(request: Request) -> None:
    if request.params.pooling is None:
        assert request.pooled is None
    else:
        theirs = states(tuple(request.prompt.tolist()))
        expected_one = theirs[-1] if request.params.pooling == "last" else theirs.mean(0)
        np.testing.assert_allclose(request.embedding, expected_one, atol=1e-4)
    count, found = request.params.prompt_logprobs, request.prompt_logprobs
    if count is None:
        assert not found
        return
    tokens = request.prompt.tolist()
    assert [each.token for each in found] == tokens[1:]
    logprobs = expected(tuple(tokens))
    for position, each in enumerate(found):
        assert each.logprob == pytest.approx(float(logprobs[position, each.token]), abs=1e-4)
        assert len(each.top) == count
        best = logprobs[position].topk(max(1, count))
        values = [value for _, value in each.top]
        assert values == pytest.approx(best.values[:count].tolist(), abs=1e-4)
        assert values == sorted(values, reverse=True)
        if count:  # lm-eval asks so whether a continuation is the greedy one
            margin = float(best.values[0] - logprobs[position, each.token])
            assert margin < 1e-4 or each.logprob < values[0]
            assert margin > 0 or each.logprob == values[0]
            assert dict(each.top).get(each.token, each.logprob) == each.logprob


@pytest.mark.parametrize("name", first_quick(1, SETTINGS))
def test_every_schedule_tells_what_transformers_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "chunks":
        monkeypatch.setattr(prompt_outputs, "_PIECE_BYTES", 4 * 1024 * 5)  # five positions
    made = requests()
    engine = engine_of(SETTINGS[name])
    serve(engine, made)
    everyone = [each for request in made for each in (request, *request.followers)]
    for request in everyone:
        check(request)
        assert request.finish_reason in ("stop", "length")
    if name in ("few pages", "swap"):
        assert engine.scheduler.counters.preemptions
    if name != "chunks":
        return
    plain = requests()
    for request in plain:
        for each in (request, *request.followers):
            each.params = replace(each.params, prompt_logprobs=None)
    serve(engine_of(SETTINGS[name]), plain)
    assert [each.answer.tolist() for each in made] == [each.answer.tolist() for each in plain]


@pytest.mark.parametrize(("is_scored", "rows"), [(False, [1]), (True, [24, 16])])
def test_the_last_layer_computes_only_tokens_that_are_read(is_scored: bool, rows: list[int]) -> None:
    engine, counts = engine_of(SETTINGS["chunks"]), []
    assert isinstance(engine.runner, ModelRunner)
    mlp = engine.runner.decoder.layers[-1].mlp
    mlp.register_forward_pre_hook(lambda _, given: counts.append(len(given[0])))
    params = SamplingParams(max_tokens=3, prompt_logprobs=0 if is_scored else None)
    serve(engine, [Request("a", np.arange(5, 45), params)])
    assert counts[:-2] == rows, "before two steps of the answer"


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "overrides"), [(5, []), (2, ["cache.host_gib=0.01"])])
def test_preempted_anywhere_nothing_is_told_twice_or_lost(overrides: list[str], seed: int) -> None:
    random = np.random.default_rng(seed)
    engine = engine_of([*SETTINGS["chunks"], "cache.page_size=4", *overrides])
    made, interrupted, of_pooled = requests(seed), 0, 0
    everyone = [each for request in made for each in (request, *request.followers)]
    for request in made:
        engine.add(request)
    while engine.has_work:
        engine.step()
        busy = engine.slots.busy
        if len(busy) and random.random() < 0.5:
            request = engine.slots.requests[row := int(random.choice(busy))]
            engine.scheduler.preemption.preempt(row)
            interrupted += 0 < request.num_scored < request.num_prompt_tokens - 1
            of_pooled += request.params.pooling == "mean" and request.num_scored > 0
    assert interrupted > 3
    assert of_pooled > 2
    for request in everyone:
        check(request)


@pytest.mark.parametrize("device", on_each("fused"))
def test_each_device_tells_what_transformers_finds(device: tuple[Kind, Way]) -> None:
    if device[0] == "npu" and npu() == "real":
        pytest.skip("it computes in bfloat16, which is no match for float32")
    graphs = [] if device[0] == "cpu" else ["device.graphs=4"]
    sizes = ["scheduler.num_slots=4", "scheduler.max_batch_tokens=23"]  # so that a chunk is of one token
    engine = engine_of([*settings(device[0]), *sizes, *graphs])
    made = requests()[1:5]
    serve(engine, made)
    for request in made:
        check(request)


def test_a_prompt_is_told_again_though_it_is_cached() -> None:
    engine = engine_of(["cache.page_size=4"])
    for count in (0, 3):
        first, second = requests()[0], requests()[0]
        first.params = second.params = replace(first.params, prompt_logprobs=count)
        serve(engine, [first])
        serve(engine, [second])
        assert second.num_cached_tokens == 0
        check(second)
    plain = requests()[0]
    serve(engine, [plain])
    assert plain.num_cached_tokens > 40  # what was told of is there for others


def test_who_leads_in_place_of_one_that_gave_up_tells_the_rest() -> None:
    engine = engine_of(["scheduler.num_slots=6", "scheduler.max_batch_tokens=12"])
    leader = requests()[1]
    leader.params = replace(leader.params, prompt_logprobs=2)
    followers = [Request(f"f{n}", leader.prompt, leader.params) for n in range(3)]
    leader.followers = list(followers)
    engine.add(leader)
    engine.step()
    engine.step()
    engine.abort(leader.id)
    while engine.has_work:
        engine.step()
    for each in followers:
        check(each)
    assert followers[0].prompt_logprobs is followers[2].prompt_logprobs
    assert 0 < leader.num_scored < leader.num_prompt_tokens - 1


def test_what_cannot_be_told_of_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt_logprobs is 1; it must be left out beside beam_width"):
        SamplingParams(beam_width=2, prompt_logprobs=1)
    with pytest.raises(ValueError, match=r"prompt_logprobs is 1; it must be left out"):
        SamplingParams(pooling="last", max_tokens=1, prompt_logprobs=1)
