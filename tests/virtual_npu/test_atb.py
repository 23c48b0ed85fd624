"""The 310P's attention against fused attention over the same keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.virtual_npu.batches import Dense, oracle, paged
from tests.virtual_npu.right_calls import compressed
from virtual_npu.contract import Conditions
from virtual_npu.operators import operator
from virtual_npu.simulated_products import A2, P310

LENS = {"decodes": [(1, 70), (1, 3), (1, 128)], "spans": [(1, 70), (40, 40), (9, 200)]}


def split(cache: Tensor) -> Tensor:
    """[P, B, K * D] as [P, K * D / 16, B, 16]."""
    return cache.unflatten(2, (-1, 16)).transpose(1, 2).contiguous()


def over_pages(
    name: str, lens: list[tuple[int, int]], product: Any = P310, **more: Any
) -> tuple[Tensor, Dense]:
    """What an operator makes of a random batch in float32, and the batch."""
    batch, dense = paged(np.random.default_rng(3), torch.float32, lens=lens, heads=(4, 2), page_size=64)
    query = batch["query"]
    out = torch.empty_like(query)
    caches = [
        split(batch[each]) if product is P310 else batch[each].unflatten(2, (2, 64))
        for each in ("key", "value")
    ]
    operator(name)(
        Conditions(product=product, fp32=True),
        query=query,
        key_cache=caches[0],
        value_cache=caches[1],
        num_kv_heads=2,
        num_heads=4,
        scale_value=dense.scale,
        block_table=batch["block_table"],
        context_lens=torch.tensor([m for _, m in lens], dtype=torch.int32),
        out=out,
        **more,
    )
    return out, dense


@pytest.mark.parametrize("product", [P310, A2], ids=lambda product: product.name)
def test_decodes(product: Any) -> None:
    out, dense = over_pages("_npu_paged_attention", LENS["decodes"], product)
    torch.testing.assert_close(out.double(), oracle(dense)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_spans(lens: list[tuple[int, int]]) -> None:
    counts = torch.tensor([n for n, _ in lens], dtype=torch.int32)
    out, dense = over_pages("_npu_paged_attention_splitfuse_v2", lens, mask=compressed(), seq_len=counts)
    torch.testing.assert_close(out.double(), oracle(dense)[0], atol=1e-5, rtol=0)
