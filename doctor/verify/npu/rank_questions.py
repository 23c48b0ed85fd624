"""Ask several ranks the questions about their device that a single rank cannot answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from devices.ascend_limits import DISPATCHING, AscendProduct
from doctor.verify.npu.questions import NEAR, Found, Probe, captured, is_refusal, rows_apart, time_us
from models.config import MixtureConfig
from models.layers.dtypes import TORCH_DTYPES
from models.ops.divided_rows import DividedRows
from models.ops.operands import UnpackedLinear
from models.ops.reference import Ops
from models.parallel.group import Group, divided
from models.parallel.share import Share
from recipes.cluster.in_ranks import Body, in_ranks
from recipes.machine import Npu, one_line, start
from recipes.schema.recipe import Recipe

HIDDEN, INNER = 4096, 14336  # sizes of an 8B model's down projection; the ranks share its inner axis
PROMPT = 2048  # rows
EXPERTS = 2048, 768, 16  # hidden and inner size of Qwen3-30B-A3B's experts, and the experts of a rank
NEAR_SUM = 2 * NEAR  # each rank's part is rounded, and so is each sum, in another order
RANKS_S = 500  # most seconds of a question to all ranks; several of them are a part of a verification
FEW_TOKENS = 8  # tokens of each rank in a step of decodes


def of_ranks(recipe: Recipe) -> list[Probe]:
    """Return the questions for a recipe with several ranks; none for a single rank."""
    if recipe.parallel.ranks < 2:
        return []

    def probe(question: str, applies: Callable[[AscendProduct], bool], body: Body) -> Probe:
        return Probe(
            body.__name__,
            question,
            applies,
            lambda machine: of_all(
                in_ranks(recipe, partial(_found, body), machine.product, within_s=RANKS_S)
            ),
        )

    summed = "is a prompt's product with the ranks' sum right and faster in one launch?"
    sent = "is sending tokens to the ranks of their experts right, and faster than adding up what all made?"
    beside = "is it right and faster where parts of a shared expert are added up beside?"
    return [
        probe(summed, _sums, sums_products),
        probe(sent, _sends, dispatches),
        probe(beside, _sends, dispatches_beside_shared),
    ]


def _found(
    body: Callable[[Recipe, Group, AscendProduct], Found],
    recipe: Recipe,
    group: Group,
    product: AscendProduct,
) -> Found:
    """Return what a rank has found; a call that its device refuses is a no."""
    try:
        return body(recipe, group, product)
    except RuntimeError as error:
        if not is_refusal(error):
            raise
        return False, one_line(error)[:500]


def _rank_machine(recipe: Recipe, product: AscendProduct) -> Npu:
    """Return the machine of a rank, whose product has the answers that the run already has."""
    machine = start(recipe.device)
    assert isinstance(machine, Npu), "the probes ask an NPU"
    machine.product = product
    return machine


def sums_products(recipe: Recipe, group: Group, product: AscendProduct) -> Found:
    """Ask each rank whether the product with its sum in one launch is right and faster than the two apart.

    The product is in the first dtype of the device's product.
    """
    from models.ops.npu.ops import NpuOps

    machine = _rank_machine(recipe, product)
    dtype, rows = TORCH_DTYPES[machine.product.dtypes[0]], 256 if machine.asked.virtual else PROMPT
    inner = (256 if machine.asked.virtual else INNER) // group.size
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(rows, inner, generator=generator).to(dtype).to(machine.device)
    weight = torch.randn(HIDDEN, inner, generator=generator).div(inner**0.5).to(dtype).to(machine.device)
    ways = [NpuOps(replace(machine.product, sums_products=each)) for each in (False, True)]
    packed = ways[0].pack(weight, None)
    calls = [partial(ops.linear_summed, x, packed, group) for ops in ways]
    apart, joined = calls
    return _judged(machine, group, apart, joined, machine.product.sums_products)


def dispatches(recipe: Recipe, group: Group, product: AscendProduct) -> Found:
    """Ask each rank whether sending tokens to their experts' ranks is right and faster, in captured calls."""
    return _dispatched(recipe, group, product, has_shared=False)


def dispatches_beside_shared(recipe: Recipe, group: Group, product: AscendProduct) -> Found:
    """Ask each rank the same where every rank has a part of a shared expert, which is added up beside."""
    return _dispatched(recipe, group, product, has_shared=True)


