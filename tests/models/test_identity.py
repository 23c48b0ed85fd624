"""Served all at once, does each request get the tokens that transformers gives it alone?

With chunked prompts, shared prefixes, a pool so small that requests are preempted, and both the engine and
the model in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention.reference import Attention, AttentionShape
from continuous_batching.engine import Engine
from continuous_batching.policies.stall_free import StallFree
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.pages import PagePool
from kv_cache.storage import KVCache
from models import weights
from models.decoder import Decoder
from models.fused import Fused
from models.runner import ModelRunner
from models.sampler import Sampler
from recipes import families
from tests.models.families import VARIANTS, VOCABULARY, fresh_rope, make

NUM_REQUESTS, NUM_NEW, LONGEST = 32, 48, 300
IMPLEMENTATIONS = [(Fused, Attention)]


def make_engine(
    path: Path, implementation: tuple[type[Fused], type[Attention]], page_size: int, num_pages: int
) -> Engine:
    config = replace(families.decoder_config(families.read(path)), dtype=torch.float32)
    kv = (config.num_kv_heads, config.head_dim)
    shape = AttentionShape(
        config.num_heads, *kv, page_size, config.head_dim**-0.5, config.dtype, config.windows
    )
    fused, attention = implementation[0](), implementation[1](shape)
    attention.check()
    decoder = Decoder(config, fused, attention)
    weights.load(decoder, path)
    cache = KVCache(config.num_layers, num_pages, page_size, *kv, config.dtype)
    slots = SlotPool(12, LONGEST + NUM_NEW, page_size)
    scheduler = Scheduler(
        slots,
        PagePool(num_pages),
        StallFree(),
        max_batch_tokens=96,
        vocab_size=config.vocab_size,
        max_shared_tokens=config.max_shared_positions,
    )
    sampler = Sampler(config.eos_token_ids, config.vocab_size, fused)
    return Engine(scheduler, ModelRunner(decoder, cache, attention, sampler, slots))


def make_prompts(seed: int) -> list[list[int]]:
    """1 to 300 tokens; every other prompt opens like one of three, the last ones are short and open alike."""
    rng = np.random.default_rng(seed)
    openings = rng.integers(0, VOCABULARY, (3, 200)).tolist()
    lengths = [1, LONGEST, *rng.integers(1, LONGEST + 1, 24).tolist(), *rng.integers(40, 61, 6).tolist()]
    prompts = [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]
    for index in [*range(0, NUM_REQUESTS, 2), NUM_REQUESTS - 3]:
        shared = int(rng.integers(0, 201)) if index < 26 else 35
        prompts[index] = (openings[index % 3][:shared] + prompts[index])[: lengths[index]]
    return prompts


def serve(engine: Engine, prompts: list[list[int]]) -> list[Request]:
    """All requests, a few joining at each step; checks that the schedule was as hard as it is meant to be."""
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, logprobs=3, ignore_eos=True)
    requests = [Request(str(index), np.array(prompt), params) for index, prompt in enumerate(prompts)]
    waiting, chunks = list(requests), 0
    while waiting or engine.has_work:
        for request in waiting[:3]:
            engine.add(request)
        waiting = waiting[3:]
        step = engine.step()
        assert step is not None
        chunks += step.batch.num_spans - len(step.batch.sampled)
    counters = engine.scheduler.counters
    assert counters.preemptions >= 3, "the pool was too large to force preemptions"
    assert counters.hit_tokens > 0, "no prefix was shared"
    assert chunks > NUM_REQUESTS, "hardly a prompt was cut"
    return requests


@torch.no_grad()
def generated(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Transformers' own greedy tokens for a prompt alone, and the log-probabilities [NUM_NEW, V]."""
    fresh_rope(model)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logprobs = torch.cat(output.logits).log_softmax(-1)
    return output.sequences[0, len(prompt) :].tolist(), logprobs


@dataclass(frozen=True)
class Case:
    """A checkpoint, prompts, and what transformers makes of each alone."""

    path: Path
    prompts: list[list[int]]
    expected: list[tuple[list[int], torch.Tensor]]


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: variant.name)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model, path = make(request.param, tmp_path_factory.mktemp("checkpoint"))
    prompts = make_prompts(seed=len(request.param.name))
    return Case(path, prompts, [generated(model, prompt) for prompt in prompts])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda pair: pair[1].__name__)
@pytest.mark.parametrize(("page_size", "num_pages"), [(16, 70)])
def test_greedy_tokens_are_those_of_transformers(
    case: Case, implementation: tuple[type[Fused], type[Attention]], page_size: int, num_pages: int
) -> None:
    requests = serve(make_engine(case.path, implementation, page_size, num_pages), case.prompts)
    for request, (tokens, logprobs) in zip(requests, case.expected):
        assert request.answer.tolist() == tokens, f"request {request.id}"
        assert len(request.logprobs) == NUM_NEW
        lines = [[(line.token, line.logprob), *line.top] for line in request.logprobs]
        ours = torch.tensor(lines)
        theirs = logprobs.gather(1, ours[..., 0].long())
        torch.testing.assert_close(ours[..., 1], theirs, rtol=0, atol=1e-4)
