"""States in bfloat16 advance by an NPU's fused operators as by the definition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attention.recurrent import GRID, Recurrence
from tests.attention.test_atb import answering_as
from tests.device_kinds import machine, stand_in_alone

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


def drawn(count: int, width: int, by_channel: bool, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Queries, keys, values, logarithms of decays, and betas of so many tokens."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=generator)

    channels = (width,) if by_channel else ()
    decay = -0.1 * F.softplus(normal(HEADS, *channels))
    key_heads = HEADS if by_channel else KEY_HEADS
    query, key, value = normal(key_heads, width), normal(key_heads, width), normal(HEADS, width)
    return query.bfloat16(), key.bfloat16(), value.bfloat16(), decay, normal(HEADS).sigmoid().bfloat16()


@pytest.mark.parametrize(("width", "by_channel"), [(128, False), (64, False), (128, True)])
def test_steps_of_all_spans_are_those_of_the_definition(width: int, by_channel: bool) -> None:
    """Prompts, parts of prompts that leave states behind, decodes in place and from a shared row."""
    generator = torch.Generator().manual_seed(width + by_channel)
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
        parts = drawn(int((spans[1] - spans[0]).sum()), width, by_channel, generator)
        reads = [
            way.advance(*(each.to(way.device) for each in parts), held, way.plan(*spans)).cpu()
            for way, held in ways
        ]
        torch.testing.assert_close(reads[1], reads[0], rtol=NEAR, atol=NEAR)
        torch.testing.assert_close(states.cpu(), wanted, rtol=NEAR, atol=NEAR)


def test_only_states_in_bfloat16_are_advanced_by_the_operators() -> None:
    found = machine("npu")
    kinds = {name: type(found.recurrence(name)).__name__ for name in ("float32", "float16", "bfloat16")}
    assert kinds == {"float32": "Recurrence", "float16": "Recurrence", "bfloat16": "FusedRecurrence"}
