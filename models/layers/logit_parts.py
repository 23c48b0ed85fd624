"""Find the best tokens, or join all logits, if each rank has the logits of its vocabulary shard alone.

For a greedy choice each rank sends its best logit and its token. All logits are joined only if rows are
drawn, changed or reported.

Legend: R rows, V vocabulary, P ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.ops.reference import Ops
from models.parallel.group import Group

MOST_TOKENS = 1 << 24  # tokens that float32, in which a token travels beside its logit, can represent exactly


class LogitParts:
    """Logits [R, V] of which this rank has the columns of `tokens`, followed by padding.

    All ranks of `group` must call the same methods with equally many rows.
    """

    def __init__(self, group: Group, tokens: range, vocab_size: int, ops: Ops) -> None:
        assert vocab_size <= MOST_TOKENS, f"{vocab_size} tokens"
        self._group, self._ops = group, ops
        self._tokens, self._vocab_size = tokens, vocab_size

    def joined(self, own: Tensor) -> Tensor:
        """Return all logits [R, V], identical to the bit on every rank."""
        parts = self._group.all_gather(own).unbind()
        return torch.cat(parts, dim=-1)[:, : self._vocab_size].contiguous()

    def greedy(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `Ops.greedy` returns for all logits, the same on every rank.

        Ties go to the first token.
        """
        logits, tokens = self._group.all_gather(self.own_best(own)).unbind(-1)  # [P, R] each
        best = logits.amax(0)
        return torch.where(logits == best, tokens, MOST_TOKENS).amin(0).long(), best.isfinite()

    def own_best(self, own: Tensor) -> Tensor:
        """Return the best logit of this rank's tokens and that token, as float32 [R, 2].

        For a row with a NaN the logit is infinite, so that it stays the largest on every device.
        """
        if not len(self._tokens):  # the vocabulary ends within the shards of the ranks before this one
            return own.new_tensor([-torch.inf, MOST_TOKENS], dtype=torch.float32).repeat(len(own), 1)
        own = own[:, : len(self._tokens)]
        at, is_finite = self._ops.greedy(own)
        logit = own.gather(1, at[:, None])[:, 0].float()
        logit = torch.where(is_finite | (logit == -torch.inf), logit, torch.inf)
        return torch.stack((logit, (at + self._tokens.start).float()), -1)
