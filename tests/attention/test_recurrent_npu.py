"""States in bfloat16 advance by an NPU's fused operators as by the definition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attention.recurrent import GRID, Recurrence
from kv_cache.groups import DType
from models.config import RecurrentConfig
from recipes.machine import start
from tests.attention.test_atb import answering_as
from tests.device_kinds import section, stand_in_alone

pytestmark = [pytest.mark.npu, stand_in_alone]

KEY_HEADS, HEADS, ROWS = 2, 4, 9
NEAR = 2e-2  # numbers are around 1, and both round states and what is read to 8 bits


@pytest.fixture(scope="module", params=["910B", "910C"], autouse=True)
def _answers_as(request: pytest.FixtureRequest) -> Iterator[None]:
    with answering_as(request.param):
        yield


def fused() -> Any:
    from attention.npu.recurrent import FusedRecurrence

    return FusedRecurrence("npu:0")


def drawn(count: int, width: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Queries, keys, values, logarithms of decays, and betas of so many tokens."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=generator)

    decay = -0.1 * F.softplus(normal(HEADS))
    query, key, value = normal(KEY_HEADS, width), normal(KEY_HEADS, width), normal(HEADS, width)
    return query.bfloat16(), key.bfloat16(), value.bfloat16(), decay, normal(HEADS).sigmoid().bfloat16()


@pytest.mark.parametrize("width", [128, 64])
def test_steps_of_all_spans_are_those_of_the_definition(width: int) -> None:
    """Prompts, parts of prompts that leave states behind, decodes in place and from a shared row."""
    generator = torch.Generator().manual_seed(width)
    wanted = torch.randn(ROWS, HEADS, width, width, generator=generator).bfloat16()
    states = wanted.to("npu:0")
    ways: tuple[tuple[Recurrence, Tensor], ...] = ((Recurrence(), wanted), (fused(), states))
    for starts, stops, sources, targets in (
        ([0, 0], [GRID + 3, 5], [1, 2], [1, 2]),
        ([GRID + 3, 5], [GRID + 4, 6], [1, 2], [1, 2]),
        ([0, GRID, 2 * GRID, 6], [GRID, 2 * GRID, 2 * GRID + 9, 7], [3, 4, 5, 2], [4, 5, 3, 2]),
        ([GRID + 4, 6], [GRID + 5, 7], [1, 1], [6, 7]),
        ([7, 2 * GRID + 9], [8, 2 * GRID + 40], [7, 3], [7, 3]),
    ):
        spans = [np.array(each) for each in (starts, stops, sources, targets)]
        parts = drawn(int((spans[1] - spans[0]).sum()), width, generator)
        reads = [
            way.advance(*(each.to(way.device) for each in parts), held, way.plan(*spans)).cpu()
            for way, held in ways
        ]
        torch.testing.assert_close(reads[1], reads[0], rtol=NEAR, atol=NEAR)
        torch.testing.assert_close(states.cpu(), wanted, rtol=NEAR, atol=NEAR)


@pytest.mark.parametrize("kind", ["gated", "kimi"])
@pytest.mark.parametrize("virtual_fp32", [False, True])
def test_the_operators_advance_states_of_heads_in_bfloat16_alone(
    kind: Literal["gated", "kimi"], virtual_fp32: bool
) -> None:
    """Of a model in bfloat16, too, or in float32 where the stand-in takes it: all their inputs have to be."""
    found = start(section("npu", virtual_fp32=virtual_fp32))
    sizes, dtypes = RecurrentConfig(kind, KEY_HEADS, HEADS, 128, 128, 4), get_args(DType)
    fused = {
        (of_states, of_model)
        for of_states in dtypes
        for of_model in dtypes
        if type(found.recurrence(replace(sizes, state_dtype=of_states), of_model)) is not Recurrence
    }
    taken = ["bfloat16", *(["float32"] if virtual_fp32 else [])] if kind == "gated" else []
    assert fused == {("bfloat16", each) for each in taken}
