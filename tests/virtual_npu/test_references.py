"""The references of the smaller operators against torch's own, transformers, and plain indexing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.lazy import transformers
from tests.virtual_npu.right_calls import RIGHT
from virtual_npu.contract import Conditions
from virtual_npu.operators import OPERATORS, operator
from virtual_npu.operators.sparse import packed, unpacked
from virtual_npu.simulated_products import P310

KERNELS = {each.qualified: partial(each, Conditions()) for each in OPERATORS}
ON_310P = {each.qualified: partial(each, Conditions(product=P310)) for each in OPERATORS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    x, gamma = torch.randn(3, 5, 64).to(dtype), torch.randn(64).to(dtype)
    y, rstd = KERNELS["npu::npu_rms_norm"](x, gamma, 1e-5)
    want = functional.rms_norm(x.float(), (64,), gamma.float(), 1e-5)
    torch.testing.assert_close(y, want.to(dtype))
    assert (rstd.shape, rstd.dtype) == ((3, 5, 1), torch.float32)
    torch.testing.assert_close(rstd[..., 0], (x.float().square().mean(-1) + 1e-5) ** -0.5)


def test_add_rms_norm() -> None:
    x, residual, gamma = (torch.randn(*shape).to(torch.bfloat16) for shape in ((5, 64), (5, 64), (64,)))
    y, rstd, total = KERNELS["npu::npu_add_rms_norm"](x, residual, gamma)
    assert torch.equal(total, x + residual)
    for one, other in zip((y, rstd), KERNELS["npu::npu_rms_norm"](total, gamma)):
        assert torch.equal(one, other)


def test_add_rms_norm_cast() -> None:
    x, residual, gamma = (torch.randn(*shape).to(torch.bfloat16) for shape in ((5, 64), (5, 64), (64,)))
    wide, *others = KERNELS["npu::npu_add_rms_norm_cast"](x, residual, gamma)
    for one, other in zip(others, KERNELS["npu::npu_add_rms_norm"](x, residual, gamma), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(wide, others[0].float())


@pytest.mark.parametrize("is_output", [False, True])
def test_joined_heads_are_those_of_qwen3(is_output: bool) -> None:
    """In float32, which no device takes there; of two places that are written, one is in the second block."""
    tokens, heads, (cos, sin) = 5, (4, 2, 2), angles(5, 128)
    qkv, norms = torch.randn(tokens, sum(heads) * 128), [1 + torch.rand(128) for _ in range(2)]
    query, key, value = qkv.unflatten(-1, (-1, 128)).split(heads, 1)
    query, key = (
        functional.rms_norm(each, (128,), norm, 1e-5).transpose(0, 1)[None]
        for each, norm in zip((query, key), norms)
    )
    rotated = transformers.models.qwen3.modeling_qwen3.apply_rotary_pos_emb(query, key, cos[None], sin[None])
    wants = [each[0].transpose(0, 1).flatten(1) for each in rotated] + [value.flatten(1)]
    out = torch.empty(tokens, 4 * 128)
    caches = [torch.full((2, 2 * 128 // 16, 32, 16), torch.nan) for _ in range(2)]
    index = torch.tensor([-1, 3, -1, 33, -1])
    kernel = partial(operator("npu_qkv_rms_norm_rope_cache"), Conditions(fp32=True))
    found = kernel(
        qkv, *norms, cos, sin, index, out, *caches, [1, tokens, 8, 128], list(heads),
        epsilon=1e-5, is_output_qkv=is_output,
    )  # fmt: skip
    torch.testing.assert_close(out, wants[0])
    for cache, want in zip(caches, wants[1:]):
        torch.testing.assert_close(cache[0, :, 3].flatten(), want[1])
        torch.testing.assert_close(cache[1, :, 1].flatten(), want[3])
        assert int(cache.isnan().sum()) == cache.numel() - 2 * 2 * 128
    for each, want in zip(found, wants if is_output else ()):
        torch.testing.assert_close(each, want)


def angles(tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D] as transformers makes them: both halves alike."""
    half = torch.rand(tokens, dim // 2) * 6
    both = torch.cat([half, half], -1)
    return both.cos(), both.sin()


@pytest.mark.parametrize("dim", [64, 128])
def test_rotary_in_place(dim: int) -> None:
    query, key, (cos, sin) = torch.randn(7, 4, dim), torch.randn(7, 2, dim), angles(7, dim)
    rotated = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    wants = rotated(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None], sin[None])
    shaped = cos[:, None], sin[:, None]
    multiplied = [KERNELS["npu::npu_rotary_mul"](each, *shaped) for each in (query, key)]
    results = KERNELS["npu::npu_apply_rotary_pos_emb"](query, key, *shaped, layout="TND")
    assert torch.equal(results[0], query)
    assert torch.equal(results[1], key)
    for want, one, other in zip(wants, results, multiplied):
        torch.testing.assert_close(one, want[0].transpose(0, 1))
        assert torch.equal(one, other)


