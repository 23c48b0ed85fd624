"""Change the logits by a request's parameters before a token is chosen.

In this order: `logit_bias` is added; `repetition_penalty` divides the positive and multiplies the other
logits of every token seen in prompt or answer (Keskar et al. 2019, arXiv 1909.05858; Hugging Face's
RepetitionPenaltyLogitsProcessor); `presence_penalty` is subtracted once from every token of the answer,
`frequency_penalty` as often as it occurs there (OpenAI's API reference, "Frequency and presence penalties");
the operator's own processors that the request names are applied; tokens that are not allowed yet
(`min_tokens`) or at all (token_masks.py) become impossible.

What is read from the slot table is kept nowhere else but in `KnownTokens`, which counts a request anew in
another row, so preemption has nothing to restore.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from continuous_batching.own_processors import OwnProcessors
from continuous_batching.request import TokenIds
from continuous_batching.slots import SlotPool
from kv_cache.device.transfer import Arrays
from kv_cache.pages import Index
from models.sampling.known_tokens import KnownTokens
from models.sampling.token_masks import apply_masks, gather_masks


@dataclass(frozen=True, slots=True)
class OwnChange:
    """A row, by its index, that the operator's processors change, and its tokens so far."""

    row: int
    processors: OwnProcessors
    prompt: TokenIds
    answer: TokenIds


def changes_logits(rows: Index, targets: Index, slots: SlotPool) -> NDArray[np.bool_]:
    """Whether the logits of each row are changed, for a token at position `targets`."""
    needed: NDArray[np.bool_] = slots.repetition_penalty[rows] != 1
    needed |= slots.presence_penalty[rows] != 0
    needed |= slots.frequency_penalty[rows] != 0
    needed |= targets < slots.min_total[rows]
    for index in np.flatnonzero(~needed & ~slots.plain[rows]).tolist():
        params = slots.requests[rows[index]].params
        needed[index] = bool(params.logit_bias or params.processors) or params.masks_tokens
    return needed


def own_changes(rows: Index, targets: Index, slots: SlotPool) -> list[OwnChange]:
    """Return the rows that the operator's processors change, with their tokens before `targets`."""
    found = []
    for index, (row, target) in enumerate(zip(rows.tolist(), targets.tolist())):
        request = slots.requests[row]
        if request.params.processors:
            assert request.processors is not None, f"{request.id} was not given its processors"
            known, num_prompt = slots.token_ids[row, :target], int(slots.num_prompt[row])
            found.append(OwnChange(index, request.processors, known[:num_prompt], known[num_prompt:]))
    return found


def gather_changes(
    rows: Index,
    targets: Index,
    slots: SlotPool,
    known: KnownTokens,
    eos_token_ids: tuple[int, ...],
    vocab_size: int,
) -> Arrays:
    """Return the changes as flat arrays on the host: the row (an index into `rows`), token and value of each.

    Tokens before position `targets` of a row count as known, including the drafts that precede it.
    """
    arrays = _biases(rows, targets, slots, eos_token_ids, vocab_size)
    arrays |= _penalties(rows, targets, slots, known)
    arrays |= gather_masks(rows, targets, slots)
    return arrays


def apply_changes(scores: Tensor, changes: dict[str, Tensor], own: Sequence[OwnChange] = ()) -> None:
    """Change scores [rows, vocabulary] in place by what `gather_changes` found, sent to the device."""
    at = changes["bias_row"], changes["bias_token"]
    if len(at[0]):
        scores[at] = scores[at] + changes["bias"]
    at = changes["seen_row"], changes["seen_token"]
    if len(at[0]):
        seen, penalty = scores[at], changes["seen_penalty"]
        scores[at] = (seen / penalty).where(seen > 0, seen * penalty)
    at = changes["answer_row"], changes["answer_token"]
    if len(at[0]):
        scores[at] = scores[at] - changes["answer_penalty"]
    for each in own:
        found = each.processors.changed(each.prompt, each.answer, scores[each.row])
        scores[each.row] = -float("inf") if found is None else found
    at = changes["barred_row"], changes["barred_token"]
    if len(at[0]):
        scores[at] = -float("inf")
    apply_masks(scores, changes)


def _biases(
    rows: Index, targets: Index, slots: SlotPool, eos_token_ids: tuple[int, ...], vocab_size: int
) -> Arrays:
    """Return logit_bias, and the tokens that would end a request before its min_tokens.

    With ignore_eos the model's EOS ends nothing and is always allowed; the request's own stop tokens are
    still forbidden.
    """
    biased: list[tuple[int, int, float]] = []
    barred: list[tuple[int, int]] = []
    too_short = targets < slots.min_total[rows]
    for index, row in enumerate(rows.tolist()):
        params = slots.requests[row].params
        biased += [(index, token, bias) for token, bias in params.logit_bias.items()]
        if too_short[index]:
            stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
            barred += [(index, token) for token in sorted(stops) if token < vocab_size]
    bias_rows, bias_tokens, values = zip(*biased) if biased else ((), (), ())
    assert all(0 <= token < vocab_size for token in bias_tokens), "a biased token outside the vocabulary"
    barred_rows, barred_tokens = zip(*barred) if barred else ((), ())
    return {
        "bias_row": np.array(bias_rows, dtype=np.int64),
        "bias_token": np.array(bias_tokens, dtype=np.int64),
        "bias": np.array(values, dtype=np.float32),
        "barred_row": np.array(barred_rows, dtype=np.int64),
        "barred_token": np.array(barred_tokens, dtype=np.int64),
    }


def _penalties(rows: Index, targets: Index, slots: SlotPool, known: KnownTokens) -> Arrays:
    """Return the penalties of the tokens that a row's prompt and answer have, and those of its answer's."""
    repetition, presence, frequency = (
        column[rows] for column in (slots.repetition_penalty, slots.presence_penalty, slots.frequency_penalty)
    )
    asking = np.flatnonzero((repetition != 1) | (presence != 0) | (frequency != 0))
    owner, token, occurrences = known.pairs(rows[asking], targets[asking], slots)
    owner = asking[owner]
    is_seen = np.flatnonzero(repetition[owner] != 1)
    is_answer = np.flatnonzero((occurrences > 0) & ((presence != 0) | (frequency != 0))[owner])
    answering = owner[is_answer]
    return {
        "seen_row": owner[is_seen],
        "seen_token": token[is_seen],
        "seen_penalty": repetition[owner[is_seen]],
        "answer_row": answering,
        "answer_token": token[is_answer],
        "answer_penalty": presence[answering]
        + frequency[answering] * occurrences[is_answer].astype(np.float32),
    }
