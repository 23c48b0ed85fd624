"""Sparse latent attention reads what its scores say, however requests are cut and wherever their pages lie.

The oracle is its mask form in float64: scores of all pairs of tokens, a stable sort of each row, and dense
attention over expanded keys and values from which the tokens that were not chosen are masked.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.int8_sparse import latent_attention
from attention.latent import LatentUp
from attention.sparse import SparseAttention, SparseMetadata, index_scores, top_positions
from continuous_batching.batch import Batch
from devices.shapes import AttentionShape, IndexShape, LatentShape
from tests.attention.planned import planned

NOTHING = np.empty(0, np.int64)
PAGE, TOP, LENGTH = 8, 12, 90
INDEX = IndexShape(num_heads=16, head_dim=24, top_k=TOP)
SHAPE = AttentionShape(4, 1, 32, PAGE, 0.2, torch.float32, (None,), latent=LatentShape(16, 20, 28, INDEX))


class Told:
    """One request's numbers: what each token brings, in float64."""

    def __init__(self, rng: np.random.Generator, length: int) -> None:
        def random(*sizes: int) -> Tensor:
            return torch.from_numpy(rng.standard_normal((length, *sizes))).float().double()

        self.latents, self.rope_keys, self.index_keys = random(32), random(16), random(24)
        self.nope, self.rope = random(4, 20), random(4, 16)
        self.index_query, self.weights = random(16, 24), random(16)

    def as_stored(self) -> Told:
        """What int8 leaves of these numbers, and bfloat16 of rope keys; an index is turned before."""
        made = copy(self)
        hadamard = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        block = torch.kron(hadamard, torch.kron(hadamard, hadamard)) / 8**0.5  # 24 = 3 x 8
        turn = torch.kron(torch.eye(3), block)

        def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
            scale = x.float().abs().amax(-1, keepdim=True) / 127
            return (x.float() / scale).round().double() * scale.to(dtype).double()

        made.latents = rounded(self.latents, torch.float32)
        made.rope_keys = self.rope_keys.bfloat16().double()
        made.index_keys = rounded(self.index_keys.float() @ turn, torch.float16)
        made.index_query = rounded(self.index_query.float() @ turn, torch.float16)
        made.weights = self.weights.half().double()
        return made

    def expected(self, up: LatentUp, first_key: int, top: int) -> tuple[Tensor, Tensor]:
        """Return what attention gives, [length, H, V], and which tokens each token reads."""
        length = len(self.latents)
        products = torch.einsum("tid,sd->tsi", self.index_query, self.index_keys).relu()
        scores = torch.einsum("tsi,ti->ts", products, self.weights)
        position = torch.arange(length)
        is_hidden = (position > position[:, None]) | (position < position[:, None].clamp_max(first_key))
        scores = scores.masked_fill(is_hidden, -torch.inf)
        order = torch.sort(scores, dim=-1, descending=True, stable=True)
        gaps = (order.values[:, top - 1] - order.values[:, top])[top + first_key :]
        assert gaps.min() > 1e-5, "the seed has two scores that float32 cannot tell apart: choose another"
        is_read = torch.zeros_like(is_hidden).scatter(1, order.indices[:, :top], True) & ~is_hidden
        keys = torch.einsum("sl,hnl->shn", self.latents, up.keys.double())
        values = torch.einsum("sl,hlv->shv", self.latents, up.values.double())
        scores = torch.einsum("thn,shn->hts", self.nope, keys)
        scores = (scores + torch.einsum("thr,sr->hts", self.rope, self.rope_keys)) * SHAPE.scale
        weights = scores.masked_fill(~is_read, -torch.inf).softmax(-1)
        return torch.einsum("hts,shv->thv", weights, values), is_read


