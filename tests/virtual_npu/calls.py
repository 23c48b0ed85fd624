"""What the tables of right and of wrong calls share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Arguments = dict[str, Any]
HALVES = (torch.float16, torch.bfloat16)


def pick(rng: np.random.Generator, *choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]
