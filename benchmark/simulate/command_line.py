"""What may be asked of a simulation on the command line?"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from benchmark import outputs
from benchmark.options import add_json, at_least
from benchmark.workloads.lengths import lengths
from recipes.schema.command_line import add_recipe
from simulation.fleet import ROUTERS


def counts(text: str) -> list[int]:
    """A comma-separated list of positive integers."""
    values = [int(each) for each in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text}: each must be at least 1")
    return values


def positive(text: str) -> int:
    """An integer from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def above_0(text: str) -> float:
    """A number above 0, which `inf` is too."""
    if not _number(text) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return float(text)


def percent(text: str) -> float:
    """A share that is not empty, of 100."""
    if not 0 < _number(text) <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage above 0 and up to 100")
    return float(text)


def drawn(text: str) -> str:
    """The name of a distribution of lengths, checked here; it is sent to the processes that draw from it."""
    lengths(text)
    return text


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def pair(text: str) -> tuple[int, int]:
    """Engines for prompts and for answers, from `P:D`."""
    prompts, _, answers = text.partition(":")
    return positive(prompts), positive(answers)


def serve_parser(doc: str) -> argparse.ArgumentParser:
    """The options of a simulated run."""
    top = _parser("", doc)
    _add_trace(top)
    _add_device(top)
    add = top.add_argument
    add("--tp", type=positive, default=1, metavar="N", help="devices that share each layer")
    add("--pp", type=positive, default=1, metavar="N", help="stages of layers, each on devices of its own")
    add("--dp", type=positive, default=1, metavar="N", help="engines behind a router")
    add("--route", choices=ROUTERS, help="how the router chooses (default: least_loaded)")
    add("--split", type=pair, metavar="P:D", help="engines for prompts, and engines for answers")
    add("--costs", type=Path, metavar="COSTS.json", help="what `fit` made, in place of the device's profile")
    add("--timeline", type=outputs.file, metavar="OUT.json", help="write a time line for Perfetto")
    return top


def search_parser() -> argparse.ArgumentParser:
    """The options of a search."""
    top = _parser(" search", "Which is the cheapest setting that meets the objectives? Nothing is measured.")
    _add_trace(top)
    _add_device(top)
    add = top.add_argument
    add(
        "--ttft-ms",
        type=above_0,
        required=True,
        metavar="MS",
        help="objective of the time to the first token",
    )
    add("--itl-ms", type=above_0, required=True, metavar="MS", help="objective of the time between tokens")
    add(
        "--percent", type=percent, default=99.0, metavar="P", help="of each that must be within (default: 99)"
    )
    add("--tp", type=counts, default=[1, 2, 4, 8], metavar="N,N,...", help="devices that share each layer")
    add("--dp", type=counts, default=[1, 2, 4, 8], metavar="N,N,...", help="engines behind a router")
    add("--chunk", type=counts, metavar="N,N,...", help="scheduler.max_batch_tokens; else the recipe's")
    add("--slots", type=counts, metavar="N,N,...", help="scheduler.num_slots; else the recipe's")
    return top


def fleet_parser() -> argparse.ArgumentParser:
    """The options of many engines under a drawn load."""
    top = _parser(
        " fleet", "What would thousands of engines make of millions of requests? Nothing is measured."
    )
    add = top.add_argument
    add_recipe(top)
    add_json(top)
    _add_device(top)
    add("--requests", type=positive, required=True, metavar="N")
    add(
        "--rate", type=above_0, required=True, metavar="R", help="requests a second, for all engines together"
    )
    add("--prompt-tokens", type=drawn, required=True, metavar="DRAW", help="as `scripts.trace` draws them")
    add("--output-tokens", type=drawn, required=True, metavar="DRAW", help="likewise")
    add("--seed", type=at_least(0), default=0, metavar="S")
    add("--tp", type=positive, default=1, metavar="N", help="devices that share each layer")
    add("--dp", type=positive, required=True, metavar="N", help="engines, which are sent requests in turn")
    add(
        "--sample",
        type=positive,
        metavar="N",
        help="simulate N engines, drawn by the seed, and estimate the rest",
    )
    add("--processes", type=positive, default=2, metavar="N", help="processes that simulate (default: 2)")
    return top


def held_out_parser() -> argparse.ArgumentParser:
    """The options of a fit that is held against another trace."""
    top = _parser(" held-out", "How far off is a simulation, of runs that its costs were not fitted to?")
    add_recipe(top)
    add_json(top)
    add = top.add_argument
    add("--train", required=True, metavar="FILE", help="the trace that costs are fitted to")
    add("--held", metavar="FILE", help="the trace that is simulated (default: other runs of the same)")
    add("--runs", type=at_least(2), default=3, metavar="N", help="measured runs of each (default: 3)")
    return top


def fit_parser() -> argparse.ArgumentParser:
    """The options of a fit."""
    top = argparse.ArgumentParser(prog="python -m scripts.simulate fit")
    top.add_argument("recording", help="made with scheduler.record=FILE")
    top.add_argument("--output", type=outputs.file, required=True, metavar="COSTS.json")
    return top


def _parser(verb: str, doc: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m scripts.simulate{verb}",
        description=doc,
        formatter_class=argparse.RawTextHelpFormatter,
    )


def _add_trace(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_recipe(parser)
    add_json(parser)
    add("--trace", required=True, metavar="FILE", help="requests, as `generate` reads them")
    add("--skip-bad", action="store_true", help="leave out lines that are no requests")


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", metavar="NAME", help="a name in simulation/profiles; else the recipe's own"
    )
