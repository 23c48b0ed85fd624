"""Which drafts are what the model would have said?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import Batch
from kv_cache.pages import Index


def accepted(batch: Batch, tokens: Index, token_ids: NDArray[np.int32]) -> Index:
    """The tokens of a batch that count, as indices which rise.

    A span with drafts yields a token at each of its last positions. A token counts if every draft before it
    in its span equals the token that was chosen for the same place. The first of a span always counts; one
    that follows a wrong draft was computed from what the model never said. `token_ids` are the slot
    table's, where the drafts still lie.
    """
    is_right = tokens == token_ids[batch.owners, batch.targets]
    wrong = np.cumsum(~is_right) - ~is_right  # wrong drafts before each token, over all spans
    is_first = np.diff(batch.owners, prepend=-1) != 0
    span = np.cumsum(is_first) - 1
    return np.flatnonzero(wrong == wrong[is_first][span])