def test_rotary_of_neighbours() -> None:
    x, (cos, sin) = torch.randn(3, 2, 64), angles(3, 64)
    cos, sin = (each[:, None, :32].repeat_interleave(2, -1) for each in (cos, sin))
    turned = torch.view_as_complex(x.view(3, 2, 32, 2)) * torch.complex(cos[..., ::2], sin[..., ::2])
    result = KERNELS["npu::npu_rotary_mul"](x, cos, sin, "interleave")
    torch.testing.assert_close(result, torch.view_as_real(turned).flatten(-2))


def test_swiglu() -> None:
    x = torch.randn(4, 6, 32).to(torch.bfloat16)
    for dim in (-1, 1):
        gate, up = x.float().chunk(2, dim)
        want = (functional.silu(gate) * up).to(torch.bfloat16)
        assert torch.equal(KERNELS["npu::npu_swiglu"](x, dim), want)


def test_clipped_swiglu_is_the_gate_of_gpt_oss() -> None:
    with torch.device("meta"):
        experts = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts(transformers.GptOssConfig())
    by_turns, clipped = 10 * torch.randn(4, 6, 32), KERNELS["npu::npu_clipped_swiglu"]
    want = experts._apply_gate(by_turns)
    torch.testing.assert_close(clipped(by_turns), want)
    halves = torch.cat((by_turns[..., ::2], by_turns[..., 1::2]), -1)
    torch.testing.assert_close(clipped(halves, interleaved=False), want)
    turned = halves.transpose(1, 2).contiguous()
    torch.testing.assert_close(clipped(turned, dim=1, interleaved=False), want.transpose(1, 2))
    experts.alpha, experts.limit = 0.9, 3.0
    other = clipped(by_turns.bfloat16(), alpha=0.9, limit=3.0)
    torch.testing.assert_close(other, experts._apply_gate(by_turns.bfloat16().float()).bfloat16())


