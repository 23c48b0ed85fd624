"""Collect the operators that the virtual NPU checks and computes, and find one by name."""

from __future__ import annotations

from virtual_npu.contract import Operator
from virtual_npu.operators import (
    activation,
    atb,
    attention,
    cache,
    delta_rule,
    dispatch,
    grouped_matmul,
    int8_fusions,
    joined_heads,
    latent,
    latent_prolog,
    matmul,
    mixture,
    norm,
    prefetch,
    rotary,
    sampling,
    sparse,
    summed_matmul,
    weight_quant,
)

OPERATORS: tuple[Operator, ...] = tuple(
    operator
    for room in (
        *(attention, atb, cache, latent, latent_prolog, norm, rotary, joined_heads, activation, matmul),
        *(grouped_matmul, summed_matmul, weight_quant, mixture, dispatch, int8_fusions),
        *(delta_rule, sparse, sampling, prefetch),
    )
    for operator in room.OPERATORS
)


def operator(name: str) -> Operator:
    """Return the operator of that name, with or without its namespace.

    Raises ValueError for an unknown name.
    """
    for each in OPERATORS:
        if name in (each.name, each.qualified):
            return each
    raise ValueError(f"operator {name!r} is not known here: ask python -m virtual_npu.ops for those that are")
