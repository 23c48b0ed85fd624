"""Every implementation of the small operators computes what its definition says.

The tests run the definition itself and a device's own operators, on each device that is present. The expected
values are computed in float64, by other formulas than the definition's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from models.ops.cpu.ops import CpuOps
from models.ops.cuda.ops import CudaOps
from models.ops.reference import Ops
from tests.attention.test_attention import PAIRS, shape
from tests.device_kinds import machine, operators
from tests.each_of import each_of
from tests.interpreter import DEVICE
from tests.pairs import pairs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NEAR = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class There:
    """Operators of a device, which are given tensors of the host and give such."""

    def __init__(self, inner: Ops, device: torch.device) -> None:
        self.inner, self.device = inner, device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = getattr(self.inner, name)(*(self._moved(each, self.device) for each in args))
            return result if name == "pack" else self._moved(result, torch.device("cpu"))

        return call

    def _moved(self, value: Any, device: torch.device) -> Any:
        if isinstance(value, tuple):
            return tuple(self._moved(each, device) for each in value)
        return value.to(device) if isinstance(value, Tensor) else value


KERNELS = [pytest.param(("kernels", way), id=f"kernels-{way}") for way in ("any", "batch_invariant")]


@pytest.fixture(params=[*PAIRS, *KERNELS])
def ops(request: pytest.FixtureRequest) -> There:
    kind, way = request.param
    if kind == "kernels":  # CUDA's kernels, in Triton's interpreter where there is no GPU
        return There(CudaOps(batch_invariant=way == "batch_invariant"), torch.device(DEVICE))
    return There(Ops() if way == "reference" else operators(kind, way, shape())[0], machine(kind, way).device)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(ours: Tensor, expected: Tensor) -> None:
    tolerance = NEAR[ours.dtype]
    torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)


@each_of("num_rows, bias, dtype", pairs([1, 2, 7, 8, 9, 63, 64, 65, 130], [False, True], DTYPES))
def test_linear(ops: There, dtype: torch.dtype, num_rows: int, bias: bool) -> None:
    x, weight = drawn(num_rows, 24, dtype=dtype), drawn(40, 24, dtype=dtype, seed=1) / 5
    shift = drawn(40, dtype=dtype, seed=2) if bias else None
    ours = ops.linear(x, ops.pack(weight, shift))
    assert ours.dtype == dtype
    near(ours, x.double() @ weight.double().T + (0 if shift is None else shift.double()))


def test_a_row_of_nan_stays_alone_in_a_linear(ops: There, dtype: torch.dtype) -> None:
    x, packed = drawn(5, 24, dtype=dtype), ops.pack(drawn(40, 24, dtype=dtype, seed=1), None)
    clean = ops.linear(x, packed)
    x[2] = torch.nan
    ours = ops.linear(x, packed)
    assert ours[2].isnan().all()
    rest = [0, 1, 3, 4]
    assert torch.equal(ours[rest], clean[rest])


@pytest.mark.parametrize("heads", [None, 3])
def test_rms_norm(ops: There, dtype: torch.dtype, heads: int | None) -> None:
    x = drawn(6, 32, dtype=dtype) if heads is None else drawn(6, heads + 2, 32, dtype=dtype)[:, 1:-1]
    x[1] *= 1e-3  # so small that eps counts
    weight, before = drawn(32, dtype=dtype, seed=1), x.clone()
    wide = x.double()
    expected = wide / (wide.square().sum(-1, keepdim=True) / 32 + 1e-4).sqrt() * weight.double()
    near(ops.rms_norm(x, weight, 1e-4), expected)
    assert torch.equal(x, before)


@pytest.mark.parametrize("kind", ["silu", "sigmoid"])
def test_gated_rms_norm(ops: There, dtype: torch.dtype, kind: str) -> None:
    x, gate = drawn(5, 4, 24, dtype=dtype), drawn(5, 4, 24, dtype=dtype, seed=1)
    x[1] *= 1e-3  # so small that eps counts
    weight = drawn(24, dtype=dtype, seed=2)
    opened = torch.sigmoid(gate.double()) * (gate.double() if kind == "silu" else 1)
    length = (x.double().square().mean(-1, keepdim=True) + 1e-4).sqrt()
    near(ops.gated_rms_norm(x, gate, weight, 1e-4, kind), x.double() / length * weight.double() * opened)


def test_add_rms_norm(ops: There, dtype: torch.dtype) -> None:
    x, residual = drawn(6, 32, dtype=dtype), drawn(6, 32, dtype=dtype, seed=1)
    weight = drawn(32, dtype=dtype, seed=2)
    normed, total = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    assert torch.equal(total, x + residual)
    near(normed, ops.rms_norm(x + residual, weight, 1e-6).double())


@each_of("dim, num_heads", [(16, 4), (64, 4), (128, 4), (128, 70)])
def test_rotary_turns_pairs_as_complex_numbers(
    ops: There, dtype: torch.dtype, dim: int, num_heads: int
) -> None:
    heads = drawn(5, num_heads + 2 + 2, dim, dtype=dtype)  # they are views of the product, as in a layer
    query, key, _ = heads.split((num_heads, 2, 2), dim=1)
    angles = drawn(5, dim // 2, dtype=torch.float64, seed=1) * 3
    cos, sin = (torch.cat((part, part), -1).to(dtype) for part in (angles.cos(), angles.sin()))
    before = heads.clone()
    ours = ops.rotary(query, key, cos, sin)
    for turned, x in zip(ours, before.split((num_heads, 2, 2), dim=1)):
        complex_numbers = torch.complex(*x.double().chunk(2, -1))
        expected = complex_numbers * torch.polar(torch.ones_like(angles), angles)[:, None]
        assert turned.shape == x.shape
        near(turned, torch.cat((expected.real, expected.imag), -1))


def test_swiglu(ops: There, dtype: torch.dtype) -> None:
    gate_up = drawn(6, 48, dtype=dtype) * 3
    gate, up = gate_up[:, :24].double(), gate_up[:, 24:].double()
    near(ops.swiglu(gate_up), gate / (1 + (-gate).exp()) * up)


def test_clamped_swiglu(ops: There, dtype: torch.dtype) -> None:
    gate_up = drawn(6, 48, dtype=dtype) * 3
    gate, up = gate_up[:, :24].double(), gate_up[:, 24:].double()
    gate, up = gate.where(gate < 2, 2), up.where(up.abs() < 2, 2 * up.sign())
    near(ops.clamped_swiglu(gate_up, 1.702, 2.0), gate / (1 + (-1.702 * gate).exp()) * (up + 1))


def test_greedy_takes_the_best_and_tells_what_is_not_finite(ops: There, dtype: torch.dtype) -> None:
    logits = drawn(8, 1000, dtype=dtype)
    logits[range(8), [0, 999, 5, 31, 32, 500, 7, 8]] = 50
    logits[1, 3] = -math.inf
    logits[2, 700] = math.nan
    logits[3, 0] = math.inf
    logits[4] = -math.inf
    tokens, finite = ops.greedy(logits)
    assert finite.tolist() == [True, True, False, False, False, True, True, True]
    assert tokens[finite].tolist() == [0, 999, 500, 7, 8]
    assert tokens.dtype == torch.int64


def test_padded_never_takes_rows_away(ops: There) -> None:
    assert all(ops.padded(num_rows) >= num_rows for num_rows in range(1, 300))


def test_a_linear_without_bfloat16_is_that_of_float32_but_for_its_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    ops, weight, x = CpuOps(), drawn(48, 80, dtype=torch.bfloat16), drawn(9, 80, dtype=torch.bfloat16)
    expected = (x.double() @ weight.double().T + weight[:, 0].double()).to(torch.bfloat16)
    torch.testing.assert_close(ops.linear(x, ops.pack(weight, weight[:, 0])), expected, rtol=0.01, atol=0)


def test_a_tied_weight_of_a_cpu_stays_readable_after_packing() -> None:
    weight = drawn(32, 16, dtype=torch.float32)
    before = weight.clone()
    CpuOps().pack(weight, None)
    assert torch.equal(weight, before)


def test_padding_of_a_cpu_is_bounded_and_never_takes_rows_away() -> None:
    ops = CpuOps()
    sizes = [ops.padded(count) for count in range(1, 1000)]
    assert all(count <= size < 2 * count + 64 for count, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < 32
