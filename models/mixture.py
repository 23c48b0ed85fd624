"""What does a mixture of experts make of a token?

A router scores the experts, the best of them compute the token, and the router's weights add up what they
made: arXiv 2401.04088 (Mixtral), 2505.09388 (Qwen3).

Legend: T tokens of the step, E experts, C experts that a token chooses.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.config import DecoderConfig
from models.group import Group
from models.mlp import MLP
from models.ops.reference import Ops


class Mixture(nn.Module):
    """The mixture of the layer that a checkpoint calls `name`: a router and its experts.

    Every rank of a group holds the router whole, and so chooses the same experts, and its part of each.
    """

    gate_up = None  # no linear reads what comes in: the router reads it too, which is never in int8

    def __init__(
        self, config: DecoderConfig, layer: int, name: str, ops: Ops, device: torch.device, group: Group
    ) -> None:
        super().__init__()
        mixture = config.mixture_of(layer)
        assert mixture is not None, f"layer {layer} has a dense MLP"
        self.config, self.ops, self.group = mixture, ops, group
        weight = torch.empty(mixture.num_experts, config.hidden_size, dtype=torch.float32, device=device)
        self.router = nn.Parameter(weight, requires_grad=False)
        names, inner = config.mlp_names(layer, name), mixture.inner_size
        self.experts = nn.ModuleList(MLP(config, each, inner, ops, device, group) for each in names)
        self._parts = [expert.part for expert in self.experts]

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        weights, chosen = route(x, self.router, self.config.num_chosen, self.config.normalizes)
        return self.group.all_reduce(self.ops.mixture(x, weights, chosen, self._parts))


def route(x: Tensor, router: Tensor, num_chosen: int, normalizes: bool) -> tuple[Tensor, Tensor]:
    """x [T, hidden] and float32 router [E, hidden] -> float32 weights [T, C] and int64 experts [T, C]."""
    probabilities = F.linear(x.float(), router).softmax(-1)
    weights, chosen = probabilities.topk(num_chosen, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if normalizes else weights), chosen
