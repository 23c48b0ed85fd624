"""Define a decoder layer's multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434).

The layer projects queries and latents, writes one latent and one rope key of each token to the cache, and
projects the result. Where the device allows it, steps of short spans compute all of this before attention in
one fused launch. Each tensor-parallel rank has its share of the heads and all latents. Attention itself,
absorbed or expanded, is left to `attention.latent`.

Legend: T tokens of the step, H heads, L latent, R rope, N the other part of a query (nope).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attention.latent import LatentAttention, LatentProlog, LatentUp
from attention.sparse import SparseAttention
from models.config import INDEX_KEY_NORM, NORM_EPS, QUERY_NORM, DecoderConfig, Form
from models.layers.dtypes import TORCH_DTYPES
from models.layers.indexer import Indexer
from models.layers.linear import Linear, SplitLinear, SummedLinear, parameter
from models.layers.rope import is_scaled
from models.ops.operands import Int8Rows
from models.ops.reference import Ops
from models.parallel.group import Group
from models.step_inputs import StepInputs


class UpProjection(nn.Module):
    """The linear from latents to keys and values of heads, which is split up instead of multiplied with.

    Its rows are filled with the keys of all heads and, after them, the values of all heads.
    """

    bias, rounds, form = None, False, "int8"  # attributes of a linear

    def __init__(
        self,
        ops: Ops,
        latents: int,
        widths: tuple[int, int],
        num_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        form: Form,
    ) -> None:
        super().__init__()
        self.ops, self.widths, self.num_heads, self.dtype = ops, widths, num_heads, dtype
        stored = torch.int8 if form == "int8" else dtype
        self.weight: nn.Parameter | None = parameter(sum(widths), latents, dtype=stored, device=device)
        self.weight_scale: nn.Parameter | None = None
        if form == "int8":
            self.weight_scale = parameter(sum(widths), 1, dtype=torch.float32, device=device)
        self.packed: LatentUp | None = None

    def pack(self) -> None:
        """Pack the filled weight, once; int8 is converted back to the model's type."""
        assert self.weight is not None, "it is packed once"
        weight = self.weight.data
        if self.weight_scale is not None:
            weight = (weight.float() * self.weight_scale).to(self.dtype)
        keys, values = (rows.unflatten(0, (self.num_heads, -1)) for rows in weight.split(self.widths))
        self.packed = self.ops.pack_up(keys.contiguous(), values.transpose(1, 2).contiguous())
        self.weight = self.weight_scale = None


