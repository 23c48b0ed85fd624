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
from kv_cache.pages import PageCopy
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


def test_the_largest_number_of_a_head_is_kept() -> None:
    x = torch.randn(1000, 4, 16, generator=torch.Generator().manual_seed(1))
    found, largest = unpacked(packed(x)), x.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(found.gather(-1, largest), x.gather(-1, largest), rtol=1e-6, atol=0)


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


@pytest.mark.parametrize("seed", range(4))
def test_scales_go_with_their_pages(seed: int) -> None:
    """Copies, swaps and resizes in any order, against a list of what each page holds."""
    random, torch_random = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    heads, dim, size = (2, 3)[seed % 2], (12, 10)[seed // 2], 4
    shape = AttentionShape(heads, heads, dim, size, 1.0, torch.float32, (None, None), int8_pages=True)
    attention = Attention(shape)
    cache = KVCache([LayerPages(attention.new_planes)] * 2, size, [24], [24])
    nothing = torch.zeros(4, size, heads, row_bytes(dim), dtype=torch.int8)
    held, rested = [nothing] * 24, [nothing] * 24
    for page in range(24):
        numbers = torch.randn(4, size, heads, dim, generator=torch_random) * 10.0 ** (page % 5)
        held[page] = packed(numbers)
        for tensor, part in zip(cache.tensors, held[page]):
            tensor[page] = part
    for _ in range(30):
        pages, others = random.permutation(cache.num_pages[0]), random.permutation(24)
        count = int(random.integers(1, cache.num_pages[0] // 2))
        move = int(random.integers(4))
        if move == 0:
            cache.resize([int(random.integers(12, 25))])
            held = (held + [nothing] * 24)[: cache.num_pages[0]]
            continue
        if move == 1:
            copy, before, after = PageCopy(pages[:count], pages[-count:]), held, held
        elif move == 2:
            copy, before, after = PageCopy(pages[:count], others[:count], "to_host"), held, rested
        else:
            copy, before, after = PageCopy(others[:count], pages[:count], "from_host"), rested, held
        cache.apply([copy])
        for source, target in zip(copy.sources.tolist(), copy.targets.tolist()):
            after[target] = before[source]
    index = torch.arange(cache.num_pages[0] * size)
    wanted = [unpacked(torch.stack(each)).flatten(0, 1) for each in zip(*held)]
    for layer in range(2):
        keys, values = attention.read(*cache.of(layer), index)
        assert torch.equal(keys, wanted[2 * layer])
        assert torch.equal(values, wanted[2 * layer + 1])
