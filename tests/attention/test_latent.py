"""Latent attention is right on each device, however requests are cut and wherever their pages lie.

The oracle expands every latent to keys and values of each head, in float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.int8_pages import packed, unpacked
from attention.latent import LatentAttention
from attention.reference import AttentionMetadata, StaticDecodes
from continuous_batching.batch import Batch
from devices.ascend_limits import MOST_GATHERED
from devices.shapes import AttentionShape, LatentShape
from doctor.verify.npu.latent_questions import joins_latents
from models.ops.reference import Ops
from recipes.machine import Npu, start
from tests.attention.planned import planned
from tests.attention.test_attention import MOST_TOKENS, NOTHING, PAIRS, ROWS, Bench, Pair, Told
from tests.device_kinds import has_npu, on_each, operators, section
from tests.thorough import cases

HEADS, PAGE = 4, 16
SMALL = AttentionShape(HEADS, 1, 32, PAGE, 0.2, torch.float32, (None, None), latent=LatentShape(16, 20, 24))
PUBLISHED = replace(SMALL, head_dim=512, latent=LatentShape(64, 128, 128))  # all that fused attention takes


class LatentBench(Bench):
    """A bench whose requests are told latents and rope keys, for keys and values."""

    def __init__(self, ops: Ops, attention: LatentAttention, seed: int = 0) -> None:
        super().__init__(attention, seed)
        self.attention: Any = attention
        self.latent = attention.latent
        self.ups = [
            (self.random(HEADS, self.latent.nope_dim, self.shape.head_dim) / 4,
             self.random(HEADS, self.shape.head_dim, self.latent.value_dim) / 4)
            for _ in self.layers
        ]  # fmt: skip
        self.packed = [ops.pack_up(*(each.to(self.device) for each in up)) for up in self.ups]

    def random(self, *sizes: int) -> Tensor:
        return torch.from_numpy(self.rng.standard_normal(sizes)).to(self.shape.dtype)

    def _step_layer(self, layer: int, spans: dict[int, int], metadata: object) -> None:
        total, rope_dim = sum(spans.values()), self.latent.rope_dim
        nope, rope = (self.random(total, HEADS, width) for width in (self.latent.nope_dim, rope_dim))
        latents, rope_keys = self.random(total, 1, self.shape.head_dim), self.random(total, 1, rope_dim)
        pages, device = self.cache.of(layer), self.device
        self.attention.write(latents.to(device), rope_keys.to(device), *pages, metadata)
        found = self.attention.attend_heads(
            nope.to(device), rope.to(device), self.packed[layer], *pages, metadata, layer
        )
        first = 0
        for row, count in spans.items():
            rows, told = slice(first, first + count), self.told[row]
            for kept, new in ((told.keys, latents), (told.values, rope_keys)):
                new = unpacked(packed(new)) if self.shape.int8_pages else new
                if len(kept) <= layer:
                    kept.append(new[:0, 0])
                kept[layer] = torch.cat((kept[layer], new[rows, 0]))
            expected = self.expected(layer, nope[rows], rope[rows], told)
            torch.testing.assert_close(
                found[rows].cpu().double(), expected, rtol=0, atol=2e-5 * expected.abs().max().item()
            )
            first += count

    def expected(self, layer: int, nope: Tensor, rope: Tensor, told: Told) -> Tensor:
        """[t, H, V] of the last t positions of a request, with keys and values of each head."""
        latents, rope_keys = told.keys[layer].double(), told.values[layer].double()
        up_keys, up_values = (each.double() for each in self.ups[layer])
        keys = torch.einsum("hnl,sl->shn", up_keys, latents)
        scores = torch.einsum("thn,shn->hts", nope.double(), keys)
        scores += torch.einsum("thr,sr->hts", rope.double(), rope_keys)
        count, length = len(nope), len(latents)
        hidden = torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)
        weights = (scores * self.shape.scale).masked_fill(hidden, -torch.inf).softmax(-1)
        values = torch.einsum("sl,hlv->shv", latents, up_values)
        return torch.einsum("hts,shv->thv", weights, values)


def bench(pair: Pair, seed: int = 0, int8_pages: bool = False) -> LatentBench:
    shape = PUBLISHED if pair == ("npu", "fused") else SMALL
    ops, attention = operators(*pair, replace(shape, int8_pages=int8_pages))
    assert isinstance(attention, LatentAttention)
    return LatentBench(ops, attention, seed)


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return request.param


def test_prompts_chunks_and_decodes_of_one_step(pair: Pair) -> None:
    """Of a long span the latents are expanded, of a short one queries are absorbed."""
    made = bench(pair)
    made.step({0: 150, 3: 1, 1: 33})
    made.step({2: 17, 0: 1, 1: 100, 3: 1})
    made.step({0: 1, 1: 1, 2: 1, 3: 1})
    made.step({4: 2, 0: 3, 2: 200, 1: 16})
    made.step({2: 1})


@pytest.mark.parametrize("seed", range(cases(2, 20)))
def test_random_steps(pair: Pair, seed: int) -> None:
    made = bench(pair, seed)
    for _ in range(6):
        rows = made.rng.permutation(ROWS)[: made.rng.integers(1, ROWS + 1)]
        lens = made.rng.choice([1, 1, 2, 16, 17, 40, 90], len(rows))
        spans = dict(zip(rows.tolist(), lens.tolist()))
        made.step({row: n for row, n in spans.items() if made.told[row].length + n <= MOST_TOKENS})


@pytest.mark.parametrize("pair", on_each("reference")[:1])
def test_int8_pages(pair: Pair) -> None:
    made = bench(pair, int8_pages=True)
    made.step({0: 150, 3: 1, 1: 33})
    made.step({0: 1, 3: 1, 1: 90})


def test_pages_hold_a_latent_and_a_rope_key() -> None:
    attention = LatentAttention(replace(SMALL, int8_pages=True))
    assert [each.shape for each in attention.new_planes(3)] == [(3, PAGE, 1, 32 + 4), (3, PAGE, 1, 16 + 4)]
    assert LatentAttention(SMALL).new_planes(2)[1].shape == (2, PAGE, 1, 16)


@pytest.mark.npu
@pytest.mark.skipif(not has_npu(), reason="torch_npu is not installed")
@pytest.mark.parametrize("num_tokens", [3, 300])
def test_one_launch_writes_what_the_parts_of_it_write(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are sequences of their own, and one sequence where there are more rows than pages."""
    ops, attention = operators("npu", "fused", PUBLISHED)
    assert isinstance(attention, LatentAttention)
    import torch_npu

    seen, inner = [], torch_npu.npu_kv_rmsnorm_rope_cache

    def watched(kv: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(tuple(kv.shape[:3]))
        return inner(kv, *args, **kwargs)

    monkeypatch.setattr(torch_npu, "npu_kv_rmsnorm_rope_cache", watched)
    made = LatentBench(ops, attention)
    write_raw(made, num_tokens)
    is_long = num_tokens > len(made.cache.of(0)[0])
    assert (seen, is_long) == ([(1, 1, 300) if is_long else (3, 1, 1)], num_tokens == 300)
    found = [pages[1:].flatten(0, 1)[:num_tokens].cpu() for pages in made.cache.of(0)]
    kv, norm, cos, sin = raw(made, num_tokens)
    pairs = kv[:, 512:]
    halves = torch.cat((pairs[:, ::2], pairs[:, 1::2]), -1)
    rope_key = Ops().rotary_of_one(halves[:, None], cos, sin)
    for ours, expected in zip(found, (Ops().rms_norm(kv[:, None, :512], norm, 1e-6), rope_key)):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.npu
@pytest.mark.skipif(not has_npu(), reason="torch_npu is not installed")
def test_a_call_expands_one_long_request_or_several_up_to_a_bound() -> None:
    """More would be beyond the plan of memory, which counts the longest request or the bound."""
    attention = bench(("npu", "fused")).attention
    lens = np.array([100_000] * 8 + [MOST_GATHERED // 2] * 3)
    rows = np.arange(len(lens))
    batch = Batch(rows, lens - 256, lens, NOTHING, NOTHING, NOTHING)
    calls = planned(attention, batch, np.ones((len(lens), -(-int(lens.max()) // PAGE)), np.int32)).long
    assert [len(each.places) for each in calls] == [100_000] * 8 + [MOST_GATHERED, MOST_GATHERED // 2]
    assert torch.cat([each.rows.cpu() for each in calls]).tolist() == list(range(256 * len(lens)))


@pytest.mark.npu
@pytest.mark.skipif(not has_npu(), reason="torch_npu is not installed")
def test_several_calls_read_what_one_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(("npu", "fused"))
    made.step({0: 150, 1: 60, 2: 40, 3: 5})
    stops = np.array([each.length for each in made.told[:4]])
    batch = Batch(np.arange(4), stops - [20, 30, 17, 2], stops, NOTHING, NOTHING, NOTHING)
    nope, rope = (made.random(69, HEADS, width).to(made.device) for width in (128, 64))
    found = []
    for most in (MOST_GATHERED, 100):
        monkeypatch.setattr("attention.npu.fused_attention.MOST_GATHERED", most)
        metadata = planned(made.attention, batch, made.page_table)
        attended = made.attention.attend_heads(nope, rope, made.packed[0], *made.cache.of(0), metadata, 0)
        found.append((attended.cpu(), [each.kv_ends for each in metadata.long]))
    (whole, one), (parts, two) = found
    assert (one, two) == ([[150, 210, 250]], [[150], [60, 100]])
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)


def raw(made: LatentBench, num_tokens: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Latents and rope keys of some tokens, a norm, and angles."""
    angles = torch.arange(num_tokens)[:, None] * torch.linspace(0.1, 3, 32).repeat(2)
    made.rng = np.random.default_rng(8)
    return made.random(num_tokens, 576), made.random(512), angles.cos(), angles.sin()


def write_raw(made: LatentBench, num_tokens: int = 3) -> None:
    """Write them at the first places of page 1."""
    device = made.attention.device
    kv, norm, cos, sin = (each.to(device) for each in raw(made, num_tokens))
    metadata = AttentionMetadata(16 + torch.arange(num_tokens, device=device), ())
    pages = made.cache.of(0)
    made.attention.write_raw(kv, norm, 1e-6, cos, sin, *pages, metadata)


def on_an_npu() -> None:
    """Attend by latents, with products whose rows are too wide for the fused one, write, and join all that
    comes before.
    """
    ops = operators("npu", "fused", PUBLISHED)[0]
    made = bench(("npu", "fused"))
    made.step({0: 1, 1: 20})
    made.step({0: 1, 1: 1})
    made.attention.product = replace(made.attention.product, unmasks_decodes=True)
    made.step({0: 1, 1: 1})
    write_raw(made)
    zeros = torch.zeros(2, dtype=torch.int32, device="npu:0")
    metadata = made.attention.plan_static(StaticDecodes(zeros, zeros[:, None], zeros + 1))
    nope, rope = (torch.ones(2, 4, width, device="npu:0") for width in (128, 64))
    pages = made.cache.of(0)
    with torch.npu.graph(torch.npu.NPUGraph()):
        made.attention.attend_heads(nope, rope, made.packed[0], *pages, metadata, 0)
    ops.rotary_of_one(rope, rope[:, 0], rope[:, 0])
    wide = torch.ones(64, 1100, 2, device="npu:0")
    ops.pack_up(wide, wide).raised(torch.ones(3, 64, 1100, device="npu:0"))
    found = start(section("npu"))
    assert isinstance(found, Npu)
    joins_latents(found)


@pytest.mark.npu
@pytest.mark.skipif(not has_npu(), reason="torch_npu is not installed")
def test_layers_of_a_captured_step_write_one_output() -> None:
    """And each is right at a replay of other lengths: its output was read before the next layer's call."""
    made = bench(("npu", "fused"))
    attention, device = made.attention, made.device
    table = 1 + torch.arange(6, dtype=torch.int32, device=device).view(3, 2)
    for layer in range(2):
        for plane in made.cache.of(layer):
            plane.copy_(made.random(*plane.shape))
    nope, rope = (made.random(3, HEADS, width).to(device) for width in (128, 64))
    places = torch.zeros(3, dtype=torch.int32, device=device)

    def attended(metadata: Any) -> list[Tensor]:
        return [
            attention.attend_heads(nope, rope, made.packed[layer], *made.cache.of(layer), metadata, layer)
            for layer in range(2)
        ]

    metadata = attention.plan_static(StaticDecodes(places, table, places))
    npu: Any = torch.get_device_module("npu")
    graph = npu.NPUGraph()
    with npu.graph(graph):
        found = attended(metadata)
    assert len({call.arguments["out"][0].data_ptr() for call in metadata.captured}) == 1
    assert len(metadata.captured) == 2
    lens = [5, 2 * PAGE, 1]
    attention.replay(graph, [metadata], lens)
    (part,) = metadata.parts
    wanted = attended(replace(metadata, parts=(replace(part, kv_lens=lens),)))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted))
    assert not torch.equal(*found), "the layers have other latents"
