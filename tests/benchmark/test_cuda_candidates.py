"""Are other libraries' kernels asked for the same attention? By stand-ins made after their documentation."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.reference import Attention
from benchmark.micro import cuda_candidates as candidates
from continuous_batching.batch import Batch
from devices.shapes import AttentionShape
from tests.attention.planned import planned
from tests.attention.test_attention import alone

PAGE, PAGES = 16, 12
NOTHING = np.empty(0, np.int64)
SHAPE = AttentionShape(4, 2, 32, PAGE, 0.2, torch.float32, (None, 9))


def over_pages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    ends: list[int],
    pages: list[list[int]],
    lens: list[int],
    scale: float,
    left: int,
) -> Tensor:
    """Each sequence's last queries over its first `lens` tokens, `left` of them before their own."""
    window = None if left < 0 else left + 1
    shape = AttentionShape(query.shape[1], keys.shape[2], query.shape[2], PAGE, scale, query.dtype, (window,))
    parts = [
        alone(
            query[first:last],
            keys[held].flatten(0, 1)[:length],
            values[held].flatten(0, 1)[:length],
            shape,
            0,
        )
        for first, last, held, length in zip(ends, ends[1:], pages, lens)
    ]
    return torch.cat(parts).to(query.dtype)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """As torch 2.13 documents it: (-1, 0) is causal, (w, 0) causal with w before the query's own."""
    assert seqused_k is not None
    assert block_table is not None
    assert scale is not None
    assert window_size[1] == 0
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    lens = seqused_k.tolist()
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), max(lens))
    pages = [row[: -(-length // PAGE)] for row, length in zip(block_table.tolist(), lens)]
    return over_pages(query, key, value, cu_seq_q.tolist(), pages, lens, scale, window_size[0])


@dataclass
class Wrapper:
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper, as its page says."""

    workspace: Tensor
    kv_layout: str

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
    ) -> None:
        assert (self.kv_layout, causal, page_size, q_data_type) == ("NHD", True, PAGE, torch.float32)
        assert (num_qo_heads, num_kv_heads, head_dim_qk) == (4, 2, 32)
        every = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert {each.dtype for each in every} == {torch.int32}
        starts = paged_kv_indptr.tolist()
        indices = paged_kv_indices.tolist()
        self.pages = [indices[first:last] for first, last in pairwise(starts)]
        last = paged_kv_last_page_len.tolist()
        assert all(1 <= length <= PAGE for length in last)
        self.lens = [(len(held) - 1) * PAGE + length for held, length in zip(self.pages, last)]
        self.ends, self.scale, self.left = qo_indptr.tolist(), sm_scale, window_left

    def run(self, query: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        return over_pages(query, *paged_kv_cache, self.ends, self.pages, self.lens, self.scale, self.left)


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("name", candidates.NAMES)
def test_a_candidate_is_asked_for_the_attention_of_the_engine(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, random = Attention(SHAPE), torch.Generator().manual_seed(0)
    keys, values = (torch.randn(PAGES, PAGE, 2, 32, generator=random) for _ in range(2))
    starts, stops = np.array([20, 0, 31]), np.array([21, 40, 37])
    table = np.zeros((4, 3), np.int32)
    table[[0, 2, 3]] = [[5, 9, 0], [1, 7, 3], [4, 2, 8]]
    batch = Batch(np.array([0, 2, 3]), starts, stops, NOTHING, NOTHING, NOTHING)
    query = torch.randn(batch.num_tokens, 4, 32, generator=random)
    metadata = planned(attention, batch, table)

    def own(keys: Tensor, values: Tensor, layer: int) -> Tensor:
        return attention.attend(query, keys, values, metadata, layer)

    with pytest.raises(ValueError, match=f"^{name} reads pages on CUDA alone$"):
        candidates.made(name, query, batch, table, attention)
    monkeypatch.setattr(candidates, "DEVICE", "cpu")
    attend = candidates.made(name, query, batch, table, attention)
    candidates.check(attend, own, keys, values)
    for layer in range(2):
        torch.testing.assert_close(attend(keys, values, layer), own(keys, values, layer))
    with pytest.raises(ValueError, match=r"^its result differs, \d.* from the engine's own attention$"):
        candidates.check(lambda *_: attend(keys, values, 0).flip(0), own, keys, values)


def test_a_candidate_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "DEVICE", "cpu")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    batch = Batch(np.array([0]), np.array([0]), np.array([3]), NOTHING, NOTHING, NOTHING)
    with pytest.raises(ValueError, match=r"^flashinfer: import of flashinfer halted"):
        candidates.made(
            "flashinfer", torch.ones(3, 4, 32), batch, np.zeros((1, 1), np.int32), Attention(SHAPE)
        )
