"""The costs that are derived from a model and a profile, beside the simulated device's own clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from continuous_batching.step_time import UNKNOWN, StepCosts
from devices.rates import DeviceRates
from models.config import layer_specs
from models.cost import Counts, ModelPart, step_costs
from recipes.assembly.families import decoder_config
from simulation.roofline import Roofline
from tests.each_of import each_of
from tests.recipes import published

ROWS, TOKENS = 64, 2048
MODELS = {
    "dense": published.QWEN3_8B,
    "experts": published.QWEN3_30B_A3B,
    "latents": published.DEEPSEEK_V2_LITE,
}


def predicted_s(costs: StepCosts, starts: list[int], lens: list[int]) -> float:
    each = costs.prompts if max(lens) > 1 else costs.decodes
    pairs = sum(num * (start + num / 2) for start, num in zip(starts, lens))
    read_s = each.context_s * sum(starts) + each.pair_s * pairs
    return each.step_s + each.token_s * sum(lens) + read_s


def simulated_s(costs: Roofline, starts: list[int], lens: list[int]) -> float:
    layers, total = costs.config.num_layers, sum(lens)
    pairs = sum(num * (start + num / 2) for start, num in zip(starts, lens))
    captured = total if max(lens) == 1 else 1
    sampled = len(lens) if max(lens) == 1 else 1
    context = layers * (sum(starts) + total)
    return costs.time_s(total, captured, sampled, context, layers * pairs)


@each_of("tensor", [1, 2])
@each_of("profile", ["ascend910b", "h200"])
@each_of("name", MODELS)
def test_the_lines_are_near_the_roofline(name: str, profile: str, tensor: int) -> None:
    config, device = decoder_config(MODELS[name]), DeviceRates.load(profile)
    found = step_costs(Counts(config, tensor), device, ROWS, TOKENS, graphs=ROWS)
    roofline = Roofline(config, device, tensor, graphs=ROWS)
    for rows, context in ((1, 100), (1, 8000), (ROWS, 100), (ROWS, 8000)):
        step = [context] * rows, [1] * rows
        assert predicted_s(found, *step) == pytest.approx(simulated_s(roofline, *step), rel=0.2), step
    for chunk, start in ((128, 0), (2048, 0), (2048, 6144)):
        assert predicted_s(found, [start], [chunk]) == pytest.approx(
            simulated_s(roofline, [start], [chunk]), rel=0.3
        ), (chunk, start)


@each_of("tensor", [1, 8])
def test_a_chunk_expands_the_latents_of_all_tokens_before_it(tensor: int) -> None:
    config, device = decoder_config(published.DEEPSEEK_V3), DeviceRates.load("h200")
    found = step_costs(Counts(config, tensor), device, ROWS, TOKENS)
    chunk = [32 * 1024], [512]
    simulated = simulated_s(Roofline(config, device, tensor), *chunk)
    assert predicted_s(found, *chunk) == pytest.approx(simulated, rel=0.05)


def test_a_stage_costs_its_share_and_layers_with_a_window_read_no_more_of_a_longer_context() -> None:
    config, device = decoder_config(published.QWEN3_8B), DeviceRates.load("ascend910b")
    whole = step_costs(Counts(config), device, ROWS, TOKENS)
    half = ModelPart(config.num_layers // 2, has_head=True)
    part = step_costs(Counts(config, part=half), device, ROWS, TOKENS)
    assert part.decodes.context_s == pytest.approx(whole.decodes.context_s / 2)
    assert whole.prompts.token_s / 2 < part.prompts.token_s < 0.6 * whole.prompts.token_s
    windows = tuple(None if layer % 4 else 1024 for layer in range(config.num_layers))
    seen = step_costs(Counts(replace(config, layers=layer_specs(windows))), device, ROWS, TOKENS)
    assert seen.decodes.context_s == pytest.approx(0.75 * whole.decodes.context_s)
    assert seen.prompts.pair_s == pytest.approx(0.75 * whole.prompts.pair_s)


def test_nothing_is_known_of_a_type_that_the_profile_has_no_rate_for() -> None:
    config = decoder_config(published.QWEN3_8B)  # its type is bfloat16, which an Ascend 910 does not multiply
    assert step_costs(Counts(config), DeviceRates.load("ascend910"), ROWS, TOKENS) == UNKNOWN
