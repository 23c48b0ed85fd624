"""Ranks that divide pages give each query what it sees, by the sums that each device returns of its part.

The ranks are threads, which meet where they send each other something. Random schedules are held to the
oracle of `test_attention.py`, in plain numbers and in int8.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention import divided
from attention.divided import (
    MOST_ROWS,
    DividedAttention,
    DividedLatentAttention,
    DividedMetadata,
    Neighbours,
    shapes_of,
)
from attention.latent import LatentAttention, LatentUp
from attention.reference import Attention, AttentionMetadata, ChannelScales, StaticDecodes, Windows
from continuous_batching.batch import Batch
from devices.ascend_limits import MOST_SPANS
from devices.cpp_sources import missing_for_sources
from devices.shapes import AttentionShape, LatentShape
from recipes.machine import start
from tests.attention.test_attention import NOTHING, Bench, Pair, disturb, shape
from tests.attention.test_channel_scales import ChannelBench
from tests.device_kinds import has_npu, section
from tests.models.test_random_shares import met


class Ranks(Attention):
    """The attention of all ranks, as that of one: its pages are their parts side by side, [P, ranks, ...]."""

    def __init__(self, pair: Pair, shape: AttentionShape, count: int) -> None:
        made = start(section(*pair, compile="auto") if pair[0] == "cpu" else section(*pair))
        of_rank = replace(shape, num_heads=shape.num_heads // count)
        parts, whole = (made.operators(each)[1] for each in shapes_of(of_rank, count))
        super().__init__(shape, parts.device)
        self.count = count
        self.ranks = [DividedAttention(of_rank, parts, whole, each) for each in met(count)]

    def check(self) -> None:
        for each in self.ranks:
            each.check()

    def new_planes(self, count: int) -> tuple[Tensor, ...]:
        planes = zip(*(each.new_planes(count) for each in self.ranks))
        return tuple(torch.stack(each, 1) for each in planes)

    def plan(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        write_index: NDArray[np.int64],
        windows: Windows = None,
    ) -> Any:
        return [each.plan(batch, page_table, write_index, windows) for each in self.ranks]

    def pack_scales(self, keys: Tensor, values: Tensor) -> ChannelScales:
        return self.ranks[0].pack_scales(keys, values)

    def write(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, metadata: Any) -> None:
        self._written(keys, values, metadata, lambda each, *own: each.write(key, value, *own))

    def write_by_channel(
        self, key: Tensor, value: Tensor, scales: ChannelScales, keys: Tensor, values: Tensor, metadata: Any
    ) -> None:
        self._written(
            keys, values, metadata, lambda each, *own: each.write_by_channel(key, value, scales, *own)
        )

    def _written(self, keys: Tensor, values: Tensor, metadata: Any, write: Callable[..., None]) -> None:
        for rank, each in enumerate(self.ranks):
            own = [plane[:, rank].contiguous() for plane in (keys, values)]
            write(each, *own, metadata[rank])
            for plane, part in zip((keys, values), own):
                plane[:, rank] = part

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, metadata: Any, layer: int) -> Tensor:
        return self._attended(
            query, keys, values, metadata, lambda each, rows, *own: each.attend(rows, *own, layer)
        )

    def attend_by_channel(
        self, query: Tensor, scales: ChannelScales, keys: Tensor, values: Tensor, metadata: Any, layer: int
    ) -> Tensor:
        return self._attended(
            query,
            keys,
            values,
            metadata,
            lambda each, rows, *own: each.attend_by_channel(rows, scales, *own, layer),
        )

    def _attended(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        metadata: list[DividedMetadata],
        attend: Callable[..., Tensor],
    ) -> Tensor:
        def of(rank: int) -> Tensor:
            own = [plane[:, rank].contiguous() for plane in (keys, values)]
            return attend(self.ranks[rank], query.chunk(self.count, 1)[rank], *own, metadata[rank])

        with ThreadPoolExecutor(self.count) as pool:
            return torch.cat([*pool.map(of, range(self.count))], 1)

    def read(self, layer_keys: Tensor, layer_values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        size, count = self.shape.page_size, self.count
        own = index // size * (size // count) + index % size // count
        found = []
        for rank, each in enumerate(self.ranks):
            planes = (plane[:, rank].contiguous() for plane in (layer_keys, layer_values))
            found.append(each.parts.read(*planes, own))
        chosen = index % count, torch.arange(len(index), device=index.device)
        keys, values = (torch.stack(each)[chosen] for each in zip(*found))
        return keys, values


NPU = pytest.mark.skipif(not has_npu(), reason="torch_npu is not installed")
COMPILED = pytest.mark.skipif(missing_for_sources() is not None, reason=str(missing_for_sources()))
KINDS = [
    pytest.param(("cpu", "reference"), Bench, 2, {"page_size": 4, "int8_pages": True}, id="int8 by token"),
    pytest.param(("cpu", "reference"), ChannelBench, 4, {"int8_pages": True}, id="int8 by channel"),
    pytest.param(("cpu", "fused"), Bench, 2, {"page_size": 32}, id="in C++", marks=COMPILED),
    pytest.param(
        *(("cpu", "fused"), Bench, 4, {"page_size": 256, "int8_pages": True}),
        id="int8 by token in C++",
        marks=[COMPILED, pytest.mark.slow],
    ),
    pytest.param(
        *(("cpu", "fused"), ChannelBench, 2, {"page_size": 64, "int8_pages": True}),
        id="int8 by channel in C++",
        marks=COMPILED,
    ),
    pytest.param(
        *(("npu", "fused"), ChannelBench, 2, {"page_size": 64, "int8_pages": True}),
        id="int8 by channel on an NPU",
        marks=[pytest.mark.npu, NPU],
    ),
]


@pytest.mark.parametrize(("pair", "kind", "count", "changes"), KINDS)
def test_random_schedules(
    pair: Pair, kind: type[Bench], count: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of single queries, of short spans, joined a few at a time, and of long ones, with pages in pieces."""
    monkeypatch.setattr(divided, "GATHERED_TOKENS", 96)
    monkeypatch.setattr(divided, "MOST_ROWS", 5)
    sizes = {"num_heads": 8, "num_kv_heads": 1, "windows": (None, None)}
    bench = kind(Ranks(pair, shape(**sizes, **changes), count))
    disturb(bench, np.random.default_rng(3))


