"""Which shapes must a device's attention support for a model?"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LatentShape:
    """What latent attention adds: a token's values are its key, all heads read it, and a part beside it
    carries the position.
    """

    rope_dim: int  # of the part of queries and keys that carries the position
    nope_dim: int  # of the other part of a query, before it is brought into the space of keys
    value_dim: int  # of a head's result, once it is brought out of that space


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention's sizes by model and recipe; `windows` has one entry a layer, None for full attention.

    Positions before `first_key`, 0 or 1, hold zeros in place of a key and a value: no query sees them, and
    none stands there; layers then have no window.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    dtype: torch.dtype
    windows: tuple[int | None, ...]
    int8_pages: bool = False  # keys and values in int8, with a scale for each token and head; else `dtype`
    first_key: int = 0
    score_cap: float | None = None  # scores are cap * tanh(score / cap)
    has_sinks: bool = (
        False  # whether a score of each query head, which no key has, takes its share of the weights
    )
    latent: LatentShape | None = None  # then there is one key-value head, as wide as a latent
