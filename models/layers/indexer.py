"""Define the indexer of a layer with sparse latent attention (DSA; DeepSeek-V3.2-Exp, and GLM-5 after it).

It projects hidden states to an index key of each token and to a weight of each index head, and the compressed
queries of latent attention to index queries. Keys are normed, with a mean and a bias, before they are
rotated; of keys and queries the first channels alone are rotated, by latent attention's own angles. Scores,
choice and pages are left to `attention.sparse`. Each tensor-parallel rank holds the whole indexer; in steps
of many tokens it chooses for some of the rows alone, for which it also attends.

Legend: T tokens of the step, I index heads, X width of an index key.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention.sparse import SparseAttention
from models.config import NORM_EPS, DecoderConfig
from models.layers.dtypes import TORCH_DTYPES
from models.layers.linear import Linear, SplitLinear, parameter
from models.ops.reference import Ops
from models.step_inputs import StepInputs


class Indexer(nn.Module):
    """The indexer of the layer `layer` of this rank, with the prefix `name` in a checkpoint."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        name: str,
        ops: Ops,
        attention: SparseAttention,
    ) -> None:
        super().__init__()
        index, latent = config.index_of(layer), config.latent
        assert latent is not None, "an indexer chooses for latent attention"
        assert index is not None, "the layer has an indexer of its own"
        assert latent.query_rank is not None, "an indexer reads compressed queries"
        self.layer, self.index, self.rope_dim = layer, index, latent.rope_dim
        self.ops, self.attention = ops, attention
        dtype, device = TORCH_DTYPES[config.dtype], attention.device
        forms = [config.form(f"{name}self_attn.{each}") for each in ("indexer.wk", "indexer.wq_b")]
        widths = index.head_dim, index.num_heads
        self.first = SplitLinear(ops, config.hidden_size, sum(widths), False, dtype, device, forms[0], widths)
        queries = index.num_heads * index.head_dim
        self.query_up = Linear(ops, latent.query_rank, queries, False, dtype, device, forms[1])
        self.key_norm = parameter(index.head_dim, dtype=dtype, device=device)
        self.key_norm_bias = parameter(index.head_dim, dtype=dtype, device=device)

    def joined(self) -> list[tuple[tuple[str, ...], Linear]]:
        """Return its linears with the checkpoint's linears that each of them joins."""
        return [(self.index.first(), self.first), (("indexer.wq_b",), self.query_up)]

    def order(self, name: str) -> Tensor | None:
        """Return the order in which rows of a checkpoint's linear or norm are held; None for its own.

        Where rotated pairs lie side by side in a checkpoint, they lie halves apart here.
        """
        if not self.index.interleaved or name == "indexer.weights_proj":
            return None
        rows = torch.arange(self.index.head_dim)
        pairs, rest = rows[: self.rope_dim], rows[self.rope_dim :]
        head = torch.cat((pairs[::2], pairs[1::2], rest))
        count = self.index.num_heads if name == "indexer.wq_b" else 1
        return (head + self.index.head_dim * torch.arange(count)[:, None]).flatten()

    def write(
        self, x: Tensor, cos: Tensor, sin: Tensor, step: StepInputs, is_absent: Tensor | None = None
    ) -> Tensor:
        """Write the index keys of hidden states [T, hidden] to the cache, zeros for absent tokens [T].

        Returns the weights of the index heads [T, I].
        """
        parts: tuple[Tensor, ...] = self.first(x)
        key, weights = parts
        key = F.layer_norm(key, key.shape[-1:], self.key_norm, self.key_norm_bias, NORM_EPS)
        if is_absent is not None:  # rotations of zeros are zeros
            key = key.masked_fill(is_absent[:, None], 0)
        key = self._rotated(key[:, None], cos, sin)[:, 0]
        pages = self.attention.index_pages(step.cache.of(self.layer))
        self.attention.write_index(key, pages, step.metadata)
        return weights

    def choose(self, compressed: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, step: StepInputs) -> None:
        """Choose what the step's queries read, by normed compressed queries and the heads' weights.

        Nothing is computed in a step in which every token is read.
        """
        if not self.attention.is_sparse(step.metadata):
            return
        own = self.attention.own_rows(step.metadata)
        query, weights = self.query_up(compressed[own]), weights[own]
        query = self._rotated(query.unflatten(-1, (-1, self.index.head_dim)), cos[own], sin[own])
        pages = self.attention.index_pages(step.cache.of(self.layer))
        self.attention.choose(query, weights, pages, step.metadata)

    def _rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first channels of heads [T, I, X]."""
        turned, rest = heads.split((self.rope_dim, self.index.head_dim - self.rope_dim), -1)
        return torch.cat((self.ops.rotary_of_one(turned, cos, sin), rest), -1)
