"""Fit costs to a recorded run from the command line."""

from __future__ import annotations

import argparse

from benchmark.recordings.recording_file import Recording
from borders.file_bounds import opened
from borders.whole_file import whole_file
from recipes.assembly.scheduler import scheduler_from
from recipes.schema.command_line import keep_apart
from simulation.fit_trust import in_words
from simulation.fitted import NAMES, learn


def fit_main(options: argparse.Namespace) -> None:
    """Fit costs to a recording, write them, and print those that are not 0.

    Raises ValueError for a recording that is damaged, or cut short.
    """
    keep_apart(options.output, options.recording)
    with opened(options.recording) as file:
        recording = Recording(file, options.recording, needs_all=True)
        fitted = learn(recording, scheduler_from(recording.facts))
    with whole_file(options.output) as output:
        output.write(fitted.in_json())
    for name, cost_s in zip(NAMES, fitted.costs_s.tolist()):
        if cost_s:
            print(f"{name:22} {1e6 * cost_s:.4g} us")
    print(f"{'the fit':22} {in_words(fitted.trust.describe())}")
