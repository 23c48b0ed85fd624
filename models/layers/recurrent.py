"""Define a decoder layer's attention by a recurrent state: Gated DeltaNet and Kimi Delta Attention.

The layer projects queries, keys and values, which a causal convolution mixes with those of the last
positions; decays and betas, which govern the state; and a gate for what the queries read. Each rank has its
share of the heads, with their states and channels of the convolution. The convolution and the rule itself are
left to `attention.recurrent`.

Legend: T tokens of the step, J key heads, H value heads, K width of a key, V width of a value, C channels of
  the convolution, W its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention.recurrent import DraftRows, Recurrence, StateMetadata, Tails
from kv_cache.device.storage import zeros
from models.config import DecoderConfig, Form, LayerState, RecurrentConfig
from models.layers.dtypes import TORCH_DTYPES
from models.layers.linear import Linear, SplitLinear, SummedLinear, parameter
from models.ops.reference import Ops
from models.parallel.group import Group
from models.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class Projected:
    """What a layer projects of the hidden states of T tokens."""

    mixed: Tensor  # [T, C] inputs of the convolution: queries, keys and values of all heads
    decay: Tensor  # float32 [T, H] or [T, H, K], logarithms of the decays
    beta: Tensor  # [T, H], from 0 to 1
    gate: Tensor  # [T, H, V]


class RecurrentMixer(nn.Module):
    """What both kinds share; `layer` is that of this rank, with the prefix `name` in a checkpoint."""

    activation: Literal["silu", "sigmoid"]  # what is applied to the gate

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        name: str,
        ops: Ops,
        recurrence: Recurrence,
        group: Group,
    ) -> None:
        super().__init__()
        assert config.recurrent is not None, "a recurrent state has sizes"
        self.sizes: RecurrentConfig = config.recurrent
        self.layer, self.eps, self.ops, self.recurrence = layer, config.rms_eps, ops, recurrence
        self._config, self._name, self._group = config, name, group
        sizes, dtype, device = self.sizes, TORCH_DTYPES[config.dtype], recurrence.device
        shifts = sizes.num_value_heads * (sizes.key_dim if sizes.kind == "kimi" else 1)
        # All but the norm are multiplied in float32
        channels = sizes.num_channels, 1, sizes.conv_width
        self.conv: nn.Parameter | None = parameter(*channels, dtype=torch.float32, device=device)
        self.decay_log: nn.Parameter | None = parameter(
            sizes.num_value_heads, dtype=torch.float32, device=device
        )
        self.decay_shift = parameter(shifts, dtype=torch.float32, device=device)
        self.norm = parameter(sizes.value_dim, dtype=dtype, device=device)
        self.output = self._summed(sizes.output, sizes.widths[2])
        self._taps: Tensor | None = None  # the convolution's weights, float32 [W, C]
        self._rate: Tensor | None = None  # the decay of a unit, [H]

    def _form(self, linear: str) -> Form:
        return self._config.form(f"{self._name}{self.sizes.block}.{linear}")

    def _split(self, roles: tuple[str, ...], *widths: int) -> SplitLinear:
        """Return a linear of the hidden state that joins these of the checkpoint, and is read in parts."""
        hidden, dtype = self._config.hidden_size, TORCH_DTYPES[self._config.dtype]
        form, device = self._form(roles[0]), self.recurrence.device
        return SplitLinear(self.ops, hidden, sum(widths), False, dtype, device, form, widths)

    def _plain(self, role: str, inputs: int, outputs: int) -> Linear:
        dtype = TORCH_DTYPES[self._config.dtype]
        return Linear(self.ops, inputs, outputs, False, dtype, self.recurrence.device, self._form(role))

    def _summed(self, role: str, inputs: int) -> SummedLinear:
        config, dtype, device = self._config, TORCH_DTYPES[self._config.dtype], self.recurrence.device
        form = self._form(role)
        return SummedLinear(self.ops, inputs, config.hidden_size, False, dtype, device, form, self._group)

    @property
    def reader(self) -> None:
        """The linear that alone reads the hidden state: there are two."""
        return None

    def norms(self) -> dict[str, nn.Parameter | None]:
        """Return norms by their checkpoint names; to its own, among the vectors, 1 is never added."""
        return {}

    def joined(self) -> list[tuple[tuple[str, ...], Linear]]:
        """Return its linears with the checkpoint's linears that each of them joins."""
        raise NotImplementedError

    def vectors(self) -> dict[str, Tensor]:
        """Return its other weights by their checkpoint names, in the checkpoint's number of dimensions."""
        assert self.conv is not None, "they are filled before it is packed"
        assert self.decay_log is not None, "they are filled before it is packed"
        return self._vectors(self.conv.data, self.decay_log.data)

    def _vectors(self, conv: Tensor, decay_log: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def order(self, name: str) -> Tensor | None:
        """Return the order in which rows of a checkpoint's linear are held; None for its own."""
        return None

    def pack(self) -> None:
        """Convert the filled weights of the convolution and of the decays, once."""
        assert self.conv is not None, "it is packed once"
        assert self.decay_log is not None, "it is packed once"
        self._taps = self.conv.data[:, 0].t().contiguous()
        self._rate = -self.decay_log.data.exp()
        self.conv = self.decay_log = None

    def projected(self, x: Tensor, rate: Tensor) -> Projected:
        """Project hidden states [T, hidden]."""
        raise NotImplementedError

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, step: StepInputs) -> Tensor:
        """Map [T, hidden] to [T, hidden], after advancing the states of the step's spans.

        There may be more rows than the step has tokens; the rest are padding, and change no state.
        """
        assert step.states is not None, "a step of this decoder says which states it advances"
        assert self._taps is not None, "pack the decoder before its first step"
        assert self._rate is not None, "pack the decoder before its first step"
        planes = step.cache.of(self.layer)
        num_tokens, num_rows = len(step.token_ids), len(x)
        made = self.projected(x[:num_tokens], self._rate)
        if isinstance(step.states, DraftRows):
            read = self._read_in_rows(made, planes, self._taps, step.states)
        else:
            read = self._read(made, planes, self._taps, step.states)
        read = self.ops.gated_rms_norm(read, made.gate, self.norm, self.eps, self.activation).flatten(1)
        if num_rows > num_tokens:  # otherwise it would be copied
            read = F.pad(read, (0, 0, 0, num_rows - num_tokens))
        y: Tensor = self.output(read, step.divided)
        return y

    def _read(
        self, made: Projected, planes: tuple[Tensor, ...], taps: Tensor, metadata: StateMetadata
    ) -> Tensor:
        """Return what the tokens read [T, H, V] of the states that they advance."""
        states, pasts, *kept = planes
        inputs, tails = (made.mixed, made.decay, made.beta), metadata.tails
        if tails is not None:
            inputs = _with_tails(inputs, kept, tails)
        convolved, decay, beta = inputs
        mixed = self.recurrence.convolve(convolved, taps, pasts, metadata)
        query, key, value = self._heads(mixed)
        read = self.recurrence.advance(query, key, value, decay, beta, states, metadata)
        return read if tails is None else read[tails.own]

    def _read_in_rows(
        self, made: Projected, planes: tuple[Tensor, ...], taps: Tensor, rows: DraftRows
    ) -> Tensor:
        """Return the same in a captured step with drafts."""
        states, pasts, *kept = planes
        each = torch.arange(len(rows.pages), device=states.device)[:, None]
        inputs = []
        for plane, new in zip(kept, (made.mixed, made.decay, made.beta)):
            of_rows = new.unflatten(0, (len(rows.pages), -1))
            joined = torch.cat((plane[rows.pages].to(new.dtype), of_rows), 1)
            plane[rows.pages] = of_rows[each, rows.drafts].to(plane.dtype)
            inputs.append(joined[each, rows.order])
        convolved, decay, beta = inputs
        mixed = self.recurrence.convolve_drafts(convolved, taps, pasts, rows)
        query, key, value = self._heads(mixed)
        read = self.recurrence.advance_drafts(query, key, value, decay, beta, states, rows)
        return read.flatten(0, 1)

    def _heads(self, mixed: Tensor) -> list[Tensor]:
        """Return queries, keys and values [..., J or H, K or V] of what the convolution made [..., C]."""
        sizes = self.sizes
        widths = (sizes.key_dim, sizes.key_dim, sizes.value_dim)
        parts = zip(mixed.split(sizes.widths, -1), widths)
        return [part.unflatten(-1, (-1, width)) for part, width in parts]


