"""Define the command-line options of simulations."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmark import outputs
from benchmark.options import add_json
from benchmark.workloads.lengths import lengths
from continuous_batching.routing.routing import ROUTES
from recipes.schema.command_line import add_recipe
from recipes.schema.numbers import MOST_SEED, RATES_PER_S, real, whole, wholes

MOST_DEVICES = 10**6  # most engines of a fleet
MOST_FLEET_REQUESTS = 10**10
engines = whole(1, MOST_DEVICES)
devices = wholes(1, MOST_DEVICES)
milliseconds = real(1e-6, 1e9, endless=True)


def drawn(text: str) -> str:
    """Check the name of a distribution of lengths, and return it for the processes that draw from it."""
    lengths(text)
    return text


def pair(text: str) -> tuple[int, int]:
    """Parse engines for prompts and for answers from `P:D`."""
    prompts, _, answers = text.partition(":")
    return engines(prompts), engines(answers)


def serve_parser(doc: str) -> argparse.ArgumentParser:
    """Return the options of a simulated run."""
    top = _parser("", doc)
    _add_trace(top)
    _add_device(top)
    add = top.add_argument
    add("--tp", type=engines, default=1, metavar="N", help="devices that share each layer")
    add("--pp", type=engines, default=1, metavar="N", help="stages of layers, each on devices of its own")
    add("--dp", type=engines, default=1, metavar="N", help="engines behind a router")
    add("--route", choices=ROUTES, help="how the router chooses (default: least_loaded)")
    add("--split", type=pair, metavar="P:D", help="engines for prompts, and engines for answers")
    add(
        "--split-by",
        choices=("cost", "always"),
        help="which prompts those compute, as the router chooses (default: cost); none: --dp P+D",
    )
    add("--costs", type=Path, metavar="COSTS.json", help="what `fit` made, in place of the device's profile")
    add("--timeline", type=outputs.file, metavar="OUT.json", help="write a time line for Perfetto")
    return top


def search_parser() -> argparse.ArgumentParser:
    """Return the options of a search."""
    top = _parser(" search", "Which is the cheapest setting that meets the objectives? Nothing is measured.")
    _add_trace(top)
    _add_device(top)
    add = top.add_argument
    add(
        "--ttft-ms",
        type=milliseconds,
        required=True,
        metavar="MS",
        help="objective of the time to the first token",
    )
    add(
        "--itl-ms",
        type=milliseconds,
        required=True,
        metavar="MS",
        help="objective of the time between tokens",
    )
    add(
        "--percent",
        type=real(1e-3, 100),
        default=99.0,
        metavar="P",
        help="of each that must be within (default: 99)",
    )
    add("--tp", type=devices, default=[1, 2, 4, 8], metavar="N,N,...", help="devices that share each layer")
    add("--dp", type=devices, default=[1, 2, 4, 8], metavar="N,N,...", help="engines behind a router")
    add(
        "--chunk",
        type=wholes(1, 2**31 - 1),
        metavar="N,N,...",
        help="scheduler.max_batch_tokens; else the recipe's",
    )
    add(
        "--slots", type=wholes(1, 2**31 - 1), metavar="N,N,...", help="scheduler.num_slots; else the recipe's"
    )
    return top


def routes_parser() -> argparse.ArgumentParser:
    """Return the options of a comparison of routes."""
    top = _parser(" routes", "How do the routes of a router compare on one trace? Nothing is measured.")
    _add_ways(top)
    top.add_argument("--dp", type=engines, required=True, metavar="N", help="engines behind the router")
    top.add_argument("--plot", type=outputs.picture, metavar="OUT.png", help="draw them, too")
    return top


def splits_parser() -> argparse.ArgumentParser:
    """Return the options of a comparison of who computes prompts."""
    top = _parser(" splits", "Who should compute prompts, by one trace? Nothing is measured.")
    _add_ways(top)
    help_ = "engines for prompts, and for answers; or all for both"
    top.add_argument("--split", type=pair, required=True, metavar="P:D", help=help_)
    return top


def fleet_parser() -> argparse.ArgumentParser:
    """Return the options of many engines under a random load."""
    top = _parser(
        " fleet", "What would thousands of engines make of millions of requests? Nothing is measured."
    )
    add = top.add_argument
    add_recipe(top)
    add_json(top)
    _add_device(top)
    add("--requests", type=whole(1, MOST_FLEET_REQUESTS), required=True, metavar="N")
    add(
        "--rate",
        type=real(*RATES_PER_S, endless=True),
        required=True,
        metavar="R",
        help="requests a second, for all engines together",
    )
    add("--prompt-tokens", type=drawn, required=True, metavar="DRAW", help="as `scripts.trace` draws them")
    add("--output-tokens", type=drawn, required=True, metavar="DRAW", help="likewise")
    add("--seed", type=whole(0, MOST_SEED), default=0, metavar="S")
    add("--tp", type=engines, default=1, metavar="N", help="devices that share each layer")
    add("--dp", type=engines, required=True, metavar="N", help="engines, which are sent requests in turn")
    add(
        "--sample",
        type=engines,
        metavar="N",
        help="simulate N engines, drawn by the seed, and estimate the rest",
    )
    add(
        "--processes",
        type=whole(1, 1024),
        default=2,
        metavar="N",
        help="processes that simulate (default: 2)",
    )
    return top


def held_out_parser() -> argparse.ArgumentParser:
    """Return the options of a fit that is checked against another trace."""
    top = _parser(" held-out", "How far off is a simulation, of runs that its costs were not fitted to?")
    add_recipe(top)
    add_json(top)
    add = top.add_argument
    add("--train", required=True, metavar="FILE", help="the trace that costs are fitted to")
    add("--held", metavar="FILE", help="the trace that is simulated (default: other runs of the same)")
    add("--runs", type=whole(2, 100), default=3, metavar="N", help="measured runs of each (default: 3)")
    return top


def fit_parser() -> argparse.ArgumentParser:
    """Return the options of a fit."""
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


def _add_ways(parser: argparse.ArgumentParser) -> None:
    _add_trace(parser)
    _add_device(parser)
    parser.add_argument("--tp", type=engines, default=1, metavar="N", help="devices that share each layer")


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="NAME", help="a name in devices/profiles; else the recipe's own")
