"""Which continuations of its beams does a search keep, and when does it end?

The rules are those of transformers' `generate(num_beams=...)` for one prompt, which end a search as its
`early_stopping` says: True, when there are as many hypotheses as beams; False, when moreover the best living
beam scores no better than the worst of them; "never", when it cannot, however long it grows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from continuous_batching.request import Hypothesis, SamplingParams
from kv_cache.pages import Index

Floats = NDArray[np.float64]


def choose(
    totals: Floats, tokens: Index, ends: NDArray[np.bool_], width: int
) -> tuple[tuple[Index, Index], tuple[Index, Index]]:
    """The candidates that live on, and those that become hypotheses, each as (beam, candidate), best first.

    For n beams, best first, with c candidates each: `totals` [n, c] are the log-probabilities of whole
    answers, `tokens` [n, c] what they end in, `ends` [n, c] whether that is their end. The `width` best that
    do not end live on. One that ends counts only if it is among the `width` best of all. Of equals the better
    beam's goes first, then the smaller token.
    """
    beams = np.repeat(np.arange(len(totals)), totals.shape[1])
    order = np.lexsort((tokens.ravel(), beams, -totals.ravel()))
    over = ends.ravel()[order]
    living, ended = order[~over][:width], order[:width][over[:width]]
    return np.divmod(living, totals.shape[1]), np.divmod(ended, totals.shape[1])


def keep(found: Sequence[Hypothesis], width: int) -> list[Hypothesis]:
    """The `width` best hypotheses, best first; of equals the one found first goes first."""
    return sorted(found, key=lambda each: -each.score)[:width]


def score(total: float, num_tokens: int, params: SamplingParams) -> float:
    """What an answer of this log-probability and length is worth."""
    return float(total / num_tokens**params.length_penalty)


def is_over(hypotheses: Sequence[Hypothesis], best: float, num_tokens: int, params: SamplingParams) -> bool:
    """Whether the search ends, when its best living beam has `num_tokens` and log-probability `best`."""
    if len(hypotheses) < params.beam_width:
        return False
    if params.early_stopping is True:
        return True
    if params.early_stopping == "never" and params.length_penalty > 0:
        num_tokens = params.max_tokens
    return score(best, num_tokens, params) <= hypotheses[-1].score


def place(rows: Sequence[int], parents: Sequence[int], seats: Sequence[int]) -> list[int]:
    """A row of `seats` for each beam that lives on from the row `rows[parent]`, with as few moves as can be.

    The best continuation of a row stays in it; the others go to rows that no beam continues.
    """
    taken = {rows[parent] for parent in parents}
    free = [seat for seat in seats if seat not in taken]
    placed = []
    for parent in parents:
        row = rows[parent]
        placed.append(row if row in taken else free.pop(0))
        taken.discard(row)
    return placed
