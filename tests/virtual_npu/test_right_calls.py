"""No right call is refused, however it is drawn."""

from __future__ import annotations

import numpy as np

from tests.each_of import each_of
from tests.thorough import cases
from tests.virtual_npu.right_calls import DRAWN, RIGHT
from virtual_npu.operators import OPERATORS, operator


def test_every_operator_has_right_calls() -> None:
    assert set(RIGHT) == {each.name for each in OPERATORS}


@each_of("name", DRAWN)
def test_right_calls_pass(name: str) -> None:
    """6 of each operator, with --thorough 200; test_verify.py has those that a verification draws."""
    called = operator(name)
    for seed in range(cases(6, 200)):
        arguments, conditions = DRAWN[name](np.random.default_rng([seed, len(name)]))
        called(conditions, **arguments)
