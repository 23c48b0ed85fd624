"""What would a recipe serve on a machine that is not here? Nothing of it is measured.

    python -m scripts.simulate RECIPE [key=value] --trace FILE --device ascend910b --tp 8
    python -m scripts.simulate search RECIPE [key=value] --trace FILE --ttft-ms 500 --itl-ms 50
    python -m scripts.simulate fleet RECIPE [key=value] --dp 10000 --requests 10000000 --sample 100 ...
    python -m scripts.simulate held-out RECIPE [key=value] --train FILE --held FILE
    python -m scripts.simulate fit RECORDING --output COSTS.json     what --costs takes

The scheduler is the real one; the time of a step is what a model of the device says (`simulation/profiles`),
or what was fitted to a recorded run (`scheduler.record` in its recipe).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

from benchmark.gate.verdict import with_verdict
from benchmark.offline.offline import print_table
from benchmark.simulate.command_line import (
    fit_parser,
    fleet_parser,
    held_out_parser,
    search_parser,
    serve_parser,
)
from benchmark.simulate.deployment import SIMULATED, Deployment, Result
from benchmark.simulate.held_out import held_out
from benchmark.simulate.placement import place
from benchmark.simulate.search import search_main
from benchmark.simulate.shards import fleet_main
from benchmark.simulate.trace_events import TraceEventFile
from benchmark.simulate.trace_loading import requests_of
from continuous_batching.recording.format import Header, read_entries
from continuous_batching.request import Request
from recipes.build.scheduler import scheduler_from
from recipes.schema.reader import read
from scripts import verb
from simulation.fitted import NAMES, Fitted, learn

MOST_RECORDS = 20_000  # kept in a result, for the gate to recount


def deployment_of(options: argparse.Namespace) -> Deployment:
    """What the options name."""
    recipe = read(options.recipe, options.overrides, options.profile).recipe
    if options.costs is not None and (options.tp > 1 or options.pp > 1):
        raise ValueError("--costs are of the devices that were recorded; leave out --tp and --pp")
    if options.split is not None and (options.dp > 1 or options.pp > 1):
        raise ValueError("--split says how many engines there are; leave out --dp and --pp")
    if options.route is not None and options.dp == 1 and max(options.split or (1,)) == 1:
        raise ValueError("--route chooses among engines; give several, by --dp or --split, or leave it out")
    if options.pp > 1 and options.dp > 1:
        raise ValueError("--pp is simulated for one engine; leave out --dp")
    fitted = None if options.costs is None else Fitted.load(options.costs)
    planned = place(recipe, options.device, options.tp, options.pp, fitted)
    return Deployment(planned, options.dp, options.route or "least_loaded", options.split)


def run(
    deployment: Deployment, requests: Iterator[Request], timeline: TraceEventFile | None = None
) -> Result:
    """The figures of one simulated run, without a verdict."""
    began_s = time.perf_counter()
    totals, own = deployment.serve(requests, timeline, records=True)
    took_s = time.perf_counter() - began_s
    figures = totals.figures()
    kept = totals.records is not None and len(totals.records) <= MOST_RECORDS and not figures["failed"]
    return {
        **deployment.placement.facts(),
        "devices": deployment.num_devices,
        "num_pages": deployment.placement.sizing.num_pages,
        "slots": deployment.num_slots,
        "max_tokens_per_step": 1,
        "warm_up_counted": 0,
        **figures,
        **own,
        "wall_s": round(took_s, 3),
        "simulated_output_tokens_per_wall_s": round(totals.output_tokens / took_s),
        **({"records": totals.records} if kept else {}),
    }


def serve_main(options: argparse.Namespace) -> None:
    """Simulate one setting."""
    deployment = deployment_of(options)
    if options.timeline is not None and (options.split is not None):
        raise ValueError("--timeline shows one engine or the stages of one; leave out --split")
    placement = deployment.placement
    requests = requests_of(
        options.trace,
        placement.recipe,
        placement.config.vocab_size,
        skip_bad=options.skip_bad,
    )
    if options.timeline is None:
        figures = run(deployment, requests())
    else:
        with open(options.timeline, "w", encoding="utf-8") as file:
            timeline = TraceEventFile(file)
            figures = run(deployment, requests(), timeline)
            timeline.close()
    said = {"recipe": options.recipe, "overrides": list(options.overrides), "trace": Path(options.trace).name}
    show(options, with_verdict({"SIMULATED": SIMULATED, **said, **figures}))


def show(options: argparse.Namespace, result: Result) -> None:
    """Print it as was asked."""
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print_table(result)


def fit_main(options: argparse.Namespace) -> None:
    """Fit costs to a recording."""
    with open(options.recording, "rb") as file:
        entries = list(read_entries(file))
    header = entries[0] if entries else None
    if not isinstance(header, Header):
        raise ValueError(f"{options.recording} is no recording; make one with scheduler.record=FILE")
    fitted = learn(entries, scheduler_from(header.facts))
    fitted.save(options.output)
    for name, cost_s in zip(NAMES, fitted.costs_s.tolist()):
        if cost_s:
            print(f"{name:22} {1e6 * cost_s:.4g} us")


def main(argv: list[str]) -> None:
    """Simulate, search or fit; raises ValueError or OSError for what cannot be read or cannot be."""
    if argv[:1] == ["fit"]:
        fit_main(fit_parser().parse_args(argv[1:]))
    elif argv[:1] == ["held-out"]:
        options = held_out_parser().parse_intermixed_args(argv[1:])
        show(options, held_out(options))
    elif argv[:1] == ["fleet"]:
        options = fleet_parser().parse_intermixed_args(argv[1:])
        show(options, fleet_main(options))
    elif argv[:1] == ["search"]:
        search_main(search_parser().parse_intermixed_args(argv[1:]))
    else:
        serve_main(serve_parser(str(__doc__)).parse_intermixed_args(argv))


if __name__ == "__main__":
    verb.run(main)
