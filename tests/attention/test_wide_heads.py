"""Fused attention reads heads of 256 as single queries, and a longer span in a call of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from continuous_batching.batch import Batch
from tests.attention.planned import eager, replayed
from tests.attention.test_attention import NOTHING, Bench, disturb, shape
from tests.device_kinds import operators, stand_in_alone

pytestmark = pytest.mark.npu
WIDE = {"head_dim": 256, "windows": (None, None), "page_size": 128}


@pytest.mark.parametrize("seed", range(3))
def test_random_schedules(seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads = ((4, 2), (3, 3), (8, 1))[seed]
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1]}
    disturb(Bench(operators("npu", "fused", shape(**sizes, **WIDE))[1], seed), rng)


@stand_in_alone
@pytest.mark.parametrize("width", [1, 3])
def test_a_captured_step_reads_what_an_eager_one_reads(width: int) -> None:
    """A row's drafts see all keys up to their own, whose number a replay is told on the host."""
    attention = operators("npu", "fused", shape(**WIDE))[1]
    bench, lens = Bench(attention), {4: 37, 1: 70}
    bench.step(lens)
    pages = bench.cache.of(0)
    query = torch.randn(len(lens) * width, 4, 256, device="npu:0")
    rows, stops = np.array(list(lens)), np.array(list(lens.values()))
    batch = Batch(rows, stops - width, stops, NOTHING, NOTHING, NOTHING)
    expected, found = (
        way(attention, batch, bench.page_table, lambda metadata: attention.attend(query, *pages, metadata, 0))
        for way in (eager, replayed)
    )
    torch.testing.assert_close(found.cpu(), expected.cpu())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"windows": (None, 7)}, "head_dim is 256, and it has a sliding window of 7"),
        ({"has_sinks": True}, "head_dim is 256, and it has attention sinks"),
        ({"page_size": 64}, "cache.page_size is 64; fused attention of the 910B takes 128, 256, 384, 512"),
        ({"head_dim": 192}, "head_dim is 192"),
    ],
)
def test_what_wide_heads_cannot_have_is_refused(changes: dict[str, object], words: str) -> None:
    attention = operators("npu", "fused", shape(**{**WIDE, **changes}))[1]
    with pytest.raises(ValueError, match=words):
        attention.check()
