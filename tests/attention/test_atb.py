"""Attention on a 310P computes what a request alone would compute, over pages in that chip's own order.

The tests run on the stand-in, whose operators answer here as those of a 310P would.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from devices.ascend_limits import FRACTAL_NZ, product
from devices.shapes import AttentionShape
from kv_cache.device.storage import KVCache, LayerPages
from kv_cache.pages import PageCopy
from tests.attention.test_attention import Bench, disturb, shape
from tests.device_kinds import machine, stand_in_alone

pytestmark = [pytest.mark.npu, stand_in_alone]


@contextmanager
def answering_as(name: str) -> Iterator[None]:
    """Let the stand-in's operators follow another product's contract in here."""
    machine("npu")
    import virtual_npu
    from virtual_npu.simulated_products import PRODUCTS

    device = virtual_npu.start(fp32=True)
    before = device.conditions
    assert before is not None
    device.contract(replace(before, product=PRODUCTS[name]))
    try:
        yield
    finally:
        device.contract(before)


@pytest.fixture(scope="module", autouse=True)
def _answers_as_310p() -> Iterator[None]:
    with answering_as("310P"):
        yield


def atb(**changes: Any) -> Any:
    """Attention of a 310P; in float32, with two layers, over pages of 128."""
    from attention.npu.atb_attention import AtbAttention

    sizes: AttentionShape = shape(**{"page_size": 128, "windows": (None, None), **changes})
    return AtbAttention(sizes, "npu:0", product("310P", ""), takes_float32=True)


def test_mixed_spans_decodes_and_leavers() -> None:
    bench = Bench(atb(page_size=64))
    bench.step({0: 33, 2: 1, 4: 1})
    bench.leave(0)
    bench.step({1: 130, 4: 20, 0: 3, 2: 1})
    bench.leave(1)
    bench.leave(4)
    bench.step(dict.fromkeys((5, 4, 2, 1, 0), 1))


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_heads": 4, "num_kv_heads": 4},
        {"num_heads": 8, "num_kv_heads": 1, "head_dim": 128},
        {"num_heads": 6, "num_kv_heads": 2, "head_dim": 80},
        {"head_dim": 256, "page_size": 64},
        {"dtype": torch.float16},
    ],
    ids=str,
)
def test_heads_and_types(sizes: dict[str, Any]) -> None:
    bench = Bench(atb(**sizes))
    bench.step({0: 21, 3: 2})
    bench.step({3: 1, 0: 1, 1: 18})
    bench.step({3: 1, 0: 1, 1: 1})


def test_random_schedules() -> None:
    disturb(Bench(atb()), np.random.default_rng(0))


def test_a_batch_beyond_what_a_call_takes_is_cut() -> None:
    attention = atb()
    attention.product = replace(attention.product, most_spans=2)
    bench = Bench(attention)
    bench.step({0: 1, 1: 1, 2: 7, 3: 1, 4: 3})
    bench.step(dict.fromkeys(range(5), 1))


def test_the_cache_keeps_its_format_through_all_that_is_done_to_pages() -> None:
    import torch_npu

    attention = atb(dtype=torch.float16)
    cache = KVCache([LayerPages(attention.new_planes)], 128, [6], [3], indexed=attention.indexed)
    tensors = cache.tensors
    assert tensors[0].shape == (6, 8, 128, 16)
    assert sum(each.nbytes for each in tensors) == 6 * 2 * 128 * 2 * 64 * 2
    for number in range(6):
        for tensor in tensors:
            tensor[number].fill_(number)
    cache.copy(np.array([1, 2]), np.array([4, 5]))
    cache.apply([PageCopy(np.array([5, 3]), np.array([2, 1]), "to_host")])
    cache.apply([PageCopy(np.array([1, 2]), np.array([2, 1]), "from_host")])
    cache.clear_null_page()
    cache.resize([5])
    cache.resize([7])
    for tensor in cache.tensors:
        assert torch_npu.get_npu_format(tensor) == FRACTAL_NZ
        assert torch.equal(tensor.cpu(), tensor.cpu()[:, :1, :1, :1].expand_as(tensor))
        assert tensor.cpu()[:, 0, 0, 0].tolist() == [0, 2, 3, 3, 1, 0, 0]


def test_a_head_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"310P reads every position, .*: set device\.attention to reference"
    ):
        atb(first_key=1).check()
