"""Divide the rows of a step among the ranks of a group between its products (arXiv 2205.05198, 4.2.2).

Norms and residuals need no other row, so that each rank computes them for its own rows alone. The inputs of a
product are gathered, in int8 where it reads int8, and the sum of the ranks' products is scattered: both
together move as many bytes as the one sum that they replace. The embedding of a large step, its layers and
the links between its stages have divided rows; what the decoder returns is whole again on every rank.

Legend: T rows of the step, N ranks, t = T / N rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from models.ops.operands import Int8Rows
from models.parallel.group import Group


@dataclass(frozen=True, slots=True)
class DividedRows:
    """The division of `num_rows` rows among the ranks of a group; the last ones are padded with zeros."""

    group: Group
    num_rows: int

    @property
    def count(self) -> int:
        """The number of rows on each rank."""
        return -(-self.num_rows // self.group.size)

    def summed(self, part: Tensor) -> Tensor:
        """Return this rank's rows [t, ...] of the sum over all ranks of their parts [T, ...]."""
        return self.group.reduce_scatter(self._padded(part))

    def whole(self, own: Tensor) -> Tensor:
        """Return all rows [T, ...], of which each rank has its own [t, ...]."""
        return self.group.all_gather(own).flatten(0, 1)[: self.num_rows]

    def whole_input(self, own: Tensor | Int8Rows) -> Tensor | Int8Rows:
        """Return what a linear reads of all rows, in the form in which each rank has its own."""
        if isinstance(own, Tensor):
            return self.whole(own)
        return Int8Rows(self.whole(own.rows), self.whole(own.scale), own.dtype)

    def _padded(self, x: Tensor) -> Tensor:
        missing = self.count * self.group.size - len(x)
        return F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)) if missing else x
