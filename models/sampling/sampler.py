"""Choose the token of each sampled row.

Each token is drawn with one random number: a hash of the request's seed and the token's position, computed on
the host. So a request draws the same tokens whatever runs beside it, in any row, and after a preemption.

The parameters of all rows travel to the device in one copy, and tokens and log-probabilities come back in
one. Changes of the logits and masks are computed in the modules beside this one, draws by `Ops.draw`.

Legend: R sampled rows, W those of them that need more than the best token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from continuous_batching.batch import LATE, NONE_LEFT, NOT_FINITE, SPOILT, Sampled
from continuous_batching.samples.mask_maker import MaskMaker
from continuous_batching.slots import SlotPool
from kv_cache.device.transfer import Arrays, Tensors, all_to_device, all_to_host, to_host
from kv_cache.pages import Index
from models.layers.logit_parts import LogitParts
from models.ops.drawing import limits_of
from models.ops.reference import Ops
from models.sampling.draw_columns import packed, unpacked
from models.sampling.known_tokens import KnownTokens
from models.sampling.logit_processors import (
    OwnChange,
    apply_changes,
    changes_logits,
    gather_changes,
    own_changes,
)
from models.sampling.logprobs import (
    BeamRows,
    read_top_logprobs,
    rows_with_logprobs,
    top_logprobs,
)
from models.sampling.token_masks import grammar_columns

_GREEDY_BELOW = 1e-5  # lower temperatures would divide float32 logits out of range
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: NDArray[np.uint64], counters: Index) -> NDArray[np.float32]:
    """Return for each pair of seed and counter a number in [0, 1), a multiple of 2^-24.

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
class Best:
    """The tokens of the largest logits."""

    tokens: Tensor  # int64 [R]
    chosen: Tensor  # int64 [R]: `tokens`, with NOT_FINITE where the row's largest logit is not finite

    @staticmethod
    def of(tokens: Tensor, is_finite: Tensor) -> Best:
        """Combine the results of `Ops.greedy`."""
        return Best(tokens, torch.where(is_finite, tokens, NOT_FINITE))


@dataclass(frozen=True, slots=True)
class Chosen:
    """The chosen tokens, on their way to the host."""

    tokens: Tensor  # int64 [R] on the device; NOT_FINITE, NONE_LEFT or SPOILT if there is none
    wait: Callable[[], Sampled]


