"""The predicted time of a step approaches that of devices whose costs are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from continuous_batching.batch import Batch
from continuous_batching.step_time import Coefficients, StepCosts, StepTime
from kv_cache.pages import Index
from tests.each_of import each_of
from tests.thorough import first_quick

DECODES = Coefficients(step_s=8e-3, token_s=60e-6, context_s=0.15e-6, drafted_s=2e-3)
PROMPTS = Coefficients(step_s=12e-3, token_s=90e-6, context_s=0.15e-6, pair_s=20e-9)
COSTS = StepCosts(DECODES, PROMPTS)


def batch(starts: Index, lens: Index, drafts: Index | int = 0) -> Batch:
    """Spans that each end in so many drafts."""
    rows, counts = np.arange(len(starts)), np.broadcast_to(drafts, starts.shape)
    sampled = np.repeat(rows, 1 + counts)
    ahead = np.concatenate([np.arange(-each, 1) for each in counts])
    stops = starts + lens + counts
    targets = stops[sampled] + ahead
    return Batch(rows, starts, stops, sampled, sampled, targets, num_drafts=int(counts.sum()))


def drawn(random: np.random.Generator, kind: str) -> Batch:
    num = int(random.integers(1, 40))
    starts, ones = random.integers(0, 4000, num), np.ones(num, dtype=np.int64)
    if kind == "drafts":
        return batch(starts, ones, random.integers(0, 5, num) + (np.arange(num) == 0))
    if kind == "chunks":
        ones[: int(random.integers(1, 3))] = random.integers(2, 600)
        return batch(starts, ones, random.integers(0, 2, num) * (ones == 1))
    return batch(starts, ones)


def cost_s(made: Batch, costs: StepCosts = COSTS) -> float:
    """The cost in the form of the model, of each span and pair anew."""
    lens, starts = made.stops - made.starts, made.starts
    has_chunks = bool((lens - np.bincount(made.sampled, minlength=len(lens)) > 0).any())
    each = costs.prompts if has_chunks else costs.decodes
    seconds = each.step_s + each.token_s * lens.sum() + each.context_s * starts.sum()
    if has_chunks:
        pairs = (lens * (starts + lens / 2)).sum()
        return float(seconds + each.pair_s * pairs)
    return float(seconds + each.drafted_s * (made.num_drafts > 0))


def predicted_s(times: StepTime, made: Batch) -> float:
    return cost_s(made, StepCosts(times.decodes, times.prompts))


KINDS = ["decodes", "drafts", "chunks"]


@pytest.mark.parametrize("given", first_quick(1, [StepCosts(), COSTS]))
def test_the_costs_are_found_whatever_was_given(given: StepCosts) -> None:
    random, times = np.random.default_rng(0), StepTime(given)
    for number in range(4000):
        made = drawn(random, KINDS[number % 3])
        times.observe(made, 3 * cost_s(made))
    for kind in KINDS:
        made = drawn(random, kind)
        assert predicted_s(times, made) == pytest.approx(3 * cost_s(made), rel=0.01)


def test_given_costs_hold_until_steps_say_otherwise_and_the_first_steps_scale_them() -> None:
    random, times = np.random.default_rng(0), StepTime(COSTS)
    assert (times.decodes, times.prompts) == (DECODES, PROMPTS)
    chunk = batch(np.array([0]), np.array([64]))  # steps of one size alone, four times as slow as given
    for _ in range(4):
        times.observe(chunk, 4 * cost_s(chunk))
    other = drawn(random, "chunks")
    assert predicted_s(times, other) == pytest.approx(4 * cost_s(other), rel=0.02)
    assert times.decodes == DECODES, "nothing was seen of these"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [StepCosts(), COSTS])
def test_a_compilation_is_no_cost_of_a_step(given: StepCosts, kind: str) -> None:
    random, times = np.random.default_rng(0), StepTime(given)
    for number in range(400):
        made = drawn(random, kind)
        times.observe(made, cost_s(made) + (30.0 if number in (0, 200) else 0.0))
        if number in (60, 203, 399):
            assert predicted_s(times, made) == pytest.approx(cost_s(made), rel=0.3)


def test_what_was_never_tried_costs_nothing_and_what_is_not_seen_any_more_keeps_its_cost() -> None:
    random, times = np.random.default_rng(0), StepTime()
    for _ in range(800):
        made = drawn(random, "decodes")
        times.observe(made, cost_s(made))
    assert times.decodes.drafted_s == 0
    for kind in ("drafts", "decodes"):
        for _ in range(800):
            made = drawn(random, kind)
            times.observe(made, cost_s(made))
    assert times.decodes.drafted_s == pytest.approx(DECODES.drafted_s, rel=0.1)


@pytest.mark.slow
@each_of("ratio", [1 / 10, 10])
@each_of("kind", KINDS)
def test_times_follow_a_machine_that_gets_slower_or_faster(kind: str, ratio: float) -> None:
    random, times = np.random.default_rng(0), StepTime()
    num_steps = 4000 if kind == "chunks" else 1200  # times of chunks are forgotten more slowly
    for number in range(800 + num_steps):
        made = drawn(random, kind)
        times.observe(made, cost_s(made) * (1 if number < 800 else ratio))
    assert predicted_s(times, made) == pytest.approx(ratio * cost_s(made), rel=0.1)


def test_the_ratio_is_that_of_steps_with_chunks_alone() -> None:
    times = StepTime(COSTS)
    chunk, decode = batch(np.array([0, 9]), np.array([64, 1])), batch(np.array([9]), np.array([1]), 3)
    ratios = []
    for made in (*[chunk] * 5, decode):
        times.observe(made, 1.5 * cost_s(made))
        ratios.append(times.prompt_ratio)
    assert ratios == [0, 0, 0, 0, pytest.approx(1.0, rel=0.01), 0]
    times.observe(replace(decode, copies=()), 0.0)
    assert times.decodes == DECODES, "a step that took no time says nothing"
