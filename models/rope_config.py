"""Which rotary embedding does a decoder have?"""

from __future__ import annotations

from dataclasses import dataclass

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary position embedding; which fields count depends on `kind`, one of ROPE_KINDS.

    `max_positions` is the reach that the checkpoint claims, `original_max_positions` the length that it was
    first trained on; `attention_factor` None means that yarn derives it.
    """

    kind: str
    theta: float
    dim: int
    factor: float = 1.0
    original_max_positions: int = 0
    max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    # Factor of each pair, if no request is longer than the original length
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()  # factor of each pair, if one may be
    width: int = 0  # width of a head, of which `dim` dimensions are rotated
    is_within: bool = False  # whether `max_positions` is the whole reach, however the embedding is stretched
    # Whether rotated pairs lie side by side in a checkpoint, and not halves apart
    interleaved: bool = False

    @property
    def num_fixed(self) -> int:
        """Number of dimensions of a head that are not rotated."""
        return max(0, self.width - self.dim)
