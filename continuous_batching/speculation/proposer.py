"""Define the interface of a proposer, which drafts the next tokens of rows.

Implementations are `ngram`, `suffix` and, for drafts that the device makes, `draft_model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kv_cache.pages import Index


@dataclass(frozen=True, slots=True)
class Guesses:
    """The drafts of N rows."""

    tokens: NDArray[np.int32]  # [N, most]; entries beyond `counts` have no meaning
    counts: Index  # [N] number of drafts of each row


class Proposer(Protocol):
    """Proposes tokens as a function of the slot table alone, without a clock or randomness.

    It is not told when rows are taken and left: it finds the tokens that came since it last looked at a row,
    and recognises a new request by its number.
    """

    def guess(self, rows: Index, most: int) -> Guesses:
        """Return at most `most` tokens to follow the known ones of each of these rows [N], which decode."""
        ...
