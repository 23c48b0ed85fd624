"""Bound the tokens that ranks may send to one another's experts by Ascend's operators.

Sources: op-plugin, npu_moe_distribute_dispatch_v2 and npu_moe_distribute_combine_v2; CANN, HCCL_BUFFSIZE, the
size of each of a communicator's two buffers.

Legend: H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass

from borders.numbers import integers

BUFFER_NAME, BUFFER_MIB = "HCCL_BUFFSIZE", 200  # an environment variable, and its default
MOST_TOKENS = 64  # tokens of each rank; the probe times so many, and the operators take 256
HIDDEN_STEP = 32
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class _Limits:
    ranks: Set[int]
    hidden: range
    most_chosen: int
    most_experts: int
    most_held: int


_LIMITS: Mapping[str, _Limits] = {
    "910B": _Limits({*range(2, 9), 16, 32, 64, 128, 256}, range(32, 7168 + 1, HIDDEN_STEP), 16, 512, 24),
    "910C": _Limits(set(range(2, 768 + 1)), range(1024, 8192 + 1, HIDDEN_STEP), 12, 1024, 1024),
}
DISPATCHING = tuple(_LIMITS)  # names of products


def most_dispatched(
    product: str, ranks: int, num_experts: int, num_chosen: int, hidden: int, buffer_mib: int
) -> int:
    """Return the tokens that each rank may send in one launch; 0 if the operators do not take the model.

    `num_experts` counts the experts of all ranks, of which a token chooses `num_chosen`. The communicator's
    buffers hold the worst case: all tokens of all ranks on one of them, in 16 bits even if int8 is sent.
    """
    limits, (held, rest) = _LIMITS.get(product), divmod(num_experts, ranks)
    if limits is None or ranks not in limits.ranks or rest:
        return 0
    if held > limits.most_held or num_experts > limits.most_experts:
        return 0
    if hidden not in limits.hidden or num_chosen > limits.most_chosen:
        return 0
    room = buffer_mib * _MIB // 2
    if product == "910B":
        most = (room - 2 * _MIB) // (ranks * min(held, num_chosen) * hidden * 2)
    else:
        arriving = _up(_up(2 * hidden, 32) + 64, 512) * held * ranks
        most = room // (arriving + num_chosen * _up(2 * hidden, 512))
    return max(0, min(most, MOST_TOKENS))


def buffer_mib(environment: Mapping[str, str]) -> int:
    """Return HCCL's buffer size in MiB. Raises ValueError if the variable is no number of MiB."""
    said = environment.get(BUFFER_NAME, str(BUFFER_MIB))
    allowed = integers(1, 2**31 - 1, "MiB")
    if (size_mib := allowed.parse(said)) is None:
        raise ValueError(f"{BUFFER_NAME} is {said!r}; it must be {allowed}: unset it for {BUFFER_MIB}")
    return size_mib


def _up(size: int, step: int) -> int:
    return math.ceil(size / step) * step
