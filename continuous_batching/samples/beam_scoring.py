"""Choose the continuations that a beam search keeps, and decide when it ends.

The rules are those of transformers' `generate(num_beams=...)` for one prompt. A search ends as its
`early_stopping` says: with True, when there are as many hypotheses as beams; with False, when moreover the
best living beam scores no better than the worst of them; with "never", when it cannot do so, however long it
grows.
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
    """Return the candidates that live on and those that become hypotheses, best first.

    Both are given as (beam, candidate) indices.

    For n beams, best first, with c candidates each: `totals` [n, c] are the log-probabilities of whole
    answers, `tokens` [n, c] their last tokens, `ends` [n, c] whether the answer ends there. The `width` best
    that do not end live on. One that ends counts only if it is among the `width` best of all. Ties go to the
    better beam, then to the smaller token.
    """
    beams = np.repeat(np.arange(len(totals)), totals.shape[1])
    order = np.lexsort((tokens.ravel(), beams, -totals.ravel()))
    over = ends.ravel()[order]
    living, ended = order[~over][:width], order[:width][over[:width]]
    return np.divmod(living, totals.shape[1]), np.divmod(ended, totals.shape[1])


def keep(found: Sequence[Hypothesis], width: int) -> list[Hypothesis]:
    """Return the `width` best hypotheses, best first; ties go to the one found first."""
    return sorted(found, key=lambda each: -each.score)[:width]


def score(total: float, num_tokens: int, params: SamplingParams) -> float:
    """Return the score of an answer with this log-probability and length."""
    return float(total / num_tokens**params.length_penalty)


def is_over(hypotheses: Sequence[Hypothesis], best: float, num_tokens: int, params: SamplingParams) -> bool:
    """Whether the search ends, given the length and log-probability of its best living beam."""
    if len(hypotheses) < params.beam_width:
        return False
    if params.early_stopping is True:
        return True
    if params.early_stopping == "never" and params.length_penalty > 0:
        num_tokens = params.max_tokens
    return score(best, num_tokens, params) <= hypotheses[-1].score


def place(rows: Sequence[int], parents: Sequence[int], seats: Sequence[int]) -> list[int]:
    """Assign a row of `seats` to each beam that continues `rows[parent]`, with as few moves as possible.

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
