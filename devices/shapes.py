"""Describe the shapes that a device's attention must support for a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Least rows of a step, for each tensor rank, for which the ranks divide rows of sparse attention. To exchange
# fewer, as decodes have, takes longer than to choose for all of them and attend by a rank's own heads.
DIVIDED_ROWS = 16
LATENT_TILE = 128  # numbers of a latent in int8 that share a scale
LATENT_SCALE_BYTES = 4  # bytes of such a scale, a float32
INT8_ROPE_BYTES = 2  # bytes of each number of the rope key beside it, a bfloat16


def latent_tile(rank: int) -> int:
    """Return how many numbers of a latent of this width share a scale: all, where tiles do not divide it."""
    return rank if rank % LATENT_TILE else LATENT_TILE


def latent_row_bytes(rank: int, rope_dim: int) -> int:
    """Return the bytes of a token's latent in int8, its rope key and the scales, which lie in one row."""
    return rank + INT8_ROPE_BYTES * rope_dim + rank // latent_tile(rank) * LATENT_SCALE_BYTES


@dataclass(frozen=True, slots=True)
class IndexShape:
    """An indexer, which chooses for each query token the earlier tokens that latent attention reads."""

    num_heads: int  # every device computes all of them
    head_dim: int  # width of a head's query, and of the index key of a token
    top_k: int  # most tokens that a query token reads


@dataclass(frozen=True, slots=True)
class LatentShape:
    """What latent attention adds to a shape.

    A token's values are its key, all heads read it, and a part beside it carries the position.
    """

    rope_dim: int  # width of the part of queries and keys that carries the position
    nope_dim: int  # width of the other part of a query, before it is projected into the space of keys
    value_dim: int  # width of a head's result, once it is projected out of that space
    index: IndexShape | None = None  # None: every earlier token is read


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention's sizes by model and recipe; `windows` has one entry a layer, None for full attention.

    Positions before `first_key`, 0 or 1, hold zeros in place of a key and a value: no query sees them, and no
    query stands there; the layers then have no window.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    dtype: torch.dtype
    windows: tuple[int | None, ...]
    # Keys and values are int8, with a scale for each token and head, or for each channel; otherwise `dtype`
    int8_pages: bool = False
    first_key: int = 0
    score_cap: float | None = None  # scores are cap * tanh(score / cap)
    has_sinks: bool = (
        # Whether each query head has one more score, which belongs to no key and takes its share of the
        # weights
        False
    )
    latent: LatentShape | None = None  # if set, there is one key-value head, as wide as a latent


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type as a recipe has it, such as bfloat16."""
    return str(dtype).removeprefix("torch.")
