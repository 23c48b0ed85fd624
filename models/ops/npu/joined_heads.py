"""Split the product of queries, keys and values, and norm and rotate its heads, in one launch on an NPU.

See virtual_npu/operators/joined_heads.py. The operator also writes keys and values to a cache, whose order
fused attention does not read: it is told to skip every token, and its other results are taken.

Legend: T tokens of the step, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from devices.ascend_limits import JOINED_BLOCK_STEP

MOST_TOKENS = 1024  # longer steps are computed one by one, since launches are few beside their work
TILE = 16  # columns of 16-bit numbers side by side in the cache


class JoinedHeads:
    """The operator for layers of so many heads, with the cache that it leaves as it is."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert MOST_TOKENS % JOINED_BLOCK_STEP == 0, "all tokens lie in one block"
        self.heads, self.head_dim = (num_heads, num_kv_heads, num_kv_heads), head_dim
        columns = num_kv_heads * head_dim // TILE
        self._cache = torch.zeros(1, columns, MOST_TOKENS, TILE, dtype=dtype, device=device)
        self._nowhere = torch.full((MOST_TOKENS,), -1, dtype=torch.int64, device=device)

    def takes(self, num_tokens: int) -> bool:
        """Return whether a step of so many tokens is computed in one launch."""
        return num_tokens <= MOST_TOKENS

    def __call__(
        self, qkv: Tensor, query_norm: Tensor, key_norm: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map [T, (H + 2 * K) * D] to rotated queries [T, H * D] and keys, and to values, [T, K * D] both."""
        count = len(qkv)
        query = qkv.new_empty(count, self.heads[0] * self.head_dim)
        _, key, value = torch_npu.npu_qkv_rms_norm_rope_cache(
            qkv,
            query_norm,
            key_norm,
            cos,
            sin,
            self._nowhere[:count],
            query,
            self._cache,
            self._cache,
            [1, count, sum(self.heads), self.head_dim],
            list(self.heads),
            epsilon=eps,
            cache_mode="PA_NZ",
            is_output_qkv=True,
        )
        return query, key, value
