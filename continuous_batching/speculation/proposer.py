"""Who guesses what rows will say next?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kv_cache.pages import Index


@dataclass(frozen=True, slots=True)
class Guesses:
    """The next tokens of N rows, as far as there is a guess."""

    tokens: NDArray[np.int32]  # [N, most]; those beyond `counts` mean nothing
    counts: Index  # [N] guessed tokens of each row


class Proposer(Protocol):
    """Guesses tokens from what the slot table holds, and from nothing else: no clock, no chance.

    It is not told when rows are taken and left: it finds the tokens that came since it last looked at a row,
    and knows a new request by its number.
    """

    def guess(self, rows: Index, most: int) -> Guesses:
        """At most `most` tokens to follow the known ones of each of these rows [N], which decode."""
        ...
