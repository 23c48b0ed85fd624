"""Which questions does the first day on hardware answer that take several ranks, and how is each asked?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from devices.ascend_dispatch import DISPATCHING
from devices.ascend_limits import AscendProduct
from doctor.verify.npu.questions import NEAR, Found, Probe, time_us
from models.filled import Filled
from models.group import Group, divided
from models.mixture_config import MixtureConfig
from models.share import Share
from recipes.build.in_ranks import Body, in_ranks
from recipes.build.machine import Npu, start
from recipes.schema.recipe import Recipe

HIDDEN, INNER = 4096, 14336  # of the down projection of an 8B model, whose inner axis the ranks share
PROMPT = 2048  # rows
EXPERTS = 2048, 768, 16  # hidden and inner size, of Qwen3-30B-A3B, and how many a rank has
FEW_TOKENS = 8  # of each rank, which decode


def of_ranks(recipe: Recipe) -> list[Probe]:
    """What is asked where the recipe has several ranks."""
    if recipe.parallel.ranks < 2:
        return []

    def probe(question: str, applies: Callable[[AscendProduct], bool], body: Body) -> Probe:
        return Probe(body.__name__, question, applies, lambda _: _all(in_ranks(recipe, body)))

    summed = "is a prompt's product with the ranks' sum right and faster in one launch?"
    sent = "is sending tokens to the ranks of their experts right, and faster than adding up what all made?"
    return [probe(summed, _sums, sums_products), probe(sent, _sends, dispatches)]


def sums_products(recipe: Recipe, group: Group) -> Found:
    """In each rank: against the product and the sum apart, in the first type of the product."""
    from models.ops.npu import NpuOps

    machine = start(recipe.device)
    assert isinstance(machine, Npu), "the probes ask an NPU"
    dtype, rows = machine.product.dtypes[0], 256 if machine.asked.virtual else PROMPT
    inner = (256 if machine.asked.virtual else INNER) // group.size
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(rows, inner, generator=generator).to(dtype).to(machine.device)
    weight = torch.randn(HIDDEN, inner, generator=generator).div(inner**0.5).to(dtype).to(machine.device)
    ways = [NpuOps(replace(machine.product, sums_products=each)) for each in (False, True)]
    packed = ways[0].pack(weight, None)
    calls = [partial(ops.linear_summed, x, packed, group) for ops in ways]
    apart, joined = calls
    return _judged(machine, group, dtype, apart, joined, machine.product.sums_products)


def dispatches(recipe: Recipe, group: Group) -> Found:
    """In each rank, captured: of experts of Qwen3-30B's sizes, in the first type of the product, for few
    tokens and for as many as are sent at most, against each rank's own experts for all tokens, and the sum.
    """
    from models.ops.npu import NpuOps

    machine = start(recipe.device)
    assert isinstance(machine, Npu), "the probes ask an NPU"
    share = Share(group.rank, group.size, experts=group.size)
    world, _ = divided(group, share, recipe.parallel.connect_timeout_s)
    world.open_for_tokens(machine.buffer_mib, machine.device)
    hidden, inner, num_held = (1024, 64, 2) if machine.asked.virtual else EXPERTS
    config = MixtureConfig(num_held * world.size, min(8, num_held * world.size), inner, True, (True,))
    ops, dtype = NpuOps(machine.product), machine.product.dtypes[0]
    dispatch = ops.dispatch_of(hidden, config, world)
    if dispatch is None:
        return False, f"operators take no such {world.size} ranks, or HCCL_BUFFSIZE is too small for a token"

    def drawn(*shape: int, seed: int) -> Tensor:
        made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return made.to(dtype).to(machine.device)

    own = range(group.rank * num_held, (group.rank + 1) * num_held)
    linears = [
        [Filled(drawn(outputs, inputs, seed=2 * each + side).div_(inputs**0.5)) for each in own]
        for side, (outputs, inputs) in enumerate(((2 * inner, hidden), (hidden, inner)))
    ]
    packed, router = ops.pack_experts(*linears), drawn(config.num_experts, hidden, seed=10**6).float()
    answers = []
    for num_tokens in (FEW_TOKENS, dispatch.most_tokens):
        x = drawn(num_tokens * world.size, hidden, seed=num_tokens)
        weights, chosen = ops.route(x, router, None, config)
        numbers = (chosen - own.start) % config.num_experts  # its own come first
        apart = partial(ops.joined_mixture, x, weights, numbers, packed, config.num_experts, ops.swiglu)
        sent = partial(dispatch.mixture, x, weights, chosen, packed, ops.swiglu)
        ways = [_captured(call) for call in (lambda apart=apart: world.all_reduce(apart()), sent)]
        answers.append(_judged(machine, world, dtype, ways[0], ways[1], machine.product.dispatches))
    return _all(answers)


def _captured(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The call as a graph does it, once it has been done outside of one."""
    call()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = call()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def _judged(
    machine: Npu,
    group: Group,
    dtype: torch.dtype,
    apart: Callable[[], Tensor],
    joined: Callable[[], Tensor],
    as_it_was: bool,
) -> Found:
    """Whether the second way gives what the first does, on every rank, and is faster."""
    expected, found = (call().cpu().float() for call in (apart, joined))
    furthest = float((found - expected).abs().max())
    is_near = furthest <= NEAR[dtype] * float(expected.abs().max())
    if not group.least(int(is_near), machine.device):  # or others would wait for this rank
        return False, f"{furthest:.2g} from what is made apart, or too far on another rank"
    if machine.asked.virtual:
        return as_it_was, "right, and as it was: a stand-in has no times"
    apart_us, joined_us = (time_us(machine, call) for call in (apart, joined))
    return joined_us < apart_us, f"{joined_us:.0f} us against {apart_us:.0f} us"


def _sends(product: AscendProduct) -> bool:
    return product.name in DISPATCHING


def _sums(product: AscendProduct) -> bool:
    return product.name == "910B"  # the document lists no other


def _all(found: list[Found]) -> Found:
    """A yes of every rank, and what the first said that says no."""
    return min(found, key=lambda each: each[0])
