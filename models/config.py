"""Which decoder is it: its sizes, its options, its rotary embedding?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


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


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A dense decoder: RMS norms before attention and MLP, rotary embedding, SwiGLU.

    `windows` has one entry a layer: how many positions a query sees, itself among them; None for all.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tie_embeddings: bool
    attention_bias: bool  # of q, k and v
    output_bias: bool  # of attention's output projection
    mlp_bias: bool
    qk_norm: bool
    dtype: torch.dtype
    max_positions: int
    eos_token_ids: tuple[int, ...]

    @property
    def max_shared_positions(self) -> int | None:
        """Positions whose keys depend on the tokens alone; None for all.

        Under dynamic RoPE a prompt longer than this turns all its keys by a base of its own, so such
        a request can share nothing, and any other request only positions below this.
        """
        return self.rope.original_max_positions if self.rope.kind == "dynamic" else None

    @property
    def num_parameters(self) -> int:
        """Weights of the whole decoder, each tied one counted once."""
        attention_dim, kv_dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * attention_dim + 2 * kv_dim + 3 * self.intermediate_size + 2)
        layer += self.attention_bias * (attention_dim + 2 * kv_dim) + self.output_bias * self.hidden_size
        layer += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        layer += self.qk_norm * 2 * self.head_dim
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * layer + self.hidden_size