class Sampler:
    """Chooses tokens from logits by each row's sampling parameters.

    First logit_processors.py changes the logits. Then temperature 0 (or top_k 1) takes the best token; any
    other row draws from softmax(logits / temperature) under the limits of models/ops/drawing.py.
    Log-probabilities are those of the model's own distribution, before all of this. A row that holds NaN or
    +inf gets NOT_FINITE for a token, or SPOILT if only the operator's processors left that, and a row for
    which every token is forbidden NONE_LEFT; rows do not affect each other. A row whose mask is not ready in
    time gets LATE, and a beam gets candidates (logprobs.py).
    """

    reads_logits = True

    def __init__(
        self,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        ops: Ops | None = None,
        masks: MaskMaker | None = None,
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._ops = ops or Ops()
        self._masks = masks or MaskMaker()
        self._known = KnownTokens()
        self.captures_draws = self._ops.captures_draws

    def prepare(self, rows: Index, targets: Index, slots: SlotPool) -> None:
        """Start to make the grammar masks that these rows need for their positions `targets`."""
        self._masks.begin(rows, targets, slots)

    def run(self, logits: Tensor, rows: Index, targets: Index, slots: SlotPool) -> Sampled:
        """Return tokens for logits [R, V] of the slot rows [R], for their positions `targets` [R]."""
        return self.start(logits, rows, targets, slots).wait()

    def best(self, logits: Tensor, parts: LogitParts | None = None) -> Best:
        """Return the best tokens of logits [R, V], or of all ranks' parts of them; called in a capture."""
        return Best.of(*(self._ops.greedy(logits) if parts is None else parts.greedy(logits)))

    def draw_columns(self, rows: Index, targets: Index, slots: SlotPool) -> NDArray[np.int32] | None:
        """Return what `draw` reads for the rows [R] of a whole step; None if `start` has to choose.

        It has to if logits are changed or reported, and if no row is drawn by top_k or top_p, for which the
        sort of a captured draw would be wasted.
        """
        if not self.captures_draws or not slots.plain[rows].all():
            return None
        drawn = _is_drawn(rows, slots)
        arrays = self._limits(rows, targets, drawn, slots)
        return packed(arrays, len(rows)) if "excess" in arrays else None

    def draw(self, logits: Tensor, best: Best, columns: Tensor) -> Tensor:
        """Return tokens [R] of logits [R, V], given what `draw_columns` returned; called in a capture."""
        return self._choose(logits, best, unpacked(columns))

    def start(
        self, logits: Tensor, rows: Index, targets: Index, slots: SlotPool, best: Best | None = None
    ) -> Chosen:
        """Start to choose, without waiting for the device.

        `Chosen.wait` does. `best` is of the same logits.
        """
        assert logits.shape == (len(rows), self._vocab_size), f"logits are {tuple(logits.shape)}"
        drawn = _is_drawn(rows, slots)
        plain = bool(slots.plain[rows].all())
        changed = np.zeros_like(drawn) if plain else changes_logits(rows, targets, slots)
        asked = [] if plain else rows_with_logprobs(rows, slots)
        beams = None if plain else BeamRows(rows, targets, slots, self._eos_token_ids, self._vocab_size)
        if beams:
            changed[beams.at] = False  # their log-probabilities are changed, not their logits
        work = np.flatnonzero(drawn | changed)

        best = best or self.best(logits)
        tokens = best.chosen
        if not len(work) and not asked and not beams:
            return arriving(tokens)
        host: Arrays = {"asked": np.array([index for index, _ in asked], dtype=np.int64)} if asked else {}
        if len(work) < len(rows):
            host["work"] = work
        host |= self._limits(rows[work], targets[work], drawn[work], slots)
        own: list[OwnChange] = []
        late: Index = work[:0]
        if changed.any():
            asking = rows[work], targets[work], slots
            own = own_changes(*asking)
            if own:
                host["own"] = np.array([each.row for each in own], dtype=np.int64)
            host |= gather_changes(*asking, self._known, self._eos_token_ids, self._vocab_size)
            if slots.constrained[rows].any():
                made = self._masks.take(*asking, is_alone=bool(slots.constrained[rows].all()))
                host |= grammar_columns(made.rows, made.masks)
                late = work[made.late]
        if beams:
            host |= beams.arrays()
        sent = all_to_device(host, logits.device)
        if len(work):
            tokens = self._choose(logits, best, sent, own)
        if not asked and not beams:
            return _without(late, arriving(tokens))
        up = {"tokens": tokens}
        if asked:
            up |= top_logprobs(logits[sent["asked"]], tokens[sent["asked"]])
        if beams:
            up |= beams.candidates(logits, sent)
        arrived = all_to_host(up)

        def wait() -> Sampled:
            got = arrived()
            logprobs = read_top_logprobs(got, asked) if asked else {}
            return Sampled(got["tokens"], logprobs, beams.read(got) if beams else {})

        return _without(late, Chosen(up["tokens"], wait))

    def _limits(self, rows: Index, targets: Index, drawn: NDArray[np.bool_], slots: SlotPool) -> Arrays:
        """Return what `Ops.draw` needs for the rows [W]."""
        if not drawn.any():
            return {}
        top_k = slots.top_k[rows]
        has_k = drawn & (top_k > 0) & (top_k < self._vocab_size)
        arrays: Arrays = {
            "uniform": uniforms(slots.seed[rows], targets),
            "sharpness": 1 / np.where(drawn, slots.temperature[rows], np.float32(1)),
        }
        if not drawn.all():
            arrays["drawn"] = drawn.astype(np.int64)
        top_p = np.where(drawn, slots.top_p[rows], np.float32(1))
        top_k = np.where(has_k, top_k, self._vocab_size)
        return arrays | limits_of(top_k, top_p, slots.min_p[rows], self._vocab_size)

    def _choose(self, logits: Tensor, best_of: Best, sent: Tensors, own: Sequence[OwnChange] = ()) -> Tensor:
        """Return tokens [R] of logits [R, V]: the best ones, or new ones for changed and drawn rows."""
        work, given = sent.get("work"), (logits, best_of.tokens, best_of.chosen)
        scores, best, chosen = given if work is None else (each[work] for each in given)
        if "bias" in sent:
            scores = scores.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            apply_changes(scores, sent, own)
            best, is_possible = self._ops.greedy(scores)
            changed = torch.where(is_possible, best, NONE_LEFT)
            if own:  # a processor of the operator's may return what is no number, which is no mask
                at = sent["own"]
                spoilt = scores[at].isnan().any(-1) | (scores[at] == torch.inf).any(-1)
                changed[at] = changed[at].masked_fill(spoilt, SPOILT)
            chosen = torch.where(chosen == NOT_FINITE, chosen, changed)
        if "uniform" in sent:
            drawn = self._ops.draw(scores, best, chosen, sent)
            # A change may have overwritten the one logit that was not finite
            chosen = torch.where(chosen < 0, chosen, drawn) if "bias" in sent else drawn
        return chosen if work is None else best_of.chosen.index_copy(0, work, chosen)


def arriving(tokens: Tensor) -> Chosen:
    """Return tokens [R] with nothing beside them."""
    arrival = to_host(tokens)
    return Chosen(tokens, lambda: Sampled(arrival()))


def takes_best(rows: Index, slots: SlotPool) -> bool:
    """Whether all these slot rows get their best token, and nothing beside it."""
    return bool(slots.plain[rows].all()) and not _is_drawn(rows, slots).any()


def _without(late: Index, chosen: Chosen) -> Chosen:
    """Replace the tokens of the rows `late`, given as indices, whose masks were not ready.

    Only what the model itself has computed needs no mask to be known as not finite.
    """
    if not len(late):
        return chosen

    def wait() -> Sampled:
        sampled = chosen.wait()
        tokens = sampled.tokens.copy()
        tokens[late] = np.where(tokens[late] == NOT_FINITE, NOT_FINITE, LATE)
        return replace(sampled, tokens=tokens)

    return Chosen(chosen.tokens, wait)


def _is_drawn(rows: Index, slots: SlotPool) -> NDArray[np.bool_]:
    """Whether each row is drawn; the others get their best token."""
    drawn: NDArray[np.bool_] = (slots.temperature[rows] >= _GREEDY_BELOW) & (slots.top_k[rows] != 1)
    return drawn
