"""Compute the embeddings of prompts that ask for one.

An embedding is the hidden state after the last norm, at the last token of a prompt or summed over all of
them; a step adds up its own tokens, so that a prompt may be computed in chunks. A prompt with labels gets the
log-probabilities of these tokens as its continuation instead.

Legend: T tokens of the step, N those of them that count, P prompts that they belong to, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from continuous_batching.batch import Batch, ragged_ranges
from continuous_batching.request import Vector
from continuous_batching.slots import SlotPool
from kv_cache.device.transfer import to_device, to_host
from kv_cache.pages import Index
from models.decoder import Decoder


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
