"""An NPU's attention to a part of the keys gives the sums of weights by which parts are joined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.latent import LatentAttention
from attention.reference import Attention
from continuous_batching.batch import Batch
from devices.shapes import AttentionShape
from kv_cache.device.storage import KVCache, LayerPages
from tests.attention.planned import eager, planned, replayed
from tests.attention.test_attention import NOTHING, shape
from tests.attention.test_latent import PUBLISHED
from tests.device_kinds import operators, stand_in_alone

pytestmark = [pytest.mark.npu, stand_in_alone]
PLAIN = shape(windows=(None,), page_size=32)
LATENT = replace(PUBLISHED, windows=(None,))


@pytest.mark.parametrize("sizes", [PLAIN, LATENT], ids=["heads", "latents"])
@pytest.mark.parametrize("way", [eager, replayed])
def test_sums_are_those_of_the_definition(
    sizes: AttentionShape, way: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    """Read parts of several requests' keys, by an NPU and by the definition over the same pages."""
    fused, generator = operators("npu", "fused", sizes)[1], torch.Generator().manual_seed(5)
    plain: Attention = Attention(sizes) if sizes.latent is None else LatentAttention(sizes)
    stops = np.array([37, 70, 5])
    table = 1 + np.arange(3 * 5, dtype=np.int32).reshape(3, 5)
    cache = KVCache([LayerPages(plain.new_planes)], sizes.page_size, [1 + table.size])
    for plane in cache.of(0):
        plane.copy_(torch.randn(plane.shape, generator=generator))
    rope = 0 if sizes.latent is None else sizes.latent.rope_dim
    query = torch.randn(3, sizes.num_heads, sizes.head_dim + rope, generator=generator)
    batch = Batch(np.arange(3), stops - 1, stops, NOTHING, NOTHING, NOTHING)
    wanted = plain.attend_with_sums(query, *cache.of(0), planned(plain, batch, table), 0)
    sent = [each.to(fused.device) for each in (query, *cache.of(0))]
    found = way(fused, batch, table, lambda metadata: fused.attend_with_sums(*sent, metadata, 0))
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)