class LatentSelfAttention(nn.Module):
    """Latent attention of the layer `layer` of this rank, with the prefix `name` in a checkpoint."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        name: str,
        ops: Ops,
        attention: LatentAttention,
        group: Group,
    ) -> None:
        super().__init__()
        latent, heads, hidden = config.latent, config.num_heads, config.hidden_size
        assert latent is not None, "the decoder has other attention"
        self.layer, self.latent, self.num_heads = layer, latent, heads
        self.ops, self.attention = ops, attention
        ops.scales_angles |= is_scaled(config.rope)
        dtype, device = TORCH_DTYPES[config.dtype], attention.device

        def form(linear: str) -> Form:
            return config.form(f"{name}self_attn.{linear}")

        queries = heads * latent.nope_dim, heads * latent.rope_dim
        compressed = queries if latent.query_rank is None else (latent.query_rank,)
        widths = (*compressed, latent.token_width)
        self.qkv = SplitLinear(
            ops, hidden, sum(widths), False, dtype, device, form(latent.first()[0]), widths
        )
        self.query_norm: nn.Parameter | None = None
        self.query_norm_bias: nn.Parameter | None = None
        self.query_up: SplitLinear | None = None
        self.joins = False  # steps of short spans compute everything before attention in one launch
        self.prolog: LatentProlog | None = None  # what that launch takes, once it is packed
        if latent.query_rank is not None:
            forms = form(latent.first()[0]), form("q_b_proj")
            are_alike = len({each == "plain" for each in forms}) == 1
            are_wide = all(each in ("plain", "int8", "quantize") for each in forms)
            if config.has_norm_bias(
                f"{name}self_attn.{QUERY_NORM}"
            ):  # no operator adds a bias beside the rest
                self.query_norm_bias = parameter(latent.query_rank, dtype=dtype, device=device)
                are_wide = False
            self.joins = are_alike and are_wide and attention.joins(hidden, latent.query_rank)
            outputs = (sum(queries),) if self.joins else queries
            self.query_norm = parameter(latent.query_rank, dtype=dtype, device=device)
            self.query_up = SplitLinear(
                ops, latent.query_rank, sum(queries), False, dtype, device, forms[1], outputs
            )
            self.qkv.in_parts = self.query_up.in_parts = self.joins
        if isinstance(attention, SparseAttention):  # also where each layer shares the choice of others
            attention.ranks = group
        self.indexer: Indexer | None = None
        if config.index_of(layer) is not None:
            assert isinstance(attention, SparseAttention), "the device's operators are those of the model"
            self.indexer = Indexer(config, layer, name, ops, attention)
        self.latent_norm = parameter(latent.rank, dtype=dtype, device=device)
        ups = heads * latent.nope_dim, heads * latent.value_dim
        self.up = UpProjection(ops, latent.rank, ups, heads, dtype, device, form("kv_b_proj"))
        self.output = SummedLinear(
            ops, heads * latent.value_dim, hidden, False, dtype, device, form("o_proj"), group
        )

    @property
    def reader(self) -> Linear | None:
        """The linear that alone reads the hidden state; None if an indexer reads it, too."""
        return self.qkv if self.indexer is None else None

    def norms(self) -> dict[str, nn.Parameter | None]:
        """Return its norms by their checkpoint names."""
        found: dict[str, nn.Parameter | None] = {QUERY_NORM: self.query_norm}
        if self.indexer is not None:
            found[INDEX_KEY_NORM] = self.indexer.key_norm
        return {**found, "kv_a_layernorm": self.latent_norm}

    def joined(self) -> list[tuple[tuple[str, ...], Linear | UpProjection]]:
        """Return its linears with the checkpoint's linears that each of them joins."""
        up = [] if self.query_up is None else [(("q_b_proj",), self.query_up)]
        return [
            (self.latent.first(), self.qkv),
            *up,
            *([] if self.indexer is None else self.indexer.joined()),
            (("kv_b_proj",), self.up),
            (("o_proj",), self.output),
        ]

    def order(self, name: str) -> Tensor | None:
        """Return the order in which rows of a checkpoint's linear are held; None for its own.

        A checkpoint has the two parts of each head side by side, and the pairs of the rotary embedding too.
        Fused linears take queries in that form.
        """
        latent = self.latent
        if self.indexer is not None and name.startswith("indexer."):
            return self.indexer.order(name)
        if name in ("q_proj", "q_b_proj") and not self.joins:
            rows = torch.arange(self.num_heads * latent.query_dim).unflatten(0, (self.num_heads, -1))
            nope, rope = rows.split((latent.nope_dim, latent.rope_dim), 1)
            return torch.cat((nope.flatten(), torch.cat((rope[:, ::2], rope[:, 1::2]), 1).flatten()))
        if name == "kv_b_proj":
            widths = latent.nope_dim, latent.value_dim
            rows = torch.arange(self.num_heads * sum(widths)).unflatten(0, (self.num_heads, -1))
            return torch.cat([part.flatten() for part in rows.split(widths, 1)])
        return None

    def pack(self) -> None:
        """Join its packed linears, once, if the device fuses them."""
        if not self.joins:
            return
        query_up, query_norm, up = self.query_up, self.query_norm, self.up.packed
        assert query_up is not None, "only queries that are compressed are joined"
        assert query_norm is not None, "these have a norm"
        assert up is not None, "the up projection is packed before"
        linears = self.ops.join_latents(self.qkv.packed, query_up.packed, self.qkv.is_int8)
        self.prolog = LatentProlog(linears, query_norm.data, self.latent_norm.data, NORM_EPS, up)

    def forward(self, x: Tensor | Int8Rows, cos: Tensor, sin: Tensor, step: StepInputs) -> Tensor:
        """Map [T, hidden] to [T, hidden], after writing the step's latents and rope keys to the cache."""
        (latents, rope_keys), up = self.attention.pages_of(step.cache.of(self.layer)), self.up.packed
        assert up is not None, "pack the decoder before its first step"
        weights = self._write_index(x, cos, sin, step)
        if self.prolog is not None and self.attention.is_joined(step.metadata):
            rows, scale = self.rows(x)
            query, rope, compressed = self.attention.write_joined(
                rows, scale, self.prolog, cos, sin, latents, rope_keys, step.metadata
            )
            self._choose(compressed, weights, cos, sin, step)
            attended = self.attention.attend_joined(query, rope, up, latents, rope_keys, step.metadata)
        else:
            nope, rope, compressed = self._write_latents(x, cos, sin, step)
            self._choose(compressed, weights, cos, sin, step)
            attended = self.attention.attend_heads(
                nope, rope, up, latents, rope_keys, step.metadata, self.layer
            )
        y: Tensor = self.output(attended.flatten(1), step.divided)
        return y

    def rows(self, x: Tensor | Int8Rows) -> tuple[Tensor, Tensor | None]:
        """Return the rows that the linears multiply, and their scales [T] if these are in int8."""
        if not self.qkv.is_int8:
            assert isinstance(x, Tensor), "linears that are not in int8 read no rows in int8"
            return x, None
        made = self.ops.quantized(x)
        return made.rows, made.scale

    def write(
        self,
        x: Tensor | Int8Rows,
        cos: Tensor,
        sin: Tensor,
        step: StepInputs,
        is_absent: Tensor | None = None,
    ) -> None:
        """Write what the cache keeps of the step's tokens, zeros for absent tokens [T]."""
        self._write_index(x, cos, sin, step, is_absent)
        self._write_latents(x, cos, sin, step, is_absent)

    def _write_index(
        self,
        x: Tensor | Int8Rows,
        cos: Tensor,
        sin: Tensor,
        step: StepInputs,
        is_absent: Tensor | None = None,
    ) -> Tensor | None:
        """Write the step's index keys to the cache; return the weights of the index heads.

        None if the layer has no indexer.
        """
        if self.indexer is None:
            return None
        assert isinstance(x, Tensor), "an indexer reads no rows in int8"
        return self.indexer.write(x, cos, sin, step, is_absent)

    def _choose(
        self, compressed: Tensor | None, weights: Tensor | None, cos: Tensor, sin: Tensor, step: StepInputs
    ) -> None:
        """Choose what the step's queries read, if the layer has an indexer and some tokens are not read."""
        if self.indexer is not None:
            assert compressed is not None, "an indexer reads compressed queries"
            assert weights is not None, "they were computed with the index keys"
            self.indexer.choose(compressed, weights, cos, sin, step)

    def _write_latents(
        self,
        x: Tensor | Int8Rows,
        cos: Tensor,
        sin: Tensor,
        step: StepInputs,
        is_absent: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Write the step's latents and rope keys to the cache, zeros for absent tokens [T].

        Returns its queries [T, H, N] and [T, H, R], and the normed compressed queries, if it has these.
        """
        *queries, kv = self.qkv(x)
        normed: Tensor | None = None
        if is_absent is not None:
            kv = kv.masked_fill(is_absent[:, None], 0)
        if self.query_up is not None and self.query_norm is not None:
            normed = self.ops.rms_norm(queries[0], self.query_norm, NORM_EPS)
            normed = normed if self.query_norm_bias is None else normed + self.query_norm_bias
            queries = list(self.query_up(normed))
        widths = self.latent.nope_dim, self.latent.rope_dim
        if self.joins:
            nope, pairs = queries[0].unflatten(-1, (-1, sum(widths))).split(widths, -1)
            nope, rope = nope.contiguous(), torch.cat((pairs[..., ::2], pairs[..., 1::2]), -1)
        else:
            nope, rope = (each.unflatten(-1, (-1, width)) for each, width in zip(queries, widths))
        latents, rope_keys = self.attention.pages_of(step.cache.of(self.layer))
        return nope, self._write(kv, rope, cos, sin, latents, rope_keys, step), normed

    def _write(
        self,
        kv: Tensor,
        rope: Tensor,
        cos: Tensor,
        sin: Tensor,
        latents: Tensor,
        rope_keys: Tensor,
        step: StepInputs,
    ) -> Tensor:
        """Write the step's latents and rope keys, of kv [T, L + R]; return the rotated queries [T, H, R].

        The pairs that are rotated lie side by side in keys; in queries, whose rows are reordered at load,
        they are halves apart, as the operators for other attention have them.
        """
        if self.attention.normalizes:
            self.attention.write_raw(
                kv, self.latent_norm, NORM_EPS, cos, sin, latents, rope_keys, step.metadata
            )
            return self.ops.rotary_of_one(rope, cos, sin)
        latent, pairs = kv.split((self.latent.rank, self.latent.rope_dim), -1)
        key = torch.cat((pairs[:, ::2], pairs[:, 1::2]), -1)
        rope, key = self.ops.rotary(rope, key[:, None], cos, sin)
        latent = self.ops.rms_norm(latent, self.latent_norm, NORM_EPS)
        self.attention.write(latent[:, None], key, latents, rope_keys, step.metadata)
        return rope