def _dispatched(recipe: Recipe, group: Group, product: AscendProduct, *, has_shared: bool) -> Found:
    """Answer whether sending tokens is right and faster, with a shared expert or without.

    The experts have the sizes of Qwen3-30B's, in the first dtype of the product. The question is asked for
    few tokens and for as many as may be sent; the other way computes each rank's own experts for all tokens,
    and sums the results.
    """
    from models.ops.npu.ops import NpuOps

    machine = _rank_machine(recipe, product)
    share = Share(group.rank, group.size, experts=group.size)
    world, _ = divided(group, share)
    world.open_for_tokens(machine.buffer_mib, machine.device)
    hidden, inner, num_held = (1024, 64, 2) if machine.asked.virtual else EXPERTS
    config = MixtureConfig(num_held * world.size, min(8, num_held * world.size), inner, True)
    sending = replace(machine.product, dispatches=True)
    ops, dtype = NpuOps(sending), TORCH_DTYPES[machine.product.dtypes[0]]
    dispatch = ops.dispatch_of(hidden, config, world)
    if dispatch is None:
        return False, f"operators take no such {world.size} ranks, or HCCL_BUFFSIZE is too small for a token"

    def drawn(*shape: int, seed: int) -> Tensor:
        made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return made.to(dtype).to(machine.device)

    own = range(group.rank * num_held, (group.rank + 1) * num_held)
    linears = [
        [UnpackedLinear(drawn(outputs, inputs, seed=2 * each + side).div_(inputs**0.5)) for each in own]
        for side, (outputs, inputs) in enumerate(((2 * inner, hidden), (hidden, inner)))
    ]
    packed, router = ops.pack_experts(*linears), drawn(config.num_experts, hidden, seed=10**6).float()
    part = max(16, inner // world.size)  # The shared expert is as large as the others.
    shapes = ((2 * part, hidden), (hidden, part)) if has_shared else ()
    shared = [
        drawn(*shape, seed=2 * 10**6 + 2 * group.rank + side).div_(shape[1] ** 0.5)
        for side, shape in enumerate(shapes)
    ]
    as_it_was = machine.product.dispatches_beside_shared if has_shared else machine.product.dispatches
    answers = []
    for num_tokens in (FEW_TOKENS, dispatch.most_tokens):
        x = drawn(num_tokens * world.size, hidden, seed=num_tokens)
        weights, chosen = ops.route(x, router, None, config)
        numbers = (chosen - own.start) % config.num_experts  # the rank's own experts come first
        apart = partial(ops.joined_mixture, x, weights, numbers, packed, config.num_experts, ops.swiglu)
        rows = DividedRows(world, len(x))
        x_own, weights_own, chosen_own = dispatch.own(x, weights, chosen)
        sent = partial(dispatch.mixture, x_own, weights_own, chosen_own, packed, ops.swiglu)
        beside = partial(_expert, ops, x, *shared) if has_shared else None
        ways = [captured_call(partial(_summed, world, apart, beside))]
        ways.append(captured_call(partial(_gathered, rows, sent, beside)))
        answers.append(_judged(machine, world, ways[0], ways[1], as_it_was))
    return of_all(answers)


def _summed(world: Group, made: Callable[[], Tensor], beside: Callable[[], Tensor] | None) -> Tensor:
    """Return the sum over all ranks of what each makes of all rows."""
    return world.all_reduce(made() if beside is None else made() + beside())


def _gathered(rows: DividedRows, made: Callable[[], Tensor], beside: Callable[[], Tensor] | None) -> Tensor:
    """Return all rows of what each rank makes of its own, beside sums of parts of all rows."""
    return rows.whole(made() if beside is None else made() + rows.summed(beside()))


def _expert(ops: Ops, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return this rank's part of a shared expert."""
    return ops.linear(ops.swiglu(ops.linear(x, (gate_up, None))), (down, None))


def captured_call(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Call once outside of a graph, capture the call, and return its replay."""
    call()
    npu = torch.get_device_module("npu")
    graph = npu.NPUGraph()
    with captured(graph):
        result = call()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def _judged(
    machine: Npu,
    group: Group,
    apart: Callable[[], Tensor],
    joined: Callable[[], Tensor],
    as_it_was: bool,
) -> Found:
    """Return whether the second way agrees with the first on every rank, and is faster."""
    expected, found = (call().cpu() for call in (apart, joined))
    far = rows_apart(found, expected)
    # The ranks must agree, or the others would wait for this one.
    if not group.least(int(far <= NEAR_SUM), machine.device):
        return False, f"{far:.2g} from what is made apart, or too far on another rank"
    if machine.asked.virtual:
        return as_it_was, "right, and as it was: a stand-in has no times"
    apart_us, joined_us = (time_us(machine, call) for call in (apart, joined))
    return joined_us < apart_us, f"{joined_us:.0f} us against {apart_us:.0f} us"


def _sends(product: AscendProduct) -> bool:
    return product.name in DISPATCHING


def _sums(product: AscendProduct) -> bool:
    return product.name == "910B"  # the document lists no other product


def of_all(found: list[Found]) -> Found:
    """Combine the ranks' answers: yes if all say yes, otherwise the first answer that says no."""
    return min(found, key=lambda each: each[0])
