"""Estimate what drafts would gain on a device that is not at hand.

The gain is tokens a second with a number of drafts a row over those without, by the roofline of a device
profile. Each draft is accepted with the same chance. Drafts are free, or come from a second model whose steps
are simulated too. Steps run as captured graphs. Figures of a profile are assumed unless it says otherwise.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmark.options import add_json, show
from devices.rates import DeviceRates
from models.config import DecoderConfig
from recipes.assembly.families import model_config
from recipes.schema.command_line import add_recipe
from recipes.schema.numbers import MOST_TOKENS, real, whole, wholes
from recipes.schema.reader import read
from simulation.roofline import Roofline


def step_s(costs: Roofline, rows: int, tokens: int, context: int) -> float:
    """Return the seconds of a step in which each row computes `tokens` tokens and samples at each of them."""
    read_tokens = costs.config.num_layers * float(rows * (context + tokens))
    num = rows * tokens  # tokens of a captured graph, whose attention reads the keys of each row once
    return costs.time_s(num, num, num, read_tokens, read_tokens * tokens)


def tokens_of_a_step(rate: float, drafts: int) -> float:
    """Return a row's mean tokens: its accepted drafts before the first wrong one, and one more."""
    return sum(rate**each for each in range(drafts + 1))


def gain(
    target: Roofline, drafter: Roofline | None, rows: int, context: int, rate: float, drafts: int
) -> float:
    """Return the ratio of tokens a second with drafts to those without."""
    with_s = step_s(target, rows, 1 + drafts, context)
    if drafter is not None:
        with_s += drafts * step_s(drafter, rows, 1, context)
    return tokens_of_a_step(rate, drafts) * step_s(target, rows, 1, context) / with_s


def table(
    config: DecoderConfig,
    draft_config: DecoderConfig | None,
    device: DeviceRates,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Return a row for each number of rows and context: with all drafts, and with the best number of them."""
    graphs = max(options.rows) * (1 + options.drafts)
    target = Roofline(config, device, graphs=graphs, hides_host=True)
    drafter = None if draft_config is None else Roofline(draft_config, device, graphs=graphs, hides_host=True)
    found = []
    for rows in options.rows:
        for context in options.contexts:
            gains = [
                gain(target, drafter, rows, context, options.acceptance, drafts)
                for drafts in range(options.drafts + 1)
            ]
            best = max(range(len(gains)), key=gains.__getitem__)
            asked = {"times_plain": round(gains[-1], 3), "best_drafts": best}
            found.append(
                {"rows": rows, "context": context, **asked, "best_times_plain": round(gains[best], 3)}
            )
    return found


def print_table(result: dict[str, Any]) -> None:
    """Print a row for each number of rows and context."""
    print(
        f"{result['device']} ({result['basis']}), {result['drafts']} drafts, {result['acceptance']:g} right"
    )
    print(f"{'rows':>6}{'context':>9}{'x plain':>9}{'best number':>13}{'x plain':>9}")
    for row in result["rows"]:
        print(
            f"{row['rows']:>6}{row['context']:>9}{row['times_plain']:>9.2f}{row['best_drafts']:>13}"
            f"{row['best_times_plain']:>9.2f}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `drafts`."""
    add_recipe(parser)
    add = parser.add_argument
    add("--device", default="ascend910b", metavar="NAME", help="of devices/profiles")
    add("--rows", type=wholes(1, 2**16), default=[1, 16, 64, 128, 256], metavar="N,N,...")
    add("--contexts", type=wholes(1, MOST_TOKENS), default=[1000, 8000], metavar="N,N,...")
    add("--drafts", type=whole(1, 64), default=5, metavar="N", help="of a row in a step")
    add("--acceptance", type=real(0, 1), default=0.8, metavar="SHARE", help="of drafts after right ones")
    add("--drafter", metavar="RECIPE", help="whose model makes the drafts; without one they are free")
    add_json(parser)


def main(options: argparse.Namespace) -> None:
    config = model_config(read(options.recipe, options.overrides, options.profile).recipe)
    draft_config = model_config(read(options.drafter).recipe) if options.drafter else None
    device = DeviceRates.load(options.device)
    asked = {"device": device.name, "basis": device.basis, "drafts": options.drafts}
    rows = table(config, draft_config, device, options)
    show({**asked, "acceptance": options.acceptance, "rows": rows}, options, print_table)
