"""Check that collectives bring every rank of a recipe the right numbers, and time them.

    python -m doctor.verify.collectives recipes/tiny/npu.yaml parallel.tensor=8 [key=value ...]

The ranks add up, gather and send whole numbers, so that every result is known exactly. Where the recipe
captures graphs, a replay is checked too. Status 0: all results are right on all ranks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from doctor.verify.npu.questions import Found, time_us
from doctor.verify.npu.rank_questions import RANKS_S, captured_call, of_all
from doctor.verify.probes import Answer
from models.layers.dtypes import TORCH_DTYPES
from models.parallel.group import Group
from recipes.cluster.in_ranks import in_ranks
from recipes.machine import Npu, start
from recipes.schema import verb
from recipes.schema.command_line import add_recipe, with_keys
from recipes.schema.reader import load
from recipes.schema.recipe import Recipe

# Hidden states of an 8B model: of a step of decodes, and of a prompt
ROWS, HIDDEN = (8, 2048), 4096
FEW_ROWS = (8,)  # a stand-in has no times, so one size is enough


def contribution(rank: int, rows: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return what a rank gives: zeros and ones, others for each rank, which 256 ranks add up exactly."""
    return (torch.arange(rows * HIDDEN) // (rank + 1) % 2).view(rows, HIDDEN).to(dtype).to(device)


def expected(name: str, size: int, rows: int, dtype: torch.dtype) -> Tensor:
    """Return what every rank has after a collective of `size` ranks."""
    parts = torch.stack([contribution(rank, rows, torch.device("cpu"), dtype) for rank in range(size)])
    return {"all_reduce": parts.sum(0), "all_gather": parts, "broadcast": parts[-1]}[name]


def collectives_of(recipe: Recipe, group: Group) -> dict[str, Found]:
    """Return what a rank finds of each collective, by name."""
    machine = start(recipe.device)
    assert isinstance(machine, Npu), "this checks an NPU"
    dtype = TORCH_DTYPES[machine.product.dtypes[0]]
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "all_reduce": group.all_reduce,
        "all_gather": group.all_gather,
        "broadcast": partial(group.broadcast, root=group.size - 1),
    }
    found = {}
    for name, call in calls.items():
        wrong, times = [], []
        for rows in FEW_ROWS if machine.asked.virtual else ROWS:
            given = contribution(group.rank, rows, machine.device, dtype)
            x, wanted = given.clone(), expected(name, group.size, rows, dtype)
            ways: dict[str, Callable[[], Tensor]] = {"at once": partial(call, x)}
            if recipe.device.graphs:
                ways["in a graph"] = captured_call(ways["at once"])
            for way, run in ways.items():
                x.copy_(given)  # sums are in place
                if not torch.equal(run().cpu(), wanted):
                    wrong.append(f"{rows} rows {way}")
            times.append(f"{time_us(machine, [*ways.values()][-1]):.0f} us for {x.nbytes // 1024} KiB")
        said = f"wrong on rank {group.rank}: {', '.join(wrong)}" if wrong else ", ".join(times)
        found[name] = not wrong, said
    return found


def main(argv: list[str]) -> int:
    """Print the answers as JSON; returns 0 where every collective is right."""
    parser = argparse.ArgumentParser(
        prog="python -m doctor.verify.collectives",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add_recipe(parser)
    options = parser.parse_intermixed_args(with_keys(argv))
    recipe = load(options.recipe, options.overrides, options.profile)
    ranks = recipe.parallel.ranks
    by_rank = in_ranks(recipe, collectives_of, within_s=RANKS_S)
    found = {name: of_all([each[name] for each in by_rank]) for name in by_rank[0]}
    answers = [
        Answer(name, f"is {name} of {ranks} ranks right?", is_right, said, is_right)
        for name, (is_right, said) in found.items()
    ]
    print(json.dumps([asdict(each) for each in answers], indent=2))
    return int(not all(each.is_right for each in answers))


if __name__ == "__main__":
    verb.run(main)
