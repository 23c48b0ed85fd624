"""Define mixtures of experts.

A router scores the experts, the best of them compute the token, and their results are summed with the
router's weights: arXiv 2401.04088 (Mixtral), 2505.09388 (Qwen3). A shared expert may compute every token
beside them: arXiv 2401.06066 (DeepSeekMoE), 2412.19437 (DeepSeek-V3).

Legend: T tokens of the step, E experts, C experts that a token chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from models.config import DecoderConfig
from models.layers.dtypes import TORCH_DTYPES
from models.layers.linear import Linear, parameter
from models.layers.mlp import MLP
from models.ops.divided_rows import DividedRows
from models.ops.operands import ExpertKind
from models.ops.reference import Ops, Packed
from models.packing import Int4
from models.parallel.group import Group, sharing_experts


class Mixture(nn.Module):
    """The mixture of the layer with the checkpoint prefix `name`: a router, its experts and a shared one.

    Every rank of a group holds the whole router, and so chooses the same experts. `sharing` ranks divide each
    expert, and other ranks hold other experts: their results for a token add up in the sum over the group.
    """

    gate_up = None  # no linear alone reads the input: the router reads it too, and is never in int8

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        name: str,
        ops: Ops,
        device: torch.device,
        group: Group,
        sharing: int,
    ) -> None:
        super().__init__()
        mixture = config.mixture_of(layer)
        assert mixture is not None, f"layer {layer} has a dense MLP"
        self.config, self.ops, self.group = mixture, ops, group
        self.router = parameter(mixture.num_experts, config.hidden_size, dtype=torch.float32, device=device)
        held, few = mixture.held_in(layer), sharing_experts(group, sharing)
        experts = {
            str(number): MLP(config, names, mixture.inner_size, ops, device, few)
            for number, names in zip(held, config.mlp_names(layer, name))
        }
        self.experts = nn.ModuleDict(experts)
        for expert in experts.values() if config.dtype == "bfloat16" else ():
            expert.down.scale_dtype = torch.bfloat16  # the type in published checkpoints of this form
        self._parts = [expert.part for expert in experts.values()]
        self._gated = next(iter(experts.values())).gated
        # Number of each expert in an order that begins with this rank's own
        self._numbers: Tensor | None = None
        self._dispatch: Any = None  # sends tokens to the ranks of their experts, if they are sent
        self._by_place, self._places = mixture.places(layer), torch.empty(0)
        if list(held) != list(range(mixture.num_experts)):
            others = [each for each in range(mixture.num_experts) if str(each) not in self.experts]
            order = torch.tensor([*held, *others], device=device)
            self._numbers = order.argsort().int()
        self.correction: nn.Parameter | None = None
        self.router_bias: nn.Parameter | None = None
        if mixture.is_biased:
            self.router_bias = parameter(mixture.num_experts, dtype=torch.float32, device=device)
        if mixture.is_corrected:
            self.correction = parameter(mixture.num_experts, dtype=torch.float32, device=device)
        shared = config.shared_names(layer, name)
        self.shared = None if shared is None else MLP(config, shared, mixture.shared_size, ops, device, group)
        self.shared_gate: nn.Parameter | None = None
        if mixture.has_shared_gate:
            dtype = TORCH_DTYPES[config.dtype]
            self.shared_gate = parameter(1, config.hidden_size, dtype=dtype, device=device)
        self._joined: Packed | None = None
        self.counts: Tensor | None = None  # int32 [E]: tokens that chose each expert, if they are counted

    def mlps(self) -> dict[str, MLP]:
        """Return the experts that this rank holds by their numbers; none once `pack` has joined them."""
        return {number: each for number, each in self.experts.items() if isinstance(each, MLP)}

    def pack(self) -> None:
        """Pack the filled experts, once, before linears are packed; this may join them."""
        experts = list(self.mlps().values())
        linears: list[Linear] = [linear for expert in experts for linear in (expert.gate_up, expert.down)]
        one, hidden, form = experts[0], self.router.shape[1], _form(linears[0])
        has_bias = one.down.bias is not None
        kind = ExpertKind(hidden, self.config.inner_size, form, one.is_swiglu, has_bias)
        if all(_form(linear) == form for linear in linears) and self.ops.joins_experts(kind):
            unpacked = [linear.unpacked() for linear in linears]
            self._joined = self.ops.pack_experts(unpacked[::2], unpacked[1::2])
            self.experts, self._parts = nn.ModuleDict(), []
            self._dispatch = self.ops.dispatch_of(hidden, self.config, self.group)
            order = torch.tensor(list(self._by_place), device=self.router.device)
            self._places = order.argsort().int()  # place of each expert

    def forward(self, x: Tensor, wide: Tensor | None = None, is_asked: Tensor | None = None) -> Tensor:
        """Map [T, hidden] to [T, hidden].

        `wide` is the same in float32, if there is one, and `is_asked` says which tokens count, as in
        `StepInputs`.
        """
        shared = self._begun(x)
        weights, chosen = self._chosen(x, wide)
        self._count(chosen, is_asked)
        if self._dispatch is not None and self._dispatch.takes(len(x), x.dtype):
            division = DividedRows(self.group, len(x))
            own, weights, chosen = self._dispatch.own(x, weights, chosen)
            return division.whole(self._sent(own, weights, chosen, shared, division))
        part = self._part(x, weights, chosen)
        return self.group.all_reduce(part if shared is None else part + shared())

    def of_divided(
        self,
        own: Tensor,
        wide: Tensor | None,
        is_asked: Tensor | None,
        num_tokens: int,
        divided: DividedRows,
    ) -> Tensor:
        """Map this rank's rows [t, hidden] to [t, hidden], of a step of so many tokens and padding.

        `wide` and `is_asked` are as in `forward`. Experts are chosen for these rows alone.
        """
        own_weights, own_chosen = self._chosen(own, wide)
        # Both in one gather, since float32 represents the numbers exactly
        both = divided.whole(torch.cat((own_weights, own_chosen.float()), -1))[:num_tokens]
        weights, chosen = both[:, : self.config.num_chosen], both[:, self.config.num_chosen :]
        chosen = chosen.to(own_chosen.dtype)
        self._count(chosen, is_asked)
        sends = self._dispatch is not None and self._dispatch.takes(num_tokens, own.dtype)
        if sends and self.shared is None:
            return self._sent(own, own_weights, own_chosen, None, divided)
        x = divided.whole(own)[:num_tokens]
        shared = self._begun(x)
        if sends:
            return self._sent(own, own_weights, own_chosen, shared, divided)
        part = self._part(x, weights.contiguous(), chosen)
        return divided.summed(part if shared is None else part + shared())

    def _begun(self, x: Tensor) -> Callable[[], Tensor] | None:
        """Begin to compute this rank's part of the shared expert for [T, hidden], if there is one."""
        return None if self.shared is None else self.ops.begin_beside(partial(self._shared, self.shared, x))

    def _chosen(self, x: Tensor, wide: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of the experts [T, C] that each row chooses."""
        read = x if wide is None else wide
        return self.ops.route(read, self.router, self.correction, self.config, self.router_bias)

    def _count(self, chosen: Tensor, is_asked: Tensor | None) -> None:
        """Count the tokens that chose each expert, if they are counted."""
        if self.counts is not None:
            one = self.counts.new_ones(len(chosen)) if is_asked is None else is_asked
            self.counts.index_add_(0, chosen.flatten(), one[:, None].expand_as(chosen).flatten())

    def _part(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return what this rank's experts add for each token [T, hidden]."""
        if self._numbers is not None:
            chosen = self._numbers.index_select(0, chosen.flatten()).view_as(chosen)
        if self._joined is None:
            return self.ops.mixture(x, weights, chosen, self._parts)
        count = self.config.num_experts
        return self.ops.joined_mixture(x, weights, chosen, self._joined, count, self._gated)

    def _sent(
        self,
        own: Tensor,
        weights: Tensor,
        chosen: Tensor,
        shared: Callable[[], Tensor] | None,
        division: DividedRows,
    ) -> Tensor:
        """Send this rank's rows [t, hidden] to their experts; return the sums [t, hidden].

        Parts of the shared expert, which the ranks divide, are added up for these rows.
        """
        assert self._dispatch is not None, "tokens are sent"
        places = self._places.index_select(0, chosen.flatten()).view_as(chosen)
        made: Tensor = self._dispatch.mixture(own, weights, places, self._joined, self._gated)
        return made if shared is None else made + division.summed(shared())

    def _shared(self, expert: MLP, x: Tensor) -> Tensor:
        """Return this rank's part of what the shared expert adds for each token."""
        made = expert.part(x)
        if self.shared_gate is None:
            return made
        return self.ops.sigmoid(self.ops.scores(x, self.shared_gate)) * made


def _form(linear: Linear) -> Literal["plain", "int8", "int4", "static", "w4a8", "w8a16"]:
    if isinstance(linear.form, Int4):
        return "int4"
    if linear.form in ("static", "w4a8", "w8a16"):
        return linear.form
    return "int8" if linear.is_int8 else "plain"
