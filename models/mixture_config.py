"""What mixtures of experts stand in place of the MLP in some layers, and who chooses among them?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MLP_ROLES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """The mixtures of experts of a decoder.

    A router's `scores` of the experts are their chances ("softmax"), or a number from 0 to 1 for each by
    itself ("sigmoid"). Of `num_groups` equal groups of experts, a token chooses within those
    `num_chosen_groups` whose `group_best` best experts score best together. Where it `is_corrected`, a bias
    is added to the scores for the choice alone. The weights are the scores of the chosen, which add up to one
    if it `normalizes`, times `scale`.

    The experts of a layer lie in places, in the order of `placement`; of several ranks, one may have those in
    the places that are `held` alone.
    """

    num_experts: int
    num_chosen: int  # of each token
    inner_size: int  # of each expert
    normalizes: bool
    layers: tuple[bool, ...]  # whether a layer has a mixture, one entry a layer
    block: str = "mlp"  # how a checkpoint calls the mixture of a layer
    roles: tuple[str, str, str] = MLP_ROLES  # how it calls an expert's gate, up and down
    scores: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_best: int = 1
    is_corrected: bool = False
    router: str = "gate"  # how a checkpoint calls it
    is_biased: bool = False  # whether the router has a bias
    is_stacked: bool = False  # whether a checkpoint has all experts of a layer in one tensor
    scale: float = 1.0
    shared_size: int = 0  # of an expert that computes every token; 0: there is none
    shared_block: str = "shared_experts"  # how a checkpoint calls it
    has_shared_gate: bool = False  # whether a gate from 0 to 1 weighs what it made of a token
    placement: tuple[
        tuple[int, ...], ...
    ] = ()  # the experts of each layer by place; empty: as they are numbered
    held: range | None = None  # the places of those that are here; None: all

    def places(self, layer: int) -> Sequence[int]:
        """The experts of a layer in the order of their places."""
        return self.placement[layer] if self.placement else range(self.num_experts)

    def held_in(self, layer: int) -> Sequence[int]:
        """Those of a layer that are here; all, as they are numbered, or some, as they lie."""
        if self.held is None:
            return range(self.num_experts)
        places = self.places(layer)
        return [places[each] for each in self.held]

    @property
    def num_held(self) -> int:
        """How many of a layer are here."""
        return self.num_experts if self.held is None else len(self.held)

    @property
    def is_plain(self) -> bool:
        """Whether the best of all experts are chosen by their chances, which are the weights."""
        return self.scores == "softmax" and self.num_groups == 1 and not self.is_corrected
