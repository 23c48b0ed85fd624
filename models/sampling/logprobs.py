"""Compute the log-probabilities that are returned beside tokens, and the candidates of beams.

A request gets those of the model's own distribution. Beams get the most likely continuations, ranked as in
transformers' beam search: the request's parameters change the log-probabilities, not the logits before them.

Legend: R sampled rows, L those that want log-probabilities, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from borders.field_table import MOST_LOGPROBS
from continuous_batching.batch import Candidates
from continuous_batching.request import SamplingParams, TokenLogprobs
from continuous_batching.slots import SlotPool
from kv_cache.device.transfer import Arrays, Tensors
from kv_cache.pages import Index
from models.sampling.known_tokens import KnownTokens
from models.sampling.logit_processors import apply_changes, changes_logits, gather_changes


def rows_with_logprobs(rows: Index, slots: SlotPool) -> list[tuple[int, int]]:
    """Return (index into rows, number of most likely tokens) for each row that wants log-probabilities."""
    special = np.flatnonzero(~slots.plain[rows]).tolist()
    wanted = [(index, slots.requests[rows[index]].params.logprobs) for index in special]
    return [(index, num_top) for index, num_top in wanted if num_top is not None]


def top_logprobs(logits: Tensor, tokens: Tensor, num_top: int = MOST_LOGPROBS) -> Tensors:
    """Return, for logits [L, V], the log-probabilities of tokens [L], and of the most likely tokens.

    Every row gets the same number of these, because the order of ties must not depend on what other rows
    want.
    """
    scores = torch.log_softmax(logits.float(), dim=-1)
    top = scores.topk(min(num_top, scores.shape[1]), dim=-1)
    given = scores.gather(1, tokens.clamp(min=0)[:, None])
    return {"top_ids": top.indices, "top_values": torch.cat((given, top.values), dim=1)}


def read_top_logprobs(up: Arrays, asked: list[tuple[int, int]]) -> dict[int, TokenLogprobs]:
    """Read the results of `top_logprobs`, by index into the rows; a row that failed has none."""
    indexes, num_tops = np.array(asked).T
    found = token_logprobs(up["tokens"][indexes], up, num_tops)
    return {index: each for (index, _), each in zip(asked, found) if each.token >= 0}


def token_logprobs(tokens: Index, up: Arrays, num_tops: Index) -> list[TokenLogprobs]:
    """Read the results of `top_logprobs` for tokens [L], with `num_tops` most likely tokens each."""
    ids, values = up["top_ids"], up["top_values"][:, 1:]
    order = np.lexsort((ids, -values), axis=-1)
    ids, values = np.take_along_axis(ids, order, 1).tolist(), np.take_along_axis(values, order, 1).tolist()
    columns = zip(tokens.tolist(), up["top_values"][:, 0].tolist(), ids, values, num_tops.tolist())
    return [
        TokenLogprobs(token, logprob, tuple(zip(best[:num], top[:num])))
        for token, logprob, best, top, num in columns
    ]


class BeamRows:
    """The sampled rows that are beams, and how many candidates each needs."""

    def __init__(
        self,
        rows: Index,
        targets: Index,
        slots: SlotPool,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
    ) -> None:
        self._slots, self._eos_token_ids, self._vocab_size = slots, eos_token_ids, vocab_size
        at = np.flatnonzero(slots.beam_width[rows])
        counts = np.array([min(self._count(row), vocab_size) for row in rows[at].tolist()], dtype=np.int64)
        order = np.argsort(counts, kind="stable")  # beams with the same count are neighbours
        self.at, self._counts = at[order], counts[order]
        self._rows, self._targets = rows[self.at], targets[self.at]

    def __len__(self) -> int:
        return len(self.at)

    def arrays(self) -> Arrays:
        """Return what the device needs to know about the beams."""
        asked = self._rows, self._targets, self._slots
        is_changed = len(self) and changes_logits(*asked).any()
        known = KnownTokens()  # a beam goes on from what another one knew
        changes = gather_changes(*asked, known, self._eos_token_ids, self._vocab_size) if is_changed else {}
        return {"beams": self.at} | {f"beams {name}": array for name, array in changes.items()}

    def candidates(self, logits: Tensor, sent: Tensors) -> Tensors:
        """Return the candidates of the beams among the rows of logits [R, V], grouped by their number."""
        before = torch.log_softmax(logits[sent["beams"]].float(), dim=-1)
        after, changes = before, {name[6:]: each for name, each in sent.items() if name.startswith("beams ")}
        if changes:
            after = before.clone()
            apply_changes(after, changes)
        up = {}
        for count, first, stop in self._runs():
            best = after[first:stop].topk(count, dim=-1)
            up[f"{count} tokens"], up[f"{count} scores"] = best.indices, best.values
            up[f"{count} logprobs"] = before[first:stop].gather(1, best.indices)
        return up

    def read(self, up: Arrays) -> dict[int, Candidates]:
        """Read the results of `candidates`, by index into the rows."""
        result = {}
        for count, first, stop in self._runs():
            columns = (up[f"{count} {name}"] for name in ("tokens", "scores", "logprobs"))
            for index, *each in zip(self.at[first:stop].tolist(), *columns):
                result[index] = Candidates(*each)
        return result

    def _count(self, row: int) -> int:
        params: SamplingParams = self._slots.requests[row].params
        return params.beam_width + len(params.stop_token_ids) + len(self._eos_token_ids)

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (count, first, stop) for each group of beams that need the same number of candidates."""
        for count in np.unique(self._counts).tolist():
            first, stop = np.searchsorted(self._counts, [count, count + 1]).tolist()
            yield count, first, stop
