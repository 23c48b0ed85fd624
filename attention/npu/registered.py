"""Compare what the installed torch_npu registers with what this project calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch_npu

from devices.ascend_limits import AscendProduct
from devices.torch_npu_calls import OperatorCall, calls_of, lacking


def check_release(product: AscendProduct) -> None:
    """Raise ValueError if torch_npu lacks an operator, or an argument, that this product's operators need."""
    lacks = lacking_here(calls_of(product))
    if lacks:
        raise ValueError(
            f"torch_npu {torch_npu.__version__} does not fit this project on a {product.name}; it lacks"
            f" {'; '.join(lacks)}: docs/ascend.md names the releases that have them"
        )


def lacking_here(calls: Sequence[OperatorCall]) -> list[str]:
    """Return what the installed release lacks for these calls, in words."""
    known = {call.operator: _arguments(call) for call in calls}
    return list(lacking(calls, known.__getitem__))


def _arguments(call: OperatorCall) -> Sequence[Collection[str]]:
    """Return the names of the arguments of each overload; ATB's are registered at their first call."""
    name, _, overload = call.operator.partition(".")
    operator = getattr(torch_npu, name, None)
    if operator is None:
        return ()
    if not hasattr(operator, "overloads"):
        return [call.arguments]
    overloads = [each for each in operator.overloads() if overload in ("", each)]
    return [{each.name for each in getattr(operator, name)._schema.arguments} for name in overloads]
