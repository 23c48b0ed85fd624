"""Let each query attend to latents in C++ by itself, so that its bits do not depend on its batch.

`latent.cpp` reads what `attention.latent` defines for absorbed queries. Long spans are not expanded here, as
they are in plain torch, because their sums would then have another order than those of decodes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from attention.latent import LatentAttention
from attention.reference import Span
from devices.cpp_sources import compiled_source
from devices.shapes import AttentionShape

SOURCE = Path(__file__).with_name("latent.cpp")


class CompiledLatents:
    """The compiled source."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_long
        self._attend = library.attend
        self._attend.argtypes = [*[pointer] * 5, *[integer] * 5, ctypes.c_float, ctypes.c_int]
        self._attend.restype = None

    def attend(self, query: Tensor, latents: Tensor, rope_keys: Tensor, start: int, scale: float) -> Tensor:
        """Let queries [T, H, L + R] from position `start` on read latents [n, L] and rope keys [n, R]."""
        query, latents, rope_keys = (each.float().contiguous() for each in (query, latents, rope_keys))
        output = torch.empty(*query.shape[:2], latents.shape[1])
        num_threads = torch.get_num_threads()
        scores = torch.empty(num_threads, start + len(query))
        self._attend(
            *(each.data_ptr() for each in (query, latents, rope_keys, output, scores)),
            *(*query.shape[:2], latents.shape[1], rope_keys.shape[1], start),
            *(scale, num_threads),
        )
        return output


class CpuLatentAttention(LatentAttention):
    """Latent attention of which each query has the same bits in any batch."""

    gives_sums = False

    def __init__(self, shape: AttentionShape, compiled: CompiledLatents) -> None:
        super().__init__(shape)
        self._compiled = compiled

    def expands(self, num_tokens: int) -> bool:
        """See LatentAttention.expands; a query is absorbed however many are beside it."""
        return False

    def _attend_span(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        span: Span,
        window: int | None,
        output: Tensor,
        sinks: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> None:
        assert window is None, "no layer with latents has a window"
        assert sinks is None, "no layer with latents has sinks"
        assert sums is None, "it gives no sums"
        rank, first = values.shape[-1], min(self.shape.first_key, span.start)
        rows = slice(span.first_row, span.first_row + span.stop - span.start)
        latents, rope_keys = values[first:, 0], keys[first:, 0, rank:]
        read = self._compiled.attend(query[rows], latents, rope_keys, span.start - first, self.shape.scale)
        output[rows] = read.to(output.dtype)


@cache
def compiled_latents() -> CompiledLatents | str:
    """Return the source compiled for this machine, or why there is none."""
    found = compiled_source(SOURCE)
    return found if isinstance(found, str) else CompiledLatents(found)
