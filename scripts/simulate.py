"""Simulate a recipe on a machine that is not here; nothing of it is measured.

    python -m scripts.simulate RECIPE [key=value] --trace FILE --device ascend910b --tp 8
    python -m scripts.simulate search RECIPE [key=value] --trace FILE --ttft-ms 500 --itl-ms 50
    python -m scripts.simulate routes RECIPE [key=value] --trace FILE --dp 64 [--plot OUT.png]
    python -m scripts.simulate splits RECIPE [key=value] --trace FILE --split 2:2
    python -m scripts.simulate fleet RECIPE [key=value] --dp 10000 --requests 10000000 --sample 100 ...
    python -m scripts.simulate held-out RECIPE [key=value] --train FILE [--held FILE] [--runs N]
    python -m scripts.simulate fit RECORDING --output COSTS.json     what --costs takes

The scheduler is the real one; the time of a step comes from a model of the device (`devices/profiles`), or
was fitted to a recorded run (`scheduler.record` in its recipe).
"""

from __future__ import annotations

import argparse
import json

from benchmark.options import print_figures
from benchmark.simulate.command_line import (
    fit_parser,
    fleet_parser,
    held_out_parser,
    routes_parser,
    search_parser,
    serve_parser,
    splits_parser,
)
from benchmark.simulate.deployment import Result
from benchmark.simulate.fitting import fit_main
from benchmark.simulate.one_run import simulate
from benchmark.simulate.search import search_main
from benchmark.simulate.shards import fleet_main
from benchmark.simulate.ways import routes_main, splits_main
from recipes.schema import verb


def show(options: argparse.Namespace, result: Result) -> None:
    """Print the result as JSON or as a table."""
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print_figures(result)


def main(argv: list[str]) -> None:
    """Simulate, search or fit; raises ValueError or OSError for what cannot be read or is impossible."""
    if argv[:1] == ["fit"]:
        fit_main(fit_parser().parse_args(argv[1:]))
    elif argv[:1] == ["held-out"]:
        options = held_out_parser().parse_intermixed_args(argv[1:])
        from benchmark.simulate.held_out import held_out  # imported here because it runs an engine

        show(options, held_out(options))
    elif argv[:1] == ["fleet"]:
        options = fleet_parser().parse_intermixed_args(argv[1:])
        show(options, fleet_main(options))
    elif argv[:1] == ["search"]:
        search_main(search_parser().parse_intermixed_args(argv[1:]))
    elif argv[:1] == ["routes"]:
        routes_main(routes_parser().parse_intermixed_args(argv[1:]))
    elif argv[:1] == ["splits"]:
        splits_main(splits_parser().parse_intermixed_args(argv[1:]))
    else:
        options = serve_parser(__doc__ or "").parse_intermixed_args(argv)
        show(options, simulate(options))


if __name__ == "__main__":
    verb.run(main)