NO_PLACES = np.zeros(0, np.int64)


def test_no_device_refuses_so_many_rows_at_a_time() -> None:
    """Each joined row is a span of its own, and Ascend's calls of latents are not cut further."""
    assert MOST_ROWS <= MOST_SPANS


@pytest.mark.parametrize("is_captured", [False, True])
def test_other_ranks_tokens_are_spread_over_the_null_page(
    is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators write places in no order that is known: of a page between two ranks none comes twice."""

    def plan_static(_: Attention, decodes: StaticDecodes) -> AttentionMetadata:
        return AttentionMetadata(decodes.write_index, ())

    monkeypatch.setattr(Attention, "plan_static", plan_static)
    own = shape(num_heads=2, num_kv_heads=1, windows=(None,))
    batch = Batch(np.array([0]), np.array([0]), np.array([16]), NOTHING, NOTHING, NOTHING)
    for neighbour in met(2):
        made = DividedAttention(own, *map(Attention, shapes_of(own, 2)), neighbour)
        index = 3 * 16 + np.arange(16)
        if is_captured:
            table, lens = torch.full((16, 1), 3, dtype=torch.int32), torch.arange(1, 17, dtype=torch.int32)
            planned = made.plan_static(StaticDecodes(torch.from_numpy(index).int(), table, lens))
        else:
            planned = made.plan(batch, np.array([[3]], np.int32), index)
        places = planned.own.write_index.view(8, 2)
        assert places[:, neighbour.rank].tolist() == list(range(24, 32))
        assert places[:, 1 - neighbour.rank].tolist() == list(range(8))


@pytest.mark.parametrize("is_latent", [False, True])
def test_rows_that_pad_a_step_are_zeros(is_latent: bool) -> None:
    """They follow a joined row and a gathered span; see tests/attention/test_cpu_source.py."""
    batch = Batch(np.array([0, 1]), np.array([20, 4]), np.array([21, 30]), NOTHING, NOTHING, NOTHING)
    table, num_tokens = np.array([[1, 2], [3, 4]], np.int32), 1 + 26

    def attended(neighbour: Neighbours) -> Tensor:
        if not is_latent:
            own = shape(num_heads=2, num_kv_heads=1, windows=(None,))
            made = DividedAttention(own, *map(Attention, shapes_of(own, 2)), neighbour)
            query = torch.ones(num_tokens + 5, 2, own.head_dim)
            planes = [plane.zero_() for plane in made.new_planes(5)]
            return made.attend(query, *planes, made.plan(batch, table, NO_PLACES), 0)
        own = AttentionShape(2, 1, 32, 16, 0.2, torch.float32, (None,), latent=LatentShape(16, 20, 24))
        latent = DividedLatentAttention(own, *map(LatentAttention, shapes_of(own, 2)), neighbour)
        nope, rope = torch.ones(num_tokens + 5, 2, 20), torch.ones(num_tokens + 5, 2, 16)
        planes = [plane.zero_() for plane in latent.new_planes(5)]
        up = LatentUp(torch.ones(2, 20, 32), torch.ones(2, 32, 24))
        return latent.attend_heads(nope, rope, up, *planes, latent.plan(batch, table, NO_PLACES), 0)

    torch.use_deterministic_algorithms(True)  # which fills new tensors with NaN
    try:
        with ThreadPoolExecutor(2) as threads:
            outputs = [*threads.map(attended, met(2))]
    finally:
        torch.use_deterministic_algorithms(False)
    for output in outputs:
        assert not output[num_tokens:].any()
        assert output.isfinite().all()
