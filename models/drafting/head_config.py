"""What does the host know of a head, which guesses from the target's hidden states?"""

from __future__ import annotations

from dataclasses import dataclass

from models.config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig(DecoderConfig):
    """The layers of a head. `vocab_size` is the target's; a page keeps `num_kept` features.

    `taps` are the layers of the target whose inputs it reads, in rising order; a number one past the last
    layer stands for its output.
    """

    taps: tuple[int, ...]
    num_kept: int

    @property
    def feature_bytes(self) -> int:
        """Bytes of the features that one page holds."""
        return self.num_kept * self.hidden_size * self.dtype_bytes
