"""What of a decoder sets the time of a step?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a dense decoder, as `models.config.DecoderConfig` has them, without torch.

    `weight_bytes` are of all weights; `product_dtype` is what linears multiply in, of `product_bytes` a
    weight. `windows` has one entry a layer: how many positions a query sees, None for all.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    windows: tuple[int | None, ...]
    weight_bytes: int
    dtype: str
    dtype_bytes: int
    product_dtype: str
    product_bytes: int
    embedding_bytes: int  # of a table of which a step takes few rows; 0 where it is the head's too

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def held_bytes_per_token(self, tensor: int) -> int:
        """On each of `tensor` devices that share the layers: of more than there are heads, each has a whole
        one, as others have too."""
        return self.kv_bytes_per_token // self.num_kv_heads * -(-self.num_kv_heads // tensor)

    @property
    def linears(self) -> tuple[tuple[int, int, bool], ...]:
        """Inputs and outputs of a layer's products, and whether tensor parallelism splits the outputs (else
        the inputs, and a sum over devices follows)."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (
            (self.hidden_size, heads + 2 * kv_heads, True),
            (heads, self.hidden_size, False),
            (self.hidden_size, 2 * self.intermediate_size, True),
            (self.intermediate_size, self.hidden_size, False),
        )
