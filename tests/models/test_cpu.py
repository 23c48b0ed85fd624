"""Linears of a CPU are those of plain torch; its other operators are in test_rowwise.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.ops.cpu.ops import CpuOps
from models.ops.reference import Ops
from tests.each_of import each_of

NEAR = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@each_of("bias", [False, True])
@each_of("num_rows", [1, 2, 3, 8, 9, 64, 65, 200])
@each_of("dtype", NEAR)
def test_linear(dtype: torch.dtype, num_rows: int, bias: bool) -> None:
    ops, plain = CpuOps(), Ops()
    weight, x = some(dtype, 48, 80), some(dtype, num_rows, 80)
    offset = some(dtype, 48) if bias else None
    found = ops.linear(x, ops.pack(weight.clone(), offset))
    expected = plain.linear(x.float(), (weight.float(), None if offset is None else offset.float()))
    assert found.shape == (num_rows, 48)
    torch.testing.assert_close(found.float(), expected, rtol=NEAR[dtype], atol=10 * NEAR[dtype])


def test_a_linear_without_bfloat16_is_that_of_float32_but_for_its_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    ops, weight, x = CpuOps(), some(torch.bfloat16, 48, 80), some(torch.bfloat16, 9, 80)
    expected = (x.double() @ weight.double().T + weight[:, 0].double()).to(torch.bfloat16)
    torch.testing.assert_close(ops.linear(x, ops.pack(weight, weight[:, 0])), expected, rtol=0.01, atol=0)


def test_a_tied_weight_stays_readable_after_packing() -> None:
    weight = some(torch.float32, 32, 16)
    before = weight.clone()
    CpuOps().pack(weight, None)
    assert torch.equal(weight, before)


def test_rows_of_a_linear_do_not_depend_on_their_number() -> None:
    ops = CpuOps()
    packed, x = ops.pack(some(torch.float32, 96, 64), None), some(torch.float32, 100, 64)
    whole = ops.linear(x, packed)
    for count in (1, 5, 33):
        torch.testing.assert_close(ops.linear(x[:count], packed), whole[:count], rtol=1e-6, atol=1e-6)


def test_padding_is_bounded_and_never_takes_rows_away() -> None:
    ops = CpuOps()
    sizes = [ops.padded(count) for count in range(1, 1000)]
    assert all(count <= size < 2 * count + 64 for count, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < 32
