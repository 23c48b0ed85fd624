"""No right call is refused, however it is drawn."""

from __future__ import annotations

import numpy as np
import pytest

from tests.virtual_npu.right_calls import RIGHT
from virtual_npu.operators import OPERATORS, operator


def test_every_operator_has_right_calls() -> None:
    assert set(RIGHT) == {each.name for each in OPERATORS}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_right_calls_pass(name: str, count: int) -> None:
    """8 of each operator, and 200 of each in the slow set: 5,000 in all."""
    called = operator(name)
    for seed in range(count):
        arguments, conditions = RIGHT[name](np.random.default_rng([seed, len(name)]))
        called(conditions, **arguments)
