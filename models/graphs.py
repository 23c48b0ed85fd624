"""How does a step of decodes run without the host launching each operator?

Steps are captured for a ladder of row counts. A captured step reads its inputs at fixed addresses, to which
they are sent in one copy; rows beyond the batch are padding on the null page.

Legend: R rows of a captured step, S spans of the batch, V vocabulary.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.reference import Attention, AttentionMetadata, StaticDecodes
from continuous_batching.batch import Batch
from continuous_batching.slots import SlotPool
from kv_cache.storage import KVCache
from kv_cache.transfer import to_device
from models.decoder import Decoder, StepInputs

log = logging.getLogger(__name__)

GRAPHS = {"cuda": "CUDAGraph", "npu": "NPUGraph"}  # the class of each device's module
COLUMNS = 5  # before the pages: token id, position, place to write, kv length, length that sets dynamic rope


def ladder(most: int, page_size: int) -> list[int]:
    """Numbers of rows to capture: doubling up to a page, then growing by a page, up to `most`.

    So there is at most a page of padding, and every padding row writes to its own place in the null page.
    """
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + min(sizes[-1], page_size)))
    return sizes


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """One captured step."""

    graph: Any
    pinned: tuple[Tensor, Tensor]  # int32 [COLUMNS + max_pages, R], which the host fills by turns
    sent: Tensor  # the same on the device
    metadata: AttentionMetadata
    logits: Tensor  # [R, V]


class DecodeGraphs:
    """Captured steps of decodes only, of up to `most` rows."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, attention: Attention, slots: SlotPool, most: int
    ) -> None:
        self.decoder, self.cache, self.attention, self.slots = decoder, cache, attention, slots
        wanted = ladder(min(most, slots.num_slots), slots.page_size)
        self.sizes = attention.graph_sizes(wanted)
        if self.sizes != wanted:
            log.warning(
                "graphs: of the sizes %s the device holds %s; steps of others run in the next larger one",
                ", ".join(map(str, wanted)),
                ", ".join(map(str, self.sizes)),
            )
        self.device = torch.get_device_module(attention.device)
        self.steps: dict[int, CapturedStep] = {}
        self._turn = 0  # a step's inputs may be written while those of the step before are still being copied

    def takes(self, batch: Batch) -> bool:
        """Whether a batch is decodes only, and not too many."""
        return batch.is_one_token_each and batch.num_spans <= self.sizes[-1]

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes, the largest first, since the others share its memory."""
        pool = self.device.graph_pool_handle()
        # Before a capture its step runs once with padding only, in more rows than the null page may have
        # places
        scratch = self.cache.scratch(self.sizes[-1])
        for size in reversed(self.sizes):
            self.steps[size] = self._captured(size, pool, scratch)
        log.info("graphs: decodes of up to %s rows, captured in %s sizes", self.sizes[-1], len(self.sizes))

    def drop(self) -> None:
        """Drop all captured steps, as must be done before the tensors that they read are replaced."""
        self.device.synchronize()
        self.steps.clear()

    def run(self, batch: Batch, unknown: Tensor | None) -> Tensor:
        """Logits [S, V] of a batch that `takes` allows; they are valid until the next run.

        `unknown` [U] are the tokens of the spans `batch.unknown`.
        """
        count = batch.num_spans
        step = self.steps[next(size for size in self.sizes if size >= count)]
        self._turn ^= 1
        pinned = step.pinned[self._turn]
        host = pinned.numpy()
        self._fill(host[:, :count], batch)
        _pad(host[:, count:])
        step.sent.copy_(pinned, non_blocking=True)
        if unknown is not None:
            step.sent[0].index_copy_(0, to_device(batch.unknown, unknown.device), unknown.int())
        self.attention.replay(step.graph, step.metadata, host[3].tolist())
        return step.logits[:count]

    def _fill(self, host: NDArray[np.int32], batch: Batch) -> None:
        slots = self.slots
        packed = slots.inputs(batch)
        width = -(-int(batch.stops.max()) // slots.page_size)
        host[0], host[1], host[2], host[3] = packed.token_ids, batch.starts, packed.write_index, batch.stops
        host[4] = np.maximum(slots.num_prompt[batch.slots], batch.stops)
        host[COLUMNS : COLUMNS + width] = slots.page_table[batch.slots, :width].T

    def _captured(self, size: int, pool: Any, scratch: KVCache) -> CapturedStep:
        shape = (COLUMNS + self.slots.max_pages, size)
        pinned = tuple(torch.zeros(shape, dtype=torch.int32, pin_memory=True) for _ in range(2))
        _pad(pinned[0].numpy())
        sent = pinned[0].to(self.attention.device)
        self._step(sent, scratch)  # operators compile and allocate, which they must not do in a capture
        graph = getattr(self.device, GRAPHS[self.attention.device.type])()
        with self.device.graph(graph, pool=pool):
            logits, metadata = self._step(sent, self.cache)
        return CapturedStep(graph, pinned, sent, metadata, logits)

    def _step(self, sent: Tensor, cache: KVCache) -> tuple[Tensor, AttentionMetadata]:
        token_ids, positions, write_index, kv_lens, rope_lens = sent[:COLUMNS]
        page_table = sent[COLUMNS:].t().contiguous()
        metadata = self.attention.plan_static(StaticDecodes(write_index, page_table, kv_lens))
        is_dynamic = self.decoder.config.rope.kind == "dynamic"
        step = StepInputs(token_ids, positions, metadata, cache, rope_lens if is_dynamic else None)
        return self.decoder.logits(self.decoder(step)), metadata


def _pad(host: NDArray[np.int32]) -> None:
    """Padding rows: one token each, at position 0, written to different places of the null page."""
    host[:] = 0
    host[2] = np.arange(host.shape[1])
    host[3:5] = 1
