"""How are the costs of a recorded run fitted from the command line?"""

from __future__ import annotations

import argparse

from benchmark.recordings.recording_file import Recording
from recipes.build.scheduler import scheduler_from
from recipes.schema.command_line import keep_apart
from simulation.fit_trust import in_words
from simulation.fitted import NAMES, learn


def fit_main(options: argparse.Namespace) -> int:
    """Fit costs to a recording, write them, and print those that are not 0; returns the exit status."""
    keep_apart(options.output, options.recording)
    with open(options.recording, "rb") as file:
        recording = Recording(file, options.recording)
        fitted = learn(recording, scheduler_from(recording.facts))
    fitted.save(options.output)
    for name, cost_s in zip(NAMES, fitted.costs_s.tolist()):
        if cost_s:
            print(f"{name:22} {1e6 * cost_s:.4g} us")
    print(f"{'the fit':22} {in_words(fitted.trust.describe())}")
    return recording.status
