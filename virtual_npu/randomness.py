"""Give random operators on the virtual device reproducible numbers.

They are drawn from a CPU generator that is seeded from the seed and the offset of npu:0's generator, so that
restoring its state repeats them, as on the device. A real device draws other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

STEP = 4  # how far an operator moves its generator's offset; Philox gives four numbers at a time


def seeded(function: Callable[..., Any], names: set[str]) -> Callable[..., Any]:
    """Let `function`, an operator with these arguments, draw from its generator or from npu:0's own."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("generator")
        place = next((i for i, each in enumerate(args) if isinstance(each, torch.Generator)), None)
        given = given if place is None else args[place]
        source = given if given is not None else torch.npu.default_generators[0]
        if source.device.type == "cpu":
            raise RuntimeError("Expected a 'npu' device type for generator but found 'cpu'")
        seed, offset = source.initial_seed(), source.get_offset()
        source.set_offset(offset + STEP)
        mixed = hash((seed, offset)) & 0x7FFF_FFFF_FFFF_FFFF
        if "generator" not in names:
            before = torch.get_rng_state()
            try:
                torch.default_generator.manual_seed(mixed)
                return function(*args, **kwargs)
            finally:
                torch.set_rng_state(before)
        twin = torch.Generator().manual_seed(mixed)
        if place is not None:
            args = (*args[:place], twin, *args[place + 1 :])
        else:
            kwargs["generator"] = twin
        return function(*args, **kwargs)

    return run