class GatedDelta(RecurrentMixer):
    """Gated DeltaNet (arXiv 2412.06464): the state of a head decays as a whole."""

    activation = "silu"

    def __init__(
        self, config: DecoderConfig, layer: int, name: str, ops: Ops, recurrence: Recurrence, group: Group
    ) -> None:
        super().__init__(config, layer, name, ops, recurrence, group)
        sizes = self.sizes
        wide, narrow = sizes.first()
        self.qkvz = self._split(wide, sizes.num_channels, sizes.widths[2])
        self.ba = self._split(narrow, sizes.num_value_heads, sizes.num_value_heads)

    def joined(self) -> list[tuple[tuple[str, ...], Linear]]:
        """See RecurrentMixer.joined."""
        wide, narrow = self.sizes.first()
        return [(wide, self.qkvz), (narrow, self.ba), ((self.sizes.output,), self.output)]

    def _vectors(self, conv: Tensor, decay_log: Tensor) -> dict[str, Tensor]:
        return {
            "conv1d.weight": conv,
            "A_log": decay_log,
            "dt_bias": self.decay_shift,
            "norm.weight": self.norm,
        }

    def order(self, name: str) -> Tensor | None:
        """See RecurrentMixer.order.

        Where the projections lie side by side for each key head, their parts are put one after the other.
        """
        sizes = self.sizes
        shared = sizes.num_value_heads // sizes.num_key_heads
        if name == "in_proj_qkvz":
            widths = [sizes.key_dim, sizes.key_dim, shared * sizes.value_dim, shared * sizes.value_dim]
        elif name == "in_proj_ba":
            widths = [shared, shared]
        else:
            return None
        rows = torch.arange(sizes.num_key_heads * sum(widths)).unflatten(0, (sizes.num_key_heads, -1))
        return torch.cat([part.flatten() for part in rows.split(widths, 1)])

    def projected(self, x: Tensor, rate: Tensor) -> Projected:
        """See RecurrentMixer.projected."""
        mixed, gate = self.qkvz(x)
        beta, decay = self.ba(x)
        decay = rate * self.ops.softplus(decay.float() + self.decay_shift)
        return Projected(mixed, decay, self.ops.sigmoid(beta), gate.unflatten(-1, (-1, self.sizes.value_dim)))


