"""Kernels on npu:0 compute what the CPU computes, at the place where torch expects it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tests.each_of import each_of

pytestmark = [pytest.mark.npu, pytest.mark.usefixtures("device")]

INDEX = torch.tensor([2, 0])
CASES = {
    "add": lambda x, y: x + y,
    "wrapped": lambda x, _: x * torch.tensor(3.0),  # a scalar of the host may stand beside
    "where": lambda x, y: torch.where(x > 0, x, y),
    "matmul": lambda x, y: x @ y.t(),
    "attention": lambda x, y: functional.scaled_dot_product_attention(
        x[None], y[None], x[None], is_causal=True
    ),
    "softmax": lambda x, _: torch.softmax(x, -1),
    "embedding": lambda x, y: functional.embedding(x.argmax(0), y),
    "topk": lambda x, _: torch.topk(x, 2),
    "split": lambda x, _: [each + 1 for each in x.split([1, 2])],
    "mask": lambda x, y: x[x > y],
    "nonzero": lambda x, _: x.nonzero(),
    "index": lambda x, _: x[INDEX.to(x.device), :2],
    "to": lambda x, _: x.to(torch.bfloat16).to(torch.float64),
    "contiguous": lambda x, _: x.t().contiguous(),
    "expand": lambda x, _: x[:1].expand(3, -1) + 0,
    "new": lambda x, _: x.new_full((2,), 3.0),
    "arange": lambda x, _: torch.arange(5, device=x.device) * 2,
    "foreach": lambda x, y: torch._foreach_add([x, y], 1.0),
    "out": lambda x, y: torch.mul(x, y, out=torch.empty(0, device=x.device)),
    "unique": lambda x, _: torch.unique(x.sign()),
    "nothing": lambda x, _: x[:0].sum(0),
}


@each_of("name", CASES)
def test_operators_give_the_cpu_s_results(name):
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    expected = CASES[name](x, y)
    got = CASES[name](x.npu(), y.npu())
    if not isinstance(got, torch.Tensor):
        assert all(each.device.type == "npu" for each in got)
        got = [each.cpu() for each in got]
        expected = list(expected)
    else:
        assert got.device == torch.device("npu", 0)
        got = got.cpu()
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def scatter(x, y):
    x.index_put_((torch.tensor([1, 2], device=x.device),), y[:2])
    x[0].add_(y[0]).mul_(2)
    x.t()[1].copy_(y[:, 0])
    x.view(-1)[::5].fill_(7)
    x.index_copy_(0, torch.tensor([1], device=x.device), y[2:])
    x.scatter_add_(1, torch.zeros_like(x, dtype=torch.int64), y)
    torch.add(x, y, out=x)
    return x


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-8, 8, width=32), min_size=24, max_size=24))
def test_writes_go_where_a_view_points(numbers):
    x, y = torch.tensor(numbers).view(2, 3, 4)
    on_device = x.npu()
    address = on_device.data_ptr()
    written = scatter(on_device, y.npu())
    assert written is on_device
    assert written.data_ptr() == address
    torch.testing.assert_close(written.cpu(), scatter(x, y), rtol=0, atol=0)


def test_a_tensor_of_the_host_is_no_tensor_of_the_device():
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        torch.ones(3, device="npu") + torch.ones(3)


def test_numbers_are_drawn_again_from_the_same_state():
    generator = torch.Generator(device="npu").manual_seed(3)
    first = torch.rand(8, device="npu", generator=generator)
    state = generator.get_state()
    second = torch.rand(8, device="npu", generator=generator)
    assert not torch.equal(first, second)
    generator.set_state(state)
    assert torch.equal(second, torch.rand(8, device="npu", generator=generator))
    assert torch.equal(first, torch.rand(8, device="npu", generator=generator.manual_seed(3)))
    assert not torch.equal(
        *(torch.empty(8, device="npu").exponential_(generator=generator) for _ in range(2)),
    )
    torch.manual_seed(5)
    drawn = torch.randperm(8, device="npu"), torch.multinomial(torch.ones(8, device="npu"), 3)
    torch.manual_seed(5)
    again = torch.randperm(8, device="npu"), torch.multinomial(torch.ones(8, device="npu"), 3)
    assert all(map(torch.equal, drawn, again))
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.rand(3, device="npu", generator=torch.Generator())


def test_the_cpu_s_numbers_are_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    torch.randperm(8, device="npu")
    assert torch.equal(torch.rand(4), expected)


def test_pinned_memory_goes_to_and_fro():
    pinned = torch.arange(5.0).pin_memory()
    assert pinned.is_pinned()
    assert not torch.ones(5).is_pinned()
    there = pinned.to("npu", non_blocking=True)
    back = there.to("cpu", non_blocking=True)
    torch.npu.synchronize()
    assert back.is_pinned()
    assert torch.equal(back, pinned)


def test_a_function_answers_an_operator_of_torch_npu(device):
    import torch_npu

    calls = []

    def mish(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.device.type)
        return functional.mish(x)

    device.implement("npu::npu_mish", mish)
    x = torch.randn(3, device="npu")
    torch.testing.assert_close(torch_npu.npu_mish(x).cpu(), functional.mish(x.cpu()))
    assert calls == ["cpu"]
    with pytest.raises(ValueError, match="no operator npu::npu_nothing"):
        device.implement("npu::npu_nothing", mish)
