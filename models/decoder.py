"""How does a dense decoder turn tokens into logits?

Legend: T tokens of the step, R sampled rows, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from attention.reference import Attention, AttentionMetadata
from kv_cache.storage import KVCache
from models.config import DecoderConfig
from models.dtypes import TORCH_DTYPES
from models.layers import DecoderLayer, Linear, parameter
from models.ops.reference import Ops
from models.rope import Rope


class Decoder(nn.Module):
    """A dense decoder over packed spans. Fill its weights (models/weights.py), then `pack` it once."""

    def __init__(self, config: DecoderConfig, fused: Ops, attention: Attention) -> None:
        super().__init__()
        hidden, vocab = config.hidden_size, config.vocab_size
        dtype, device = TORCH_DTYPES[config.dtype], attention.device
        self.config, self.fused, self.attention = config, fused, attention
        self.embedding = parameter(vocab, hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, fused, attention) for layer in range(config.num_layers)
        )
        self.norm = parameter(hidden, dtype=dtype, device=device)
        self.head = Linear(fused, hidden, vocab, False, dtype, device, config.form("lm_head"))
        if config.tie_embeddings:
            self.head.weight = self.embedding
        self.rope = Rope(config.rope, device)

    def pack(self) -> None:
        """Bring every linear into the device's form, one after the other: at most one is held twice."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        cache: KVCache,
        rope_lens: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, hidden] of the step's tokens, before the last norm; all arguments [T].

        `rope_lens` is needed by dynamic rope alone (see Rope.cos_sin).
        """
        num_tokens = len(token_ids)
        num_rows = self.fused.padded(num_tokens)
        token_ids, positions = pad_rows(token_ids, num_rows), pad_rows(positions, num_rows)
        if rope_lens is not None:
            rope_lens = pad_rows(rope_lens, num_rows)
        x, residual = F.embedding(token_ids, self.embedding), None
        cos, sin = self.rope.cos_sin(positions, rope_lens, x.dtype)
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin, metadata, cache)
        x = x if residual is None else x + residual
        return x[:num_tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] -> logits [R, V], in the model's dtype."""
        num_rows = len(hidden)
        hidden = pad_rows(hidden, self.fused.padded(num_rows))
        return self.head(self.fused.rms_norm(hidden, self.norm, self.config.rms_eps))[:num_rows]


def pad_rows(x: Tensor, num_rows: int) -> Tensor:
    """Zeros after the last row, up to `num_rows`."""
    missing = num_rows - len(x)
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)) if missing else x