class KimiDelta(RecurrentMixer):
    """Kimi Delta Attention (arXiv 2510.26692): each channel of a key has a decay of its own."""

    activation = "sigmoid"

    def __init__(
        self, config: DecoderConfig, layer: int, name: str, ops: Ops, recurrence: Recurrence, group: Group
    ) -> None:
        super().__init__(config, layer, name, ops, recurrence, group)
        sizes = self.sizes
        wide, narrow = sizes.first()
        self.qkv = self._split(wide, sizes.num_channels)
        self.narrow = self._split(narrow, sizes.num_value_heads, sizes.key_dim, sizes.key_dim)
        self.decay_up = self._plain("f_b_proj", sizes.key_dim, sizes.widths[0])
        self.gate_up = self._plain("g_b_proj", sizes.key_dim, sizes.widths[2])

    def joined(self) -> list[tuple[tuple[str, ...], Linear]]:
        """See RecurrentMixer.joined."""
        wide, narrow = self.sizes.first()
        ups = [(("f_b_proj",), self.decay_up), (("g_b_proj",), self.gate_up)]
        return [(wide, self.qkv), (narrow, self.narrow), *ups, ((self.sizes.output,), self.output)]

    def _vectors(self, conv: Tensor, decay_log: Tensor) -> dict[str, Tensor]:
        names = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
        return {
            **dict(zip(names, conv.split(self.sizes.widths))),
            "A_log": decay_log.view(1, 1, -1, 1),
            "dt_bias": self.decay_shift,
            "o_norm.weight": self.norm,
        }

    def projected(self, x: Tensor, rate: Tensor) -> Projected:
        """See RecurrentMixer.projected."""
        (mixed,) = self.qkv(x)
        beta, decay, gate = self.narrow(x)
        decay = self.ops.softplus(self.decay_up(decay).float() + self.decay_shift)
        decay = decay.unflatten(-1, (-1, self.sizes.key_dim)) * rate[:, None]
        gate = self.gate_up(gate).unflatten(-1, (-1, self.sizes.value_dim))
        return Projected(mixed, decay, self.ops.sigmoid(beta), gate)


def _with_tails(
    inputs: tuple[Tensor, Tensor, Tensor], planes: Sequence[Tensor], tails: Tails
) -> tuple[Tensor, Tensor, Tensor]:
    """Put what is read again before the inputs [T, ...] of each span, and keep the inputs of drafts."""
    mixed, decay, beta = (
        torch.cat((plane[tails.pages, tails.places].to(each.dtype), each))[tails.order]
        for plane, each in zip(planes, inputs)
    )
    for plane, each in zip(planes, inputs):
        plane[tails.draft_pages, tails.draft_places] = each[tails.drafts].to(plane.dtype)
    return mixed, decay, beta


def new_states(state: LayerState, count: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return `count` rows of zeros for each plane that a layer keeps of a request."""
    return tuple(zeros((count, *plane.shape), getattr(torch, plane.dtype), device) for plane in state.planes)
