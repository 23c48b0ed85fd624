"""Derive what steps cost on the device that computes them, from which the predictor of their times starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from continuous_batching.step_time import UNKNOWN, StepCosts
from devices.rates import DeviceRates, named, names
from models.config import DecoderConfig
from models.cost import Counts, ModelPart, step_costs
from recipes.schema.recipe import Recipe

if TYPE_CHECKING:
    from models.parallel.group import Group
    from recipes.machine import Machine


def costs_of(recipe: Recipe, config: DecoderConfig, machine: Machine, world: Group) -> StepCosts:
    """Return the costs by the profile of the machine; `UNKNOWN` where it has none.

    All ranks return the same, because they must decide the same steps: where their devices have different
    profiles, nothing is known.
    """
    profiles, name = names(), named(machine.name)
    number = -1 if name is None else profiles.index(name)
    least, most = world.least(number, machine.device), -world.least(-number, machine.device)
    return costs_on(recipe, config, DeviceRates.load(profiles[number])) if least == most >= 0 else UNKNOWN


def costs_on(
    recipe: Recipe,
    config: DecoderConfig,
    device: DeviceRates,
    tensor: int | None = None,
    pipeline: int | None = None,
) -> StepCosts:
    """Return the costs on so many of these devices, by default as many as the recipe says."""
    asked, drafts, parallel = recipe.scheduler, recipe.speculation, recipe.parallel
    width = 1 if drafts.kind == "none" else 1 + drafts.max_tokens
    stage = ModelPart(config.num_layers // (pipeline or parallel.pipeline), has_head=True)
    most_tokens = asked.max_batch_tokens or asked.num_slots
    counts = Counts(config, tensor or parallel.tensor, stage)
    return step_costs(counts, device, asked.num_slots * width, most_tokens, graphs=recipe.device.graphs)
