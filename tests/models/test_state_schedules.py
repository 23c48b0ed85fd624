"""An engine whose layers keep states gives transformers' tokens, whatever is shared, preempted or forked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from continuous_batching.engine import Engine
from continuous_batching.inspection import recount
from continuous_batching.request import Request, SamplingParams
from continuous_batching.slots import SlotPool
from kv_cache.states import GRID, StateGroup
from recipes.assembly.engine import BuiltEngine, build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import settings, stand_in_alone
from tests.knowing import Knowing
from tests.models.families import VOCABULARY, logprobs_behind, make, wide
from tests.models.recurrent_variants import RECURRENT_VARIANTS
from tests.patience import PATIENCE_S
from tests.thorough import cases, first_quick

VARIANTS = {each.name: each for each in RECURRENT_VARIANTS}
NUM_NEW, NUM_SLOTS, NEAR = 12, 4, 1e-3
Case = tuple[Any, Path]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "states of the slots alone": {"cache.num_states": 1 + NUM_SLOTS},
    "nothing shared": {"cache.prefix_sharing": "false"},
    "preempted": {"cache.num_pages": 16},
    "swapped": {"cache.num_pages": 16, "cache.host_gib": 0.01},
    "one slot": {"scheduler.num_slots": 1, "cache.num_states": 2},
    "compacted": {"cache.compact_every_steps": 1},
    "whole prompts": {"scheduler.policy": "orca", "scheduler.max_batch_tokens": 300},
    "long chunks": {"scheduler.max_batch_tokens": 200},
    "overlapped": {"scheduler.overlap": "true"},
}


@pytest.fixture(scope="module")
def case_named(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda name: make(VARIANTS[name], folder))


def built(path: Path, changes: dict[str, Any]) -> BuiltEngine:
    overrides = {
        "model.path": path,
        "model.dtype": "float32",
        "cache.page_size": 16,
        "cache.num_pages": 90,
        "cache.memory_gib": "null",
        "scheduler.num_slots": NUM_SLOTS,
        "scheduler.max_batch_tokens": GRID + NUM_SLOTS,
        "scheduler.max_request_tokens": 240,
        "device.compile": "false",
    } | changes
    return build(load(ROOT / "recipes/any/cpu.yaml", [f"{key}={value}" for key, value in overrides.items()]))


PARTS = [(150, 40), (0, 128), (150, 20), (0, 1), (150, 5), (70, 61), (150, 40), (128, 1)]


def requests(parts: Sequence[tuple[int, int]] = PARTS) -> list[Request]:
    """Prompts, by default of up to three blocks of the grid, with so many tokens of a common opening and of
    their own; one has several samples, and the first comes again.
    """
    random = np.random.default_rng(3)
    opening = random.integers(0, VOCABULARY, max(shared for shared, _ in parts)).tolist()
    made = []
    for number, (shared, own) in enumerate(parts):
        prompt = np.array(opening[:shared] + random.integers(0, VOCABULARY, own).tolist())
        params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
        request = Request(str(number), prompt, params)
        if number == 2:
            request.followers = [Request(f"2.{index}", prompt, params) for index in range(2)]
        made.append(request)
    made.append(Request("again", made[0].prompt, params))
    return made


def served(engine: Engine, made: Sequence[Request] | None = None) -> list[Request]:
    """All of them, two joining at each step; the pools are recounted after each."""
    made = requests() if made is None else made
    waiting, asked = list(made), everyone(made)
    while waiting or engine.has_work:
        for request in waiting[:2]:
            engine.add(request)
        waiting = waiting[2:]
        assert engine.step() is not None
        assert not recount(engine.scheduler).wrong_pages
    for group in engine.scheduler.tables.groups:
        assert group.num_available == group.pool.num_pages - 1, f"{group.name} leaked"
    return asked


def everyone(made: Sequence[Request]) -> list[Request]:
    """Requests and those that take samples beside them, who later stand alone."""
    return [each for leader in made for each in (leader, *leader.followers)]


def check(model: Any, answered: list[Request], near: float = NEAR) -> None:
    for request in answered:
        prompt, answer = request.prompt.tolist(), request.answer.tolist()
        assert len(answer) == NUM_NEW, f"request {request.id} ended with {request.finish_reason}"
        logprobs = logprobs_behind(model, prompt, answer)
        best, taken = logprobs.max(-1).values, logprobs[np.arange(NUM_NEW), answer]
        assert (best - taken).max() < near, f"request {request.id}"


def states_of(engine: Engine) -> StateGroup:
    group = engine.scheduler.tables.states
    assert group is not None
    return group


FEW = [("qwen3_5", "one slot"), ("qwen3_next", "swapped"), ("kimi_linear", "overlapped")]
CELLS = cases(
    [*FEW, *(("qwen3_5", way) for way in ("preempted", "compacted", "whole prompts"))],
    [(name, way) for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear") for way in WAYS],
)


@pytest.mark.parametrize(
    ("name", "way"),
    first_quick(1, CELLS),
)
def test_tokens_are_those_of_transformers(name: str, way: str, case_named: Callable[[str], Case]) -> None:
    model, path = case_named(name)
    engine = built(path, WAYS[way]).engine
    check(model, served(engine))
    counters, group = engine.scheduler.counters, states_of(engine)
    if way == "swapped":
        assert group.counts.swapped_in_pages
    elif way == "preempted":
        assert counters.preemptions
    else:
        assert not counters.preemptions
    if way not in ("nothing shared", "one slot"):
        assert counters.hit_tokens


@pytest.mark.slow
def test_a_restart_resumes_from_states_in_a_folder(case_named: Callable[[str], Case], tmp_path: Path) -> None:
    """The second life finds each prompt up to the last state that the first has left in it."""
    model, path = case_named("qwen3_5")
    more = {
        "cache.host_gib": 0.02,
        "cache.tier": f"{{kind: disk, gib: 0.1, path: {tmp_path}, wait_s: 60}}",
        "scheduler.num_slots": 2,
    }
    cached = []
    for _ in range(2):
        made, found = lived(built(path, more).engine, requests())
        check(model, everyone(made))
        cached.append([each.num_cached_tokens for each in made])
    assert cached[1] == [(each.num_prompt_tokens - 1) // GRID * GRID for each in made]
    assert found > sum(cached[1][at] // 16 for at in (0, 1)), "pages, and a state behind them"


def lived(engine: Engine, made: list[Request]) -> tuple[list[Request], int]:
    """Serve all of them by an engine whose pages outlive it in a tier, and count what it has found there."""
    asked = everyone(made)
    for request in made:
        engine.add(request)
    while engine.has_work:
        if engine.step() is None:
            time.sleep(0.001)  # waits for a lookup
    assert engine.tier is not None
    assert engine.tier.settle(PATIENCE_S)
    assert not engine.tier.counters.refused
    assert all(len(each.answer) == NUM_NEW for each in asked)
    engine.close()
    return made, engine.tier.counters.found


@pytest.mark.parametrize(
    ("name", "way"),
    cases([("qwen3_5", "swapped")], [("qwen3_5", "swapped"), ("kimi_linear", "states of the slots alone")]),
)
def test_drafts_change_no_token(name: str, way: str, case_named: Callable[[str], Case]) -> None:
    """Drafts that are accepted are taken in by the next step, those that are refused by none."""
    model, path = case_named(name)
    answered = served(built(path, {}).engine)
    drafts = {"speculation.kind": "ngram", "speculation.max_tokens": 4, "speculation.adaptive": "fixed"}
    engine = built(path, WAYS[way] | drafts).engine
    assert engine.scheduler.speculation is not None
    engine.scheduler.speculation._proposer = knowing(engine.slots, answered)
    check(model, served(engine))
    counters = engine.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.draft_tokens
    assert counters.hit_tokens


def knowing(slots: SlotPool, answered: list[Request]) -> Knowing:
    """A proposer of what these requests have answered."""
    stories = {each.id: each.tokens.tolist() for each in answered}
    return Knowing(slots, lambda asked: stories[asked.id], VOCABULARY)


WIDE = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}


@pytest.mark.npu
@pytest.mark.slow
@stand_in_alone
def test_captured_steps_advance_the_states_of_their_rows(tmp_path: Path) -> None:
    """On the stand-in for an NPU; padding writes the null page alone. Those of Qwen3.5 have drafts, too, in
    test_state_mtp.py.
    """
    variant = wide(VARIANTS["kimi_linear"])
    model, path = make(replace(variant, options=variant.options | {"linear_head_dim": 128}), tmp_path)
    npu = dict(each.split("=", 1) for each in settings("npu"))
    built_one = built(path, npu | {"device.graphs": 3, "scheduler.overlap": "true"})
    runner = built_one.runner
    assert runner.graphs is not None
    taken = []
    takes = runner.graphs.takes
    runner.graphs.takes = lambda batch: taken.append(takes(batch)) or taken[-1]
    check(model, served(built_one.engine, requests()[:4]))
    assert 0 < sum(taken) < len(taken), "some steps are captured, and some are not"


@pytest.mark.npu
@pytest.mark.slow
@stand_in_alone
def test_states_in_bfloat16_whose_channels_decay_apart_give_a_cpus_tokens(tmp_path: Path) -> None:
    """In eager steps of an NPU and in captured ones: its operators take no such decays."""
    variant = wide(VARIANTS["kimi_linear"])
    _, path = make(replace(variant, options=variant.options | {"linear_head_dim": 128}), tmp_path)
    npu = dict(each.split("=", 1) for each in settings("npu"))
    answers = []
    for changes in ({}, npu, npu | {"device.graphs": 3}):
        engine = built(path, changes | {"cache.state_dtype": "bfloat16"}).engine
        answers.append([each.answer.tolist() for each in served(engine, requests()[:2])])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.npu
@pytest.mark.slow
@stand_in_alone
def test_an_npu_fuses_states_in_bfloat16_and_wide_heads(tmp_path: Path) -> None:
    """Both in one model, as Qwen3.5 has them; what a state loses by its type is all that tokens may lose."""
    variant = wide(VARIANTS["qwen3_next"])
    options = variant.options | WIDE | {"head_dim": 256}
    model, path = make(replace(variant, options=options), tmp_path)
    fused = {
        "cache.state_dtype": "bfloat16",
        "cache.page_size": 128,
        "cache.num_pages": 24,
        "device.graphs": 3,
    }
    built_one = built(path, dict(each.split("=", 1) for each in settings("npu")) | fused)
    decoder = built_one.runner.decoder
    kinds = type(decoder.recurrence).__name__, type(decoder.attention).__name__
    assert kinds == ("FusedRecurrence", "WideHeadAttention")
    check(model, served(built_one.engine, requests()[:4]), near=0.05)


def test_states_are_equal_to_the_bit_however_a_prompt_is_cut(case_named: Callable[[str], Case]) -> None:
    """In chunks of one block and of two, with and without other prompts before it."""
    _, path = case_named("qwen3_5")
    found = []
    for num_blocks, before in ((1, 0), (2, 0), (2, 3)):
        one = built(
            path, {"scheduler.max_batch_tokens": num_blocks * GRID + NUM_SLOTS, "model.dtype": "bfloat16"}
        )
        engine, config = one.engine, one.config
        for request in (*requests()[1 : 1 + before], requests()[0]):
            engine.add(request)
            while engine.has_work:
                engine.step()
        prompt = requests()[0]
        entries = engine.scheduler.prefix.find(engine.scheduler.page_keys(prompt), prompt.prompt, "")
        page = int(states_of(engine).beside[entries[2 * GRID // 16 - 1]])
        assert page > 0
        kept = [layer for layer in range(config.num_layers) if config.layer_state(layer) is not None]
        found.append([plane[page].clone() for layer in kept for plane in one.runner.cache.of(layer)])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))
