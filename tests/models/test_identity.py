"""Served all at once, each request gets the tokens that transformers gives it alone.

Prompts are chunked, prefixes shared, the pool is so small that requests are preempted, and both the engine
and the model run in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import Kind, Way, on_each, settings
from tests.models.families import VARIANTS, VOCABULARY, Variant, followed, generated, make, wide
from tests.thorough import THOROUGH, cases

Pair = tuple[Kind, Way]

NUM_REQUESTS, NUM_NEW, LONGEST = cases((10, 16, 120), (32, 48, 300))
PAGE_SIZE, NUM_PAGES, NUM_SLOTS, BATCH_TOKENS = cases((8, 30, 10, 24), (16, 70, 12, 96))
NUM_OPENINGS = cases(1, 3)
NUM_LONG = 4 * (NUM_REQUESTS - 2) // 5  # the others are short, and open alike
NUM_GENERATED = cases(2, NUM_REQUESTS)  # transformers itself generates so many, a token at a time
BY_LENGTH = ("dynamic", "longrope")  # ropes that turn the same token otherwise once a request is longer
FAST = ("llama_dynamic", "mistral_window", "qwen2_yarn", "qwen3_layer_types", "gpt_oss", "gemma2")
FAST += ("mixtral_window", "deepseek_v2", "deepseek_v3")
QUICK = ("llama_dynamic", "qwen3_layer_types", "gpt_oss", "gemma2", "deepseek_v3")
# Plain attention meets the same steps, and has every checkpoint's log-probabilities in test_decoder.py
IN_PLAIN_TORCH = ("llama_dynamic", "mistral_window", "gpt_oss", "deepseek_v3")
ALL = {each.name: each for each in VARIANTS}
# Further options of a family reach attention in the same ways, and have their log-probabilities in
# test_decoder.py
OF_FAMILY = {each.family: name for name, each in ALL.items()} | {ALL[name].family: name for name in FAST}
NAMES = cases(sorted(OF_FAMILY.values()), [*ALL])
ELSEWHERE = ("llama_dynamic", "mistral_window", "qwen2_yarn", "qwen3_layer_types")  # others than a CPU's


def make_engine(path: Path, pair: Pair, graphs: int = 0) -> Engine:
    kind, attention = pair
    overrides = {
        "model.path": path,
        "model.dtype": "float32",
        "device.attention": attention,
        "device.compile": "auto",
        "device.graphs": graphs,
        "cache.page_size": PAGE_SIZE,
        "cache.num_pages": NUM_PAGES,
        "cache.memory_gib": "null",
        "scheduler.num_slots": NUM_SLOTS,
        "scheduler.max_batch_tokens": BATCH_TOKENS,
        "scheduler.max_request_tokens": LONGEST + NUM_NEW,
    }
    texts = [*settings(kind), *(f"{key}={value}" for key, value in overrides.items())]
    return build(load(ROOT / "recipes/any/cpu.yaml", texts)).engine


def make_prompts(seed: int) -> list[list[int]]:
    """1 to LONGEST tokens; every other prompt opens like one of a few, and the last ones are short."""
    rng = np.random.default_rng(seed)
    openings = rng.integers(0, VOCABULARY, (NUM_OPENINGS, 200)).tolist()
    num_short = NUM_REQUESTS - 2 - NUM_LONG
    lengths = [1, LONGEST, *rng.integers(1, LONGEST + 1, NUM_LONG).tolist()]
    lengths += rng.integers(40, 61, num_short).tolist()
    prompts = [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]
    for index in [*range(0, NUM_REQUESTS, 2), NUM_REQUESTS - 3]:
        shared = int(rng.integers(0, 201)) if index < 2 + NUM_LONG else 35
        prompts[index] = (openings[index % NUM_OPENINGS][:shared] + prompts[index])[: lengths[index]]
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


Told = tuple[list[int], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A checkpoint, prompts, and the model that transformers makes of it."""

    path: Path
    model: Any
    prompts: list[list[int]]
    num_generated: int
    told: dict[tuple[int, tuple[int, ...]], Told] = field(default_factory=dict)

    def expected(self, number: int, answer: list[int]) -> Told:
        """Transformers' tokens and log-probabilities [NUM_NEW, V] for a prompt alone.

        The first prompts are generated. Of the others its best token behind each beginning of the answer is
        told, all in one pass: the same tokens if the answer is right, and others from where it is not.
        """
        is_generated = number < self.num_generated
        key = number, () if is_generated else tuple(answer)
        if key not in self.told:
            prompt = self.prompts[number]
            if is_generated:
                self.told[key] = generated(self.model, prompt, NUM_NEW)
            else:
                self.told[key] = followed(self.model, prompt, answer, NUM_NEW)
        return self.told[key]


def case_of(variant: Variant, folder: Path) -> Case:
    model, path = make(variant, folder)
    by_length = any(kind in repr(variant.rope) for kind in BY_LENGTH)
    # One crowd that is crowded enough for all; the larger ones are for each seed
    prompts = make_prompts(seed=cases(4, len(variant.name)))
    return Case(path, model, prompts, NUM_REQUESTS if by_length else NUM_GENERATED)


@pytest.fixture(scope="module")
def case_named(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """The case of a checkpoint's name, the same one for both ways of attention."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda name: case_of(ALL[name], folder))


@pytest.fixture(
    scope="module", params=[each for each in VARIANTS if each.name in ELSEWHERE], ids=lambda each: each.name
)
def wide_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of(wide(request.param), tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        pytest.param(name, way, marks=() if name in QUICK and way == "fused" else pytest.mark.slow)
        for name in NAMES
        for way in (get_args(Way) if name in IN_PLAIN_TORCH or THOROUGH else ("fused",))
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    name: str, attention: Way, case_named: Callable[[str], Case]
) -> None:
    case = case_named(name)
    check(make_engine(case.path, ("cpu", attention)), case)


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [0, 8])
@pytest.mark.parametrize("pair", on_each("fused")[2:])  # test_every_product.py has those of an NPU
def test_so_they_are_on_other_devices(wide_case: Case, pair: Pair, graphs: int) -> None:
    check(make_engine(wide_case.path, pair, graphs), wide_case)


def check(engine: Engine, case: Case) -> None:
    requests = serve(engine, case.prompts)
    for number, request in enumerate(requests):
        tokens, logprobs = case.expected(number, request.answer.tolist())
        assert request.answer.tolist() == tokens, f"request {request.id}"
        assert len(request.logprobs) == NUM_NEW
        lines = [[(line.token, line.logprob), *line.top] for line in request.logprobs]
        ours = torch.tensor(lines)
        theirs = logprobs.gather(1, ours[..., 0].long())
        torch.testing.assert_close(ours[..., 1], theirs, rtol=0, atol=1e-4)
