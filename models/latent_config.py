"""Which linears does latent attention have, and how wide are they?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

NORM_EPS = 1e-6  # eps of the norms of compressed queries and of latents, whatever the model's own is


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads come from one latent."""

    query_rank: int | None  # width of compressed queries; None: queries come from the hidden state
    rank: int  # width of a latent
    nope_dim: int  # width of the part of a head's query that does not carry the position
    rope_dim: int  # width of the part that does
    value_dim: int  # width of a head's value
    scale: float  # scale of the scores

    @property
    def query_dim(self) -> int:
        """Width of a head's query, both parts together."""
        return self.nope_dim + self.rope_dim

    @property
    def token_width(self) -> int:
        """Numbers that the cache holds of a token in one layer: its latent and its rope key."""
        return self.rank + self.rope_dim

    def first(self) -> tuple[str, str]:
        """Return the linears that read the hidden state, which are multiplied as one."""
        return ("q_proj" if self.query_rank is None else "q_a_proj", "kv_a_proj_with_mqa")

    def linears(self, hidden_size: int, num_heads: int) -> Iterator[tuple[str, int, int]]:
        """Yield the checkpoint name, inputs and outputs of every linear of a layer's attention."""
        queries = num_heads * self.query_dim
        if self.query_rank is None:
            yield "q_proj", hidden_size, queries
        else:
            yield "q_a_proj", hidden_size, self.query_rank
            yield "q_b_proj", self.query_rank, queries
        yield "kv_a_proj_with_mqa", hidden_size, self.token_width
        yield "kv_b_proj", self.rank, num_heads * (self.nope_dim + self.value_dim)
        yield "o_proj", num_heads * self.value_dim, hidden_size

    @property
    def norm_width(self) -> int:
        """Number of weights of its norms."""
        return self.rank + (self.query_rank or 0)
