"""What is a head of the target's own checkpoint, whichever way it was trained?

It makes drafts from the target's hidden states. Its entry for a position reads the token there and a feature
of the position before: what the target found, or, ahead of the target, what the head itself did. So an entry
depends on the tokens up to its own alone, as keys of the same page do, and the first position has none.

A family of heads says which layers it reads (`taps`), what a feature is made of (`fused`), and what it
computes (`computed`, `fill`, `own_logits`).

Legend: T tokens of the step, R rows, V draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from attention.reference import Attention
from models.config import DecoderConfig
from models.decoder import Decoder
from models.features import FeaturePages
from models.layers.dtypes import TORCH_DTYPES
from models.layers.linear import Linear
from models.layers.logit_parts import LogitParts
from models.layers.rope import Rope
from models.ops.reference import Ops
from models.step_inputs import StepInputs

FIRST_KEY = 1  # there is no feature before the first position, and so no key at it


class Head(nn.Module, ABC):
    """A head over packed spans, which computes as a `Decoder` does; `attach` it before its first step."""

    taps: tuple[int, ...]  # the target's layers whose inputs it reads, in rising order
    offsets: Tensor | None = None  # int64 [V]: offset from a draft token to the target's token
    parts: LogitParts | None = None  # same meaning as a decoder's

    def __init__(self, config: DecoderConfig, ops: Ops, attention: Attention) -> None:
        super().__init__()
        self.config = self.part = config
        self.ops, self.attention = ops, attention
        self.rope = Rope(config.rope, attention.device)
        self.dtype = TORCH_DTYPES[config.dtype]
        self.fresh = torch.empty(0)  # features [T, hidden] of the target's last step that was not captured

    def attach(self, target: Decoder, features: FeaturePages) -> None:
        """From now on, store what the target's layers read in `features`, and use its embedding."""
        self.features = features
        self._embedded = target.embedded
        target.tap(self.taps, self._take)

    def pack(self) -> None:
        """Pack its linears, as `Decoder.pack` does."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def forward(self, step: StepInputs) -> Tensor:
        """Return the hidden states [T, hidden] of the step's tokens.

        Those at the ends of spans become features.
        """
        assert step.before_index is not None, "a head reads what lies before"
        hidden = self.computed(step, self.features.read(step.before_index))
        self.features.write_ends(hidden, step.metadata.write_index, step.before_index)
        return hidden

    def _take(self, tapped: Tensor, step: StepInputs) -> None:
        """Store the features of a target step, from what its layers read [T, taps * hidden of the target]."""
        self.fresh = self.fused(tapped)
        self.features.write(self.fresh, step.metadata.write_index)

    def tabulate(self, num_positions: int) -> None:
        """Prepare the rotary embedding, as `Decoder.tabulate` does."""
        self.rope.tabulate(num_positions, self.dtype)

    @abstractmethod
    def fused(self, tapped: Tensor) -> Tensor:
        """Return features [T, hidden] of what the target's layers read, [T, taps * its hidden size]."""

    @abstractmethod
    def computed(self, step: StepInputs, features: Tensor) -> Tensor:
        """Return hidden states [T, hidden] from the step's tokens and the features before them."""

    @abstractmethod
    def fill(self, step: StepInputs, features: Tensor) -> None:
        """Write the entries of the step's tokens, zeros before FIRST_KEY, and compute nothing else."""

    @abstractmethod
    def own_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, V] of hidden states [R, hidden], for this rank's vocabulary shard."""
