"""Define a head that drafts from the target's hidden states, and keep the features that it reads.

Such a head is a layer of the target's own checkpoint, or was trained for the target. Its entry for a position
is computed from the token there and a feature of the position before: the target's hidden states or, where
the target has not been yet, the head's own output. So an entry depends only on the tokens up to its own, as
keys of the same page do, and the first position has none. A family of heads says which layers it reads
(`taps`), what a feature is made of (`fused`), and what it computes (`computed`, `fill`, `own_logits`).

Features lie in the pages of the keys and values, so that whoever finds a page by its tokens, forks from it,
or comes back to it finds them too. A page holds those of the last positions that were written to it, as many
as a step may write and take back, and the one before these. Where the target has not been yet, the head's own
output stands in its place, until the step that checks the draft overwrites it.

Legend: T tokens of the step, R rows, V draft vocabulary, P pages, B tokens a page, C features a page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention.reference import Attention
from kv_cache.device.storage import CacheLayers
from models.config import DecoderConfig
from models.decoder import Decoder
from models.layers.dtypes import TORCH_DTYPES
from models.layers.linear import Linear
from models.layers.logit_parts import LogitParts
from models.layers.rope import Rope
from models.ops.reference import Ops
from models.step_inputs import StepInputs


class FeaturePages:
    """Features [P, C, hidden], in the only plane of layer `layer` of a cache of keys and values."""

    def __init__(self, cache: CacheLayers, layer: int) -> None:
        self._cache, self._layer = cache, layer
        self._page_size = cache.page_size

    def read(self, index: Tensor) -> Tensor:
        """Return the features [T, hidden] at cache places `index` [T], page * B + offset."""
        return self._rows.index_select(0, self._places(index))

    def write(self, features: Tensor, index: Tensor) -> None:
        """Store features [T, hidden] of places `index` [T], span after span.

        A page keeps those of its last positions.
        """
        places = self._places(index)
        is_over = torch.zeros_like(index, dtype=torch.bool)
        if self._kept < self._page_size and self._kept < len(index):
            ahead = index[self._kept :] == index[: -self._kept] + self._kept
            is_over = F.pad(ahead, (0, self._kept))
            is_over &= index % self._page_size + self._kept < self._page_size
        self._rows.index_copy_(0, places.masked_fill(is_over, 0), features)

    def write_ends(self, features: Tensor, index: Tensor, before_index: Tensor) -> None:
        """Store the features of those tokens of a step that no further token of their row follows."""
        is_followed = F.pad(before_index[1:] == index[:-1], (0, 1))
        self._rows.index_copy_(0, self._places(index).masked_fill(is_followed, 0), features)

    @property
    def _kept(self) -> int:
        return self._plane.shape[1]

    @property
    def _rows(self) -> Tensor:
        """[P * C, hidden]; derived anew each time, since a resize replaces the tensor."""
        return self._plane.flatten(0, 1)

    @property
    def _plane(self) -> Tensor:
        (plane,) = self._cache.of(self._layer)
        return plane

    def _places(self, index: Tensor) -> Tensor:
        page, offset = index.long() // self._page_size, index.long() % self._page_size
        return page * self._kept + offset % self._kept


FIRST_KEY = 1  # there is no feature before the first position, and so no key at it


class Head(nn.Module, ABC):
    """A head over packed spans, which computes as a `Decoder` does; `attach` it before its first step."""

    taps: tuple[int, ...]  # the target's layers whose inputs it reads, in rising order
    offsets: Tensor | None = None  # int64 [V]: offset from a draft token to the target's token
    parts: LogitParts | None = None  # same meaning as a decoder's
    group_windows = (None,)  # its layers keep all pages

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
