"""Norms, rotary, gates, scores and the greedy choice in C++ are those of plain torch, alike in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from devices.cpp_sources import KINDS, missing_for_sources
from models.ops.cpu.rowwise import Rowwise, rowwise
from models.ops.reference import Ops

pytestmark = pytest.mark.skipif(missing_for_sources() is not None, reason=str(missing_for_sources()))
NEAR = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
ROWS = 37


@pytest.fixture(scope="module")
def own() -> Rowwise:
    found = rowwise()
    assert isinstance(found, Rowwise), found
    return found


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))).to(dtype)


def operands(dtype: torch.dtype, width: int) -> list[Tensor]:
    """Of norms: x, what is added and the weight; of rotary: parts of a wider product, angles; of
    gates; of gated norms.
    """
    heads, angles = some(dtype, ROWS, 5, 2 * width), some(torch.float32, ROWS, width // 2 + 1)
    turns = (torch.cat((each, each), -1).to(dtype) for each in (angles.cos(), angles.sin()))
    dim = 2 * angles.shape[1]
    gates = some(dtype, ROWS, 2 * width)
    gates[0, 0], gates[1, 0] = 200, -200
    read, beside = (
        some(dtype, ROWS, 3, width),
        some(dtype, ROWS, 2, 3 * width)[:, 1].unflatten(-1, (3, width)),
    )
    added = some(dtype, ROWS, width + 1)[:, :width]
    weight = some(dtype, width)
    return [
        some(dtype, ROWS, width),
        added,
        weight,
        heads[:, :3, :dim],
        heads[:, 3:, -dim:],
        *turns,
        gates,
        read,
        beside,
    ]


def results(ops: Rowwise | Ops, given: list[Tensor], rows: slice) -> list[Tensor]:
    """What each operator makes of some rows."""
    weight = given.pop(2)
    x, added, query, key, cos, sin, gates, read, beside = (each[rows] for each in given)
    given.insert(2, weight)
    return [
        ops.rms_norm(x, weight, 1e-5),
        *ops.add_rms_norm(x, added, weight, 1e-5),
        *ops.rotary(query, key, cos, sin),
        ops.swiglu(gates),
        ops.geglu(gates),
        ops.clamped_swiglu(gates, 1.702, 7.0),
        ops.gated_rms_norm(read, beside, weight, 1e-5, "silu"),
        ops.gated_rms_norm(read, beside, weight, 1e-5, "sigmoid"),
        ops.sigmoid(gates),
        ops.softplus(gates),
        ops.scores(x, weight.expand(3, -1), weight[:1].expand(3)),
    ]


@pytest.mark.parametrize("width", [2, 15, 16, 64, 107])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_rows_are_those_of_plain_torch(own: Rowwise, dtype: torch.dtype, width: int) -> None:
    given = operands(dtype, width)
    found = results(own, given, slice(None))
    expected = results(Ops(), [each.double() for each in given], slice(None))
    for each, right in zip(found, expected, strict=True):
        assert each.dtype == dtype
        torch.testing.assert_close(each.double(), right, rtol=NEAR[dtype], atol=3e-5)
    alone = results(own, given, slice(7, 8))
    assert all(torch.equal(one, each[7:8]) for one, each in zip(alone, found, strict=True))


def test_shares_of_a_row_add_up_to_one(own: Rowwise) -> None:
    """Also where all numbers are far from zero, or one is."""
    for width in (1, 6, 16, 130):
        x = some(torch.float32, ROWS, width)
        x[0] -= 300
        x[1, -1] = 400
        found = own.softmax(x)
        torch.testing.assert_close(found, x.softmax(-1), rtol=3e-6, atol=1e-30)
        assert torch.equal(torch.cat([own.softmax(row[None]) for row in x]), found)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_the_first_of_the_best_tokens_is_chosen(own: Rowwise, dtype: torch.dtype) -> None:
    for size in (1, 16, 17, 500):
        logits = some(dtype, 9, 2 * size)[:, :size]
        logits[1, size // 2] = logits[1, -1] = 100
        logits[2] = -torch.inf
        logits[3, -1] = torch.nan
        logits[4, 0] = torch.inf
        tokens, finite = own.greedy(logits)
        right, is_finite = Ops().greedy(logits)
        assert tokens[3] == size - 1, "a rank with another part of the row is told of the NaN"
        assert finite.tolist() == is_finite.tolist()
        usable = finite & (logits.float().amax(-1, keepdim=True) == logits.float()).sum(-1).ge(1)
        first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
        assert torch.equal(tokens[usable], first[usable])
        assert tokens[1] == size // 2
        assert ((tokens >= 0) & (tokens < size)).all()
        assert right.shape == tokens.shape


def test_other_types_are_left_to_torch(own: Rowwise) -> None:
    x, weight = some(torch.float32, 3, 8), some(torch.bfloat16, 8)
    assert torch.equal(own.rms_norm(x, weight, 1e-5), Ops().rms_norm(x, weight, 1e-5))
    wide = x.double()
    assert torch.equal(own.swiglu(wide), Ops().swiglu(wide))
    assert torch.equal(own.greedy(wide)[0], wide.argmax(-1))
