"""The plan counts what plain attention allocates for a request that is longer than a step."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention.latent import LatentAttention, LatentUp
from attention.reference import Attention
from attention.sparse import SparseAttention
from continuous_batching.batch import Batch
from devices.ascend_limits import MOST_GATHERED
from recipes.assembly.decoders import shape_of
from recipes.assembly.families import model_config
from recipes.assembly.sizing import STEP_BYTES, estimate
from tests.attention.planned import planned
from tests.recipes.test_sizing import made


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made while this is entered take at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.forget, storage._cdata)
        self.most = max(self.most, self.now)
        return made

    def forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


DEEPSEEK = {
    "model_type": "deepseek_v2", "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 96,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "first_k_dense_replace": 2,
    "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize("family", [{}, {"num_key_value_heads": 4}, DEEPSEEK])
def test_the_last_chunk_of_a_long_prompt(family: dict[str, Any]) -> None:
    """It reads what the chunks before it have written."""
    recipe = made(family, pages=40, dtype="float32")
    recipe = replace(recipe, device=replace(recipe.device, attention="reference"))
    config, longest = model_config(recipe), 500
    shape = shape_of(16, config)
    attention = Attention(shape) if config.latent is None else LatentAttention(shape)
    keys, values = attention.new_planes(40)
    table = np.arange(1, 33, dtype=np.int32)[None]
    nothing = np.empty(0, np.int64)
    batch = Batch(np.array([0]), np.array([longest - 64]), np.array([longest]), nothing, nothing, nothing)
    metadata = planned(attention, batch, table)
    with PeakBytes() as peak:
        if config.latent is None:
            attention.attend(torch.ones(64, 4, config.head_dim), keys, values, metadata, 0)
        else:
            latent = config.latent
            up = LatentUp(torch.ones(4, latent.nope_dim, 96), torch.ones(4, 96, latent.value_dim))
            parts = torch.ones(64, 4, latent.nope_dim), torch.ones(64, 4, latent.rope_dim)
            assert attention.expands(64)
            attention.attend_heads(*parts, up, keys, values, metadata, 0)
    assert STEP_BYTES + peak.most <= estimate(recipe, config)
    assert peak.most > 500 * 4 * 64 * 4, "the scores alone"


SPARSE = {name: value for name, value in DEEPSEEK.items() if name != "q_lora_rank"} | {
    "model_type": "deepseek_v32", "q_lora_rank": 24, "index_topk": 20, "index_n_heads": 16,
    "index_head_dim": 32,
}  # fmt: skip


WIDE_HEADS = {"qk_nope_head_dim": 128, "v_head_dim": 128}


@pytest.mark.parametrize("family", [DEEPSEEK, SPARSE | WIDE_HEADS])
def test_latents_of_several_requests_are_expanded_together_on_an_npu(family: dict[str, Any]) -> None:
    """However few tokens a request may have, or read: the operators of an NPU expand as many in a call."""
    taken, expanded = estimated(family)
    assert taken > expanded


@pytest.mark.parametrize(("family", "dtype"), [(SPARSE, "auto"), (SPARSE | WIDE_HEADS, "int8")])
def test_nothing_is_expanded_where_every_step_of_an_npu_reads_what_it_chose(
    family: dict[str, Any], dtype: Any
) -> None:
    taken, expanded = estimated(family, dtype)
    assert taken < expanded


def estimated(family: dict[str, Any], dtype: Any = "auto") -> tuple[int, int]:
    """What a step takes on an NPU with pages of this type, and what latents alone take that are expanded."""
    recipe = made(family, pages=40, dtype="bfloat16")
    device, cache = replace(recipe.device, kind="npu"), replace(recipe.cache, dtype=dtype)
    recipe = replace(recipe, device=device, cache=cache)
    config = model_config(recipe)
    latent = config.latent
    assert latent is not None
    expanded = 2 * config.num_heads * (latent.query_dim + latent.value_dim) * config.dtype_bytes
    return estimate(recipe, config), STEP_BYTES + MOST_GATHERED * expanded


def test_choosing_from_a_long_prompt() -> None:
    """Scores come in tiles: what is held beside the queries grows with the context, not with its square."""
    peaks = []
    for longest in (500, 1000):
        recipe = made(SPARSE, pages=1 + -(-longest // 16), dtype="float32")
        recipe = replace(recipe, scheduler=replace(recipe.scheduler, max_batch_tokens=1000))
        config = model_config(recipe)
        attention = SparseAttention(shape_of(16, config))
        planes = attention.new_planes(70)
        table, nothing = np.arange(1, 65, dtype=np.int32)[None], np.empty(0, np.int64)
        batch = Batch(np.array([0]), np.array([0]), np.array([longest]), nothing, nothing, nothing)
        metadata = planned(attention, batch, table)
        query, weights = torch.ones(longest, 16, 32), torch.ones(longest, 16)
        with PeakBytes() as peak:
            attention.choose(query, weights, attention.index_pages(planes), metadata)
        assert STEP_BYTES + peak.most <= estimate(recipe, config)
        peaks.append(peak.most)
    assert peaks[1] < 2.5 * peaks[0], "twice the context: its square would take four times as much"
