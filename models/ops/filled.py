"""What is a device given when it packs linears, or says whether it packs those of experts together?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from models.ops.int4_weight import Int4Weight


@dataclass(frozen=True, slots=True)
class Filled:
    """What a linear was filled with, before a device packs it."""

    weight: Tensor | Int4Weight  # [out, in]
    scale: Tensor | None = None  # [out], if the weight is int8
    bias: Tensor | None = None  # [out]


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """What all experts of a mixture have in common.

    A device decides by it whether to pack them together.
    """

    hidden: int
    inner: int  # inner size on this rank
    form: Literal["plain", "int8", "int4"] = "plain"
    is_swiglu: bool = True  # otherwise it has another gate
    has_bias: bool = False
