"""How are the costs of a recorded run fitted from the command line?"""

from __future__ import annotations

import argparse

from continuous_batching.recording.format import Header, read_entries
from recipes.build.scheduler import scheduler_from
from simulation.fitted import NAMES, learn


def fit_main(options: argparse.Namespace) -> None:
    """Fit costs to a recording, write them, and print those that are not 0."""
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
