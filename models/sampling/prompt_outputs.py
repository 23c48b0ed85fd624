"""Compute what requests ask about their prompts: the log-probabilities of their tokens, and embeddings.

The prompt's next token is sampled as usual; this module reads the same hidden states once more. The
log-probability of a prompt token comes from the position before it. An embedding is the hidden state after
the last norm, at the last token of a prompt or summed over all of them; a step adds up its own tokens, so
that a prompt may be computed in chunks. A prompt with labels gets the log-probabilities of these tokens as
its continuation instead.

Legend: T tokens of the step, N those of them that are scored or pooled, P prompts that they belong to, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from borders.field_table import MOST_LOGPROBS
from continuous_batching.batch import Batch, Sampled, ragged_ranges
from continuous_batching.request import TokenLogprobs, Vector
from continuous_batching.slots import SlotPool
from kv_cache.device.transfer import all_to_host, to_device, to_host
from kv_cache.pages import Index
from models.decoder import Decoder
from models.sampling.logprobs import token_logprobs, top_logprobs

_PIECE_BYTES = 2**26  # bytes of float32 logits that are held at a time


@dataclass(frozen=True, slots=True)
class Scored:
    """The log-probabilities that a step must find, as the host knows them when the step begins."""

    at: Index  # [N] indices into the T
    tokens: Index  # [N] the prompt's next tokens
    num_tops: Index  # [N] how many of the most likely tokens are wanted as well
    counts: dict[int, int]  # how many of the N belong to each row, in this order


def scored_of(batch: Batch, slots: SlotPool) -> Scored | None:
    """Return the log-probabilities that the step must find; None if it computes none that are wanted."""
    asking = slots.scoring[batch.slots]
    known = np.array([request.num_scored for request in slots.requests[batch.slots]])
    starts = np.maximum(batch.starts, known)
    stops = np.minimum(batch.stops, slots.num_prompt[batch.slots] - 1)
    spans = np.flatnonzero(asking & (starts < stops))
    if not len(spans):
        return None
    rows, starts, stops = batch.slots[spans], starts[spans], stops[spans]
    lens = batch.stops - batch.starts
    offsets = (np.cumsum(lens) - batch.stops)[spans]  # added to a position, this gives its index in the step
    positions, counts = ragged_ranges(starts, stops), stops - starts
    wanted = [request.params.prompt_logprobs for request in slots.requests[rows]]
    return Scored(
        positions + np.repeat(offsets, counts),
        slots.token_ids[np.repeat(rows, counts), positions + 1].astype(np.int64),
        np.repeat(np.array(wanted), counts),
        dict(zip(rows.tolist(), counts.tolist())),
    )


def score(scored: Scored, hidden: Tensor, decoder: Decoder) -> Callable[[], dict[int, list[TokenLogprobs]]]:
    """Start to compute the log-probabilities, by row, from the hidden states [T, hidden] of a step.

    The function returned waits for it. Logits [N, V] are computed piece by piece, because those of a long
    prompt would not fit beside the model.
    """
    at, tokens = to_device(scored.at, hidden.device), to_device(scored.tokens, hidden.device)
    num_rows = max(1, _PIECE_BYTES // (4 * decoder.config.vocab_size))
    num_top = MOST_LOGPROBS if scored.num_tops.any() else 0
    pieces = [
        top_logprobs(decoder.logits(hidden[some]), following, num_top)
        for some, following in zip(at.split(num_rows), tokens.split(num_rows))
    ]
    arrived = all_to_host({name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]})

    def wait() -> dict[int, list[TokenLogprobs]]:
        found = iter(token_logprobs(scored.tokens, arrived(), scored.num_tops))
        return {row: [next(found) for _ in range(count)] for row, count in scored.counts.items()}

    return wait


@dataclass(frozen=True, slots=True)
class Pooled:
    """The tokens that a step must pool, as the host knows them when the step begins."""

    at: Index  # [N] indices into the T, prompt after prompt
    rows: Index  # [P] rows of the slot table
    counts: Index  # [P] how many of the N belong to each prompt
    labels: dict[int, tuple[int, ...]]  # labels by index into the P, for prompts that have any


def pooled_of(batch: Batch, slots: SlotPool) -> Pooled | None:
    """Return what the step must pool; None if it computes no token that counts."""
    asking = slots.pooling[batch.slots]
    firsts = np.array([request.first_pooled for request in slots.requests[batch.slots]])
    starts = np.maximum(batch.starts, firsts)
    stops = np.minimum(batch.stops, slots.num_prompt[batch.slots])
    spans = np.flatnonzero(asking & (starts < stops))
    if not len(spans):
        return None
    lens = batch.stops - batch.starts
    offsets = (np.cumsum(lens) - batch.stops)[spans]  # added to a position, this gives its index in the step
    starts, stops = starts[spans], stops[spans]
    rows = batch.slots[spans]
    labels = [request.params.label_token_ids for request in slots.requests[rows]]
    at = ragged_ranges(starts + offsets, stops + offsets)
    return Pooled(at, rows, stops - starts, {place: each for place, each in enumerate(labels) if each})


def pool(pooled: Pooled, hidden: Tensor, decoder: Decoder) -> Callable[[], dict[int, Vector]]:
    """Start to sum the hidden states [T, hidden] of a step, in float32 and by row.

    The function returned waits.
    """
    states = decoder.normed(hidden[to_device(pooled.at, hidden.device)]).float()
    if len(states) > len(pooled.rows):
        states = torch.stack([each.sum(0) for each in states.split(pooled.counts.tolist())])
    arrived, rows = to_host(states), pooled.rows.tolist()
    if not pooled.labels:
        return lambda: dict(zip(rows, arrived()))
    labelled = _labelled(pooled, hidden, decoder)
    return lambda: dict(zip(rows, arrived())) | labelled()


def _labelled(pooled: Pooled, hidden: Tensor, decoder: Decoder) -> Callable[[], dict[int, Vector]]:
    """Start to compute the log-probabilities of labels, by row, from the last token of each prompt."""
    places = np.array([*pooled.labels])
    at = pooled.at[np.cumsum(pooled.counts)[places] - 1]
    logprobs = decoder.logits(hidden[to_device(at, hidden.device)]).float().log_softmax(-1)  # [places, V]
    sizes = [len(each) for each in pooled.labels.values()]
    which = to_device(np.repeat(np.arange(len(sizes)), sizes), hidden.device)
    tokens = to_device(np.array([each for some in pooled.labels.values() for each in some]), hidden.device)
    arrived = to_host(logprobs[which, tokens])
    rows = pooled.rows[places].tolist()
    return lambda: dict(zip(rows, np.split(arrived(), np.cumsum(sizes)[:-1])))


@dataclass(frozen=True, slots=True)
class PromptOutputs:
    """What a step must compute about prompts, as the host knows it when the step begins."""

    scored: Scored | None
    pooled: Pooled | None


def outputs_of(batch: Batch, slots: SlotPool) -> PromptOutputs | None:
    """Return what the step must compute about prompts; None if nothing, as in nearly every step."""
    scoring, pools = slots.scoring[batch.slots].any(), slots.pooling[batch.slots].any()
    if not scoring and not pools:
        return None
    scored = scored_of(batch, slots) if scoring else None
    pooled = pooled_of(batch, slots) if pools else None
    return None if scored is None and pooled is None else PromptOutputs(scored, pooled)


def find(outputs: PromptOutputs, hidden: Tensor, decoder: Decoder) -> Callable[[Sampled], Sampled]:
    """Start to compute these outputs from the hidden states [T, hidden] of a step.

    The function returned waits for them and adds them to what the step sampled.
    """
    logprobs = None if outputs.scored is None else score(outputs.scored, hidden, decoder)
    pooled = None if outputs.pooled is None else pool(outputs.pooled, hidden, decoder)

    def add(sampled: Sampled) -> Sampled:
        return replace(
            sampled,
            prompt_logprobs=logprobs() if logprobs is not None else {},
            pooled=pooled() if pooled is not None else {},
        )

    return add
