"""The scheduler's time predictor starts from the same costs on every rank and in every replay."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.step_time import UNKNOWN, StepCosts
from devices.rates import DeviceRates
from models.parallel.group import ALONE
from recipes.assembly.families import model_config
from recipes.assembly.scheduler import (
    SchedulerLimits,
    costs_of,
    costs_on,
    facts_of,
    scheduler_from,
    scheduler_of,
)
from recipes.schema.reader import read
from recipes.schema.recipe import CacheSection, Recipe, SchedulerSection
from recipes.schema.speculation_section import SpeculationSection

RECIPE = "recipes/bench/qwen3_8b_cuda.yaml"
LIMITS = SchedulerLimits(64, 0, 100, 10, (), None)
CACHE = CacheSection(num_pages=64)
FIXED = SchedulerSection(num_slots=4, max_batch_tokens=32)
ADAPTIVE = SchedulerSection(num_slots=4, max_batch_tokens=32, chunk="adaptive", target_itl_ms=50.0)
DRAFTS = SpeculationSection(kind="ngram", max_tokens=4)


def recipe() -> Recipe:
    return read(RECIPE, [], None).recipe


def given() -> StepCosts:
    return costs_on(recipe(), model_config(recipe()), DeviceRates.load("h200"))


class Ranks:
    """A rank, and another whose value is always this much less or more."""

    def __init__(self, other: int) -> None:
        self._other = other

    def least(self, value: int, device: torch.device) -> int:
        return min(value, value + self._other * (1 if value >= 0 else -1))


def found_on(name: str, group: Any = ALONE) -> StepCosts:
    machine: Any = SimpleNamespace(name=name, device=torch.device("cpu"))
    return costs_of(recipe(), model_config(recipe()), machine, group)


def test_costs_are_those_of_the_machine_s_profile_if_all_ranks_have_it() -> None:
    assert found_on("NVIDIA H200") == given() != UNKNOWN
    assert found_on("a machine without a profile") == UNKNOWN
    assert found_on("NVIDIA H200", Ranks(0)) == given()
    assert found_on("NVIDIA H200", Ranks(-1)) == UNKNOWN
    assert found_on("NVIDIA H200", Ranks(1)) == UNKNOWN


def costs_in(scheduler: Scheduler) -> StepCosts:
    assert scheduler.step_time is not None
    return StepCosts(scheduler.step_time.decodes, scheduler.step_time.prompts)


@pytest.mark.parametrize(("asked", "drafts"), [(ADAPTIVE, SpeculationSection()), (FIXED, DRAFTS)])
def test_a_replay_starts_from_what_the_engine_started_from(
    asked: SchedulerSection, drafts: SpeculationSection
) -> None:
    made = scheduler_of(asked, CACHE, LIMITS, drafts, step_costs=given())
    facts = json.loads(json.dumps(facts_of(asked, CACHE, LIMITS, drafts, step_costs=given())))
    assert costs_in(made) == costs_in(scheduler_from(facts)) == given()


def test_steps_are_observed_only_where_a_decision_depends_on_their_times() -> None:
    assert scheduler_of(FIXED, CACHE, LIMITS).step_time is None
    assert (
        scheduler_of(FIXED, CACHE, LIMITS, SpeculationSection(kind="ngram", adaptive="fixed")).step_time
        is None
    )


def test_a_recording_of_another_prediction_is_refused_if_its_chunks_depend_on_it() -> None:
    facts = {asked.chunk: facts_of(asked, CACHE, LIMITS, DRAFTS) for asked in (FIXED, ADAPTIVE)}
    for each in facts.values():
        del each["step_costs"]  # recordings had none before the costs of steps were recorded
    scheduler_from(facts["fixed"])
    with pytest.raises(ValueError, match=r"another version.*scheduler\.chunk is adaptive; replay it with"):
        scheduler_from(facts["adaptive"])
