"""Define the decoder: from tokens to hidden states and logits.

The stack of layers reads as the papers do; products, norms and rotations are those of `ops`, attention over
the paged cache is that of `attention`, and the part that a rank holds is its `share`.

Legend: T tokens of the step, R sampled rows, V vocabulary, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention.latent import LatentAttention
from attention.recurrent import Recurrence
from attention.reference import Attention, ChannelScales
from attention.sparse import SparseAttention
from models.config import FUSED, LAST_NORM, DecoderConfig
from models.layers.dtypes import TORCH_DTYPES
from models.layers.latent import LatentSelfAttention, UpProjection
from models.layers.linear import Linear, SplitLinear, SummedLinear, parameter
from models.layers.logit_parts import LogitParts
from models.layers.low_rank import AdapterRooms
from models.layers.mixture import Mixture
from models.layers.mlp import MLP
from models.layers.recurrent import GatedDelta, KimiDelta, RecurrentMixer
from models.layers.rope import Rope, head_order, is_scaled
from models.ops.divided_rows import DividedRows
from models.ops.operands import Int8Rows, PlainLayer
from models.ops.reference import Ops
from models.parallel.group import ALONE, NO_LINKS, Group, StageLinks
from models.parallel.share import Share
from models.step_inputs import StepInputs


class SelfAttention(nn.Module):
    """Grouped-query attention with one product for queries, keys and values, for inputs of `width`."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        name: str,
        ops: Ops,
        attention: Attention,
        group: Group,
        width: int | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.group = layer, config.group_of(layer)
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.head_order = config.head_dim, head_order(config.rope)
        self.eps = config.rms_eps
        self.ops, self.attention = ops, attention
        ops.scales_angles |= is_scaled(config.rope, config.window_rope)
        dtype, device = TORCH_DTYPES[config.dtype], attention.device
        widths: tuple[int, ...] = tuple(
            count * config.head_dim for count in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        )
        kv_width, self.has_gate = widths[1], config.has_output_gate
        if self.has_gate:  # its numbers lie behind the queries, and are as many
            widths = widths[0], *widths
        hidden, heads = config.hidden_size, config.num_heads * config.head_dim
        form = [config.form(f"{name}self_attn.{each}") for each in ("q_proj", "o_proj")]
        self.qkv = SplitLinear(
            ops, width or hidden, sum(widths), config.attention_bias, dtype, device, form[0], widths
        )
        self.joins: Any = None  # splits the product, and norms and rotates its heads, in one launch
        is_plain = config.qk_norm == "heads" and not self.has_gate
        if is_plain and form[0] not in ("static", "w8a16"):  # which are packed in parts
            self.joins = ops.join_heads(config.num_heads, config.num_kv_heads, config.head_dim, dtype, device)
        self.qkv.is_whole = self.joins is not None
        self.output = SummedLinear(ops, heads, hidden, config.output_bias, dtype, device, form[1], group)
        self.norm_kind, self.norm_names = config.qk_norm, config.qk_norm_names
        self.query_growth, self.ranks = config.query_growth, group
        self.query_norm, self.key_norm = (
            parameter(width, dtype=dtype, device=device) if width else None for width in config.qk_norm_widths
        )
        self.sinks: nn.Parameter | None = None
        if config.has_sinks:
            self.sinks = attention.sinks[layer] = parameter(config.num_heads, dtype=dtype, device=device)

        self.key_scale, self.value_scale = (
            parameter(kv_width, dtype=torch.float32, device=device)
            if config.has_cache_scales(f"{name}self_attn")
            else None
            for _ in range(2)
        )
        self.scales: ChannelScales | None = None  # the same, once they are packed

    def pack(self) -> None:
        """Convert the scales of keys and values to the device's form, if the checkpoint has them."""
        if self.key_scale is not None and self.value_scale is not None:
            self.scales = self.attention.pack_scales(self.key_scale.data, self.value_scale.data)

    @property
    def reader(self) -> Linear:
        """The linear that alone reads the hidden state."""
        return self.qkv

    def norms(self) -> dict[str, nn.Parameter | None]:
        """Return its norms by their checkpoint names."""
        return dict(zip(self.norm_names, (self.query_norm, self.key_norm)))

    def joined(self) -> list[tuple[tuple[str, ...], Linear]]:
        """Return its linears with the checkpoint's linears that each of them joins."""
        return [(FUSED, self.qkv), (("o_proj",), self.output)]

    def order(self, name: str) -> Tensor | None:
        """Return the order in which rows of a checkpoint's linear or norm are held; None for its own.

        The gate of each head lies behind its query there, and here behind the queries of all heads.
        """
        if name == "q_proj" and self.has_gate:
            plain = torch.arange(self.head_dim)
            heads = [2 * head * self.head_dim for head in range(self.num_heads)]
            query = plain if self.head_order is None else self.head_order
            return torch.cat(
                [*(first + query for first in heads), *(first + self.head_dim + plain for first in heads)]
            )
        if self.head_order is None or name not in ("q_proj", "k_proj", *self.norm_names):
            return None
        num_heads = self.num_heads if name in ("q_proj", self.norm_names[0]) else self.num_kv_heads
        if name in self.norm_names and self.norm_kind != "joined":
            num_heads = 1
        return torch.cat([head * self.head_dim + self.head_order for head in range(num_heads)])

    def forward(self, x: Tensor | Int8Rows, cos: Tensor, sin: Tensor, step: StepInputs) -> Tensor:
        """Map [T, hidden] to [T, hidden], after writing the step's keys and values to the cache."""
        query, gate = self.write(x, cos, sin, step)
        self.ops.prefetch(self.output.packed, query)
        keys, values = step.cache.of(self.layer)
        metadata = step.metadata_of(self.group)
        if self.scales is None:
            attended = self.attention.attend(query, keys, values, metadata, self.layer)
        else:
            attended = self.attention.attend_by_channel(
                query, self.scales, keys, values, metadata, self.layer
            )
        if gate is not None:
            attended = attended * self.ops.sigmoid(gate).view_as(attended)
        self.ops.await_prefetch()
        mixed: Tensor = self.output(attended.flatten(1), step.divided)
        return mixed

    def write(
        self,
        x: Tensor | Int8Rows,
        cos: Tensor,
        sin: Tensor,
        step: StepInputs,
        is_absent: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Write the step's keys and values to the cache, zeros for absent tokens [T].

        Returns its queries [T, H, D], and what opens the gates of the output [T, H * D], if there are any.
        """
        query, gate, key, value = self._rotated(x, cos, sin)
        if is_absent is not None:  # norms and rotations of zeros are zeros
            key, value = (each.masked_fill(is_absent[:, None, None], 0) for each in (key, value))
        if self.query_growth is not None:
            rate, step_size = self.query_growth
            positions = pad_rows(step.positions, len(query))
            growth = 1 + rate * (1 + (positions // step_size)).float().log()
            query = query * growth.to(query.dtype)[:, None, None]
        keys, values = step.cache.of(self.layer)
        metadata = step.metadata_of(self.group)
        if self.scales is None:
            self.attention.write(key, value, keys, values, metadata)
        else:
            self.attention.write_by_channel(key, value, self.scales, keys, values, metadata)
        return query, gate

    def _rotated(
        self, x: Tensor | Int8Rows, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return queries [T, H, D], gates, keys and values [T, K, D]; queries and keys normed and rotated."""
        if self.joins is not None and self.joins.takes(len(cos)):
            assert self.query_norm is not None, "only heads with norms are joined"
            assert self.key_norm is not None, "only heads with norms are joined"
            qkv = self.qkv.whole(x)
            parts = self.joins(qkv, self.query_norm, self.key_norm, self.eps, cos, sin)
            query, key, value = (each.unflatten(-1, (-1, self.head_dim)) for each in parts)
            return query, None, key, value
        query, *gates, key, value = self.qkv(x)
        if self.norm_kind == "joined":
            query, key = self._normed_together(query, key)
        query, key, value = (each.unflatten(-1, (-1, self.head_dim)) for each in (query, key, value))
        if self.norm_kind == "heads":
            query, key = self._normed_by_head(query, key)
        query, key = self.ops.rotary(query, key, cos, sin)
        if self.norm_kind == "rotated":
            query, key = self._normed_by_head(query, key)
        return query, gates[0] if gates else None, key, value

    def _normed_by_head(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        assert self.query_norm is not None, "its norms are those of heads"
        assert self.key_norm is not None, "its norms are those of heads"
        return (
            self.ops.rms_norm(query, self.query_norm, self.eps),
            self.ops.rms_norm(key, self.key_norm, self.eps),
        )

    def _normed_together(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Norm all heads of a token together: queries [T, H * D] and keys [T, K * D], over all ranks.

        Every rank holds equally many heads, and each key-value head lies on equally many ranks, so that the
        mean over all heads is the mean of the ranks' means.
        """
        assert self.query_norm is not None, "its norms are those of all heads"
        assert self.key_norm is not None, "its norms are those of all heads"
        if self.ranks.size == 1:
            return self._normed_by_head(query, key)
        wide = query.float(), key.float()
        means = torch.cat([each.square().mean(-1, keepdim=True) for each in wide], -1)
        means = self.ranks.all_reduce(means) / self.ranks.size
        normed = [each * (mean + self.eps).rsqrt() for each, mean in zip(wide, means.split(1, -1))]
        return normed[0].to(query.dtype) * self.query_norm, normed[1].to(key.dtype) * self.key_norm


class DecoderLayer(nn.Module):
    """One layer: norm, attention, norm, MLP. Each norm also adds the residual, because devices fuse the two.

    It is layer `layer` of those that this rank holds, and has the prefix `name` in a checkpoint; `sharing`
    ranks of the group divide each expert.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        name: str,
        ops: Ops,
        attention: Attention,
        group: Group,
        sharing: int,
        recurrence: Recurrence,
    ) -> None:
        super().__init__()
        self.ops, self.eps = ops, config.rms_eps
        dtype = TORCH_DTYPES[config.dtype]

        def norm(name: str) -> nn.Parameter | None:
            return parameter(config.hidden_size, dtype=dtype, device=attention.device) if name else None

        names = (*config.norms, "", "")
        self.input_norm, self.mlp_norm = norm(names[0]), norm(names[1])
        self.attention_post_norm, self.mlp_post_norm = norm(names[2]), norm(names[3])
        self.attention: SelfAttention | LatentSelfAttention | RecurrentMixer
        if (recurrent := config.recurrent_of(layer)) is not None:
            kind = GatedDelta if recurrent.kind == "gated" else KimiDelta
            self.attention = kind(config, layer, name, ops, recurrence, group)
        elif config.layers[layer].mixer == "latent":
            assert isinstance(attention, LatentAttention), "the device's operators are those of the model"
            self.attention = LatentSelfAttention(config, layer, name, ops, attention, group)
        else:
            self.attention = SelfAttention(config, layer, name, ops, attention, group)
        self.input_norm_bias, self.mlp_norm_bias = (
            norm(each if config.has_norm_bias(f"{name}{each}") else "") for each in names[:2]
        )
        self.mlp: MLP | Mixture
        if config.mixture_of(layer) is None:
            (names,) = config.mlp_names(layer, name)
            self.mlp = MLP(config, names, config.intermediate_size, ops, attention.device, group)
        else:
            self.mlp = Mixture(config, layer, name, ops, attention.device, group, sharing)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        step: StepInputs,
        read: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output of the last block and the residual it will be added to.

        The first layer gets no residual. If rows are divided, these are the rows of this rank; if `read` [R]
        is given, they are these rows alone.
        """
        normed: Tensor | Int8Rows
        if residual is None:
            normed, residual = self.normed_input(x), x
        else:
            weights = self.input_norm, self.input_norm_bias
            normed, residual = self._add_norm(x, residual, *weights, self.attention.reader)
        divided = step.divided
        x = self.attention(normed if divided is None else divided.whole_input(normed), cos, sin, step)
        if self.attention_post_norm is not None:
            x = self.ops.rms_norm(x, self.attention_post_norm, self.eps)
        if read is not None:
            x, residual = x[read], residual[read]
            if not read.shape[0]:  # The step computes parts of prompts and ends none of them
                return x, residual
        if isinstance(self.mlp, Mixture):
            return self._mixed(x, residual, step, self.mlp)
        weights = self.mlp_norm, self.mlp_norm_bias
        normed, residual = self._add_norm(x, residual, *weights, self.mlp.gate_up)
        x = self.mlp(normed if divided is None else divided.whole_input(normed), divided)
        if self.mlp_post_norm is not None:
            x = self.ops.rms_norm(x, self.mlp_post_norm, self.eps)
        return x, residual

    def _mixed(
        self, x: Tensor, residual: Tensor, step: StepInputs, mixture: Mixture
    ) -> tuple[Tensor, Tensor]:
        """Return the output of the mixture, and the residual; no expert computes the padding rows.

        If rows are divided, a rank chooses the experts of its own rows alone, padding included.
        """
        wide: Tensor | None = None
        if self.mlp_norm is not None and self.mlp_norm_bias is None:
            normed, wide, residual = self.ops.add_rms_norm_wide(x, residual, self.mlp_norm, self.eps)
        else:
            found, residual = self._add_norm(x, residual, self.mlp_norm, self.mlp_norm_bias, None)
            assert isinstance(found, Tensor), "a router reads no rows in int8"
            normed = found
        num_tokens, num_rows = len(step.token_ids), len(residual)
        if step.divided is not None:
            return mixture.of_divided(normed, wide, step.is_asked, num_tokens, step.divided), residual
        wide = None if wide is None else wide[:num_tokens]
        return pad_rows(mixture(normed[:num_tokens], wide, step.is_asked), num_rows), residual

    def plain(self, config: DecoderConfig) -> PlainLayer | None:
        """Return what it is made of, or None where it has more than a `PlainLayer`."""
        mixer, mlp = self.attention, self.mlp
        if not isinstance(mixer, SelfAttention) or not isinstance(mlp, MLP):
            return None
        linears = mixer.qkv, mixer.output, mlp.gate_up, mlp.down
        has_more = mixer.has_gate or mixer.joins is not None or mixer.query_growth is not None
        has_more |= mixer.sinks is not None or mixer.scales is not None
        has_more |= self.input_norm_bias is not None or self.mlp_norm_bias is not None
        has_more |= any(each.form != "plain" for each in linears)
        if has_more or mixer.norm_kind == "joined" or config.gate == "clamped" or mixer.ranks.size > 1:
            return None
        if self.input_norm is None or self.mlp_norm is None:
            return None
        return PlainLayer(
            qkv=mixer.qkv.packed,
            output=mixer.output.packed,
            gate_up=mlp.gate_up.packed,
            down=mlp.down.packed,
            input_norm=self.input_norm,
            mlp_norm=self.mlp_norm,
            query_norm=mixer.query_norm,
            key_norm=mixer.key_norm,
            attention_post_norm=self.attention_post_norm,
            mlp_post_norm=self.mlp_post_norm,
            norm_kind=mixer.norm_kind,
            gate=config.gate,
            eps=self.eps,
            layer=mixer.layer,
            group=mixer.group,
            window=config.layers[mixer.layer].window,
        )

    def normed_input(self, x: Tensor) -> Tensor:
        """Return what attention reads of hidden states [T, hidden] that are whole already."""
        if self.input_norm is None:
            return x
        normed = self.ops.rms_norm(x, self.input_norm, self.eps)
        return normed if self.input_norm_bias is None else normed + self.input_norm_bias

    def _add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, reader: Linear | None
    ) -> tuple[Tensor | Int8Rows, Tensor]:
        """Return the norm of the sum, in the form that the linear `reader` takes, and the sum.

        Without a norm, that is the sum itself.
        """
        if weight is None:
            total = x + residual
            return total, total
        if bias is not None:
            normed, residual = self.ops.add_rms_norm(x, residual, weight, self.eps)
            return normed + bias, residual
        norm = (
            self.ops.add_rms_norm_int8 if reader is not None and reader.takes_int8 else self.ops.add_rms_norm
        )
        return norm(x, residual, weight, self.eps)


class Decoder(nn.Module):
    """A decoder over packed spans. Fill its weights (models/checkpoint/weights.py), then `pack` it once.

    Of the decoder that `config` describes, it holds the `part` of this rank, which is its `share`: the ranks
    of `group` share its layers, and `stages` leads to the ranks that hold other layers. Every rank of a group
    gets the same hidden states. In the last stage each rank has the logits of its own tokens; `parts` joins
    them, and is None if no joining is needed.
    """

    def __init__(
        self,
        config: DecoderConfig,
        ops: Ops,
        attention: Attention,
        group: Group = ALONE,
        share: Share | None = None,
        stages: StageLinks = NO_LINKS,
        recurrence: Recurrence | None = None,
    ) -> None:
        super().__init__()
        self.group, self.stages = group, stages
        self.share = share or Share(group.rank, group.size)
        self.config, self.part = config, self.share.part(config)
        # The windows of each group of layers, for planning; None: whatever the layers have
        self.group_windows: tuple[tuple[int | None, ...] | None, ...] = (None,)
        if config.window_groups:
            kept = {window for window in self.part.windows if window not in config.window_groups}
            self.group_windows = (tuple(kept), *((window,) for window in config.window_groups))
        hidden, vocab = config.hidden_size, self.part.vocab_size
        dtype, device = TORCH_DTYPES[config.dtype], attention.device
        self.ops, self.attention = ops, attention
        self.recurrence = recurrence or Recurrence(device)
        sharing = self.share.of_an_expert[1]
        self.counts_experts = False  # whether experts count their tokens, see models/step/expert_counts.py
        # Tokens of a step that is not captured from which ranks divide its rows between products; 0: never
        self.least_divided = 0
        self.adapters: AdapterRooms | None = None  # places for adapters, see models/step/adapters.py
        num_embedded = vocab if self.share.holds_embedding(config) else 0
        self.embedding = parameter(num_embedded, hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(
                self.part, layer, f"model.layers.{number}.", ops, attention, group, sharing, self.recurrence
            )
            for layer, number in enumerate(self.share.layers(config))
        )
        self.norm = parameter(hidden, dtype=dtype, device=device)
        self.norm_bias: nn.Parameter | None = None
        if config.has_norm_bias(LAST_NORM):
            self.norm_bias = parameter(hidden, dtype=dtype, device=device)
        self.parts: LogitParts | None = None
        if self.share.is_last:
            if group.size > 1:
                self.parts = LogitParts(group, self.share.tokens(config), config.vocab_size, ops)
            self.head = Linear(ops, hidden, vocab, False, dtype, device, config.form("lm_head"))
            if config.tie_embeddings:
                self.head.weight = self.embedding
        ropes = [config.rope] if config.window_rope is None else [config.rope, config.window_rope]
        self.ropes = [Rope(each, device) for each in ropes]  # the last one serves layers with a window
        # Rounded to the model's type
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        # Called when a layer's keys and values have been written
        self.after_layer: Callable[[int], None] | None = None
        self._taps: tuple[int, ...] = ()
        self._take: Callable[[Tensor, StepInputs], None] | None = None
        self._first = self.share.layers(config).start  # number of the first layer here
        # What computes all layers in one call, once they are packed, or None
        self.joined: Callable[..., tuple[Tensor, Tensor]] | None = None

    def pack(self) -> None:
        """Convert every linear to the device's form, one by one.

        So at most one linear, or the experts of one layer if the device joins them, is held twice.
        """
        pack(self)
        layers = [each for each in self.layers if isinstance(each, DecoderLayer)]
        plain = [made for each in layers if (made := each.plain(self.part)) is not None]
        if len(plain) == len(self.layers):
            self.joined = self.ops.join_layers(plain, self.attention)

    def tabulate(self, num_positions: int) -> None:
        """Prepare the rotary embedding for positions below `num_positions`, once before the first step."""
        for rope in self.ropes:
            rope.tabulate(num_positions, self.embedding.dtype)

    def division(self, num_tokens: int) -> DividedRows | None:
        """Return how the ranks divide the rows of a step of so many tokens that is not captured."""
        if self.group.size == 1 or not 0 < self.least_divided <= num_tokens or not self.ops.divides_rows:
            return None
        return DividedRows(self.group, self.ops.padded(num_tokens))

    @property
    def skips_rows(self) -> bool:
        """Whether the last layer computes its MLP only for the tokens of a step that `StepInputs.read` names.

        The other layers leave keys, values and states of every token, of which later steps read. Of a prompt,
        nobody reads more of the last one than its last token.
        """
        is_plain = self.share.is_last and self.adapters is None and not self._taps
        return self.ops.skips_rows and is_plain and isinstance(self.layers[-1].mlp, MLP)

    def tap(self, layers: tuple[int, ...], take: Callable[[Tensor, StepInputs], None] | None = None) -> None:
        """In each step, pass the inputs of these layers, [T, layers * hidden] in rising order, to `take`.

        A number one past the last layer stands for its output. A stage that is not the last sends those of
        its own layers, and of the layers before, to the next one, and has nothing to take them.
        """
        self._taps, self._take = layers, take

    def forward(self, step: StepInputs) -> Tensor:
        """Return the hidden states [T, hidden] of the step's tokens, before the last norm.

        They are [R, hidden] if `step.read` says whose are read, which takes a decoder that `skips_rows`.
        In a stage that is not the last, which sends them on, they are any numbers.
        """
        num_tokens, divided = len(step.token_ids), step.divided
        num_rows = self.ops.padded(num_tokens)
        token_ids, positions = pad_rows(step.token_ids, num_rows), pad_rows(step.positions, num_rows)
        if self.adapters is not None:
            self.adapters.choose(step.adapters, num_rows)
        rope_lens = None if step.rope_lens is None else pad_rows(step.rope_lens, num_rows)
        residual: Tensor | None = None
        tapped: list[Tensor] = []  # this rank's rows of them
        if self.share.is_first:
            x = self.embedded(token_ids, divided)
        else:
            num_own = num_rows if divided is None else divided.count
            num_tapped = sum(each < self._first for each in self._taps)
            room = self.norm.new_empty(2 + num_tapped, num_own, self.config.hidden_size)
            x, residual, *tapped = self.stages.receive(room).unbind()
            self._receive_choice(step, num_rows)
        turns = [rope.cos_sin(positions, rope_lens, x.dtype) for rope in self.ropes]
        has_more = self.adapters is not None or self._taps or self.after_layer is not None
        layers: Iterable[nn.Module] = self.layers
        if self.joined is not None and not has_more and num_rows == num_tokens:
            x, residual = self.joined(x, residual, turns, step)
            layers = ()
        for number, layer in enumerate(layers):
            if self._first + number in self._taps:
                tapped.append(x if residual is None else x + residual)
            cos, sin = turns[0 if self.part.layers[number].window is None else -1]
            is_last = number == len(self.layers) - 1
            x, residual = layer(x, residual, cos, sin, step, step.read if is_last else None)
            if self.after_layer is not None:
                self.after_layer(number)
        if not self.share.is_last:
            assert residual is not None, "a stage has a layer"
            self.stages.send(torch.stack((x, residual, *tapped)))
            self._send_choice(step, num_rows)
            # Nothing reads these numbers
            return x[:num_tokens] if divided is None else x[:1].expand(num_tokens, -1)
        x = _whole(x if residual is None else x + residual, divided)
        if step.read is not None:  # Padding is not read, and a token from which several requests fork by each
            return x
        x = x[:num_tokens]
        if self._take is not None:
            features = [_whole(each, divided)[:num_tokens] for each in tapped]
            features += [x] if self.config.num_layers in self._taps else []
            self._take(torch.cat(features, -1), replace(step, divided=None))
        return x

    def _receive_choice(self, step: StepInputs, num_rows: int) -> None:
        """Receive what the stage before chose in this step, if the first layer here shares it."""
        attention = self.attention
        if self.part.layers[0].index != "shared":
            return
        assert isinstance(attention, SparseAttention), "other layers share no choice"
        if attention.is_sparse(step.metadata):
            num_rows = attention.num_chosen(step.metadata, num_rows)
            room = torch.empty(num_rows, attention.index.top_k, dtype=torch.int32, device=attention.device)
            attention.choice_of(step.metadata).positions = self.stages.receive(room)

    def _send_choice(self, step: StepInputs, num_rows: int) -> None:
        """Send on the last choice of this step, in so many rows, if the next stage begins by sharing it."""
        attention = self.attention
        if self.config.layers[self.share.layers(self.config).stop].index != "shared":
            return
        assert isinstance(attention, SparseAttention), "other layers share no choice"
        if attention.is_sparse(step.metadata):
            positions = attention.choice_of(step.metadata).positions
            assert positions is not None, "a layer before has chosen"
            self.stages.send(pad_rows(positions, attention.num_chosen(step.metadata, num_rows)))

    def normed(self, hidden: Tensor) -> Tensor:
        """Return hidden states [R, hidden] after the last norm, in the last stage."""
        num_rows = len(hidden)
        return self.last_norm(pad_rows(hidden, self.ops.padded(num_rows)))[:num_rows]

    def last_norm(self, hidden: Tensor) -> Tensor:
        """Apply the last norm to any rows [R, hidden]."""
        normed = self.ops.rms_norm(hidden, self.norm, self.config.rms_eps)
        return normed if self.norm_bias is None else normed + self.norm_bias

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, V] of hidden states [R, hidden], in the model's dtype.

        They are [R, 0] except in the last stage.
        """
        own = self.own_logits(hidden)
        return own if self.parts is None else self.parts.joined(own)

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the vocabulary shard that this rank holds."""
        if not self.share.is_last:
            return hidden[:, :0]
        num_rows = len(hidden)
        hidden = pad_rows(hidden, self.ops.padded(num_rows))
        return self.head_logits(self.last_norm(hidden), num_rows)

    def head_logits(self, normed: Tensor, num_rows: int) -> Tensor:
        """Return this rank's logits for the first rows of a norm's output, which has padding rows."""
        logits: Tensor = self.head(normed)[:num_rows]
        cap = self.config.logit_cap
        return logits if cap is None else (logits / cap).tanh() * cap

    def embedded(self, token_ids: Tensor, divided: DividedRows | None = None) -> Tensor:
        """Return scaled rows [T, hidden] of the embedding, or this rank's rows if they are divided.

        Each row is on one rank, and the others add zeros.
        """
        x = self._embedding_rows(token_ids, divided)
        return x if self.embedding_scale == 1 else x * self.embedding_scale

    def _embedding_rows(self, token_ids: Tensor, divided: DividedRows | None) -> Tensor:
        if self.group.size == 1:
            return F.embedding(token_ids, self.embedding)
        tokens = self.share.tokens(self.config)
        is_here = (token_ids >= tokens.start) & (token_ids < tokens.stop)
        x = F.embedding((token_ids - tokens.start).where(is_here, 0), self.embedding)
        x.masked_fill_(~is_here[:, None], 0)
        return self.group.all_reduce(x) if divided is None else divided.summed(x)


def pack(whole: nn.Module) -> None:
    """Pack all linears: mixtures first, since they may join the linears of their experts.

    Attention comes last: that over latents may join its own linears once they are packed.
    """
    mixers = (SelfAttention, LatentSelfAttention, RecurrentMixer)
    for kinds in ((Mixture,), (Linear, UpProjection), mixers):
        for module in [each for each in whole.modules() if isinstance(each, kinds)]:
            module.pack()


def _whole(x: Tensor, divided: DividedRows | None) -> Tensor:
    """Return all rows [T, hidden] of what a rank has, which is a part if rows are divided."""
    return x if divided is None else divided.whole(x)


def pad_rows(x: Tensor, num_rows: int) -> Tensor:
    """Append zeros after the last row, up to `num_rows`."""
    missing = num_rows - len(x)
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)) if missing else x
