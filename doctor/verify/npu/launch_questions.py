"""Ask a device whether calls that no other engine makes are right, also in graphs, and faster than theirs.

Until a probe says yes, the engine calls what other engines call.

Legend: T rows, E experts, C experts that a row chooses, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from devices.ascend_limits import JOINED_HEAD, AscendProduct
from devices.shapes import dtype_name
from doctor.verify.npu.questions import NEAR, Found, Probe, captured, furthest, fused, rows_apart, time_us
from models.config import MixtureConfig
from models.layers.dtypes import TORCH_DTYPES
from models.ops.reference import Ops, Packed, Widths
from recipes.machine import Npu

ROWS = (1, 32, 256)  # rows of the calls that are compared; all but the last are timed, as decodes have them
HIDDEN = 4096
WIDTHS = ((4096, 1024, 1024), (3584, 512, 512))  # sizes of queries, keys and values
FEW_WIDTHS = ((1024, 256, 256),)  # a stand-in has no times, so one size is enough
HEADS = ((32, 8), (16, 2), (8, 8), (8, 1), (4, 1))  # heads of queries, and of keys and values
EPS, BASE = 1e-6, 1e6  # epsilon of norms, base of rotations
MIXTURES = ((8, 2, True), (60, 4, False), (128, 8, True))  # (E, C, whether a row's weights add up to one)
NEAR_WEIGHT = 1e-5

Call = Callable[[], tuple[Tensor, ...]]


def groups_products(machine: Npu) -> Found:
    """Ask about the products of queries, keys and values in one launch, with biases and without."""
    from models.ops.npu.ops import NpuOps

    ways = [NpuOps(replace(machine.product, groups_products=each)) for each in (False, True)]
    times = []
    for dtype, widths, has_bias in product(
        _dtypes(machine), FEW_WIDTHS if machine.asked.virtual else WIDTHS, (False, True)
    ):
        weight = _drawn(machine, dtype, sum(widths), HIDDEN) / HIDDEN**0.5
        bias = _drawn(machine, dtype, sum(widths)) if has_bias else None
        packed = [way.pack_split(weight.clone(), bias, widths) for way in ways]
        for rows in ROWS:
            x = _drawn(machine, dtype, rows, HIDDEN)
            theirs, ours = (partial(_contiguous, way, x, each, widths) for way, each in zip(ways, packed))
            if (far := _apart(rows_apart, theirs, ours)) > NEAR:
                return False, f"{far:.2g} from one product of {rows} rows in {dtype_name(dtype)}"
            times += [] if rows == ROWS[-1] else [(time_us(machine, ours), time_us(machine, theirs))]
    return _faster(machine, machine.product.groups_products, times)


def _contiguous(ops: Ops, x: Tensor, packed: Packed, widths: Widths) -> tuple[Tensor, ...]:
    return tuple(each.contiguous() for each in ops.linear_split(x, packed, widths))


def divides_gates(machine: Npu) -> Found:
    """Ask about the choice of experts whose weights one launch divides by their sum."""
    from models.ops.npu.ops import NpuOps

    ways = [NpuOps(replace(machine.product, divides_gates=each)) for each in (False, True)]
    times = []
    for experts, chosen, normalizes in MIXTURES:
        config = MixtureConfig(experts, chosen, HIDDEN, normalizes)
        router = _drawn(machine, torch.float32, experts, HIDDEN) / HIDDEN**0.5
        for rows in ROWS:
            x = _drawn(machine, torch.float32, rows, HIDDEN)
            theirs, ours = (partial(way.route, x, router, None, config) for way in ways)
            if (far := _apart(_differing, theirs, ours)) > NEAR_WEIGHT:
                return False, f"{far:.2g} from weights of {experts} experts that are divided afterwards"
            times += [] if rows == ROWS[-1] else [(time_us(machine, ours), time_us(machine, theirs))]
    return _faster(machine, machine.product.divides_gates, times)


def joins_heads(machine: Npu) -> Found:
    """Ask about the parts of one product, their norms and their rotations in one launch."""
    from models.ops.npu.ops import NpuOps

    ops, times = NpuOps(replace(machine.product, joins_heads=True)), []
    for dtype, (heads, kv_heads) in product(_dtypes(machine), HEADS):
        joined = ops.join_heads(heads, kv_heads, JOINED_HEAD, dtype, machine.device)
        assert joined is not None, "the product has the operator"
        # Rows of small numbers, so that both ways' roundings are small
        query_norm, key_norm = (_drawn(machine, dtype, 2, JOINED_HEAD) / 4).unbind()
        for rows in ROWS:
            qkv = _drawn(machine, dtype, rows, (heads + 2 * kv_heads) * JOINED_HEAD)
            given = query_norm, key_norm, EPS, *_turns(machine, dtype, rows)
            theirs = partial(_one_by_one, ops, (heads, kv_heads, kv_heads), qkv, *given)
            ours = partial(joined, qkv, *given)
            if (far := _apart(rows_apart, theirs, ours)) > NEAR:
                what = f"{heads} heads over {kv_heads} in {dtype_name(dtype)}"
                return False, f"{far:.2g} from norms and rotations of {what} one by one"
            times += [] if rows == ROWS[-1] else [(time_us(machine, ours), time_us(machine, theirs))]
    return _faster(machine, machine.product.joins_heads, times)


def _turns(machine: Npu, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, D] of positions that are far apart."""
    frequencies = BASE ** -torch.linspace(0, 1, JOINED_HEAD // 2)
    angles = 97 * torch.arange(1, rows + 1)[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype).to(machine.device), angles.sin().to(dtype).to(machine.device)


def _one_by_one(
    ops: Ops,
    heads: tuple[int, ...],
    qkv: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    parts = ops.split(qkv, tuple(count * JOINED_HEAD for count in heads))
    query, key, value = (each.unflatten(-1, (-1, JOINED_HEAD)) for each in parts)
    query, key = ops.rms_norm(query, query_norm, eps), ops.rms_norm(key, key_norm, eps)
    query, key = ops.rotary(query, key, cos, sin)
    return query.flatten(1), key.flatten(1), value.flatten(1)


def _dtypes(machine: Npu) -> list[torch.dtype]:
    """Return the types of the models that follow the answer."""
    return [TORCH_DTYPES[each] for each in machine.product.dtypes]


def _drawn(machine: Npu, dtype: torch.dtype, *sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(sizes[0])
    return torch.randn(*sizes, generator=generator).to(dtype).to(machine.device)


def _apart(distance: Callable[[Tensor, Tensor], float], theirs: Call, ours: Call) -> float:
    """Return how far one call is from the other, at once and in a graph."""
    npu = torch.get_device_module("npu")
    wanted, graph = theirs(), npu.NPUGraph()
    at_once = ours()
    with captured(graph):
        replayed = ours()
    graph.replay()
    return max(distance(*pair) for found in (at_once, replayed) for pair in zip(found, wanted))


def _differing(found: Tensor, wanted: Tensor) -> float:
    return furthest((found.float() - wanted.float()).abs())


def _faster(machine: Npu, known: bool, times: list[tuple[float, float]]) -> Found:
    if machine.asked.virtual:  # a stand-in's times mean nothing
        return known, "right, and as it was: a stand-in has no times"
    said = ", ".join(f"{ours:.0f} us against {theirs:.0f}" for ours, theirs in times)
    return sum(ours for ours, _ in times) < sum(theirs for _, theirs in times), said


def _gates_by_softmax(product: AscendProduct) -> bool:
    return product.has_mixtures and product.gates_by_softmax


def _has_joined_heads(product: AscendProduct) -> bool:
    return product.has_joined_heads


LAUNCH_PROBES = (
    Probe(
        "groups_products",
        "is one launch of the products of queries, keys and values right and faster?",
        fused,
        groups_products,
    ),
    Probe(
        "divides_gates",
        "is one launch that chooses experts and divides their weights right and faster?",
        _gates_by_softmax,
        divides_gates,
    ),
    Probe(
        "joins_heads",
        "is one launch that splits queries, keys and values, and norms and rotates them, right and faster?",
        _has_joined_heads,
        joins_heads,
    ),
)
