"""Ask a device whether decodes are right without a mask in captured steps, and how a band gives a window.

vllm-ascend #12605 found wrong answers without a mask in graph mode only. The engine's own attention therefore
captures a step, and replays it with other lengths, pages and numbers of filler rows, in layers with windows
and without. Each replay is compared with the masked call of the same batch, made outside of graphs.

Legend: R rows of the captured step, P pages, B tokens a page, H query heads, K key and value heads, D head
dim, L latent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.reference import StaticDecodes
from devices.ascend_limits import LATENT_ROPE, AscendProduct
from devices.shapes import AttentionShape, LatentShape
from doctor.verify.npu.questions import (
    NEAR,
    Band,
    Found,
    Probe,
    attention_apart,
    captured,
    fused,
    rows_apart,
    time_us,
)
from models.layers.dtypes import TORCH_DTYPES
from recipes.machine import Npu

# The step has 12 rows, a page 128 tokens, the cache 24 pages, and a request 128 pages, which recur.
ROWS, PAGE, POOL, WIDTH = 12, 128, 24, 128
# The keys of each request, by replay: lengths at and between the edges of pages, all longer or shorter than
# before. Rows without a request are filler as in the engine: one key of the null page.
REPLAYS: tuple[tuple[int, ...], ...] = (
    (1, 2, 127, 128, 129, 300, 700, 64, 5, 256, 257, 31),
    (2000, 1, 128, 640, 3, 129, 17),
    (2, 1500),
    (129, 700, 2048, 699, 513, 512, 511, 385, 384, 383, 257, 1999),
    (1, 2, 127, 128, 129, 300, 700, 64, 5, 256, 257, 31),
)
LONG = (16_384, 3, 9_001)  # a further replay; a stand-in, which is slow, has it with its last shape alone
WINDOWS = (None, 200, None)  # one layer has a window, so that one graph has calls with and without a mask
# (query heads, key and value heads); a stand-in is asked only the last. No page of the operator has fewer key
# heads than query heads where these are 64 wide, as in Qwen2.5-0.5B with its 14 over 2.
HEADS = ((8, 8), (32, 8), (28, 4), (14, 2), (8, 1))
# (queries, keys) of spans, and windows within a page and across one, by which pre_tokens is judged
SPANS, BANDS = [(1, 4), (1, 260), (40, 500), (300, 300)], (5, 130)
LATENT = LatentShape(rope_dim=LATENT_ROPE, nope_dim=128, value_dim=128)


class Decodes:
    """A step of decodes over one cache, in every layer of a shape, with a mask or without."""

    def __init__(self, machine: Npu, shape: AttentionShape) -> None:
        from attention.npu.fused_attention import FusedAttention
        from attention.npu.latent_attention import FusedLatentAttention

        kind = FusedAttention if shape.latent is None else FusedLatentAttention
        self.shape, self.device = shape, machine.device
        self.generator = torch.Generator().manual_seed(shape.num_heads)
        self.unmasked, self.masked = (
            kind(shape, machine.device, replace(machine.product, unmasks_decodes=each))
            for each in (True, False)
        )
        for layer in range(len(shape.windows)) if shape.has_sinks else ():
            sinks = self._drawn(shape.num_heads)
            self.unmasked.sinks[layer] = self.masked.sinks[layer] = sinks
        self.caches = [self._cache() for _ in shape.windows]
        self.queries = [self._drawn(ROWS, shape.num_heads, width) for width in self._query_widths]
        self.pages = torch.zeros(ROWS, WIDTH, dtype=torch.int32, device=self.device)
        if shape.latent is not None:
            self.up = self._projections(machine, shape.latent)

    @property
    def _query_widths(self) -> tuple[int, ...]:
        latent = self.shape.latent
        return (self.shape.head_dim,) if latent is None else (latent.nope_dim, latent.rope_dim)

    def _drawn(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=self.generator).to(self.shape.dtype).to(self.device)

    def _cache(self) -> tuple[Tensor, Tensor]:
        """Return keys and values [P, B, K, D]; or latents and the parts of the keys that carry positions."""
        sizes = POOL, PAGE, self.shape.num_kv_heads
        latent = self.shape.latent
        keys = self._drawn(*sizes, self.shape.head_dim)
        values = self._drawn(*sizes, self.shape.head_dim if latent is None else latent.rope_dim)
        if self.shape.first_key:  # any page may be a request's first, so each begins with the uncounted key
            keys[:, 0], values[:, 0] = 0, 0
        return keys, values

    def _projections(self, machine: Npu, latent: LatentShape) -> Any:
        from models.ops.npu.ops import NpuOps

        heads, width = self.shape.num_heads, self.shape.head_dim
        keys, values = self._drawn(heads, latent.nope_dim, width), self._drawn(heads, width, latent.value_dim)
        return NpuOps(machine.product).pack_up(keys / latent.nope_dim**0.5, values / width**0.5)

    def next_batch(self, kv_lens: tuple[int, ...]) -> list[int]:
        """Write other queries and pages where captured steps read them; returns the lengths of all rows."""
        for each in self.queries:
            each.copy_(self._drawn(*each.shape))
        pages = torch.randint(1, POOL, (ROWS, WIDTH), generator=self.generator, dtype=torch.int32)
        pages[len(kv_lens) :] = 0
        self.pages.copy_(pages)
        return [*kv_lens, *[1] * (ROWS - len(kv_lens))]

    def planned(self, attention: Any, kv_lens: list[int] | None = None) -> Any:
        """Return the metadata of a step to capture, or of a step that runs at once over these lengths."""
        rows = torch.zeros(ROWS, dtype=torch.int32, device=self.device)
        made = attention.plan_static(StaticDecodes(rows, self.pages, rows + 1))
        if kv_lens is None:
            return made
        (part,) = made.parts
        return replace(made, parts=(replace(part, kv_lens=kv_lens),))

    def attend(self, attention: Any, metadata: Any) -> Tensor:
        """Return the attention output of each layer: [layers, R, H, D]."""
        found = []
        for layer, cache in enumerate(self.caches):
            if self.shape.latent is None:
                found.append(attention.attend(*self.queries, *cache, metadata, layer))
            else:
                found.append(attention.attend_heads(*self.queries, self.up, *cache, metadata, layer))
        return torch.stack(found)

    def captured(self, attention: Any) -> tuple[Any, Any, Tensor]:
        """Capture a step; returns its graph, its metadata and its output."""
        npu = torch.get_device_module("npu")
        graph, metadata = npu.NPUGraph(), self.planned(attention)
        with captured(graph):
            output = self.attend(attention, metadata)
        return graph, metadata, output

    def apart(self, replays: Sequence[tuple[int, ...]]) -> float:
        """Return how far unmasked decodes are from masked ones, both at once and in replays of one graph."""
        graph, metadata, output = self.captured(self.unmasked)
        far = 0.0
        for replay in replays:
            kv_lens = self.next_batch(replay)
            wanted = self.attend(self.masked, self.planned(self.masked, kv_lens))
            self.unmasked.replay(graph, [metadata], kv_lens)
            for found in (output, self.attend(self.unmasked, self.planned(self.unmasked, kv_lens))):
                far = max(far, rows_apart(found[:, : len(replay)], wanted[:, : len(replay)]))
        return far

    def replay_us(self, machine: Npu, attention: Any) -> float:
        """Return the microseconds of a replay."""
        graph, metadata, _ = self.captured(attention)
        return time_us(machine, partial(attention.replay, graph, [metadata], self.next_batch(REPLAYS[-1])))


def unmasks_decodes(machine: Npu) -> Found:
    """Ask for each dtype and shape that the product supports; both ways are timed for one of the shapes."""
    shapes = list(_shapes(machine.product, HEADS[-1:] if machine.asked.virtual else HEADS))
    for number, (name, shape) in enumerate(shapes, 1):
        has_long = number == len(shapes) or not machine.asked.virtual
        if (far := Decodes(machine, shape).apart([*REPLAYS, LONG] if has_long else REPLAYS)) > NEAR:
            return False, f"{far:.2g} from decodes with a mask: {name}"
    decodes = Decodes(machine, shape)
    bare_us, masked_us = (decodes.replay_us(machine, each) for each in (decodes.unmasked, decodes.masked))
    return True, f"right in graphs; {bare_us:.0f} us a replay without a mask, {masked_us:.0f} us with it"


def _shapes(
    product: AscendProduct, heads_over: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, AttentionShape]]:
    """Yield the shapes that engines on the product request, with their names; the last is an ordinary one."""
    plain = AttentionShape(8, 8, 128, PAGE, 128**-0.5, TORCH_DTYPES[product.dtypes[0]], WINDOWS)
    if product.has_latents:
        whole = replace(plain, num_kv_heads=1, head_dim=512, scale=192**-0.5, windows=(None, None))
        yield "latents", replace(whole, latent=LATENT)
    yield "a first key that does not count", replace(plain, windows=(None,), first_key=1)
    if product.dtypes[0] == "bfloat16":
        yield "attention sinks", replace(plain, num_heads=16, num_kv_heads=2, head_dim=64, has_sinks=True)
    for dtype_name in product.dtypes if product.packs_float16 else product.dtypes[:1]:
        for dim in product.head_dims:
            for heads, kv_heads in heads_over:
                sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "scale": dim**-0.5}
                name = f"{heads} heads of {dim} over {kv_heads} in {dtype_name}"
                yield name, replace(plain, dtype=TORCH_DTYPES[dtype_name], **sizes)


def counts_own_key(machine: Npu) -> Found:
    """Ask which pre_tokens of a band gives a window of W keys, in decodes, a chunk and a prompt.

    The engine passes W - 1, which is right by the operator's page, while vllm-ascend passes W. Replays of
    layers with windows are compared with calls outside of graphs where `unmasks_decodes` is asked.
    """
    cuts = list(machine.product.cuts(np.array([queries for queries, _ in SPANS])))
    dtype, far = TORCH_DTYPES[machine.product.dtypes[0]], {}
    for more in (0, 1):
        far[more] = max(
            attention_apart(machine, dtype, SPANS[first:last], kv_heads, Band(window, window - 1 + more))
            for first, last in cuts
            for kv_heads in (8, 2)
            for window in BANDS
        )
        if far[more] <= NEAR:
            return bool(more), f"{far[more]:.2g} from float32 with pre_tokens W{'' if more else ' - 1'}"
    return False, (
        f"layers with a window are wrong: {far[0]:.2g} from float32 with pre_tokens W - 1, and"
        f" {far[1]:.2g} with W"
    )


MASK_PROBES = (
    Probe("unmasks_decodes", "are decodes right without a mask, also in graphs?", fused, unmasks_decodes),
    Probe(
        "counts_own_key",
        "does a window's pre_tokens count a query's own key?",
        fused,
        counts_own_key,
    ),
)
