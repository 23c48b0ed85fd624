"""A prompt's embedding is pooled from transformers' last hidden states, however the prompt was computed.

Pooled prompts in every schedule, and preempted anywhere, are among those of test_prompt_logprobs.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from continuous_batching.request import Request, SamplingParams
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import Kind, Way, npu, on_each, settings
from tests.lazy import transformers
from tests.models.test_prompt_logprobs import PROMPTS, SETTINGS, TEXT, WEIGHTS, check, engine_of, serve

ASKED = ("last", "mean", None)


def requests(seed: int = 0) -> list[Request]:
    """The same few prompts again and again, so that their pages are cached, beside some that generate."""
    assert TEXT is not None
    made = []
    for number in range(18):
        prompt = [7] if number % 7 == 6 else TEXT.encode(PROMPTS[number // 2 % 3])
        pooling = ASKED[(number + seed) % 3]
        params = SamplingParams(max_tokens=1 if pooling else 8, temperature=0, pooling=pooling)
        made.append(Request(str(number), np.array(prompt), params))
    return made


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("way", ["parallel.tensor=2", "parallel.pipeline=2"])
def test_ranks_and_stages_find_it_too(way: str) -> None:
    built = build(load(ROOT / "recipes/tiny/cpu.yaml", [*SETTINGS["overlap"], way]))
    labels = (7, 300)
    params = SamplingParams(max_tokens=1, pooling="last", label_token_ids=labels)
    try:
        made = requests()[:8]
        labelled = Request("labelled", made[0].prompt, params)
        serve(built.engine, [*made, labelled])
    finally:
        built.engine.observer.close()  # the other ranks end with it
    for request in made:
        check(request)
    model = transformers.AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)
    with torch.inference_mode():
        known = model(torch.from_numpy(labelled.prompt)[None].long()).logits[0, -1].log_softmax(-1)
    np.testing.assert_allclose(labelled.embedding, known[list(labels)], atol=1e-4)


@pytest.mark.parametrize("device", on_each("fused"))
def test_each_device_finds_what_transformers_finds(device: tuple[Kind, Way]) -> None:
    if device[0] == "npu" and npu() == "real":
        pytest.skip("it computes in bfloat16, which is no match for float32")
    graphs = [] if device[0] == "cpu" else ["device.graphs=4"]
    sizes = ["scheduler.num_slots=4", "scheduler.max_batch_tokens=23"]  # so that a chunk is of one token
    made = requests()[:8]
    serve(engine_of([*settings(device[0]), *sizes, *graphs]), made)
    for request in made:
        check(request)


def test_a_cached_beginning_serves_the_last_token_and_not_the_mean() -> None:
    engine = engine_of(["cache.page_size=4"])
    last, mean = requests()[0], requests()[1]
    again = replace(last.params)
    serve(engine, [last])
    second = Request("again", last.prompt, again)
    third = Request("mean", last.prompt, mean.params)
    serve(engine, [second, third])
    assert (second.num_cached_tokens, third.num_cached_tokens) == (len(last.prompt) // 4 * 4, 0)
    for request in (last, second, third):
        check(request)
    plain = Request("plain", last.prompt, SamplingParams(max_tokens=2))
    serve(engine, [plain])
    assert plain.num_cached_tokens > 40  # what was pooled is there for others


def test_a_prompt_that_was_not_finished_has_no_embedding() -> None:
    engine = engine_of(SETTINGS["ones"])
    request = requests()[1]
    engine.add(request)
    engine.step()
    engine.finish(request.id, "timeout")
    assert request.pooled is not None
    assert request.embedding is None


def test_a_pooled_prompt_has_no_answer() -> None:
    for fields, said in (
        ({"pooling": "last"}, "max_tokens is 16; it must be 1 beside pooling"),
        ({"pooling": "mean", "max_tokens": 1, "beam_width": 2}, "beam_width is 2; it must be left out"),
    ):
        with pytest.raises(ValueError, match=said):
            SamplingParams(**fields)
