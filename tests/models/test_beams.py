"""A beam search finds what transformers' search finds, with the same scores.

All searches are served at once, beside requests of other kinds, and preempted at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.models.families import VARIANTS, VOCABULARY, expected_logprobs, fresh_rope, make
from tests.thorough import THOROUGH, cases, first_quick

Answer = tuple[list[int], float]


def make_engine(path: Path, **overrides: object) -> Engine:
    keys = {
        "model.path": path,
        "model.dtype": "float32",
        "device.threads": 1,
        "device.compile": "false",
        "cache.page_size": 8,
        "cache.num_pages": 42,
        "cache.memory_gib": "null",
        "scheduler.num_slots": 16,
        "scheduler.max_batch_tokens": 48,
        "scheduler.max_request_tokens": 110,
    }
    lines = [f"{key}={value}" for key, value in (keys | overrides).items()]
    return build(load(ROOT / "recipes/any/cpu.yaml", lines)).engine


@torch.no_grad()
def generated(model: Any, prompt: list[int], params: SamplingParams, **options: Any) -> list[Answer]:
    """Transformers' answers to a prompt alone, best first, with their scores."""
    fresh_rope(model)
    stops = list(params.stop_token_ids)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        eos_token_id=stops or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    answers = [sequence[len(prompt) :].tolist() for sequence in output.sequences]
    ends = [next((at + 1 for at, token in enumerate(each) if token in stops), len(each)) for each in answers]
    return [(each[:end], score) for each, end, score in zip(answers, ends, output.sequences_scores.tolist())]


def searches(count: int, seed: int, vocabulary: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts and ways to search of all kinds; some prompts open alike."""
    random = np.random.default_rng(seed)
    opening = random.integers(0, vocabulary, 40).tolist()
    made = []
    for index in range(count):
        prompt = opening[: int(random.integers(0, 41))] if index % 2 else []
        prompt = prompt + random.integers(0, vocabulary, int(random.integers(1, 30))).tolist()
        num_stops = int(random.choice([0, 1, 4, 12]))
        params = SamplingParams(
            max_tokens=int(random.integers(1, 25)),
            beam_width=int(random.integers(2, 9)),
            length_penalty=float(random.choice([-1.0, 0.0, 0.6, 1.0, 2.5])),
            early_stopping=(False, True, "never")[int(random.integers(3))],
            stop_token_ids=tuple(random.choice(vocabulary, num_stops, replace=False).tolist()),
            ignore_eos=True,
        )
        made.append((prompt, params))
    return made


def serve(engine: Engine, asked: list[tuple[list[int], SamplingParams]]) -> list[Request]:
    """All searches, two joining at each step, with a request that draws between any two; some lose their
    rows."""
    requests = [Request(str(index), np.array(prompt), params) for index, (prompt, params) in enumerate(asked)]
    draws = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    queue = [
        each
        for index, request in enumerate(requests)
        for each in (request, Request(f"draws {index}", request.prompt, draws))
    ]
    while queue or engine.has_work:
        for request in queue[:2]:
            engine.add(request)
        queue = queue[2:]
        if engine.scheduler.counters.steps % 6 == 5 and len(engine.slots.busy):
            engine.scheduler.preemption.preempt(int(engine.slots.busy[-1]))
        engine.step()
    return requests


def check(request: Request, expected: list[Answer]) -> None:
    found, penalty = request.hypotheses, request.params.length_penalty
    assert [each.tokens.tolist() for each in found] == [tokens for tokens, _ in expected], request.params
    for each, (tokens, score) in zip(found, expected):
        weight = len(tokens) ** max(0.0, -penalty)  # scores of hundreds lose digits in float32
        assert abs(each.score - score) < 1e-4 * weight
        assert each.score == pytest.approx(each.cumulative_logprob / len(tokens) ** penalty)
    assert request.answer.tolist() == expected[0][0]


@dataclass(frozen=True)
class Case:
    """A checkpoint, and the model of transformers that holds the same."""

    path: Path
    model: Any


# A search sees of a family no more than its logits and what its pages hold: keys and values, those of ropes
# that change with the length, those of a window, and latents
FEW = ("llama_dynamic", "mistral_window", "gemma2", "deepseek_v3")


@pytest.fixture(
    scope="module",
    params=first_quick(2, (each for each in VARIANTS if THOROUGH or each.name in FEW)),
    ids=lambda each: each.name,
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model, path = make(request.param, tmp_path_factory.mktemp("checkpoint"))
    return Case(path, model)


def test_a_search_finds_what_transformers_finds(case: Case) -> None:
    asked = searches(cases(9, 14), len(case.path.name), VOCABULARY)
    engine = make_engine(case.path)
    for request, (prompt, params) in zip(serve(engine, asked), asked):
        check(request, generated(case.model, prompt, params))
    assert engine.scheduler.counters.preemptions >= 2
    assert engine.scheduler.counters.copied_pages >= 12


def test_what_changes_a_search_changes_it_as_in_transformers(case: Case) -> None:
    """Penalties and barred end tokens change log-probabilities, and leave those that are told alone."""
    params = SamplingParams(
        max_tokens=12,
        min_tokens=6,
        beam_width=4,
        repetition_penalty=1.3,
        stop_token_ids=tuple(range(0, VOCABULARY, 3)),
        ignore_eos=True,
        logprobs=2,
    )
    prompts = [prompt for prompt, _ in searches(4, 7, VOCABULARY)]
    options = {"repetition_penalty": 1.3, "min_new_tokens": 6}
    for request, prompt in zip(serve(make_engine(case.path), [(each, params) for each in prompts]), prompts):
        check(request, generated(case.model, prompt, params, **options))
        for found in request.hypotheses:
            told = expected_logprobs(case.model, prompt + found.tokens.tolist())[len(prompt) - 1 : -1]
            assert [line.token for line in found.logprobs] == found.tokens.tolist()
            wanted = told.gather(1, torch.from_numpy(found.tokens).long()[:, None])[:, 0]
            ours = torch.tensor([line.logprob for line in found.logprobs])
            torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-4)
            best = torch.tensor([[value for _, value in line.top] for line in found.logprobs])
            torch.testing.assert_close(best, told.topk(2).values, rtol=0, atol=1e-4)
