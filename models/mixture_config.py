"""What mixtures of experts stand in place of the MLP in some layers, and who chooses among them?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MLP_ROLES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """The mixtures of experts of a decoder.

    A router's `scores` of the experts are their probabilities ("softmax"), or an independent number from 0 to
    1 for each ("sigmoid"). Of `num_groups` equal groups of experts, a token chooses within the
    `num_chosen_groups` groups whose `group_best` best experts have the highest sum. If it `is_corrected`, a
    bias is added to the scores for the choice alone. The weights are the scores of the chosen experts, which
    are divided by their sum if it `normalizes`, times `scale`.

    The experts of a layer lie in places, in the order of `placement`; with several ranks, a rank may have
    only those in the places that are `held`.
    """

    num_experts: int
    num_chosen: int  # experts that each token chooses
    inner_size: int  # inner size of each expert
    normalizes: bool
    layers: tuple[bool, ...]  # whether a layer has a mixture, one entry a layer
    block: str = "mlp"  # name of a layer's mixture in a checkpoint
    roles: tuple[str, str, str] = MLP_ROLES  # names of an expert's gate, up and down
    scores: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_best: int = 1
    is_corrected: bool = False
    router: str = "gate"  # name of the router in a checkpoint
    is_biased: bool = False  # whether the router has a bias
    is_stacked: bool = False  # whether a checkpoint has all experts of a layer in one tensor
    scale: float = 1.0
    shared_size: int = 0  # inner size of an expert that computes every token; 0: there is none
    shared_block: str = "shared_experts"  # name of the shared expert in a checkpoint
    has_shared_gate: bool = False  # whether a gate from 0 to 1 weighs the shared expert's result
    placement: tuple[
        tuple[int, ...], ...
    ] = ()  # the experts of each layer by place; empty: in the order of their numbers
    held: range | None = None  # places of the experts on this rank; None: all

    def places(self, layer: int) -> Sequence[int]:
        """Return the experts of a layer in the order of their places."""
        return self.placement[layer] if self.placement else range(self.num_experts)

    def held_in(self, layer: int) -> Sequence[int]:
        """Return the experts of a layer on this rank: all by number, or some by place."""
        if self.held is None:
            return range(self.num_experts)
        places = self.places(layer)
        return [places[each] for each in self.held]

    @property
    def num_held(self) -> int:
        """Number of experts of a layer on this rank."""
        return self.num_experts if self.held is None else len(self.held)

    @property
    def is_plain(self) -> bool:
        """Whether the experts with the highest probabilities are chosen, with these as weights."""
        return self.scores == "softmax" and self.num_groups == 1 and not self.is_corrected
