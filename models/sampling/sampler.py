"""Which token does each sampled row get?

Each token is drawn with one random number: a hash of the request's seed and the token's position, computed on
the host. So a request draws the same tokens whatever runs beside it, in any row, and after a preemption.

The parameters of all rows travel to the device in one copy, and tokens and log-probabilities come back in
one.

Legend: R sampled rows, W those of them that need more than the best token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from continuous_batching.batch import NONE_LEFT, NOT_FINITE, Sampled
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index
from kv_cache.transfer import Arrays, Tensors, all_to_device, all_to_host, to_host
from models.ops.reference import Ops
from models.sampling.logit_processors import apply_changes, changes_logits, gather_changes
from models.sampling.logprobs import (
    BeamRows,
    read_top_logprobs,
    rows_with_logprobs,
    top_logprobs,
)
from models.sampling.top_k_top_p import draw, tile_size, top_k_threshold, top_p_threshold

_GREEDY_BELOW = 1e-5  # temperatures under it would divide float32 logits out of range
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: NDArray[np.uint64], counters: Index) -> NDArray[np.float32]:
    """For each pair of seed and counter one number in [0, 1), a multiple of 2^-24.

    The generator is SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
    2014), which can be entered at any counter; the seed is mixed first, so that neighbouring seeds have
    nothing in common.
    """
    state = _mix(seeds + _GOLDEN) + counters.astype(np.uint64) * _GOLDEN
    return (_mix(state) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was chosen, on its way to the host."""

    tokens: Tensor  # int64 [R] on the device; NOT_FINITE or NONE_LEFT where there is none
    wait: Callable[[], Sampled]


