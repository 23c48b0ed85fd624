"""Compute the log-probabilities of prompt tokens, for requests that ask for them.

Legend: T tokens of the step, N those of them whose next token's log-probability is wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from borders.field_table import MOST_LOGPROBS
from continuous_batching.batch import Batch, ragged_ranges
from continuous_batching.request import TokenLogprobs
from continuous_batching.slots import SlotPool
from kv_cache.device.transfer import all_to_host, to_device
from kv_cache.pages import Index
from models.decoder import Decoder
from models.sampling.logprobs import token_logprobs, top_logprobs

_PIECE_BYTES = 2**26  # bytes of float32 logits that are held at a time


@dataclass(frozen=True, slots=True)
class Wanted:
    """The log-probabilities that a step must find, as the host knows them when the step begins."""

    at: Index  # [N] indices into the T
    tokens: Index  # [N] the prompt's next tokens
    num_tops: Index  # [N] how many of the most likely tokens are wanted as well
    counts: dict[int, int]  # how many of the N belong to each row, in this order


def wanted_of(batch: Batch, slots: SlotPool) -> Wanted | None:
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
    return Wanted(
        positions + np.repeat(offsets, counts),
        slots.token_ids[np.repeat(rows, counts), positions + 1].astype(np.int64),
        np.repeat(np.array(wanted), counts),
        dict(zip(rows.tolist(), counts.tolist())),
    )


def score(wanted: Wanted, hidden: Tensor, decoder: Decoder) -> Callable[[], dict[int, list[TokenLogprobs]]]:
    """Start to compute what is wanted, by row, from the hidden states [T, hidden] of a step.

    The function returned waits for it. Logits [N, V] are computed piece by piece, because those of a long
    prompt would not fit beside the model.
    """
    at, tokens = to_device(wanted.at, hidden.device), to_device(wanted.tokens, hidden.device)
    num_rows = max(1, _PIECE_BYTES // (4 * decoder.config.vocab_size))
    num_top = MOST_LOGPROBS if wanted.num_tops.any() else 0
    pieces = [
        top_logprobs(decoder.logits(hidden[some]), following, num_top)
        for some, following in zip(at.split(num_rows), tokens.split(num_rows))
    ]
    arrived = all_to_host({name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]})

    def wait() -> dict[int, list[TokenLogprobs]]:
        found = iter(token_logprobs(wanted.tokens, arrived(), wanted.num_tops))
        return {row: [next(found) for _ in range(count)] for row, count in wanted.counts.items()}

    return wait
