"""Run steps of a decoder with recurrent states, without an engine: packed spans with states of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.recurrent import StateMetadata
from continuous_batching.batch import Batch
from kv_cache.device.storage import KVCache, LayerPages
from kv_cache.groups import DType
from models.checkpoint import weights
from models.config import LayerState
from models.decoder import Decoder
from models.layers.recurrent import new_states
from models.parallel.group import ALONE, NO_LINKS, Group, StageLinks
from models.parallel.share import Share
from models.quantization import Quantization
from models.step_inputs import StepInputs
from recipes.assembly import families
from recipes.assembly.decoders import shape_of
from tests.device_kinds import Way, machine, operators

PAGE_SIZE, LONGEST = 16, 256


@dataclass(frozen=True)
class Span:
    """Tokens of a request from `start` on; states are left in the request's row, and before that, by
    position, in the rows of `cuts`.
    """

    request: int
    start: int
    stop: int
    cuts: tuple[tuple[int, int], ...] = ()


def decoder_of(path: Path, **more: Any) -> Decoder:
    """The checkpoint's decoder; `more` as for `empty_decoder`."""
    decoder = empty_decoder(path, **more)
    weights.load(decoder, path)
    return decoder


def empty_decoder(
    path: Path,
    way: Way = "fused",
    group: Group = ALONE,
    dtype: DType = "float32",
    state_dtype: DType = "float32",
    quantization: Quantization | None = None,
    stage: tuple[int, int, StageLinks] = (0, 1, NO_LINKS),
) -> Decoder:
    """The decoder of a checkpoint, or one rank's part of it, before it has weights."""
    config = families.decoder_config(families.read(path))
    config = replace(config, dtype=dtype, quantization=quantization)
    assert config.recurrent is not None
    sizes = replace(config.recurrent, state_dtype=state_dtype)
    config = replace(config, recurrent=sizes)
    share = Share(group.rank, group.size, *stage[:2])
    ops, attention = operators("cpu", way, shape_of(PAGE_SIZE, share.part(config)))
    recurrence = machine("cpu", way).recurrence(sizes, dtype)
    decoder = Decoder(config, ops, attention, group, share, stage[2], recurrence)
    decoder.tabulate(LONGEST)
    return decoder


class Steps:
    """The requests of some prompts, each with pages and a row of states of its own: row r + 1 of request r.

    What no request has written is NaN. There are `spare` rows of states behind those of the requests.
    """

    def __init__(self, decoder: Decoder, prompts: Sequence[Sequence[int]], spare: int = 0) -> None:
        self.decoder, self.tokens = decoder, [list(prompt) for prompt in prompts]
        pages = -(-LONGEST // PAGE_SIZE)
        self.table = 1 + np.arange(len(prompts) * pages, dtype=np.int32).reshape(len(prompts), pages)
        self.sources = np.arange(1, 1 + len(prompts))  # the row of states that each request goes on from
        config, device = decoder.part, decoder.attention.device
        layers = []
        for layer in range(config.num_layers):
            state = config.layer_state(layer)
            made = decoder.attention.new_planes if state is None else partial(_states, state, device)
            layers.append(LayerPages(made, group=0 if state is None else 1))
        self.cache = KVCache(layers, PAGE_SIZE, [1 + self.table.size, 1 + len(prompts) + spare])
        for tensor in self.cache.tensors:
            tensor.fill_(torch.nan)

    @torch.no_grad()
    def run(self, spans: Sequence[Span]) -> Tensor:
        """Log-probabilities [S, V] at the end of each span of one step."""
        decoder, numbers = self.decoder, np.array([span.request for span in spans])
        starts, stops = (np.array([getattr(span, end) for span in spans]) for end in ("start", "stop"))
        positions = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        rows = np.repeat(numbers, stops - starts)
        token_ids = [self.tokens[row][at] for row, at in zip(rows, positions)]
        empty = np.empty(0, dtype=np.int64)
        batch = Batch(numbers, starts, stops, empty, empty, empty)
        places = self.table[rows, positions // PAGE_SIZE] * np.int64(PAGE_SIZE) + positions % PAGE_SIZE
        step = StepInputs(
            torch.tensor(token_ids),
            torch.from_numpy(positions),
            decoder.attention.plan(batch, self.table, places),
            self.cache,
            states=self._states(spans),
        )
        hidden = decoder(step)[torch.from_numpy(np.cumsum(stops - starts) - 1)]
        return decoder.logits(hidden).float().log_softmax(-1)

    def _states(self, spans: Sequence[Span]) -> StateMetadata:
        parts = []
        for span in spans:
            at, source = span.start, int(self.sources[span.request])
            for position, row in (*span.cuts, (span.stop, span.request + 1)):
                parts.append((at, position, source, row))
                at, source = position, row
            self.sources[span.request] = source
        return self.decoder.recurrence.plan(*(np.array(column) for column in zip(*parts)))

    def state(self, row: int) -> list[Tensor]:
        """What a row of states holds, of all layers."""
        layers = range(self.decoder.part.num_layers)
        kept = [layer for layer in layers if self.decoder.part.layer_state(layer) is not None]
        return [plane[row].clone() for layer in kept for plane in self.cache.of(layer)]


def _states(state: LayerState, device: torch.device, count: int) -> tuple[Tensor, ...]:
    return new_states(state, count, device)
