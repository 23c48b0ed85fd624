"""On checkpoints, every kind of request gets the tokens that it gets without drafts.

The engine runs in float32, with chunked prompts, shared prefixes and a pool so small that requests are
preempted, at temperatures from 0 to 2, with all penalties, masks and log-probabilities. The plain run is the
definition.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams, packed_ids
from continuous_batching.speculation.lengths import Fixed
from continuous_batching.speculation.proposer import NGram, Proposer
from continuous_batching.speculation.speculation import Speculation
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import Kind, on_each, settings
from tests.knowing import Knowing
from tests.models.families import VOCABULARY, Variant, make, wide
from tests.thorough import cases

MOST_CAPTURED = 7  # drafts of a row
NUM_REQUESTS, NUM_NEW, LONGEST = cases(8, 70), 16, 90
VARIANTS = [
    Variant("mistral_drafted", "mistral", {"sliding_window": 11}),
    Variant("qwen3_drafted", "qwen3", {"head_dim": 48, "rms_norm_eps": 1e-5}),
]
FORMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.3, "repetition_penalty": 1.3, "prompt_logprobs": 2},
    {"temperature": 1.0, "top_p": 0.8, "presence_penalty": 0.7, "logprobs": 0},
    {"temperature": 1.4, "top_k": 12, "frequency_penalty": 0.9, "min_tokens": 9, "ignore_eos": False},
    {"temperature": 2.0, "min_p": 0.05, "logit_bias": {7: 4.0, 9: -100.0}},
    {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": -0.5, "presence_penalty": -0.3},
    {"temperature": 0.7, "allowed_token_ids": packed_ids(range(5, 60)), "bad_words": ((6, 7), (11,))},
    {"temperature": 0.0},
]


def requests() -> list[Request]:
    random = np.random.default_rng(5)
    opening = random.integers(0, VOCABULARY, 50)
    made = []
    for number in range(NUM_REQUESTS):
        own = np.tile(random.integers(0, VOCABULARY, int(random.integers(1, 20))), 2)
        prompt = np.concatenate([opening[: 50 if number % 2 else 0], own])
        options = {"max_tokens": NUM_NEW, "ignore_eos": True, "seed": number} | FORMS[number % len(FORMS)]
        made.append(Request(str(number), prompt, SamplingParams(**options)))
    return made


def serve(engine: Engine) -> list[Request]:
    """All of them, a few joining at each step."""
    made = requests()
    waiting = list(made)
    while waiting or engine.has_work:
        for request in waiting[:2]:
            engine.add(request)
        waiting = waiting[2:]
        engine.step()
    return made


def engine_of(path: Path, kind: Kind, *, graphs: int = 0) -> Engine:
    overrides = {
        "model.path": path,
        "model.dtype": "float32",
        "device.compile": "false" if kind == "cpu" else "auto",
        "device.graphs": graphs,
        "cache.page_size": 16,
        "cache.num_pages": 14,
        "cache.memory_gib": "null",
        "scheduler.num_slots": 6,
        "scheduler.max_batch_tokens": 96,
        "scheduler.max_request_tokens": LONGEST + NUM_NEW,
    }
    if graphs:  # steps of all tokens of all rows, so that none with drafts is eager
        overrides["speculation.kind"], overrides["speculation.max_tokens"] = "ngram", MOST_CAPTURED
    texts = [*settings(kind), *(f"{key}={value}" for key, value in overrides.items())]
    return build(load(ROOT / "recipes/any/cpu.yaml", texts)).engine


def check_logprobs(drafted: list[Request], plain: list[Request]) -> None:
    """Requests have the log-probabilities of others, which have the same tokens."""
    for one, other in zip(drafted, plain):
        for name in ("logprobs", "prompt_logprobs"):
            found, wanted = getattr(one, name), getattr(other, name)
            assert [each.token for each in found] == [each.token for each in wanted]
            values = [np.array([each.logprob for each in entries]) for entries in (found, wanted)]
            assert np.allclose(*values, atol=2e-4)


def check(engine: Engine, most: int) -> None:
    """For no drafts, and for right, mixed, wrong and n-gram ones."""
    plain = serve(engine)
    stories = {each.id: each.tokens.tolist() for each in plain}
    slots = engine.slots
    kinds: list[Proposer] = [
        Knowing(slots, lambda asked: stories[asked.id], VOCABULARY, share) for share in (1.0, 0.7, 0.0)
    ]
    verified, counters = [], engine.scheduler.counters
    for proposer in (*kinds, NGram(slots)):
        engine.scheduler.speculation = Speculation(slots, proposer, Fixed(), most)
        before = counters.draft_tokens, counters.accepted_tokens
        drafted = serve(engine)
        verified.append((counters.draft_tokens - before[0], counters.accepted_tokens - before[1]))
        assert {each.id: each.tokens.tolist() for each in drafted} == stories
        check_logprobs(drafted, plain)
    # How many are verified depends on the pages that are free; what a random model says quotes nothing
    right, mixed, wrong = (num_accepted / count for count, num_accepted in verified[:-1])
    assert right > mixed > wrong == 0
    assert verified[0][1] > NUM_REQUESTS, "hardly a page was left for drafts"
    assert engine.scheduler.counters.preemptions > 0
    assert engine.scheduler.counters.hit_tokens > 0


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(each, marks=() if each.family == "mistral" else pytest.mark.slow, id=each.name)
        for each in VARIANTS
    ],
)
def test_drafts_change_no_token(variant: Variant, tmp_path: Path) -> None:
    _, path = make(variant, tmp_path)
    check(engine_of(path, "cpu"), most=20)  # more than a page of 16


@pytest.mark.slow
def test_min_tokens_holds_at_each_place_of_a_run(tmp_path: Path) -> None:
    """Drafts say what comes without end tokens: at a place that is too early the model says another token."""
    engine = engine_of(make(VARIANTS[0], tmp_path)[1], "cpu")
    endless = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)

    def answered(params: SamplingParams, story: list[int] | None = None) -> list[int]:
        engine.scheduler.speculation = None
        if story is not None:
            known = Knowing(engine.slots, lambda _: story, VOCABULARY, 1.0)
            engine.scheduler.speculation = Speculation(engine.slots, known, Fixed(), 12)
        request = Request("a", np.arange(20), params)
        engine.add(request)
        while engine.has_work:
            engine.step()
        return request.tokens.tolist()

    story = answered(endless)
    for place in range(3, 13, cases(3, 1)):
        for least in (place, place + 1):
            stop = story[20 + place]
            params = replace(endless, stop_token_ids=(stop,), min_tokens=least, logit_bias={5: -1.0})
            plain = answered(params)
            assert answered(params, story) == plain
            assert len(plain) > 20 + least or plain[-1] == stop
    assert engine.scheduler.counters.accepted_tokens > 20


@pytest.mark.slow
@pytest.mark.parametrize("pair", on_each("fused")[2:])  # test_captured_draws.py has those of an NPU
def test_nor_do_they_in_captured_steps(pair: tuple[Kind, str], tmp_path: Path) -> None:
    _, path = make(wide(VARIANTS[1]), tmp_path)
    check(engine_of(path, pair[0], graphs=64), most=MOST_CAPTURED)