@pytest.mark.parametrize("name", ["npu::npu_scatter_pa_kv_cache", "atb::_npu_reshape_and_cache"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_cache_writes_land_at_their_places_and_nowhere_else(name: str, dtype: torch.dtype) -> None:
    slots = torch.tensor([5 * 16 + 3, 2 * 16, 5 * 16 + 4], dtype=torch.int32)
    rows = [torch.randint(1, 100, (3, 2, 32)).to(dtype) for _ in range(2)]
    caches = [torch.zeros(7, 16, 2, 32, dtype=dtype) for _ in range(2)]
    mode = {"cache_mode": "Norm"} if "scatter" in name else {}
    assert KERNELS[name](*rows, *caches, slots, **mode) is None
    for cache, row in zip(caches, rows):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[slots.long()], row)
        assert int(flat.any(-1).any(-1).sum()) == 3


def test_a_split_cache_holds_heads_in_columns_of_sixteen() -> None:
    key = torch.arange(2 * 2 * 32, dtype=torch.float16).view(2, 2, 32)
    slots = torch.tensor([3 * 128 + 1, 4 * 128 + 127], dtype=torch.int32)
    cache = torch.zeros(5, 4, 128, 16, dtype=torch.float16)
    ON_310P["atb::_npu_reshape_and_cache"](key, key.clone(), cache, torch.zeros_like(cache), slots)
    assert torch.equal(cache[3, :, 1], key[0].view(4, 16))
    assert torch.equal(cache[4, :, 127], key[1].view(4, 16))
    nz = torch.zeros(5, 4, 128, 16, dtype=torch.float16)
    KERNELS["npu::npu_scatter_pa_kv_cache"](key, key, nz, nz.clone(), slots)  # PA_NZ is the default
    assert torch.equal(nz, cache)


def test_padding_may_fall_on_one_place_of_page_0() -> None:
    key, cache = torch.randn(3, 2, 32), torch.zeros(4, 16, 2, 32)
    slots = torch.tensor([0, 20, 0])
    KERNELS["npu::npu_scatter_pa_kv_cache"](key, key, cache, cache.clone(), slots, cache_mode="Norm")
    assert torch.equal(cache[1, 4], key[1])


@pytest.mark.parametrize("in_int8", [False, True])
def test_what_an_indexer_chooses_scores_highest_in_float64(in_int8: bool) -> None:
    """No position that was left out scores higher, and a row that may read all positions reads all."""
    name = "npu_quant_lightning_indexer" if in_int8 else "npu_lightning_indexer"
    for seed in range(6):
        call, conditions = RIGHT[name](np.random.default_rng(seed))
        call["sparse_count"] = 9
        made = operator(name)(conditions, **call)
        chosen = made if in_int8 else made[0]
        query, keys, weights = (call[each].double() for each in ("query", "key", "weights"))
        if in_int8:
            query = query * call["query_dequant_scale"].double()[..., None]
            keys = keys * call["key_dequant_scale"].double()[..., None]
        for row, own, places in seen_by(call, "key"):
            scores = (keys[places][:, 0] @ query[row].mT).relu() @ weights[row]
            found = chosen[row, 0][chosen[row, 0] >= 0].long()
            assert len(found.unique()) == len(found) == min(own + 1, 9)
            assert int(found.max()) <= own
            left = scores[: own + 1].clone()
            left[found] = -torch.inf
            assert float(left.max()) <= float(scores[found].min()) + 1e-3


@pytest.mark.parametrize("in_int8", [False, True])
def test_sparse_attention_is_attention_under_the_mask_of_what_was_chosen(in_int8: bool) -> None:
    """In int8, each number of a latent is within half a step of its own tile's scale."""
    name = "npu_kv_quant_sparse_flash_attention" if in_int8 else "npu_sparse_flash_attention"
    for seed in range(6):
        call, conditions = RIGHT[name](np.random.default_rng(seed))
        made = operator(name)(conditions, **call)
        output = made if in_int8 else made[0]
        if in_int8:
            query, keys = call["query"].double(), unpacked(call["key"]).double()
        else:
            query, keys = (
                torch.cat((call[each], call[f"{each}_rope"]), -1).double() for each in ("query", "key")
            )
        for row, _, places in seen_by(call, "kv"):
            hidden = torch.ones(len(places[0]), dtype=torch.bool)
            hidden[call["sparse_indices"][row, 0].relu().long()] = False
            read = keys[places][:, 0]
            scores = (query[row] @ read.mT * call["scale_value"]).masked_fill(hidden, -torch.inf)
            want = (scores.softmax(-1) @ read[:, :512]).to(output.dtype)
            torch.testing.assert_close(output[row], want, atol=2e-2, rtol=2e-2)


def seen_by(call: dict[str, Any], keys: str) -> Iterator[tuple[int, int, tuple[Tensor, Tensor]]]:
    """Each row of a packed query, its position, and the pages and offsets of its request's tokens."""
    first, size = 0, call["key"].shape[1]
    ends, lens = call["actual_seq_lengths_query"].tolist(), call[f"actual_seq_lengths_{keys}"].tolist()
    for stop, length, table in zip(ends, lens, call["block_table"].long()):
        at = torch.arange(length)
        for row in range(first, stop):
            yield row, length - (stop - row), (table[at // size], at % size)
        first = stop


def test_rows_of_latents_in_int8_are_near_what_was_packed() -> None:
    latents, ropes = torch.randn(40, 512) * torch.logspace(-2, 2, 512), torch.randn(40, 64).bfloat16()
    rows = packed(latents, ropes)
    assert (rows.shape, rows.dtype) == ((40, 656), torch.int8)
    again = unpacked(rows)
    assert torch.equal(again[:, 512:], ropes.float())
    step = latents.unflatten(-1, (4, 128)).abs().amax(-1, keepdim=True).expand(-1, -1, 128).flatten(1) / 127
    assert bool(((again[:, :512] - latents).abs() <= 0.51 * step).all())


@pytest.mark.parametrize("mode", [0, 2])
def test_the_prolog_gives_the_normed_queries_that_it_projects(mode: int) -> None:
    """An indexer reads them: their product with the next weight is the rotated part of the queries."""
    for seed in range(20):
        call, conditions = RIGHT["npu_mla_prolog_v3"](np.random.default_rng(seed))
        if call["weight_quant_mode"] != mode:
            continue
        call |= {"query_norm_flag": True, "rope_cos": torch.ones(len(call["token_x"]), 64).bfloat16()}
        call["rope_sin"] = torch.zeros_like(call["rope_cos"])
        _, rope, _, normed, scale = operator("npu_mla_prolog_v3")(conditions, **call)
        wide = normed.double() * (scale.double() if mode else 1)
        weight = call["weight_uq_qr"].double() * (call["dequant_scale_w_uq_qr"].double() if mode else 1)
        pairs = (wide @ weight).unflatten(-1, (rope.shape[1], -1))[..., -64:]
        want = torch.cat((pairs[..., ::2], pairs[..., 1::2]), -1)
        torch.testing.assert_close(rope.double(), want, atol=1e-2, rtol=1e-2)
        norm = wide / call["rmsnorm_gamma_cq"].double()
        torch.testing.assert_close(
            norm.square().mean(-1), torch.ones(len(norm)).double(), atol=0.05, rtol=0.05
        )
        return
    raise AssertionError("no call of this mode was drawn")
