"""List the experiments that are re-run, run them, and write report and pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmark import outputs
from benchmark.reproduce import batching, capacity, chunks, goodput, paging, stages
from benchmark.reproduce.case_runs import run_all
from benchmark.reproduce.experiment import Experiment
from benchmark.reproduce.report import plain, write
from borders.whole_file import whole_file

GROUPS = (batching, goodput, chunks, capacity, stages, paging)


def experiments() -> list[Experiment]:
    """Return all experiments, in the order of the report."""
    return [each for group in GROUPS for each in group.experiments()]


def reproduce(
    chosen: Sequence[Experiment], command: str, output: Path, jobs: int, figures: Path | None
) -> tuple[int, int, Path]:
    """Run experiments, and write report and pictures into a folder, and `figures` as JSON.

    Returns the number of cases, the number that the gate refused, and the path of the report.
    """
    output.mkdir(parents=True, exist_ok=True)
    if figures is not None:
        outputs.file(figures)  # checked before the runs; it may be in that folder
    cases = [case for each in chosen for case in each.cases]
    found = run_all(cases, jobs, lambda line: print(line, flush=True))
    results = [(each, {case.label: found[case] for case in each.cases}) for each in chosen]
    path = write(output, command, results)
    if figures is not None:
        by_name = {each.name: {label: plain(one) for label, one in ours.items()} for each, ours in results}
        with whole_file(figures) as file:
            json.dump(by_name, file, indent=1)
    num_refused = sum(result["verdict"]["outcome"] != "pass" for result in found.values())
    return len(found), num_refused, path
