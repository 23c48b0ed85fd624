"""Measure the error of a simulation on runs that its costs were not fitted to.

Several engines serve a training trace on this machine, and as many serve the trace to predict, all of them in
turn. Costs are fitted to the steps of the former; the latter are simulated with them, NUM_SIMULATED times,
each time with another seed for which steps are slow. Percentiles are over the requests of all measured runs,
and of all simulated ones.

Two runs of one trace on one machine differ too, and no prediction can be nearer to a run than another run is.
Each error is therefore shown beside the distance of one measured run from the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmark.simulate.deployment import SIMULATED, Result
from benchmark.simulate.interleaved import MeasuredRun, serve_in_turn, steps_of
from benchmark.simulate.one_run import trust_of
from benchmark.simulate.placement import place
from benchmark.simulate.trace_loading import requests_of
from borders.file_bounds import check_rereadable
from recipes.schema.reader import read
from simulation.fitted import fit
from simulation.run_totals import RunTotals
from simulation.serve import serve

NUM_SIMULATED = 10
AIM = 0.1  # a prediction within this error is good
RATE = "output_tokens_per_s"
FLOOR = (
    "the largest difference of one measured run from the others; a prediction cannot be expected to be nearer"
)


def held_out(options: argparse.Namespace) -> Result:
    """Return figures of the predicted trace, measured and simulated, their differences, and verdicts."""
    recipe = read(options.recipe, options.overrides, options.profile).recipe
    for path in filter(None, (options.train, options.held)):
        check_rereadable(Path(path))
    planned = place(recipe, None)
    train, held = (
        requests_of(path, recipe, planned.config.vocab_size, skip_bad=False)
        for path in (options.train, options.held or options.train)
    )
    runs = [MeasuredRun(recipe, opened()) for _ in range(options.runs) for opened in (train, held)]
    serve_in_turn(runs)
    fitted = fit(steps_of(runs[0::2]))
    models = [replace(fitted, seed=seed) for seed in range(NUM_SIMULATED)]
    simulated = [
        serve(held(), planned.scheduler(), model, overlap=recipe.scheduler.overlap) for model in models
    ]
    return {
        "SIMULATED": f"{SIMULATED}; beside it {options.runs} runs of the real engine",
        **trust_of(models[0]),
        "apart": FLOOR,
        **compared([each.totals for each in runs[1::2]], simulated),
    }


def compared(measured: Sequence[RunTotals], simulated: Sequence[RunTotals]) -> Result:
    """Compare each figure of the measured runs with that of the simulated ones.

    `apart` is FLOOR; the verdict is "within 10 %", "within the measured runs' spread" or "missed".
    """
    result: Result = {}
    of_simulated = _figures(simulated)
    alone_of = [_figures([each]) for each in measured]
    others_of = [_figures([*measured[:at], *measured[at + 1 :]]) for at in range(len(measured))]
    for name, value in _figures(measured).items():
        foretold = of_simulated[name]
        if not value or not foretold:
            continue
        apart = max(abs(one[name] / other[name] - 1) for one, other in zip(alone_of, others_of))
        off = foretold / value - 1
        result[name] = {
            "real": value,
            "simulated": foretold,
            "off": f"{off:+.1%}",
            "apart": f"{apart:.1%}",
            "verdict": _verdict(abs(off), apart),
            "runs": [each[name] for each in alone_of],
        }
    return result


def _verdict(off: float, apart: float) -> str:
    if off <= AIM:
        return f"within {AIM:.0%}"
    return "within the measured runs' spread" if off <= apart else "missed"


def _figures(runs: Sequence[RunTotals]) -> dict[str, float]:
    """Return the median rate of runs, and percentiles of the requests and tokens of all of them."""
    pooled = RunTotals()
    for each in runs:
        pooled.merge(each)
    figures: dict[str, Any] = pooled.figures()
    return {
        RATE: median(each.figures()[RATE] for each in runs),
        **{
            f"{name} {part}": figures[name].get(part, 0.0)
            for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
            for part in ("p50", "p99")
        },
    }
