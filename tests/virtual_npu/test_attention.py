"""Fused attention's reference against the definition of softmax, and against torch's own attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.each_of import each_of
from tests.thorough import cases
from tests.virtual_npu.batches import MASK, Dense, first_version, int8_pages, oracle, paged
from virtual_npu.contract import Conditions, ContractError
from virtual_npu.operators import operator

FP32 = Conditions(fp32=True)
V1, V2 = operator("npu_fused_infer_attention_score"), operator("npu_fused_infer_attention_score_v2")


@each_of("seed", range(cases(40, 300)))
def test_random_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads = ((1, 1), (2, 2), (4, 2), (12, 2), (8, 1))[seed % 5]
    arguments, dense = paged(
        rng,
        heads=heads,
        dim=(64, 128)[seed % 2],
        page_size=16 * int(rng.integers(1, 13)),
        by_heads=heads[0] > heads[1] and bool(rng.integers(2)),
        window=None if rng.integers(2) else int(rng.integers(1, 90)),
        sink=bool(rng.integers(2)),
    )
    out, lse = V2(FP32, **arguments)
    close(out, lse, dense)
    if dense.sink is None:  # which the first version does not have
        assert all(map(torch.equal, V1(FP32, **first_version(arguments)), (out, lse)))


@each_of("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each_of("heads", [(2, 2), (8, 2), (6, 1)])
def test_pages_of_int8(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    lens = [(1, 70), (1, 1), (1, 33), (1, 32)]
    arguments, dense = int8_pages(np.random.default_rng(heads), dtype, lens=lens, heads=heads, dim=128)
    out, _ = V1(FP32, **first_version(arguments))
    near = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(out[:, :, 0].double(), oracle(dense)[0], rtol=near, atol=near)


def test_many_query_rows() -> None:
    arguments, dense = paged(np.random.default_rng(8), lens=[(700, 900), (1, 333)], page_size=128)
    close(*V2(FP32, **arguments), dense)


@pytest.mark.parametrize("dims", [(64, 64), (192, 128)])
def test_without_a_page_table_lengths_of_keys_add_up(dims: tuple[int, int]) -> None:
    arguments, dense = paged(np.random.default_rng(9), lens=[(5, 5), (40, 40), (1, 1)], dim=dims[0])
    dense.values = [each[..., : dims[1]] for each in dense.values]
    arguments |= {
        "key": torch.cat(dense.keys),
        "value": torch.cat(dense.values),
        "block_table": None,
        "block_size": 0,
        "actual_seq_kvlen": arguments["actual_seq_qlen"],
    }
    close(*V2(FP32, **arguments), dense)


@each_of("layout", ["BSND", "BNSD", "BNSD_BSND"])
@each_of("mode", [0, 1, 2, 3, 4])
def test_other_layouts(layout: str, mode: int) -> None:
    torch.manual_seed(mode)
    query, key, value = torch.randn(2, 6, 4, 64), torch.randn(2, 9, 2, 64), torch.randn(2, 9, 2, 64)
    at, place = torch.arange(6)[:, None], torch.arange(9)[None]
    own = torch.rand(2, 1, 6, 9) < 0.5
    own[..., 0] = False
    seen = {
        0: ~own,
        1: ~own,
        2: place <= at,
        3: place <= at + 3,
        4: (place <= at + 3 + 1) & (place >= at + 3 - 2),
    }[mode]
    order = layout.partition("_")[0]
    out, lse = V2(
        FP32,
        *(laid_out(each, order) for each in (query, key, value)),
        atten_mask=own if mode < 2 else MASK,
        num_query_heads=4,
        num_key_value_heads=2,
        softmax_scale=0.125,
        input_layout=layout,
        sparse_mode=mode,
        return_softmax_lse=True,
        **({"pre_tokens": 2, "next_tokens": 1} if mode == 4 else {}),
    )
    want = functional.scaled_dot_product_attention(
        *(each.transpose(1, 2) for each in (query, key, value)), seen, scale=0.125, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, laid_out(want, layout.rpartition("_")[2]), atol=1e-5, rtol=0)
    assert lse.shape == (2, 4, 6, 1)


def test_rows_past_a_length_are_left_at_zero() -> None:
    query, key = torch.randn(2, 4, 2, 64), torch.randn(2, 8, 2, 64)
    out, _ = V2(
        FP32,
        query,
        key,
        key,
        num_query_heads=2,
        input_layout="BSND",
        actual_seq_qlen=[4, 2],
        actual_seq_kvlen=[8, 5],
        softmax_scale=0.125,
    )
    want = functional.scaled_dot_product_attention(
        *(each[1:].transpose(1, 2) for each in (query[:, :2], key[:, :5], key[:, :5])), scale=0.125
    ).transpose(1, 2)
    torch.testing.assert_close(out[1:, :2], want, atol=1e-5, rtol=0)
    assert not out[1, 2:].any()


def test_a_single_query_ignores_the_mode() -> None:
    query, key = torch.randn(3, 1, 2, 64), torch.randn(3, 8, 2, 64)
    shared: dict[str, Any] = {"num_query_heads": 2, "input_layout": "BSND", "softmax_scale": 0.125}
    plain = V2(FP32, query, key, key, sparse_mode=0, **shared)[0]
    assert torch.equal(plain, V2(FP32, query, key, key, sparse_mode=2, **shared)[0])


def test_packed_decodes_without_a_mask_see_all_their_keys() -> None:
    arguments, _ = paged(np.random.default_rng(5))
    rows = len(arguments["actual_seq_kvlen"])
    decodes = arguments | {
        "query": torch.randn(rows, *arguments["query"].shape[1:]),
        "actual_seq_qlen": list(range(1, rows + 1)),
        "return_softmax_lse": False,
    }
    bare = decodes | {"atten_mask": None, "sparse_mode": 0}
    assert torch.equal(V2(FP32, **bare)[0], V2(FP32, **decodes)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_comes_back_in_its_type(dtype: torch.dtype) -> None:
    arguments, dense = paged(np.random.default_rng(3), dtype)
    out, lse = V2(Conditions(), **arguments)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out.double(), oracle(dense)[0], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("window", [1, 16, 17, 40])
def test_what_lies_before_a_window_is_not_read(window: int) -> None:
    """A request may give back the pages that its window has left, and the table may say anything there."""
    arguments, dense = paged(np.random.default_rng(window), lens=[(1, 70), (5, 90)], window=window)
    for row, (count, keys) in enumerate([(1, 70), (5, 90)]):
        first = keys - count - (window - 1)
        for cache in (arguments["key"], arguments["value"]):
            page = int(arguments["block_table"][row, first // 16])
            cache[page, : first % 16] = torch.nan
        arguments["block_table"][row, : first // 16] = 10_000
    close(*V2(FP32, **arguments), dense)


def test_rows_that_see_nothing_come_out_as_zero_where_that_is_asked_for() -> None:
    query, key = torch.randn(1, 3, 2, 64), torch.randn(1, 4, 2, 64)
    hidden = torch.zeros(3, 4, dtype=torch.bool)
    hidden[1] = True
    shared: dict[str, Any] = {"num_query_heads": 2, "input_layout": "BSND", "softmax_scale": 0.125}
    out, _ = V2(FP32, query, key, key, atten_mask=hidden, sparse_mode=1, inner_precise=2, **shared)
    bare, _ = V2(FP32, query, key, key, **shared)
    assert not out[0, 1].any()
    torch.testing.assert_close(out[0, ::2], bare[0, ::2])


def test_the_mask_may_lie_anywhere_in_memory() -> None:
    arguments, _ = paged(np.random.default_rng(6))
    room = torch.zeros(MASK.numel() + 1, dtype=torch.int8)
    room[1:] = MASK.flatten()
    moved = room[1:].view(2048, 2048)
    assert all(map(torch.equal, V2(FP32, **arguments | {"atten_mask": moved}), V2(FP32, **arguments)))
    moved[5, 3] = 1
    with pytest.raises(ContractError, match="atten_mask is not 1 above the diagonal"):
        V2(FP32, **arguments | {"atten_mask": moved})


def test_given_outputs_are_filled() -> None:
    arguments, _ = paged(np.random.default_rng(4))
    out, lse = V2(FP32, **arguments)
    workspace = operator("_npu_fused_infer_attention_score_v2_get_max_workspace")(FP32, **arguments)
    given = [torch.empty_like(out), torch.empty_like(lse)]
    into = operator("npu_fused_infer_attention_score_v2.out")
    results = into(FP32, **arguments, workspace=workspace, out=given)
    assert all(a is b for a, b in zip(results, given))
    assert all(map(torch.equal, given, (out, lse)))
    assert workspace.dtype == torch.uint8


def test_the_known_silent_failures_are_wrong_as_the_hardware_is() -> None:
    faithful = Conditions(fp32=True, faithful=True)
    query, key, value = torch.randn(5, 2, 64), torch.randn(5, 1, 64), torch.randn(5, 1, 64)
    out, _ = V2(
        faithful,
        query,
        key,
        value,
        actual_seq_qlen=[2, 5],
        actual_seq_kvlen=[2, 5],
        num_query_heads=2,
        num_key_value_heads=1,
        input_layout="TND",
        softmax_scale=0.125,
    )
    torch.testing.assert_close(out[2:], value[2:].mean(0).expand(3, 2, 64))

    query, key, value = torch.randn(1, 2, 1, 64), torch.randn(1, 2, 700, 64), torch.randn(1, 2, 700, 64)
    hidden = torch.zeros(1, 1, 1, 700, dtype=torch.bool)
    hidden[..., 300:] = True
    shared: dict[str, Any] = {"num_query_heads": 2, "input_layout": "BNSD", "softmax_scale": 0.125}
    right = V2(FP32, query, key, value, atten_mask=hidden, sparse_mode=1, **shared)[0]
    wrong = V2(faithful, query, key, value, atten_mask=hidden, **shared)[0]
    kept = torch.cat([torch.arange(300), torch.arange(512, 700)])
    as_seen = V2(FP32, query, key[:, :, kept], value[:, :, kept], **shared)[0]
    torch.testing.assert_close(wrong, as_seen)
    assert (wrong - right).abs().max() > 1e-2


def close(out: Tensor, lse: Tensor, dense: Dense) -> None:
    """Hold a packed result to the oracle."""
    want, log = oracle(dense)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), log, atol=1e-5, rtol=1e-5)


def laid_out(tensor: Tensor, order: str) -> Tensor:
    """[B, S, N, D] in another order."""
    return (tensor.transpose(1, 2) if order == "BNSD" else tensor).contiguous()
