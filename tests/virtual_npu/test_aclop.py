"""Operators that torch_npu would send by way of aclop are refused where the device refuses them.

A 310P is simulated in a process of its own, since a process has one NPU for as long as it lives.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.serving.warm import CODE, completed
from virtual_npu.contract import ContractError

pytestmark = [pytest.mark.npu, pytest.mark.usefixtures("device")]

ON_310P = """
import torch
import virtual_npu
from virtual_npu.contract import ContractError

virtual_npu.start("Ascend310P3")

def refusal(call):
    try:
        call()
    except ContractError as error:
        return error.rule
    return "none"

def captured(call):
    with torch.npu.graph(torch.npu.NPUGraph()):
        call()

from devices.ascend_limits import product
from models.ops.npu.ops import NpuOps
from recipes.machine import start
from tests.device_kinds import section

ops = NpuOps(product("310P", ""))
torch.manual_seed(0)
x = torch.randn(3, 32).half().npu()
weight, bias = torch.randn(48, 32).half().npu(), torch.randn(48).half().npu()
tiled = ops.pack(weight, bias)
print(torch.npu.is_jit_compile_false(), refusal(lambda: captured(lambda: x + 1)))
start(section("npu", product="310P"))
print(torch.npu.is_jit_compile_false(), refusal(lambda: captured(lambda: x + 1)))
print(refusal(lambda: torch.nn.functional.linear(x, *tiled)))
print(refusal(lambda: torch.nn.functional.linear(x, weight, bias)))
print(refusal(lambda: captured(lambda: ops.linear(x, tiled))))
for half in (31, 32):
    print(refusal(lambda: ops.swiglu(torch.ones(3, 2 * half).half().npu())))
wide = torch.nn.functional.linear(x.cpu().float(), weight.cpu().float(), bias.cpu().float())
print(bool((ops.linear(x, tiled).cpu() - wide).abs().max() < 0.02))
"""


@pytest.mark.slow
def test_before_the_910b_nothing_is_captured_online_and_no_sum_takes_tiles() -> None:
    done = completed(CODE, ON_310P)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "False online-compile",
        "True none",
        "sum-of-tiles",
        "none",
        "none",
        "none",
        "none",
        "True",
    ]


def tiles(rows: int = 32) -> Tensor:
    import torch_npu

    torch.npu.config.allow_internal_format = True
    numbers = torch.arange(rows * 16.0, dtype=torch.float16).view(rows, 16)
    return torch_npu.npu_format_cast(numbers.npu(), 29)


FIRST = torch.tensor([0])


@pytest.mark.parametrize(
    "call",
    [
        lambda x, first: x.index_fill_(0, first, 0),
        lambda x, first: x.index_copy_(0, first, x[1:2].clone()),
        lambda x, first: x.index_select(0, first),
    ],
)
def test_tiles_are_not_reached_by_index(call: Callable[[Tensor, Tensor], object]) -> None:
    x = tiles()
    with pytest.raises(ContractError, match=r"self is in tiles, float16 \(32, 16\)") as refused:
        call(x, FIRST.npu())
    assert refused.value.rule == "tiles-by-index"
    assert torch.equal(x.cpu(), tiles().cpu())


def test_slices_of_tiles_are_views() -> None:
    x = tiles()
    x[:1].zero_()
    x[2:4].copy_(x[4:6])
    assert x[:5, 0].tolist() == [0, 16, 64, 80, 64]


def test_a_capture_takes_tiles_in_products_alone() -> None:
    x, weight = torch.ones(2, 16, dtype=torch.float16, device="npu"), tiles()
    bias = torch.ones(32, dtype=torch.float16, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = torch.nn.functional.linear(x, weight, bias)
    graph.replay()
    assert y[0, :2].tolist() == [121, 377]
    refusing = pytest.raises(ContractError, match="an argument is in tiles")
    with refusing as refused, torch.npu.graph(torch.npu.NPUGraph()):
        weight.mul_(2)
    assert refused.value.rule == "captured-tiles"
    assert (weight * 2)[1, 0].item() == 32  # it is only slow outside of a capture
