"""Experts in W8A8 of any width compute on an NPU what a CPU defines, in the launches that the width takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from devices.ascend_limits import MOST_GATED, fuses_gate
from models.config import MixtureConfig
from models.ops.operands import UnpackedLinear
from models.ops.reference import Ops
from tests.attention.test_attention import shape
from tests.device_kinds import has_npu, operators

HIDDEN, EXPERTS, HELD = 64, 4, 3  # the last expert is on another rank
# The columns of an expert on a rank, by model and ranks that divide it, and whether one launch gates them
WIDTHS = [
    pytest.param(14336, 1, False, id="Mixtral-8x7B"),
    pytest.param(14336, 2, False, id="Mixtral-8x7B over two"),
    pytest.param(14336, 4, True, id="Mixtral-8x7B over four"),
    pytest.param(16384, 1, False, id="Mixtral-8x22B"),
    pytest.param(768, 1, True, id="Qwen3-30B-A3B"),
    pytest.param(768, 8, True, id="Qwen3-30B-A3B over eight"),
    pytest.param(1408, 4, True, id="DeepSeek-V2-Lite over four"),
    pytest.param(88, 1, False, id="half a tile"),
    pytest.param(MOST_GATED // 2, 1, True, id="the widest"),
    pytest.param(MOST_GATED // 2 + 16, 1, False, id="one step wider"),
]


@pytest.mark.parametrize(("inner", "ranks", "is_fused"), WIDTHS)
def test_a_width_is_gated_in_one_launch_or_not(inner: int, ranks: int, is_fused: bool) -> None:
    assert fuses_gate(inner // ranks) == is_fused


def drawn(*sizes: int, seed: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def experts(outputs: int, inputs: int, scale_dtype: torch.dtype) -> list[UnpackedLinear]:
    """A linear in int8 of each expert; scales as checkpoints have them."""
    found = []
    for seed in range(EXPERTS):
        weight = (40 * drawn(outputs, inputs, seed=seed)).round().clamp(-127, 127).to(torch.int8)
        scale = (1 + drawn(outputs, seed=seed + 50).abs()) / (40 * inputs**0.5)
        found.append(UnpackedLinear(weight, scale.to(scale_dtype)))
    return found


def hold_to_definition(width: int, num_held: int, dtype: torch.dtype) -> None:
    """Compare two steps, which run at once and as replays of one captured step, with the definition on a CPU.

    The bound is that of joined experts in tests/models/test_mixture.py, or, where that is more, half again
    the CPU's own distance from the same definition in float32.
    """
    down_scale = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    gate_ups = experts(2 * width, HIDDEN, torch.float32)
    downs = experts(HIDDEN, width, down_scale)
    npu, attention = operators("npu", "fused", shape(dtype=dtype))
    device = attention.device
    sent = (
        [UnpackedLinear(each.weight.to(device), each.scale.to(device)) for each in some[:num_held]]
        for some in (gate_ups, downs)
    )
    packed = npu.pack_experts(*sent)
    assert packed[0].is_gated == fuses_gate(width)
    config, router = MixtureConfig(EXPERTS, 2, width, True), drawn(EXPERTS, HIDDEN, seed=7)
    cpu = Ops()
    alone = [
        [cpu.pack_int8(each.weight, each.scale.float(), None) for each in some] for some in (gate_ups, downs)
    ]
    made = [lambda rows, pair=pair: cpu.mlp_int8(rows, *pair) for pair in list(zip(*alone))[:num_held]]
    steps = [drawn(9, HIDDEN, seed=seed).to(dtype) for seed in (20, 21)]
    given, place = torch.empty_like(steps[0], device=device), router.to(device)

    def mixture() -> Tensor:
        weights, chosen = npu.route(given, place, None, config)
        return npu.joined_mixture(given, weights, chosen, packed, EXPERTS, npu.swiglu)

    given.copy_(steps[0])
    mixture()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        captured = mixture()
    for x in steps:
        weights, chosen = cpu.route(x, router, None, config)
        exact = cpu.mixture(x.float(), weights, chosen, made)
        rounding = (cpu.mixture(x, weights, chosen, made) - exact).norm()
        allowed = max(1e-2 * exact.norm(), 1.5 * rounding)
        given.copy_(x)
        graph.replay()
        for found in (mixture(), captured):
            assert (found.cpu() - exact).norm() <= allowed


@pytest.mark.npu
@pytest.mark.skipif(not has_npu(), reason="torch_npu is not installed")
@pytest.mark.parametrize(
    ("width", "num_held", "dtype"),
    [
        *((88, HELD, torch.float16), (768, HELD, torch.bfloat16), (MOST_GATED // 2, HELD, torch.float16)),
        (MOST_GATED // 2 + 16, HELD, torch.bfloat16),
        *((768, 1, torch.bfloat16), (7168, 1, torch.bfloat16)),  # a list of counts of one element
    ],
)
def test_experts_of_every_width_compute_what_a_cpu_defines(
    width: int, num_held: int, dtype: torch.dtype
) -> None:
    hold_to_definition(width, num_held, dtype)
