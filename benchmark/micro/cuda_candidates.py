"""Read the engine's pages with attention kernels of other libraries, for comparison.

The engine calls none of them. A kernel that is not installed, or that refuses the batch, is not measured, and
the result says why.

Legend: T tokens of the step, S spans, H/K query/kv heads, D head dim, P pages, B tokens a page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.reference import Attention
from continuous_batching.batch import Batch
from devices.shapes import AttentionShape

Attend = Callable[[Tensor, Tensor, int], Tensor]  # keys and values [P, B, K, D], the layer -> [T, H, D]

DEVICE = "cuda"
WORKSPACE = 128 * 2**20
NEAR = 3e-2  # tolerance in bfloat16


@dataclass(frozen=True, slots=True)
class Spans:
    """A batch in the form that all kernels take; int32."""

    query: Tensor  # [T, H, D]
    shape: AttentionShape
    page_table: Tensor  # [S, pages], on the device
    query_ends: NDArray[np.int32]  # [S + 1], from 0
    kv_lens: NDArray[np.int32]  # [S]

    def sent(self, array: NDArray[np.int32]) -> Tensor:
        """Return the numbers as a tensor on the query's device."""
        return torch.from_numpy(array).to(self.query.device)


def varlen_attn(spans: Spans) -> Attend:
    """Prepare torch.nn.attention.varlen.varlen_attn, which has a block table since torch 2.12."""
    from torch.nn.attention.varlen import varlen_attn

    shape = spans.shape
    ends, lens = spans.sent(spans.query_ends), spans.sent(spans.kv_lens)
    longest = int(np.diff(spans.query_ends).max()), int(spans.kv_lens.max())

    def attend(keys: Tensor, values: Tensor, layer: int) -> Tensor:
        window = shape.windows[layer]
        return varlen_attn(
            spans.query,
            keys,
            values,
            ends,
            None,
            *longest,
            scale=shape.scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=shape.num_heads != shape.num_kv_heads,
            seqused_k=lens,
            block_table=spans.page_table,
        )

    return attend


def flashinfer(spans: Spans) -> Attend:
    """Prepare flashinfer's BatchPrefillWithPagedKVCacheWrapper, for prompts, chunks and decodes together."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    shape = spans.shape
    counts = -(-spans.kv_lens // shape.page_size)
    held = torch.arange(spans.page_table.shape[1], device=spans.query.device) < spans.sent(counts)[:, None]
    planned = {}
    for window in set(shape.windows):
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=spans.query.device)
        planned[window] = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        planned[window].plan(
            spans.sent(spans.query_ends),
            spans.sent(np.append(0, np.cumsum(counts)).astype(np.int32)),
            spans.page_table[held],
            spans.sent((spans.kv_lens - 1) % shape.page_size + 1),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            sm_scale=shape.scale,
            window_left=-1 if window is None else window - 1,
            q_data_type=shape.dtype,
        )

    def attend(keys: Tensor, values: Tensor, layer: int) -> Tensor:
        return planned[shape.windows[layer]].run(spans.query, (keys, values))

    return attend


MAKERS: dict[str, Callable[[Spans], Attend]] = {"varlen_attn": varlen_attn, "flashinfer": flashinfer}
NAMES = tuple(MAKERS)


def made(
    name: str, query: Tensor, batch: Batch, page_table: NDArray[np.int32], attention: Attention
) -> Attend:
    """Return the library's attention over a batch; raises ValueError where the library is not available."""
    if query.device.type != DEVICE:
        raise ValueError(f"{name} reads pages on CUDA alone")
    ends = np.append(0, np.cumsum(batch.stops - batch.starts)).astype(np.int32)
    width = -(-int(batch.stops.max()) // attention.shape.page_size)
    table = torch.from_numpy(page_table[batch.slots, :width]).to(query.device)
    spans = Spans(query, attention.shape, table, ends, batch.stops.astype(np.int32))
    try:
        return MAKERS[name](spans)
    except (ImportError, RuntimeError, TypeError) as error:
        raise ValueError(f"{name}: {_line(error)}") from error


def check(attend: Attend, own: Attend, keys: Tensor, values: Tensor) -> None:
    """Raise ValueError unless the first layer's result agrees with the engine's own attention."""
    try:
        found = attend(keys, values, 0)
    except (RuntimeError, TypeError) as error:
        raise ValueError(_line(error)) from error
    apart = float((found.float() - own(keys, values, 0).float()).abs().max())
    if not apart <= NEAR:
        raise ValueError(f"its result differs, {apart:.2g} from the engine's own attention")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
