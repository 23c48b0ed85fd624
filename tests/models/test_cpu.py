"""The CPU's operators compute what the plain ones compute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from models.ops.cpu.ops import CpuOps
from models.ops.cpu.rowwise import rowwise
from models.ops.reference import Ops

NEAR = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = list(NEAR)


@pytest.fixture(scope="module", params=["eager", "compiled"])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    if request.param == "eager":
        return CpuOps()
    found = rowwise()
    if isinstance(found, str):
        pytest.skip(found)
    return CpuOps(rowwise=found)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_near(found: Tensor, expected: Tensor) -> None:
    near = NEAR[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def rows() -> Iterator[int]:
    yield from (1, 2, 7, 40)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 9, 64, 65, 200])
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


def test_norms(ops: CpuOps, dtype: torch.dtype) -> None:
    plain, weight = Ops(), some(dtype, 64)
    for count in rows():
        x, residual = some(dtype, count, 64), some(dtype, 64, count).T.contiguous()
        assert_near(ops.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5))
        for found, expected in zip(
            ops.add_rms_norm(x, residual, weight, 1e-5), plain.add_rms_norm(x, residual, weight, 1e-5)
        ):
            assert_near(found, expected)
    heads = some(dtype, 5, 96).unflatten(1, (6, 16))[:, :4]  # queries lie so in the product for all three
    assert_near(ops.rms_norm(heads, weight[:16], 1e-6), plain.rms_norm(heads, weight[:16], 1e-6))


def test_rotary(ops: CpuOps, dtype: torch.dtype) -> None:
    plain = Ops()
    for count in rows():
        heads = some(dtype, count, 8 * 16).unflatten(1, (8, 16))
        halves = some(dtype, count, 8), some(dtype, 8, count).T
        cos, sin = (torch.cat((each, each), -1) for each in halves)
        query, key = heads[:, :4], heads[:, 4:6]
        for found, expected in zip(ops.rotary(query, key, cos, sin), plain.rotary(query, key, cos, sin)):
            assert_near(found, expected)


def test_swiglu(ops: CpuOps, dtype: torch.dtype) -> None:
    for count in rows():
        gate_up = 4 * some(dtype, count, 96)
        assert_near(ops.swiglu(gate_up), Ops().swiglu(gate_up))


def test_greedy(ops: CpuOps, dtype: torch.dtype) -> None:
    for count in rows():
        logits = some(dtype, count, 500)
        logits[0, [7, 300]] = 30  # the first of equals
        tokens, finite = ops.greedy(logits)
        assert torch.equal(tokens, logits.float().argmax(-1))
        assert int(tokens[0]) == 7
        assert finite.all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_greedy_tells_rows_that_are_not_finite(ops: CpuOps, bad: float) -> None:
    logits = some(torch.float32, 4, 500)
    logits[2, 60 if bad > 0 or bad != bad else slice(None)] = bad
    tokens, finite = ops.greedy(logits)
    assert finite.tolist() == [True, True, False, True]
    assert ((tokens >= 0) & (tokens < 500)).all()
