"""Which operators are checked and computed here, and how do they take the place of the device's?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from virtual_npu.contract import Conditions, Operator
from virtual_npu.operators import (
    activation,
    atb_operators,
    attention,
    cache,
    matmul,
    norm,
    rotary,
    sampling,
    scatter,
)

Kernel = Callable[..., Any]

OPERATORS: tuple[Operator, ...] = tuple(
    operator
    for room in (
        *(attention, atb_operators, cache, scatter),
        *(norm, rotary, activation, matmul, sampling),
    )
    for operator in room.OPERATORS
)


def operator(name: str) -> Operator:
    """The operator of that name, with or without its namespace. Raises ValueError where there is none."""
    for each in OPERATORS:
        if name in (each.name, each.qualified):
            return each
    raise ValueError(f"operator {name!r} is not known here: ask python -m virtual_npu.ops for those that are")


def kernels(conditions: Conditions) -> dict[str, Kernel]:
    """What each operator computes on CPU tensors, its call checked first, by its qualified name."""
    return {each.qualified: partial(each, conditions) for each in OPERATORS}


def register(implement: Callable[[str, Kernel], object], conditions: Conditions) -> None:
    """Give every kernel to `implement`, under the name that the wheel registers its schema by."""
    for name, kernel in kernels(conditions).items():
        implement(name, kernel)
