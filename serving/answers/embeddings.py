"""What do clients get of an embedding?"""

from __future__ import annotations

import numpy as np

from continuous_batching.request import Vector


def unit(embedding: Vector, dimensions: int | None = None) -> Vector:
    """Its first `dimensions` numbers (None: all), scaled so that their squares add up to 1; zeros stay."""
    kept = embedding[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(kept))
    scaled: Vector = (kept / length if length else kept).astype(np.float32)
    return scaled
