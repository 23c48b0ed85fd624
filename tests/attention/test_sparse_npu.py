"""Sparse attention by an NPU's operators reads what the definition reads, in steps and in replays of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.int8_sparse import latent_attention
from attention.latent import LatentUp
from attention.reference import StaticDecodes
from attention.sparse import SparseAttention, SparseMetadata
from continuous_batching.batch import Batch
from devices.ascend_limits import product
from devices.shapes import AttentionShape, IndexShape, LatentShape
from models.parallel.group import Group
from recipes.machine import Npu
from tests.attention.planned import planned
from tests.device_kinds import machine, operators, stand_in_alone
from tests.models.test_random_shares import met, together

pytestmark = [pytest.mark.npu, stand_in_alone]

NOTHING = np.empty(0, np.int64)
HEADS, PAGE, ROWS, PAGES, TOP = 4, 16, 3, 8, 20
INDEX = IndexShape(num_heads=16, head_dim=128, top_k=TOP)
SHAPE = AttentionShape(
    HEADS, 1, 512, PAGE, 0.05, torch.float32, (None,), latent=LatentShape(64, 128, 128, INDEX)
)
OF_GLM = replace(SHAPE, latent=LatentShape(64, 192, 256, INDEX))
IN_INT8 = replace(SHAPE, int8_pages=True)
INDEXER, ATTENTION = "npu::npu_lightning_indexer", "npu::npu_sparse_flash_attention"
OF_INT8 = "npu::npu_quant_lightning_indexer", "npu::npu_kv_quant_sparse_flash_attention"
DENSE = "npu::npu_fused_infer_attention_score"


class Bench:
    """The definition on the CPU and the operators under test, over pages with the same numbers."""

    def __init__(self, shape: AttentionShape) -> None:
        fused = operators("npu", "fused", shape)[1]
        assert isinstance(fused, SparseAttention)
        fused.check()
        plain = latent_attention(shape)
        assert isinstance(plain, SparseAttention)
        self.shape, self.fused, self.plain = shape, fused, plain
        self.generator = torch.Generator().manual_seed(5)
        self.table = 1 + np.random.default_rng(2).permutation(ROWS * PAGES).reshape(ROWS, PAGES).astype(
            np.int32
        )
        self.planes = [each.new_planes(1 + ROWS * PAGES) for each in (self.plain, self.fused)]
        for planes in self.planes:
            for plane in planes:
                plane[1:] = torch.nan if plane.is_floating_point() else 127
        assert shape.latent is not None
        sizes = shape.latent.nope_dim, shape.latent.value_dim
        up = self.random(HEADS, sizes[0], 512) / 8, self.random(HEADS, 512, sizes[1]) / 8
        self.ups = [LatentUp(*up), LatentUp(*(each.to(fused.device) for each in up))]
        self.lens = [0] * ROWS

    def random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=self.generator)

    def drawn(self, count: int) -> dict[str, Tensor]:
        """What so many tokens bring: what is written, what chooses, and what attends."""
        assert self.shape.latent is not None
        return {
            "latents": self.random(count, 1, 512),
            "rope_keys": self.random(count, 1, 64),
            "index_keys": self.random(count, 128),
            "index_query": self.random(count, 16, 128),
            "weights": self.random(count, 16),
            "nope": self.random(count, HEADS, self.shape.latent.nope_dim),
            "rope": self.random(count, HEADS, 64),
        }

    def batch(self, spans: dict[int, int]) -> Batch:
        starts = np.array([self.lens[row] for row in spans])
        stops = starts + np.array(list(spans.values()))
        for row, stop in zip(spans, stops.tolist()):
            self.lens[row] = stop
        return Batch(np.array(list(spans)), starts, stops, NOTHING, NOTHING, NOTHING)

    def choose(self, number: int, parts: dict[str, Tensor], metadata: Any) -> None:
        """Write and choose on one of the two devices."""
        attention, planes = (self.plain, self.fused)[number], self.planes[number]
        parts = {name: each.to(attention.device) for name, each in parts.items()}
        index_pages = attention.index_pages(planes)
        attention.write(parts["latents"], parts["rope_keys"], *attention.pages_of(planes), metadata)
        attention.write_index(parts["index_keys"], index_pages, metadata)
        if attention.is_sparse(metadata):
            attention.choose(parts["index_query"], parts["weights"], index_pages, metadata)

    def attend(self, number: int, parts: dict[str, Tensor], metadata: Any) -> Tensor:
        """Write, choose and attend on one of the two devices."""
        self.choose(number, parts, metadata)
        attention = (self.plain, self.fused)[number]
        nope, rope = (parts[name].to(attention.device) for name in ("nope", "rope"))
        pages = attention.pages_of(self.planes[number])
        return attention.attend_heads(nope, rope, self.ups[number], *pages, metadata, 0)

    def step(self, spans: dict[int, int]) -> tuple[Tensor, Tensor]:
        batch, parts = self.batch(spans), self.drawn(sum(spans.values()))
        both = [
            self.attend(number, parts, planned(each, batch, self.table)).cpu()
            for number, each in enumerate((self.plain, self.fused))
        ]
        return both[0], both[1]


def log() -> Any:
    found = machine("npu")
    assert isinstance(found, Npu)
    return found.launch_log


def near(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=3e-5 * expected.abs().max().item())


def operators_of(shape: AttentionShape) -> tuple[str, str]:
    return OF_INT8 if shape.int8_pages else (INDEXER, ATTENTION)


@pytest.mark.parametrize("shape", [SHAPE, OF_GLM, IN_INT8], ids=["deepseek", "glm", "int8"])
def test_steps_read_what_the_definition_reads(shape: AttentionShape) -> None:
    """Prompts, chunks whose border lies on both sides of the first choice, and decodes, in one call each."""
    bench = Bench(shape)
    steps: list[dict[int, int]] = [{0: 12}, {0: 1, 1: 18}, {1: 1, 0: 30, 2: 3}, {2: 40}, {0: 1, 1: 1, 2: 1}]
    for spans in steps:
        with log().reading() as asked:
            expected, ours = bench.step(spans)
        near(ours, expected)
        names = [each.name for each in asked]
        reads_all = all(bench.lens[row] <= TOP for row in spans)
        takes_long = shape is SHAPE or max(spans.values()) <= 16
        is_dense = reads_all and takes_long and not shape.int8_pages
        counts = [names.count(each) for each in operators_of(shape)]
        assert counts == ([0, 0] if is_dense else [1, 1])
        assert (DENSE in names) == is_dense


@pytest.mark.parametrize(("shape", "width"), [(SHAPE, 1), (SHAPE, 2), (IN_INT8, 2)])
def test_a_replay_reads_its_lengths_on_the_device(shape: AttentionShape, width: int) -> None:
    """A captured step with a padding row, replayed at other lengths: one launch each, and no update."""
    bench = Bench(shape)
    bench.step({0: 15, 1: 40})
    device, num_rows = bench.fused.device, 3
    count = num_rows * width
    inputs = {name: each.to(device) for name, each in bench.drawn(count).items()}
    places, lens = (torch.zeros(count, dtype=torch.int32, device=device) for _ in range(2))
    table = torch.zeros(num_rows, PAGES, dtype=torch.int32, device=device)
    lens += 1
    graph: Any = torch.get_device_module("npu").NPUGraph()
    with torch.get_device_module("npu").graph(graph):
        metadata = bench.fused.plan_static(StaticDecodes(places, table, lens))
        output = bench.attend(1, inputs, metadata)
    for _ in range(3):
        batch, parts = bench.batch({0: width, 1: width}), bench.drawn(count)
        positions = np.concatenate([np.arange(*each) for each in zip(batch.starts, batch.stops)])
        rows = np.repeat(batch.slots, width)
        at = bench.table[rows, positions // PAGE] * PAGE + positions % PAGE
        places[: 2 * width] = torch.from_numpy(at).int().to(device)
        lens[: 2 * width] = torch.from_numpy(positions + 1).int().to(device)
        table[:2] = torch.from_numpy(bench.table[:2]).to(device)
        for name, each in parts.items():
            inputs[name].copy_(each)
        with log().reading() as asked:
            bench.fused.replay(graph, [metadata], lens[width - 1 :: width].tolist())
        names = [each.name for each in asked if each.in_graph]
        assert [names.count(each) for each in operators_of(shape)] == [1, 1]
        assert "update" not in {each.kind for each in asked}
        ours = {name: each[: 2 * width] for name, each in parts.items()}
        planned_here = planned(bench.plain, batch, bench.table)
        assert isinstance(planned_here, SparseMetadata)
        near(output[: 2 * width].cpu(), bench.attend(0, ours, planned_here))
        assert bool(output.isfinite().all()), "a padding row reads the null page"


@pytest.mark.parametrize("shape", [SHAPE, IN_INT8], ids=["halves", "int8"])
@pytest.mark.parametrize("number", [0, 1], ids=["plain", "fused"])
def test_ranks_read_together_what_one_reads(number: int, shape: AttentionShape) -> None:
    """Two ranks have two heads each, and one row more on the first; a span ends within its rows."""
    whole, halves = Bench(shape), [Bench(replace(shape, num_heads=HEADS // 2)) for _ in range(2)]
    spans = {0: 1, 1: 40, 2: 30}
    batch, parts = whole.batch(spans), whole.drawn(71)
    expected = whole.attend(number, parts, planned((whole.plain, whole.fused)[number], batch, whole.table))

    def attended(group: Group) -> Tensor:
        rank = group.rank
        bench, heads = halves[rank], slice(rank * HEADS // 2, (rank + 1) * HEADS // 2)
        attention = (bench.plain, bench.fused)[number]
        attention.ranks = group
        bench.ups[number] = LatentUp(whole.ups[number].keys[heads], whole.ups[number].values[heads])
        metadata = planned(attention, batch, bench.table)
        own = attention.own_rows(metadata)
        assert own == (slice(0, 36), slice(36, 71))[rank]
        of_rank = {name: parts[name][own] for name in ("index_query", "weights")}
        of_rank |= {name: parts[name][:, heads] for name in ("nope", "rope")}
        return bench.attend(number, parts | of_rank, metadata).cpu()

    near(torch.cat(together(2, attended), 1), expected.cpu())
    attention = (whole.plain, whole.fused)[number]
    attention.ranks = met(8)[0]
    assert attention.own_rows(planned(attention, batch, whole.table)) == slice(None), "there are few rows"


def indexed(**changes: int) -> AttentionShape:
    return replace(SHAPE, latent=LatentShape(64, 128, 128, replace(INDEX, **changes)))


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("310P", SHAPE, "latent attention, whose operators the 310P lacks"),
        ("910B", replace(SHAPE, head_dim=256), "kv_lora_rank and qk_rope_head_dim are 256 and 64"),
        ("910B", replace(SHAPE, num_heads=12), "each device has 12 heads"),
        (
            "910B",
            replace(SHAPE, latent=LatentShape(64, 128, 128, replace(INDEX, num_heads=96))),
            "96 and 128",
        ),
        ("910C", replace(SHAPE, latent=LatentShape(64, 128, 128, replace(INDEX, top_k=2500))), "is 2500"),
        (
            "910C",
            replace(IN_INT8, latent=LatentShape(64, 128, 128, replace(INDEX, top_k=4096))),
            "up to 2048",
        ),
        ("950", IN_INT8, "attention of the 950 reads no keys and values in int8"),
    ],
)
def test_what_the_operators_do_not_take_is_refused(name: str, shape: AttentionShape, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        product(name, "").check(shape, takes_float32=True)


def test_a_release_without_the_operators_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = Bench(SHAPE).fused
    monkeypatch.setattr("attention.npu.sparse_attention.lacking_here", lambda _: ["npu_lightning_indexer"])
    with pytest.raises(ValueError, match="has no sparse attention; it lacks npu_lightning_indexer: install"):
        fused.check()


def test_what_was_chosen_is_kept_for_the_layers_behind() -> None:
    """A stage that begins with a layer that shares its choice is sent it."""
    bench = Bench(SHAPE)
    batch, parts = bench.batch({0: 60}), bench.drawn(60)
    metadata = planned(bench.fused, batch, bench.table)
    assert bench.fused.choice_of(metadata).positions is None
    bench.attend(1, parts, metadata)
    assert bench.fused.choice_of(metadata).positions is not None
