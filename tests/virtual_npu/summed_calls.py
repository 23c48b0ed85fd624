"""Right and wrong calls of the product that ranks add up; see right_calls and wrong_calls."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.virtual_npu.calls import HALVES, Arguments, pick
from tests.virtual_npu.wrong import Wrong, put, strided, to
from virtual_npu.contract import Conditions, Summing


class Ranks:
    """Communicators of eight ranks, of two, and of three, whose others bring nothing."""

    sizes = {"eight": 8, "two": 2, "three": 3}  # noqa: RUF012 - never changed

    def size(self, name: str) -> int:
        return self.sizes.get(name, 0)

    def rank(self, name: str) -> int:
        return min(1, self.size(name) - 1)

    def add_up(self, name: str, tensor: Tensor, operation: Summing) -> Tensor:
        return tensor


def product(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    """Of a weight that lies as [K, N], or as a linear has it."""
    rows, inner, columns = rng.integers(1, 30, 3).tolist()
    dtype = pick(rng, *HALVES)
    made = {
        "x1": torch.randn(*pick(rng, (), (2,)), rows, inner).to(dtype),
        "x2": pick(rng, torch.randn(inner, columns), torch.randn(columns, inner).t()).to(dtype),
        "hcom": pick(rng, "eight", "two"),
    }
    return made, Conditions(communicators=pick(rng, None, Ranks()))


KNOWN = {"communicators": Ranks()}
WRONG = [
    Wrong("modelled", put(pertoken_scale=torch.ones(3)), "pertoken_scale", "float32 (3,)"),
    Wrong("modelled", put(comm_turn=1), "comm_turn", "is 1"),
    Wrong("sum", put(reduce_op="max"), "reduce_op", "is max"),
    Wrong("bias", lambda call: {"bias": call["x2"][0]}, "bias", "float16"),
    Wrong("dtype", to("x1", Tensor.float), "x1", "float32"),
    Wrong("dtype", to("x2", Tensor.float), "x2", "float32"),
    Wrong("sides", to("x2", lambda weight: weight[:-1]), "x2", "for float16"),
    Wrong("contiguous", to("x1", strided), "x1", "strided"),
    Wrong("contiguous", to("x2", strided), "x2", "strided"),
    Wrong("communicator", put(hcom="three"), "hcom", "of 3 ranks", conditions=KNOWN),
    Wrong("communicator", put(hcom="none"), "hcom", "which is no communicator", conditions=KNOWN),
]