class Sampler:
    """Chooses tokens from logits by each row's sampling parameters.

    First logit_processors.py changes the logits. Then temperature 0 (or top_k 1) takes the best token; any
    other row draws from softmax(logits / temperature) under the thresholds of top_k_top_p.py.
    Log-probabilities are of the model's own distribution, before any of that. A row that holds NaN or +inf
    gets NOT_FINITE for a token, and a row for which every token is forbidden NONE_LEFT; rows do not affect
    each other. A beam gets candidates (logprobs.py).
    """

    def __init__(self, eos_token_ids: tuple[int, ...], vocab_size: int, ops: Ops | None = None) -> None:
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._ops = ops or Ops()
        self._tile = tile_size(vocab_size)

    def run(self, logits: Tensor, rows: Index, targets: Index, slots: SlotPool) -> Sampled:
        """Tokens for logits [R, V] of the slot rows [R], each for position `targets` [R] of its row."""
        return self.start(logits, rows, targets, slots).wait()

    def start(self, logits: Tensor, rows: Index, targets: Index, slots: SlotPool) -> Chosen:
        """The same, without waiting for the device; `Chosen.wait` does."""
        assert logits.shape == (len(rows), self._vocab_size), f"logits are {tuple(logits.shape)}"
        drawn = (slots.temperature[rows] >= _GREEDY_BELOW) & (slots.top_k[rows] != 1)
        plain = bool(slots.plain[rows].all())
        changed = np.zeros_like(drawn) if plain else changes_logits(rows, targets, slots)
        asked = [] if plain else rows_with_logprobs(rows, slots)
        beams = None if plain else BeamRows(rows, targets, slots, self._eos_token_ids, self._vocab_size)
        if beams:
            changed[beams.at] = False  # their log-probabilities are changed, not their logits
        work = np.flatnonzero(drawn | changed)

        tokens, finite = self._ops.greedy(logits)
        if not len(work) and not asked and not beams:
            tokens = torch.where(finite, tokens, NOT_FINITE)
            arrival = to_host(tokens)
            return Chosen(tokens, lambda: Sampled(arrival()))
        host: Arrays = {"work": work, "asked": np.array([index for index, _ in asked], dtype=np.int64)}
        host |= self._parameters(rows[work], targets[work], drawn[work], slots)
        if changed.any():
            asking = rows[work], targets[work], slots
            host |= gather_changes(*asking, self._eos_token_ids, self._vocab_size)
        if beams:
            host |= beams.arrays()
        sent = all_to_device(host, logits.device)
        if len(work):
            chosen, possible = self._choose(logits, tokens, host, sent)
            tokens[sent["work"]] = torch.where(possible, chosen, NONE_LEFT)
        up = {"tokens": torch.where(finite, tokens, NOT_FINITE)}
        if asked:
            up |= top_logprobs(logits[sent["asked"]], tokens[sent["asked"]])
        if beams:
            up |= beams.candidates(logits, sent)
        arrived = all_to_host(up)

        def wait() -> Sampled:
            got = arrived()
            logprobs = read_top_logprobs(got, asked) if asked else {}
            return Sampled(got["tokens"], logprobs, beams.read(got) if beams else {})

        return Chosen(up["tokens"], wait)

    def _parameters(self, rows: Index, targets: Index, drawn: NDArray[np.bool_], slots: SlotPool) -> Arrays:
        """What drawing needs of the rows [W]; `k_rows` and `p_rows` are indices into them."""
        if not drawn.any():
            return {}
        top_k, top_p = slots.top_k[rows], slots.top_p[rows]
        has_k = drawn & (top_k > 0) & (top_k < self._vocab_size)
        k_rows, p_rows = np.flatnonzero(has_k), np.flatnonzero(drawn & ~has_k & (top_p < 1))
        arrays: Arrays = {
            "uniform": uniforms(slots.seed[rows], targets),
            "sharpness": 1 / np.where(drawn, slots.temperature[rows], np.float32(1)),
            "drawn": drawn.astype(np.int64),
        }
        if len(k_rows):
            arrays |= {"k_rows": k_rows, "top_k": top_k[k_rows], "k_top_p": top_p[k_rows]}
        if len(p_rows):
            arrays |= {"p_rows": p_rows, "top_p": top_p[p_rows]}
        min_p = slots.min_p[rows]
        if len(k_rows) or len(p_rows) or min_p.any():
            arrays["min_p"] = min_p
        return arrays

    def _choose(self, logits: Tensor, best: Tensor, host: Arrays, sent: Tensors) -> tuple[Tensor, Tensor]:
        """Tokens [W] of the rows that are changed or drawn, and whether any token was possible, bool [W]."""
        work = sent["work"]
        scores, best = _take(logits, work).contiguous().float(), best[work]
        if scores.data_ptr() == logits.data_ptr():
            scores = scores.clone()  # the caller's stay as they are
        if "bias" in sent:
            apply_changes(scores, sent)
            best = scores.argmax(-1)
        peak = scores.gather(1, best[:, None])
        possible = peak.isfinite()[:, 0]
        if "uniform" not in sent:
            return best, possible
        weights = scores.sub_(peak).mul_(sent["sharpness"][:, None]).exp_()
        if "min_p" in sent:
            weights.masked_fill_(weights < self._thresholds(weights, host, sent), 0.0)
        tokens = draw(weights, sent["uniform"], best, self._tile)
        return torch.where(sent["drawn"] > 0, tokens, best), possible

    def _thresholds(self, weights: Tensor, host: Arrays, sent: Tensors) -> Tensor:
        """The least weight [W, 1] that may be drawn in each row."""
        least = sent["min_p"][:, None].clone()
        if "k_rows" in sent:
            at, largest_k = sent["k_rows"], int(host["top_k"].max())
            threshold = top_k_threshold(_take(weights, at), sent["top_k"], sent["k_top_p"], largest_k)
            least[at] = torch.maximum(least[at], threshold)
        if "p_rows" in sent:
            at = sent["p_rows"]
            threshold = top_p_threshold(_take(weights, at), sent["top_p"], self._tile)
            least[at] = torch.maximum(least[at], threshold)
        return least


def _take(table: Tensor, rows: Tensor) -> Tensor:
    """Rows [W], which ascend, of table [R, V]; the table itself if they are all of its rows."""
    return table if len(rows) == len(table) else table[rows]