def run(told: list[Told], cuts: list[list[int]], shape: AttentionShape, up: LatentUp) -> list[list[Tensor]]:
    """Compute all requests, whose spans end where `cuts` say; a step takes one span of each."""
    attention = latent_attention(shape)
    assert isinstance(attention, SparseAttention)
    rng = np.random.default_rng(1)
    pages = -(-LENGTH // PAGE)
    table = 1 + rng.permutation(len(told) * pages).reshape(len(told), pages).astype(np.int32)
    planes = attention.new_planes(1 + len(told) * pages)
    for plane in planes:
        plane[1:] = torch.nan if plane.is_floating_point() else 127
        plane[table[:, 0], : shape.first_key] = 0
    (latents, rope_keys), index_pages = attention.pages_of(planes), attention.index_pages(planes)
    done = [shape.first_key] * len(told)
    found: list[list[Tensor]] = [[] for _ in told]
    for stops in zip(*cuts):
        rows = [row for row, stop in enumerate(stops) if stop > done[row]]
        starts = np.array([done[row] for row in rows])
        ends = np.array([stops[row] for row in rows])
        batch = Batch(np.array(rows), starts, ends, NOTHING, NOTHING, NOTHING)
        metadata = planned(attention, batch, table)
        assert isinstance(metadata, SparseMetadata)
        parts = [slice(*each) for each in zip(starts.tolist(), ends.tolist())]

        def packed(name: str, rows: list[int] = rows, parts: list[slice] = parts) -> Tensor:
            return torch.cat([getattr(told[row], name)[part] for row, part in zip(rows, parts)]).float()

        attention.write(
            packed("latents")[:, None], packed("rope_keys")[:, None], latents, rope_keys, metadata
        )
        attention.write_index(packed("index_keys"), index_pages, metadata)
        assert attention.is_sparse(metadata) == bool((ends - shape.first_key > INDEX.top_k).any())
        if attention.is_sparse(metadata):
            attention.choose(packed("index_query"), packed("weights"), index_pages, metadata)
        nope, rope = packed("nope"), packed("rope")
        output = attention.attend_heads(nope, rope, up, latents, rope_keys, metadata, 0)
        for row, part in zip(rows, output.split((ends - starts).tolist())):
            found[row].append(part)
            done[row] = stops[row]
    return found


@pytest.mark.parametrize(("first_key", "int8"), [(0, False), (1, False), (0, True), (1, True)])
def test_chosen_tokens_alone_are_read(first_key: int, int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes and chunks, whose borders lie on both sides of the first choice, agree with the oracle.

    In int8 it reads what is left of the same numbers.
    """
    monkeypatch.setattr("attention.sparse.SCORE_ROWS", 7)
    monkeypatch.setattr("attention.sparse.SCORE_KEYS", 10)
    monkeypatch.setattr("attention.sparse.GATHERED_NUMBERS", 5 * TOP * 48)
    rng = np.random.default_rng(4)
    generator = torch.Generator().manual_seed(3)
    up = LatentUp(
        torch.randn(4, 20, 32, generator=generator) / 4, torch.randn(4, 32, 28, generator=generator)
    )
    told = [Told(rng, LENGTH) for _ in range(4)]
    cuts = [
        [LENGTH, LENGTH, LENGTH, LENGTH, LENGTH, LENGTH, LENGTH],
        [5, 11, 12, 13, 40, 89, LENGTH],
        [first_key + TOP, 13 + first_key, 14 + first_key, 60, 61, 62, LENGTH],
        [3, 70, 71, 72, 73, 74, LENGTH],
    ]
    found = run(told, cuts, replace(SHAPE, first_key=first_key, int8_pages=int8), up)
    for each, parts in zip([each.as_stored() if int8 else each for each in told], found):
        expected, is_read = each.expected(up, first_key, TOP)
        assert is_read[-1].sum() == TOP < LENGTH
        everything, _ = each.expected(up, first_key, LENGTH - 1 - first_key)
        assert (everything - expected)[-1].abs().max() > 0.1  # another choice would be seen
        torch.testing.assert_close(torch.cat(parts).double(), expected[first_key:], atol=2e-5, rtol=1e-4)


def test_equal_scores_are_chosen_from_the_lowest_position_on() -> None:
    scores = torch.tensor([
        [0.0, 2.0, 0.0, -1.0, 0.0, 3.0],
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [1.0, -torch.inf, -torch.inf, -torch.inf, -torch.inf, -torch.inf],
        [-3.0, -2.0, -2.0, -2.0, -1.0, -torch.inf],
    ])  # fmt: skip
    assert top_positions(scores, 3).tolist() == [[0, 1, 5], [0, 1, 2], [0, -1, -1], [1, 2, 4]]
    assert top_positions(scores[:, :2], 4).tolist()[0] == [0, 1, -1, -1]


def test_a_key_with_no_positive_product_beats_one_with_a_negative_score() -> None:
    query, weights = torch.ones(1, 2, 2), torch.tensor([[-1.0, -0.5]])
    scores = index_scores(query, weights, torch.tensor([[1.0, 0.0], [-1.0, -1.0], [0.5, 0.0]]))
    assert scores.tolist() == [[-1.5, 0.0, -0.75]]
    assert top_positions(scores, 2).tolist() == [[1, 2]]
