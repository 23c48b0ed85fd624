"""Search the cheapest setting that meets the objectives.

Settings are tried by the number of devices that they take, fewest first; of those with the same number, all
are tried and the one with the most output tokens a second wins. Settings with more devices than the cheapest
are not tried.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmark.gate.gate import with_verdict
from benchmark.simulate.deployment import SIMULATED, Deployment, Result, device_name, place
from benchmark.simulate.one_run import requests_of
from borders.files import check_rereadable
from continuous_batching.request import Request
from recipes.assembly.families import model_config
from recipes.schema.reader import read


@dataclass(frozen=True, slots=True)
class TriedSetting:
    """The parts of a setting that a search may choose."""

    tensor: int
    replicas: int
    overrides: tuple[str, ...]  # the recipe's keys that it sets

    @property
    def num_devices(self) -> int:
        return self.tensor * self.replicas

    def __str__(self) -> str:
        return " ".join([f"--tp {self.tensor} --dp {self.replicas}", *self.overrides])


def settings(options: argparse.Namespace) -> list[TriedSetting]:
    """Return all settings that may be tried, fewest devices first."""
    keys: list[list[tuple[str, ...]]] = [
        [(f"scheduler.{name}={value}",) for value in given] or [()]
        for name, given in (("max_batch_tokens", options.chunk or ()), ("num_slots", options.slots or ()))
    ]
    made = itertools.product(options.tp, options.dp, *keys)
    found = [TriedSetting(tensor, replicas, (*chunk, *slots)) for tensor, replicas, chunk, slots in made]
    return sorted(found, key=lambda each: each.num_devices)


def tried(options: argparse.Namespace, setting: TriedSetting) -> Result:
    """Return a setting's shares within the objectives and its figures, or why it cannot run."""
    named: Result = {"setting": str(setting), "devices": setting.num_devices}
    try:
        recipe = read(options.recipe, [*options.overrides, *setting.overrides], options.profile).recipe
        placement = place(recipe, options.device, setting.tensor)
        deployment = Deployment(placement, setting.replicas, "least_loaded")
        placement.scheduler()
    except ValueError as error:
        return {**named, "meets": False, "cannot_be": str(error)}
    requests: Iterator[Request] = requests_of(
        options.trace, recipe, placement.config.vocab_size, skip_bad=options.skip_bad
    )()
    totals, own = deployment.serve(requests, None, records=False)
    figures = totals.figures()
    shares = (
        totals.ttft.share_within(options.ttft_ms / 1e3),
        totals.itl.share_within(options.itl_ms / 1e3),
    )
    sizes = {"slots": deployment.num_slots, "max_tokens_per_step": 1}
    result = with_verdict({**deployment.placement.facts(), **sizes, **figures, **own})
    verdict = result["verdict"]
    assert isinstance(verdict, dict), "a verdict is described by an object"
    meets = all(100 * each >= options.percent for each in shares) and not figures["failed"]
    return {
        **named,
        "meets": meets and verdict["outcome"] == "pass",
        "ttft_within": round(shares[0], 4),
        "itl_within": round(shares[1], 4),
        "output_tokens_per_s": figures["output_tokens_per_s"],
        "failed": figures["failed"],
        "ttft_ms": figures["ttft_ms"],
        "itl_ms": figures["itl_ms"],
        "verdict": verdict["outcome"],
    }


def search(options: argparse.Namespace) -> list[Result]:
    """Return each setting that was tried; those that meet the objectives come last, the best at the end."""
    # The parts that no setting changes are checked before any setting is tried.
    recipe = read(options.recipe, options.overrides, options.profile).recipe
    check_rereadable(Path(options.trace))
    device_name(recipe, options.device)
    model_config(recipe)
    found: list[Result] = []
    for num_devices, same in itertools.groupby(settings(options), key=lambda each: each.num_devices):
        fared = sorted(
            (tried(options, each) for each in same),
            key=lambda each: (each["meets"], each.get("output_tokens_per_s", 0.0)),
        )
        found += fared
        if fared[-1]["meets"]:
            break
        assert num_devices, "a setting takes a device"
    return found


def run(options: argparse.Namespace) -> None:
    """Print what was tried and found; raises ValueError if nothing meets the objectives."""
    found = search(options)
    best = found[-1]
    if options.json:
        said = {"SIMULATED": SIMULATED, "tried": found, "best": best if best["meets"] else None}
        print(json.dumps(said, indent=2))
    else:
        print("\n".join([f"SIMULATED: {SIMULATED}", *map(row, found)]))
    if all("cannot_be" in each for each in found):
        raise ValueError(f"none of {len(found)} settings can run; the last: {best['cannot_be']}")
    if not best["meets"]:
        raise ValueError(
            f"none of {len(found)} settings meets the objectives; allow more devices (--tp, --dp) or time"
        )
    if not options.json:
        print(f"cheapest: {best['devices']} devices, {best['setting']}")


def row(each: Result) -> str:
    """Format one setting in a line."""
    if "cannot_be" in each:
        return f"{each['devices']:>4} devices  {each['setting']}: {each['cannot_be']}"
    mark = "meets" if each["meets"] else "fails"
    return (
        f"{each['devices']:>4} devices  {mark}  TTFT within {each['ttft_within']:.1%},"
        f" ITL {each['itl_within']:.1%},"
        f" {each['output_tokens_per_s']:>10,.0f} tokens/s  {each['setting']}"
    )
