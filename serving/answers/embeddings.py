"""Scale embeddings as clients receive them."""

from __future__ import annotations

import numpy as np

from continuous_batching.request import Vector


def unit(embedding: Vector, dimensions: int | None = None) -> Vector:
    """Return the first `dimensions` numbers (None: all), scaled to Euclidean length 1.

    A zero vector stays zero.
    """
    kept = embedding[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(kept))
    scaled: Vector = (kept / length if length else kept).astype(np.float32)
    return scaled
