"""Define the prefetch of a weight, which computes nothing, with the rules of a correct call."""

from __future__ import annotations

from collections.abc import Iterator

from virtual_npu.contract import Breach, Call, Operator, Rule
from virtual_npu.simulated_products import A2, A3

SOURCE = "op-plugin npu_prefetch"


def _nothing(call: Call) -> None:
    """Compute nothing; a size beyond the weight's end is cut to it."""


def _dependency(call: Call) -> Iterator[Breach]:
    if call["dependency"] is None:
        yield "dependency", "None, while captured"


def _size(call: Call) -> Iterator[Breach]:
    if call["max_size"] <= 0:
        yield "max_size", call["max_size"]


def _offset(call: Call) -> Iterator[Breach]:
    num_bytes = call["input"].numel() * call["input"].element_size()
    if not 0 <= call["offset"] < num_bytes:
        yield "offset", f"{call['offset']} of {num_bytes} bytes"


SHAPED = (
    Rule("size", "max_size is above 0", SOURCE, "leave the call out", _size),
    Rule("offset", "the offset lies within the weight", SOURCE, "count it in bytes", _offset),
)

OPERATORS = (
    Operator(
        schema="npu::npu_prefetch(Tensor input, Tensor? dependency, int max_size, int offset=0) -> ()",
        products=(A2, A3),
        source=SOURCE,
        rules=(),
        reference=_nothing,
        first=SHAPED,
        captured=(
            Rule(
                "dependency",
                "in a graph the tensor is given after which it begins",
                SOURCE,
                "pass what was computed last",
                _dependency,
            ),
        ),
    ),
)
