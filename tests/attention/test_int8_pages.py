"""Keys and values in int8 are as near to what was written as the scale of each head allows."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from attention.int8_pages import packed, row_bytes, unpacked
from attention.reference import Attention
from devices.shapes import AttentionShape
from kv_cache.device.storage import KVCache, LayerPages
from models.config import DecoderConfig
from recipes.assembly.families import decoder_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_are_nearest_by_the_scale_of_their_own_head(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1e-3, 1.0, 500.0])[:, None]  # scales of heads: one for all would lose the first
    x = (torch.randn(40, 3, 10, generator=random) * sizes).to(dtype)
    stored = packed(x)
    assert stored.shape == (40, 3, row_bytes(10)) == (40, 3, 14)
    assert stored.dtype == torch.int8
    numbers = stored[..., :10].numpy()
    scales = np.ascontiguousarray(stored[..., 10:].numpy()).view(np.float32)
    for at in np.ndindex(40, 3):
        row, scale = x[at].double().tolist(), float(scales[at][0])
        assert scale == pytest.approx(max(map(abs, row)) / 127, rel=1e-6)
        for value, number in zip(row, numbers[at].tolist()):
            assert abs(Fraction(value) / Fraction(scale) - number) <= Fraction(1, 2) + Fraction(1, 10**4)
    assert (unpacked(stored).double() - x.double()).abs().max(-1)[0].le(torch.tensor(scales)[..., 0]).all()


def test_a_head_of_zeros_stays_zero_and_what_is_not_finite_stays_so() -> None:
    x = torch.zeros(3, 2, 8)
    x[1, 0, 3], x[2, 1, 5] = torch.nan, torch.inf
    found = unpacked(packed(x))
    assert not found[0].any()
    assert not found[1, 0].isfinite().any()
    assert not found[2, 1].isfinite().any()
    assert not found[1, 1].any()
    assert not found[2, 0].any()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "share"), [("bfloat16", 128, 132 / 256), ("float32", 64, 68 / 256)]
)
def test_a_page_takes_as_many_bytes_as_are_planned(dtype: str, head_dim: int, share: float) -> None:
    shape = AttentionShape(8, 2, head_dim, 16, 1.0, getattr(torch, dtype), (None,) * 3, int8_pages=True)
    attention = Attention(shape)
    cache = KVCache([LayerPages(attention.new_planes)] * 3, 16, [5], [4])
    plain = config_of(dtype, head_dim)
    int8 = replace(plain, int8_cache=True)
    for tensors, pages in ((cache.tensors, 5), (cache.of_group(0)[1], 4)):
        assert {each.dtype for each in tensors} == {torch.int8}
        assert sum(each.nbytes for each in tensors) == pages * 16 * int8.kv_bytes_per_token()
    assert 16 * int8.kv_bytes_per_token() == share * 16 * plain.kv_bytes_per_token()


def config_of(dtype: str, head_dim: int) -> DecoderConfig:
    """The configuration of a small model."""
    return decoder_config(
        {
            "model_type": "llama",
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": head_dim,
            "intermediate_size": 48,
            "max_position_embeddings": 64,
            "eos_token_id": 2,
            "torch_dtype": dtype,
        }
    )
