"""Which questions does the first day on hardware answer that take several ranks, and how is each asked?"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from devices.ascend_limits import AscendProduct
from doctor.verify.npu.questions import NEAR, Found, Probe, time_us
from models.group import Group
from recipes.build.in_ranks import in_ranks
from recipes.build.machine import Npu, start
from recipes.schema.recipe import Recipe

HIDDEN, INNER = 4096, 14336  # of the down projection of an 8B model, whose inner axis the ranks share
PROMPT = 2048  # rows


def of_ranks(recipe: Recipe) -> list[Probe]:
    """What is asked where the recipe has several ranks."""
    if recipe.parallel.ranks < 2:
        return []

    def ask(_: Npu) -> Found:
        return _all(in_ranks(recipe, sums_products))

    question = "is a prompt's product with the ranks' sum right and faster in one launch?"
    return [Probe("sums_products", question, _sums, ask)]


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
    apart, joined = (call().cpu().float() for call in calls)
    furthest = float((joined - apart).abs().max())
    if furthest > NEAR[dtype] * float(apart.abs().max()):
        return False, f"{furthest:.2g} from the product and the sum apart"
    if machine.asked.virtual:
        return machine.product.sums_products, "right, and as it was: a stand-in has no times"
    apart_us, joined_us = (time_us(machine, call) for call in calls)
    return joined_us < apart_us, f"{joined_us:.0f} us against {apart_us:.0f} us"


def _sums(product: AscendProduct) -> bool:
    return product.name == "910B"  # the document lists no other


def _all(found: list[Found]) -> Found:
    """A yes of every rank, and what the first said that says no."""
    return min(found, key=lambda each: each[0])
