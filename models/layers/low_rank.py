"""Add the LoRA adapters of requests to a linear, for each token that of its own request.

An adapter adds `B (A x)` to a linear's `W x`, where A has few rows. The adapters on the device lie side by
side: one product with all A, zeros in place of the results for tokens of other adapters, and one product with
all B. So the shapes of a step are fixed whatever it holds, nothing is gathered or sorted, the host waits for
nothing, and captured steps need no form of their own.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).

Legend: T tokens of the step, P places for adapters, r the rank that each has room for, L linears that have
  their inputs in common.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.ops.reference import Ops


class AdapterRooms:
    """The places of a decoder's adapters, numbered from 1, and the adapters of this step's tokens."""

    def __init__(self, most: int, rank: int, device: torch.device) -> None:
        self.most, self.rank = most, rank
        # [T, 1, P * r]: results that belong to other tokens; None if no token has an adapter
        self.is_other: Tensor | None = None
        numbers = torch.arange(1, most + 1, dtype=torch.int32, device=device)
        self._number_of = numbers.repeat_interleave(rank)

    def choose(self, numbers: Tensor | None, num_rows: int) -> None:
        """Set the adapter of each token [T] of the next step, 0 for none; None if no token has one.

        The step has `num_rows` rows, including padding.
        """
        self.is_other = None
        if numbers is not None:
            numbers = F.pad(numbers, (0, num_rows - len(numbers)))
            self.is_other = numbers[:, None, None] != self._number_of


class LowRank(nn.Module):
    """What adapters add to a linear, or to L linears with common inputs, whose outputs have these widths."""

    def __init__(
        self,
        rooms: AdapterRooms,
        ops: Ops,
        in_features: int,
        widths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.rooms, self.ops, self.num_inputs, self.widths = rooms, ops, in_features, tuple(widths)
        columns = rooms.most * rooms.rank
        down = torch.zeros(len(widths) * columns, in_features, dtype=dtype, device=device)
        ups = [torch.zeros(each, columns, dtype=dtype, device=device) for each in widths]
        self._down, self._ups = ops.pack_low_rank(down), [ops.pack_low_rank(each) for each in ups]

    def put(self, number: int, index: int, a: Tensor, b: Tensor) -> None:
        """Let the adapter with this number add b [out, n] times a [n, in] to a linear; n is at most r."""
        rank, down, up = self.rooms.rank, *map(self.ops.plain_low_rank, (self._down, self._ups[index]))
        columns = slice((number - 1) * rank, number * rank)
        of_adapter = down.view(len(self.widths), -1, down.shape[1])[index, columns]
        for room, read in ((of_adapter, a), (up[:, columns].t(), b.t())):
            room[: len(read)].copy_(read)
            room[len(read) :].zero_()
        self._down, self._ups[index] = self.ops.pack_low_rank(down), self.ops.pack_low_rank(up)

    def add(self, outputs: Sequence[Tensor], x: Tensor) -> None:
        """Add to the outputs [T, width] what the step's adapters compute of the inputs [T, in]."""
        if (is_other := self.rooms.is_other) is None:
            return
        low = self.ops.linear(x, (self._down, None)).view(len(x), len(self.widths), -1)
        low.masked_fill_(is_other, 0)
        for output, up, own in zip(outputs, self._ups, low.unbind(1)):
            output.add_(self.ops.linear(own, (up, None)))
