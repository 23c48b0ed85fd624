"""Which rotary embedding does a decoder have?"""

from __future__ import annotations

from dataclasses import dataclass

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary position embedding; which fields count depends on `kind`, one of ROPE_KINDS.

    `max_positions` is what the checkpoint says it reaches, `original_max_positions` what it was first
    trained on; `attention_factor` None means that yarn derives it.
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
    short_factors: tuple[float, ...] = ()  # of each pair, where no request is longer than it was trained on
    long_factors: tuple[float, ...] = ()  # and where one may be
    width: int = 0  # of a head, of which `dim` are turned
    is_within: bool = False  # whether `max_positions` are all that it reaches, however it is stretched
    interleaved: bool = False  # whether a checkpoint has pairs that are turned side by side, not halves apart

    @property
    def num_fixed(self) -> int:
        """Dimensions of a head that are not turned."""
        return max(0, self.width - self.dim)
