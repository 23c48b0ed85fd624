"""The CPU's own order of the cache, read in plain torch, changes nothing but the speed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attention.cpu.attention import CpuAttention
from continuous_batching.batch import Batch
from kv_cache.device.storage import KVCache, LayerPages
from tests.attention.planned import planned
from tests.attention.test_attention import NOTHING, ROWS, Bench, shape

LENS = (1, 16, 17, 64, 65, 190)


class Layer:
    """One layer with requests of `LENS` tokens in its rows, each in pages of its own."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.shape = shape(windows=(None,), page_size=64, head_dim=32, dtype=dtype)
        self.attention = CpuAttention(self.shape)
        self.cache = KVCache([LayerPages(self.attention.new_planes)], 64, [1 + 5 * ROWS])
        self.page_table = (1 + np.arange(5 * ROWS, dtype=np.int32)).reshape(ROWS, 5)
        self.random = torch.Generator().manual_seed(0)

    def step(self, spans: dict[int, tuple[int, int]], broken: int | None = None) -> dict[int, Tensor]:
        """Compute spans (start, stop) of rows; the row `broken` has NaN everywhere."""
        rows = np.array(list(spans))
        starts, stops = np.array(list(spans.values()), np.int64).T.copy()
        metadata = planned(
            self.attention, Batch(rows, starts, stops, NOTHING, NOTHING, NOTHING), self.page_table
        )
        parts = [self._tokens(row, start, stop, row == broken) for row, (start, stop) in spans.items()]
        query, key, value = (torch.cat(each) for each in zip(*parts))
        keys, values = self.cache.of(0)
        self.attention.write(key, value, keys, values, metadata)
        output = self.attention.attend(query, keys, values, metadata, 0)
        return dict(zip(spans, output.split((stops - starts).tolist())))

    def _tokens(self, row: int, start: int, stop: int, broken: bool) -> tuple[Tensor, ...]:
        random = torch.Generator().manual_seed(row)
        whole = [torch.randn(320, heads, 32, generator=random) for heads in (4, 2, 2)]
        return tuple((each[start:stop] * (torch.nan if broken else 1)).to(self.shape.dtype) for each in whole)


def test_a_decode_is_the_same_to_the_bit_whatever_runs_beside_it() -> None:
    alone = {}
    for row, length in enumerate(LENS):
        layer = Layer()
        layer.step({row: (0, length)})
        alone |= layer.step({row: (length, length + 1)})
    layer = Layer()
    layer.step({row: (0, length) for row, length in enumerate(LENS)})
    together = layer.step({row: (length, length + 1) for row, length in reversed(list(enumerate(LENS)))})
    for row in alone:
        assert torch.equal(alone[row], together[row]), row


@pytest.mark.parametrize("start", [0, 30])
def test_a_broken_request_breaks_no_other(start: int) -> None:
    healthy, beside = Layer(), Layer()
    for layer in (healthy, beside):
        layer.step(dict.fromkeys(range(3), (0, start)) if start else {3: (0, 9)})
    spans = {0: (start, start + 20), 1: (start, start + 45), 2: (start, start + 1)}
    expected, found = healthy.step(spans), beside.step(spans, broken=1)
    for row in (0, 2):
        assert torch.equal(found[row], expected[row])
    assert found[1].isnan().all()


class Operators(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("start", "stop", "in_one"), [(0, 40, True), (0, 60, False), (8, 40, False)])
def test_a_whole_prompt_in_float32_is_attended_to_in_one_call(start: int, stop: int, in_one: bool) -> None:
    bench = Bench(CpuAttention(shape(windows=(50,), num_heads=6, num_kv_heads=2)))
    if start:
        bench.step({1: start})
    with Operators() as operators:
        bench.step({2: 1, 1: stop - start})  # compares with the reference
    assert operators.names["_scaled_dot_product_flash_attention_for_cpu.default"] == int(in_one)


class Finite(Bench):
    """A bench that also looks at queries before the first key, of which the oracle says nothing."""

    def computed(self, *given: Any) -> Tensor:
        output = super().computed(*given)
        assert output.isfinite().all()
        return output


@pytest.mark.parametrize("count", [4, 16, 300])
def test_a_query_before_the_first_key_is_a_number(count: int) -> None:
    wide = shape(windows=(65, None), page_size=128, has_sinks=True, first_key=1)
    bench = Finite(CpuAttention(wide, library=None))
    bench.step({0: count})
    bench.step({0: 9})


def test_filling_rows_are_neither_written_nor_answered_wrongly() -> None:
    layer = Layer()
    attention, cache = layer.attention, layer.cache
    batch = Batch(np.array([1]), np.array([0]), np.array([9]), NOTHING, NOTHING, NOTHING)
    metadata = planned(attention, batch, layer.page_table)
    query, key, value = layer._tokens(1, 0, 16, False)
    attention.write(key, value, *cache.of(0), metadata)
    padded = attention.attend(query, *cache.of(0), metadata, 0)
    assert torch.equal(padded[:9], Layer().step({1: (0, 9)})[1])
    assert not cache.of(0)[0][7:].any()
    assert int((attention.read(*cache.of(0), torch.arange(6 * 64, 7 * 64))[0] != 0).sum()) == 9 * 64
