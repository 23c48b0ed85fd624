"""Which tokens did the device choose last? The next step may begin before the host knows them.

Legend: N rows of the slot table, R sampled rows, U of the next step's spans end in a token of no value yet.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from continuous_batching.batch import Batch
from kv_cache.pages import Index


class LastTokens:
    """The tokens of the step before, and the place of each row's token among them."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.tokens = torch.zeros(0, dtype=torch.int64, device=device)  # [R]; negative if there is none
        self._places = np.zeros(num_rows, dtype=np.int64)  # [N]

    def keep(self, tokens: Tensor, owners: Index) -> None:
        """Store the tokens [R] that a step chose for the rows `owners` [R]."""
        self.tokens = tokens
        self._places[owners] = np.arange(len(owners))

    def places(self, batch: Batch) -> Index:
        """Return where in `tokens` the last tokens of the spans `batch.unknown` are. [U]"""
        places: Index = self._places[batch.slots[batch.unknown]]
        return places
