"""Which log-probabilities go up beside the tokens?

Those that a request asked to be told, of the model's own distribution; and of each beam its likeliest
continuations, as transformers' beam search ranks them: what a request changes is changed in its
log-probabilities, not in the logits before them.

Legend: R sampled rows, L those that want log-probabilities, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from continuous_batching.batch import Candidates
from continuous_batching.request import TokenLogprobs
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index
from models.sampling.logit_processors import Arrays, apply_edits, gather_edits, needs_edit

Tensors = dict[str, Tensor]
NUM_TOP = 20  # the most log-probabilities that a request may ask for


def fetch(tensors: Tensors) -> Callable[[], Arrays]:
    """Begin to bring tensors of small integers and of float32 to the host in one copy; what is returned waits
    for it.
    """
    flat = [each.view(torch.int32) if each.is_floating_point() else each.int() for each in tensors.values()]
    arrival = bring(torch.cat([each.flatten() for each in flat]))
    ends = np.cumsum([each.numel() for each in flat])

    def arrived() -> Arrays:
        return {
            name: (piece.view(np.float32) if tensor.is_floating_point() else piece.astype(np.int64)).reshape(
                tensor.shape
            )
            for (name, tensor), piece in zip(tensors.items(), np.split(arrival(), ends[:-1]))
        }

    return arrived


def bring(tensor: Tensor) -> Callable[[], NDArray[np.generic]]:
    """Begin to copy a tensor to the host; what is returned waits for it."""
    if tensor.device.type == "cpu":
        return tensor.numpy
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.get_device_module(tensor.device).Event()
    event.record()

    def arrived() -> NDArray[np.generic]:
        event.synchronize()
        return host.numpy()

    return arrived


def asked_logprobs(rows: Index, slots: SlotPool) -> list[tuple[int, int]]:
    """(index into rows, how many of the best) of each row that wants log-probabilities."""
    special = np.flatnonzero(~slots.plain[rows]).tolist()
    wanted = [(index, slots.requests[rows[index]].params.logprobs) for index in special]
    return [(index, num_top) for index, num_top in wanted if num_top is not None]


def likeliest(logits: Tensor, tokens: Tensor, num_top: int = NUM_TOP) -> Tensors:
    """Of logits [L, V]: the log-probabilities of tokens [L], and the likeliest tokens.

    As many of these for everybody: how equals are ordered must not depend on what a neighbour asked for.
    """
    scores = torch.log_softmax(logits.float(), dim=-1)
    top = scores.topk(min(num_top, scores.shape[1]), dim=-1)
    given = scores.gather(1, tokens.clamp(min=0)[:, None])
    return {"top_ids": top.indices, "top_values": torch.cat((given, top.values), dim=1)}


def read_likeliest(up: Arrays, asked: list[tuple[int, int]]) -> dict[int, TokenLogprobs]:
    """What `likeliest` found, by index into the rows; a failed row has none."""
    indexes, num_tops = np.array(asked).T
    told = told_of(up["tokens"][indexes], up, num_tops)
    return {index: each for (index, _), each in zip(asked, told) if each.token >= 0}


def told_of(tokens: Index, up: Arrays, num_tops: Index) -> list[TokenLogprobs]:
    """What `likeliest` found of tokens [L], with so many of the best of each."""
    ids, values = up["top_ids"], up["top_values"][:, 1:]
    order = np.lexsort((ids, -values), axis=-1)
    ids, values = np.take_along_axis(ids, order, 1).tolist(), np.take_along_axis(values, order, 1).tolist()
    columns = zip(tokens.tolist(), up["top_values"][:, 0].tolist(), ids, values, num_tops.tolist())
    return [TokenLogprobs(*given, tuple(zip(best[:num], top[:num]))) for *given, best, top, num in columns]


class Beams:
    """The sampled rows that are beams, and how many candidates each is to bring."""

    def __init__(self, rows: Index, slots: SlotPool, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self._slots, self._eos_token_ids, self._vocab_size = slots, eos_token_ids, vocab_size
        at = np.flatnonzero(slots.beam_width[rows])
        counts = np.array([self._count(row) for row in rows[at].tolist()], dtype=np.int64)
        order = np.argsort(counts, kind="stable")  # so that those of one count are neighbours
        self.at, self._counts = at[order], counts[order]
        self._rows = rows[self.at]

    def __len__(self) -> int:
        return len(self.at)

    def arrays(self) -> Arrays:
        """What the device needs to know of them."""
        edited = len(self) and needs_edit(self._rows, self._slots).any()
        edits = gather_edits(self._rows, self._slots, self._eos_token_ids, self._vocab_size) if edited else {}
        return {"beams": self.at} | {f"beams {name}": array for name, array in edits.items()}

    def candidates(self, logits: Tensor, sent: Tensors) -> Tensors:
        """Of the rows of logits [R, V] that are beams: their candidates, by how many they bring."""
        before = torch.log_softmax(logits[sent["beams"]].float(), dim=-1)
        after, edits = before, {name[6:]: each for name, each in sent.items() if name.startswith("beams ")}
        if edits:
            after = before.clone()
            apply_edits(after, edits)
        up = {}
        for count, first, stop in self._runs():
            best = after[first:stop].topk(count, dim=-1)
            up[f"{count} tokens"], up[f"{count} scores"] = best.indices, best.values
            up[f"{count} logprobs"] = before[first:stop].gather(1, best.indices)
        return up

    def read(self, up: Arrays) -> dict[int, Candidates]:
        """What `candidates` found, by index into the rows."""
        result = {}
        for count, first, stop in self._runs():
            columns = (up[f"{count} {name}"] for name in ("tokens", "scores", "logprobs"))
            for index, *each in zip(self.at[first:stop].tolist(), *columns):
                result[index] = Candidates(*each)
        return result

    def _count(self, row: int) -> int:
        params = self._slots.requests[row].params
        return params.beam_width + len(params.stop_token_ids) + len(self._eos_token_ids)

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """(count, first, stop) of the beams that bring equally many."""
        for count in np.unique(self._counts).tolist():
            first, stop = np.searchsorted(self._counts, [count, count + 1]).tolist()
            yield min(count, self._vocab_size), first, stop
