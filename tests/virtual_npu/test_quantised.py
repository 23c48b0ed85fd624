"""The quantised operators and the sampling filter against integer arithmetic and the document's own steps."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from tests.virtual_npu.calls import Arguments
from virtual_npu.contract import Conditions
from virtual_npu.operators import OPERATORS

KERNELS = {each.qualified: partial(each, Conditions()) for each in OPERATORS}


def of_4_and_8_bits(experts: int, inner: int, words: int, rows: int) -> tuple[torch.Tensor, Arguments]:
    """A weight of so many words a row, to be multiplied with int8 rows, and what goes with it."""
    numbers = torch.randint(-8, 8, (experts, inner, 8 * words))
    nibbles = [(numbers[..., place::8] & 15) << (4 * place) for place in range(8)]
    weight = torch.stack(nibbles).sum(0)
    scale = torch.rand(experts, 8 * words)
    more: Arguments = {
        "scale": [scale.view(torch.int32).long()[:, None]],
        "per_token_scale": [torch.rand(rows)],
        "bias": [8 * numbers.sum(1) * scale],
    }
    return (weight - 2**32 * (weight >= 2**31)).int(), more


def matrices(rows: int, inner: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(inner)
    return rng.integers(-128, 128, (rows, inner)), rng.integers(-128, 128, (inner, columns))


@pytest.mark.parametrize("inner", [7, 3000])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_int8_are_exact(inner: int, transposed: bool) -> None:
    one, other = matrices(5, inner, 6)
    x1, x2 = torch.from_numpy(one).to(torch.int8), torch.from_numpy(other).to(torch.int8)
    x2 = x2.t().contiguous().t() if transposed else x2
    bias = torch.arange(6, dtype=torch.int32)
    total = torch.from_numpy(one @ other) + bias
    exact = KERNELS["npu::npu_quant_matmul"](x1, x2, torch.ones(1), bias=bias, output_dtype=3)
    assert exact.dtype == torch.int32
    assert torch.equal(exact.long(), total)

    scale, by_token = torch.rand(6), torch.rand(5)
    out = KERNELS["npu::npu_quant_matmul"](
        x1, x2, scale, pertoken_scale=by_token, bias=bias, output_dtype=torch.bfloat16
    )
    torch.testing.assert_close(out, (total * scale.double() * by_token[:, None].double()).bfloat16())

    rounded = KERNELS["npu::npu_quant_matmul"](x1, x2, scale / 1e4, offset=torch.full((6,), 2.0))
    want = (torch.from_numpy(one @ other) * (scale / 1e4).double() + 2).round().clamp(-128, 127)
    assert rounded.dtype == torch.int8
    assert (rounded.double() - want).abs().max() <= 1  # a tie may fall either way
    assert (rounded.double() != want).float().mean() < 0.1


def test_a_sum_beyond_what_float32_holds_is_exact() -> None:
    x1, x2 = torch.full((1, 3001), 127, dtype=torch.int8), torch.full((3001, 1), 127, dtype=torch.int8)
    out = KERNELS["npu::npu_quant_matmul"](x1, x2, torch.ones(1), output_dtype=3)
    assert out.item() == 3001 * 127 * 127  # odd, and above 2**24


def test_a_bias_that_is_no_integer_comes_after_the_scales() -> None:
    one = torch.ones(2, 3, dtype=torch.int8)
    out = KERNELS["npu::npu_quant_matmul"](
        one,
        torch.ones(3, 1, dtype=torch.int8),
        torch.tensor([2.0]),
        pertoken_scale=torch.tensor([1.0, 10.0]),
        bias=torch.tensor([0.5]),
        output_dtype=torch.bfloat16,
    )
    assert out.tolist() == [[6.5], [60.5]]


def test_rows_are_quantised_to_their_own_greatest() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]]).bfloat16()
    rows, scale = KERNELS["npu::npu_dynamic_quant"](x)
    assert rows.tolist() == [[64, -127, 32], [0, 0, 0]]
    torch.testing.assert_close(scale, torch.tensor([2 / 127, 0]))
    rows, scale = KERNELS["npu::npu_dynamic_quant"](x, smooth_scales=torch.tensor([4.0, 1.0, 1.0]).bfloat16())
    assert rows[0].tolist() == [127, -64, 16]
    x = torch.randn(3, 4, 64).half()
    rows, scale = KERNELS["npu::npu_dynamic_quant"](x)
    assert (rows.float() * scale[..., None] - x.float()).abs().max() <= scale.max() * 0.51


def test_a_scale_that_is_known_beforehand_is_multiplied_with() -> None:
    x = torch.tensor([[1.0, -2.0, 0.25], [9.0, -9.0, 0.5]]).bfloat16()
    quantise = partial(KERNELS["npu::npu_quantize"], dtype=torch.qint8, axis=-1, div_mode=False)
    inverse, offset = (torch.full((3,), each).bfloat16() for each in (16.0, -3.0))
    assert quantise(x, inverse, offset).tolist() == [[13, -35, 1], [127, -128, 5]]
    assert quantise(x / 8, inverse[:1], None).tolist() == [[2, -4, 0], [18, -18, 1]]
    divided = partial(quantise, div_mode=True)
    step = torch.tensor([1 / 16, 1 / 4, 1 / 16]).bfloat16()
    assert divided(x, step, torch.tensor([0, 1, 0]).int()).tolist() == [[16, -7, 4], [127, -35, 8]]
    scale = torch.tensor([0.5, 1.5])
    bits = scale.view(torch.int32).long()
    assert int(bits[1]) == 1069547520
    one, other = torch.ones(1, 4, dtype=torch.int8), torch.ones(4, 2, dtype=torch.int8)
    for given in (scale, bits):
        out = KERNELS["npu::npu_quant_matmul"](one, other, given, output_dtype=torch.float16)
        assert out.tolist() == [[2.0, 6.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_product_of_4_and_8_bits_is_whole_with_its_bias_alone(dtype: torch.dtype) -> None:
    weight, more = of_4_and_8_bits(2, 5, 3, 7)
    x, counts = torch.randint(-128, 128, (7, 5)).to(torch.int8), torch.tensor([3, 4])
    words = torch.stack([weight.long() >> (4 * place) & 15 for place in range(8)], -1).flatten(-2)
    numbers = torch.where(words > 7, words - 16, words).double()
    scale = more["scale"][0].int().view(torch.float32).double()
    total = torch.cat((x[:3].double() @ numbers[0], x[3:].double() @ numbers[1]))
    right = total * scale[:, 0].repeat_interleave(counts, 0) * more["per_token_scale"][0][:, None].double()
    product = partial(KERNELS["npu::npu_grouped_matmul"], [x], [weight], output_dtype=dtype, split_item=2)
    product = partial(product, group_type=0, group_list=counts, group_list_type=1)
    torch.testing.assert_close(product(**more)[0], right.to(dtype), rtol=1e-2, atol=1e-2)
    wrong = product(**more | {"bias": [torch.zeros_like(more["bias"][0])]})[0]
    assert (wrong.double() - right).abs().max() > 1


def test_a_norm_that_ends_in_int8_is_the_norm_and_then_the_rows() -> None:
    x, residual, gamma = (torch.randn(*size).half() for size in ((5, 64), (5, 64), (64,)))
    rows, more, total, scale, none = KERNELS["npu::npu_add_rms_norm_dynamic_quant"](
        x, residual, gamma, epsilon=1e-5, output_mask=[True, False]
    )
    normed, _, wanted = KERNELS["npu::npu_add_rms_norm"](x, residual, gamma, 1e-5)
    assert torch.equal(total, wanted)
    assert not more.numel()
    assert not none.numel()
    near = float(scale.max()) * 0.6
    torch.testing.assert_close(rows * scale[:, None], normed.float(), atol=near, rtol=1e-2)


def test_a_product_in_int32_is_scaled_gated_and_quantised() -> None:
    product = torch.randint(-999, 999, (4, 20), dtype=torch.int32)
    weight_scale, row_scale = torch.rand(1, 20) / 100, torch.rand(4, 1)
    rows, scale = KERNELS["npu::npu_dequant_swiglu_quant"](
        product, weight_scale=weight_scale, activation_scale=row_scale, activate_left=True, quant_mode=1
    )
    gate, up = (product * weight_scale * row_scale).chunk(2, 1)
    wanted = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(rows * scale[:, None], wanted, atol=float(scale.max()) * 0.51, rtol=0)


@pytest.mark.parametrize("by_counts", [False, True])
def test_the_products_of_experts_are_scaled_gated_and_quantised(by_counts: bool) -> None:
    x, weight = (torch.randint(-99, 99, sizes).to(torch.int8) for sizes in ((7, 32), (3, 32, 64)))
    scale, row_scale, counts = torch.rand(3, 64) / 100, torch.rand(7) / 10, torch.tensor([2, 0, 4])
    rows, row_scales = KERNELS["npu::npu_grouped_matmul_swiglu_quant_v2"](
        x,
        [weight],
        [scale],
        row_scale,
        counts if by_counts else counts.cumsum(0),
        group_list_type=int(by_counts),
    )
    of_rows = torch.tensor([0, 0, 2, 2, 2, 2])
    product = torch.einsum("tk,tkn->tn", x[:6].double(), weight[of_rows].double())
    gate, up = (product * scale[of_rows] * row_scale[:6, None]).chunk(2, 1)
    found, wanted = rows[:6] * row_scales[:6, None], gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(found.double(), wanted, atol=float(row_scales[:6].max()) * 0.51, rtol=1e-6)
    assert row_scales[6].isnan(), "no expert has the last row"


@pytest.mark.parametrize("has_bias", [False, True])
def test_grouped_products_are_the_products_one_by_one(has_bias: bool) -> None:
    x, weights = torch.randn(5, 48).half(), [torch.randn(48, width).half() for width in (16, 3)]
    biases = [torch.randn(width).half() for width in (16, 3)] if has_bias else None
    found = KERNELS["npu::npu_grouped_matmul"]([x, x], weights, bias=biases, group_type=-1)
    for each, weight, bias in zip(found, weights, biases or (0, 0)):
        wanted = x.double() @ weight.double() + (bias if has_bias else 0)
        torch.testing.assert_close(each.double(), wanted, atol=1e-2, rtol=1e-3)
        assert each.is_contiguous()


@pytest.mark.parametrize("given", [("p",), ("k",), ("p", "k")])
def test_top_k_top_p_row_by_row(given: tuple[str, ...]) -> None:
    torch.manual_seed(1)
    logits, k, p = torch.randn(6, 50), torch.tensor([1, 3, 50, 7, 2, 10]), torch.rand(6)
    arguments = {"p": p, "k": k.int()}
    out = KERNELS["npu::npu_top_k_top_p"](logits, **{name: arguments[name] for name in given})
    for row in range(6):
        order = logits[row].argsort(descending=True)
        kept = order[: k[row]] if "k" in given else order
        if "p" in given:
            before = logits[row][kept].softmax(0).cumsum(0) - logits[row][kept].softmax(0)
            kept = kept[before < p[row]] if bool((before < p[row]).any()) else kept[:1]
        want = torch.full((50,), -torch.inf)
        want[kept] = logits[row][kept]
        assert torch.equal(out[row], want)


def test_one_is_kept_whatever_p_says() -> None:
    out = KERNELS["npu::npu_top_k_top_p"](torch.tensor([[1.0, 5.0, 2.0]]), p=torch.zeros(1))
    assert out.tolist() == [[-torch.inf, 5.0, -torch.inf]]


def test_equals_of_the_least_kept_are_kept() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 3.0]])
    out = KERNELS["npu::npu_top_k_top_p"](logits, k=torch.tensor([2], dtype=torch.int32))
    assert out.tolist() == [[-torch.inf, 2.0, 2.0, 3.0]]


def test_a_weight_of_four_bits_is_scaled_by_groups_before_it_is_multiplied() -> None:
    numbers = torch.randint(-8, 8, (70, 16), dtype=torch.int32)
    scale, offset = torch.rand(3, 16).half(), torch.randint(-7, 9, (3, 16)).half()
    x, bias = torch.randn(5, 70).half(), torch.randn(16).half()
    found = KERNELS["npu::npu_weight_quant_batchmatmul"](
        x,
        KERNELS["npu::npu_convert_weight_to_int4pack"](numbers),
        scale,
        antiquant_offset=offset,
        bias=bias,
        antiquant_group_size=32,
    )
    group = torch.arange(70) // 32
    weight = ((numbers + offset[group].float()) * scale[group].float()).half()
    torch.testing.assert_close(found, (x.float() @ weight.float() + bias.float()).half())
    one = KERNELS["npu::npu_weight_quant_batchmatmul"](
        torch.ones(1, 2).half(), torch.tensor([[0x76543218], [0]], dtype=torch.int32), torch.ones(1).half()
    )
    assert one.tolist() == [[-8, 1, 2, 3, 4, 5, 6, 7]]
