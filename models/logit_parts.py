"""Which tokens are best, where each rank has the logits of its own tokens alone?

For a greedy choice each rank sends its best logit and the token of it. All logits are brought together only
where rows are drawn, changed or reported.

Legend: R rows, V vocabulary, P ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.group import Group
from models.ops.reference import Ops

MOST_TOKENS = 1 << 24  # that float32, in which a token travels beside its logit, tells apart


class LogitParts:
    """Logits [R, V] of which this rank has the columns of `tokens`, and padding behind them.

    All ranks of `group` must call the same methods with equally many rows.
    """

    def __init__(self, group: Group, tokens: range, vocab_size: int, ops: Ops) -> None:
        assert vocab_size <= MOST_TOKENS, f"{vocab_size} tokens"
        self._group, self._ops = group, ops
        self._tokens, self._vocab_size = tokens, vocab_size

    def joined(self, own: Tensor) -> Tensor:
        """All logits [R, V], to the bit the same on every rank."""
        parts = self._group.all_gather(own).unbind()
        return torch.cat(parts, dim=-1)[:, : self._vocab_size].contiguous()

    def greedy(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """As `Ops.greedy` of all logits, and the same on every rank; of equals the first token."""
        logits, tokens = self._group.all_gather(self.own_best(own)).unbind(-1)  # [P, R] each
        best = logits.amax(0)
        return torch.where(logits == best, tokens, MOST_TOKENS).amin(0).long(), best.isfinite()

    def own_best(self, own: Tensor) -> Tensor:
        """The best logit of this rank's tokens, and which token that is, float32 [R, 2].

        Of a row with a NaN it is infinite, so that it stays the largest on every device.
        """
        if not len(self._tokens):  # the vocabulary is smaller than the ranks before this one hold
            return own.new_tensor([-torch.inf, MOST_TOKENS], dtype=torch.float32).repeat(len(own), 1)
        own = own[:, : len(self._tokens)]
        at, is_finite = self._ops.greedy(own)
        logit = own.gather(1, at[:, None])[:, 0].float()
        logit = torch.where(is_finite | (logit == -torch.inf), logit, torch.inf)
        return torch.stack((logit, (at + self._tokens.start).float()), -1)
