"""The Triton kernels compute what attention is defined to be, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.cuda import attention as cuda_attention
from attention.cuda.attention import CudaAttention
from attention.reference import Attention, StaticDecodes
from continuous_batching.batch import Batch
from devices.shapes import AttentionShape
from tests.attention.planned import planned
from tests.interpreter import DEVICE, multiply_rows_alone
from tests.thorough import cases, first_quick

NEAR = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
NOTHING = np.empty(0, np.int64)
Spans = dict[int, tuple[int, int]]  # slot: (start, stop)


def shape(**changes: object) -> AttentionShape:
    plain = AttentionShape(4, 2, 16, 16, 0.25, torch.float32, (None,))
    return replace(plain, **changes)


class World:
    """Requests with random queries, keys and values at every position, over shuffled pages."""

    def __init__(self, shape: AttentionShape, num_slots: int, most: int, seed: int) -> None:
        self.shape, self.most = shape, most
        rng = np.random.default_rng(seed)
        max_pages = -(-most // shape.page_size)
        order = 1 + rng.permutation(num_slots * max_pages)
        self.page_table = order.reshape(num_slots, max_pages).astype(np.int32)
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        self.told = [
            torch.from_numpy(rng.standard_normal((num_slots, most, count, shape.head_dim))).to(shape.dtype)
            for count in heads
        ]

    def run(self, attention: Attention, spans: Spans, layer: int = 0) -> dict[int, Tensor]:
        """What each span gets, and what it leaves in the cache, where nothing else has been written."""
        slots = np.array(list(spans), np.int64)
        starts, stops = (np.array(each, np.int64) for each in zip(*spans.values()))
        batch = Batch(slots, starts, stops, NOTHING, NOTHING, NOTHING)
        size, (_, keys, values) = self.shape.page_size, self.told
        num_pages = 1 + self.page_table.size
        cached = [torch.full((num_pages, size, *keys.shape[2:]), torch.nan, dtype=keys.dtype) for _ in "kv"]
        for slot, (start, _) in spans.items():
            at = self.places(slot, 0, start)
            for cache, told in zip(cached, (keys, values)):
                cache.flatten(0, 1)[at] = told[slot, :start]
        cached = [each.to(attention.device) for each in cached]
        packed = [
            torch.cat([each[slot, start:stop] for slot, (start, stop) in spans.items()]).to(attention.device)
            for each in self.told
        ]
        if self.shape.has_sinks:
            attention.sinks[layer] = torch.linspace(-2, 3, self.shape.num_heads).to(attention.device)
        metadata = planned(attention, batch, self.page_table)
        attention.write(packed[1], packed[2], *cached, metadata)
        output = attention.attend(packed[0], *cached, metadata, layer).cpu()
        self.written = [each.cpu() for each in cached]
        return dict(zip(spans, output.split((stops - starts).tolist())))

    def places(self, slot: int, start: int, stop: int) -> Tensor:
        position = np.arange(start, stop)
        size = self.shape.page_size
        return torch.from_numpy(self.page_table[slot, position // size] * np.int64(size) + position % size)


def agree(world: World, attention: Attention, spans: Spans) -> None:
    """Every layer of `attention` gets what the definition gets, and writes where it writes."""
    for layer in range(len(world.shape.windows)):
        ours, written = world.run(attention, spans, layer), world.written
        expected = world.run(Attention(world.shape), spans, layer)
        near = NEAR[world.shape.dtype]
        for slot in spans:
            torch.testing.assert_close(ours[slot], expected[slot], rtol=near, atol=near)
        for one, other in zip(written, world.written):
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), "wrote elsewhere"


def drawn(rng: np.random.Generator, num_slots: int, most: int) -> Spans:
    """Decodes, drafts, chunks and prompts."""
    spans = {}
    for slot in rng.permutation(num_slots)[: rng.integers(1, num_slots + 1)].tolist():
        length = int(rng.choice([1, 1, rng.integers(2, 6), rng.integers(6, 60)]))
        start = int(rng.choice([0, rng.integers(0, most - length)]))
        spans[slot] = (start, start + length)
    return spans


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_no_query_sees_what_lies_before_the_first_key(batch_invariant: bool) -> None:
    headed = shape(first_key=1)
    world = World(headed, num_slots=4, most=200, seed=2)
    for told in world.told[1:]:
        told[:, 0] = torch.nan  # it would show
    spans = {0: (1, 2), 2: (1, 40), 1: (199, 200), 3: (17, 20)}
    agree(world, CudaAttention(headed, DEVICE, batch_invariant=batch_invariant), spans)


@pytest.mark.parametrize("seed", range(cases(4, 40)))
def test_mixed_batches_agree_with_the_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_kv_heads = int(rng.integers(1, 4))
    drawn_shape = shape(
        num_heads=num_kv_heads * int(rng.choice([1, 2, 3, 7])),
        num_kv_heads=num_kv_heads,
        head_dim=int(rng.choice([8, 16, 40])),
        page_size=int(rng.choice([1, 16, 48, 128])),
        dtype=[torch.float32, torch.float32, torch.bfloat16, torch.float16][seed % 4],
        windows=(None, int(rng.integers(1, 100))),
    )
    world = World(drawn_shape, num_slots=4, most=170, seed=seed)
    attention = CudaAttention(drawn_shape, DEVICE, batch_invariant=bool(rng.integers(2)))
    attention.check()
    agree(world, attention, drawn(rng, 4, 170))


@pytest.mark.parametrize(
    ("own", "batch_invariant"),
    first_quick(
        1,
        [
            ({"has_sinks": True, "score_cap": 30.0}, False),
            ({"score_cap": 0.5}, False),
            ({"has_sinks": True}, True),
        ],
    ),
    ids=str,
)
def test_sinks_and_caps_of_scores(
    own: dict[str, object], batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_attention, "LEAST_SHARE", 16)  # then a long decode is shared out
    own_shape = shape(windows=(None, 30), scale=0.6, **own)
    spans = {1: (190, 191), 0: (0, 53), 2: (17, 20)}
    attention = CudaAttention(own_shape, DEVICE, batch_invariant=batch_invariant)
    agree(World(own_shape, 3, 200, seed=5), attention, spans)


@pytest.mark.parametrize("head_dim", cases([80, 192], [64, 80, 96, 128, 192, 256]))
def test_head_dims(head_dim: int) -> None:
    sized = shape(head_dim=head_dim, scale=head_dim**-0.5, num_kv_heads=1)
    agree(
        World(sized, 3, 40, seed=head_dim),
        CudaAttention(sized, DEVICE),
        {1: (30, 31), 0: (2, 11), 2: (16, 17)},
    )


def test_a_long_decode_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attention, "LEAST_SHARE", 16)
    sized = shape(windows=(None, 70), head_dim=128)
    world, attention = World(sized, 2, 200, seed=3), CudaAttention(sized, DEVICE)
    spans = {1: (190, 191), 0: (150, 153)}
    batch = Batch(np.array([1, 0]), np.array([190, 150]), np.array([191, 153]), NOTHING, NOTHING, NOTHING)
    launches = planned(attention, batch, world.page_table).launches
    assert all(len(each.joins) == 4 and len(each.tiles) > 4 for each in launches.values())
    agree(world, attention, spans)


@pytest.mark.slow
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_captured_step_follows_the_lengths_of_each_replay(
    batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_attention, "LEAST_SHARE", 16)
    monkeypatch.setattr(cuda_attention, "CHUNK", 64)
    sized = shape(windows=(None, 70))
    world, attention = (
        World(sized, 4, 200, seed=5),
        CudaAttention(sized, DEVICE, batch_invariant=batch_invariant),
    )
    kv_lens = torch.tensor([190, 1, 64, 130], dtype=torch.int32)
    pages = torch.from_numpy(world.page_table).to(DEVICE)
    metadata = attention.plan_static(StaticDecodes(kv_lens, pages, kv_lens))
    assert not metadata.tables.any(), "before the first replay there is only filling"
    for lens in ([190, 1, 64, 130], [5, 200, 77, 16]):
        spans = {slot: (length - 1, length) for slot, length in enumerate(lens)}
        world.run(attention, spans)
        cached = [each.to(DEVICE) for each in world.written]
        query = torch.cat([world.told[0][slot, slice(*span)] for slot, span in spans.items()]).to(DEVICE)
        for layer in range(2):
            step = Step(partial(attention.attend, query, *cached, metadata, layer))
            attention.replay(step, [metadata], lens)
            expected = world.run(Attention(sized), spans, layer)
            torch.testing.assert_close(
                step.output.cpu(), torch.cat(list(expected.values())), rtol=2e-5, atol=2e-5
            )
    assert metadata.launches[None].joins.any(), "nothing was shared out"


class Step:
    """What stands for a captured graph: a call of its own at each replay."""

    def __init__(self, act: Callable[[], Tensor]) -> None:
        self.act = act

    def replay(self) -> None:
        self.output = self.act()


def test_a_request_of_nan_stays_alone() -> None:
    world, attention = World(shape(), 3, 40, seed=1), CudaAttention(shape(), DEVICE)
    spans = {0: (20, 21), 1: (0, 20), 2: (30, 31)}
    clean = world.run(attention, spans)
    for each in world.told:
        each[1] = torch.nan
    ours = world.run(attention, spans)
    assert ours[1].isnan().all()
    assert torch.equal(ours[0], clean[0])
    assert torch.equal(ours[2], clean[2])


@pytest.mark.parametrize(
    ("seed", "length", "num_cuts"),
    cases([(0, 80, 3), (1, 60, 2)], [(seed, 100 + 9 * seed, 12) for seed in range(6)]),
)
def test_bits_depend_on_the_request_alone(
    seed: int, length: int, num_cuts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same positions as one prompt alone, and cut at random, among neighbours, shared out or not."""
    multiply_rows_alone(monkeypatch)
    monkeypatch.setattr(cuda_attention, "CHUNK", 64)
    rng = np.random.default_rng(seed)
    windows = (50,) if seed % 2 else (None,)
    sized = shape(num_kv_heads=1, windows=windows, dtype=[torch.float32, torch.bfloat16][seed // 2 % 2])
    world, attention = World(sized, 3, 150, seed), CudaAttention(sized, DEVICE, batch_invariant=True)
    alone = world.run(attention, {2: (0, length)})[2]
    cuts = [(length - 1, length)] + [
        sorted(rng.choice(length, 2, replace=False)) for _ in range(num_cuts - 1)
    ]
    for start, stop in cuts:
        attention.num_processors = int(rng.choice([1, 4, 64]))
        neighbours = drawn(rng, 2, length)
        order = rng.permutation([2, *neighbours]).tolist()
        spans = {slot: (start, stop) if slot == 2 else neighbours[slot] for slot in order}
        assert torch.equal(world.run(attention, spans)[2], alone[start:stop]), (start, stop)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"head_dim": 320},
            "head_dim is 320; fused attention takes up to 256: .* reference and device.graphs to 0$",
        ),
        ({"num_heads": 258}, "129 query heads share a kv head; .* up to 128"),
        ({"dtype": torch.float64}, "model.dtype is torch.float64; .* float32, bfloat16 or float16"),
        ({"num_heads": 5}, "num_attention_heads is 5 .* multiple"),
    ],
)
def test_a_shape_beyond_the_kernels_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CudaAttention(shape(**changes), DEVICE).check()
