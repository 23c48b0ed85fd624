"""Compute the figures of one simulated run that the command line describes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmark.gate.gate import with_verdict
from benchmark.simulate.deployment import SIMULATED, Deployment, Result
from benchmark.simulate.placement import place
from benchmark.simulate.trace_events import TraceEventFile
from benchmark.simulate.trace_loading import requests_of
from borders.file_bounds import MOST_JSON_BYTES, read_bounded
from borders.whole_file import whole_file
from continuous_batching.request import Request
from continuous_batching.routing.routing import Route
from continuous_batching.routing.splitting import Split
from recipes.schema.command_line import keep_apart
from recipes.schema.reader import read
from simulation.fit_trust import in_words
from simulation.fitted import Fitted

MOST_RECORDS = 20_000  # most records that a result keeps, for the gate to recount


def deployment_of(options: argparse.Namespace) -> Deployment:
    """Return the deployment that the options name."""
    recipe = read(options.recipe, options.overrides, options.profile).recipe
    if options.costs is not None and (options.tp > 1 or options.pp > 1):
        raise ValueError("--costs are of the devices that were recorded; leave out --tp and --pp")
    if options.split is not None and (options.dp > 1 or options.pp > 1):
        raise ValueError("--split says how many engines there are; leave out --dp and --pp")
    if options.split_by is not None and options.split is None:
        raise ValueError("--split-by says which prompts are computed apart; give --split, or leave it out")
    if options.route is not None and options.dp == 1 and max(options.split or (1,)) == 1:
        raise ValueError("--route chooses among engines; give several, by --dp or --split, or leave it out")
    if options.pp > 1 and options.dp > 1:
        raise ValueError("--pp is simulated for one engine; leave out --dp")
    fitted = None
    if options.costs is not None:
        fitted = Fitted.from_json(read_bounded(options.costs, MOST_JSON_BYTES), options.costs)
    planned = place(recipe, options.device, options.tp, options.pp, fitted)
    route: Route = options.route or "least_loaded"
    split_by: Split = options.split_by or "cost"
    return Deployment(planned, options.dp, route, options.split, split_by)


def run(
    deployment: Deployment, requests: Iterator[Request], timeline: TraceEventFile | None = None
) -> Result:
    """Return the figures of one simulated run, without a verdict."""
    began_s = time.perf_counter()
    totals, own = deployment.serve(requests, timeline, records=True)
    took_s = time.perf_counter() - began_s
    figures = totals.figures()
    kept = totals.records is not None and len(totals.records) <= MOST_RECORDS and not figures["failed"]
    return {
        **deployment.placement.facts(),
        "devices": deployment.num_devices,
        "num_pages": deployment.placement.memory.num_pages,
        "slots": deployment.num_slots,
        "max_tokens_per_step": 1,
        "warm_up_counted": 0,
        **figures,
        **own,
        **trust_of(deployment.placement.fitted),
        "wall_s": round(took_s, 3),
        "simulated_output_tokens_per_wall_s": round(totals.output_tokens / took_s),
        **({"records": totals.records} if kept else {}),
    }


def trust_of(fitted: Fitted | None) -> Result:
    """Return whether fitted costs can be trusted for the simulated steps; doubts are also printed."""
    if fitted is None:
        return {}
    said = fitted.describe()
    if said["doubts"]:
        print(f"warning: the fit {in_words(said)}", file=sys.stderr)
    return {"fit": said}


def simulate(options: argparse.Namespace) -> Result:
    """Return the figures with the gate's verdict; raises ValueError for what cannot be simulated."""
    deployment = deployment_of(options)
    if options.timeline is not None and (options.split is not None):
        raise ValueError("--timeline shows one engine or the stages of one; leave out --split")
    if options.timeline is not None:
        keep_apart(options.timeline, options.recipe, options.trace, *filter(None, [options.costs]))
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
        with whole_file(options.timeline) as file:
            timeline = TraceEventFile(file)
            figures = run(deployment, requests(), timeline)
            timeline.close()
    said = {"recipe": options.recipe, "overrides": list(options.overrides), "trace": Path(options.trace).name}
    return with_verdict({"SIMULATED": SIMULATED, **said, **figures})
