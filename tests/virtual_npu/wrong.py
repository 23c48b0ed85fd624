"""Make a right call wrong in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.virtual_npu.calls import Arguments

Change = Callable[[Arguments], Arguments]


@dataclass(frozen=True)
class Wrong:
    """One way to be wrong: what `change` puts in place of a base call's arguments, and who must object.

    `argument` is the one that the message names, and `said` a part of what it says of the value. `conditions`
    are those that are not the base's; a product among them is that of the base too. `captured` calls are
    recorded, not made.
    """

    rule: str
    change: Change
    argument: str
    said: str
    base: str = "base"
    conditions: dict[str, Any] = field(default_factory=dict)
    captured: bool = False


def put(**values: Any) -> Change:
    """Give arguments other values."""
    return lambda _: values


def to(name: str, make: Callable[[Any], object]) -> Change:
    """Give an argument a value made of its own."""
    return lambda call: {name: make(call[name])}


def cut(name: str) -> Change:
    """Take the last row from an argument."""
    return to(name, lambda tensor: tensor[:-1])


def strided(tensor: Tensor) -> Tensor:
    """The same elements, in every second place."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def spoil(tensor: Tensor, places: Any, value: float | Tensor) -> Tensor:
    """A copy with another value in some places."""
    tensor = tensor.clone()
    tensor[places] = value
    return tensor


def pages_but(*pages: int) -> Callable[[], list[int]]:
    """A hook that says all pages are held but these."""
    return lambda: [page for page in range(1, 1000) if page not in pages]


# Conditions of calls that touch the null page, which is nobody's, or pages of no request
NOBODYS: dict[str, Any] = {"held": pages_but()}
HELD: dict[str, Any] = {"held": lambda: [9999]}
