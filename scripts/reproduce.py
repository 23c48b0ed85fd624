"""What do the sources' experiments give where every figure must pass the gate? Nothing of it is measured.

    python -m scripts.reproduce --output DIR [--only NAME ...] [--quick] [--jobs N] [--json FILE]

Writes DIR/reproduced.md and its pictures. Ends with 1 if the gate refuses a result.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from benchmark import outputs
from benchmark.reproduce import batching, capacity, chunks, goodput, paging, stages
from benchmark.reproduce.case_runs import run_all
from benchmark.reproduce.experiment import Experiment
from benchmark.reproduce.report import plain, write
from scripts import verb

GROUPS = (batching, goodput, chunks, capacity, stages, paging)


def experiments() -> list[Experiment]:
    """All of them, in the order of the report."""
    return [each for group in GROUPS for each in group.experiments()]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m scripts.reproduce",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    names = [each.name for each in experiments()]
    add = top.add_argument
    add("--output", type=outputs.folder, required=True, metavar="DIR")
    add("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    add("--quick", action="store_true", help="little load: whether all goes, not what it gives")
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: one a core)")
    add("--json", type=Path, metavar="FILE", help="all figures of all cases")
    return top


def main(argv: list[str]) -> int:
    """Run, draw and tell; raises ValueError or OSError for what cannot be."""
    options = parser().parse_args(argv)
    if options.jobs < 1:
        raise ValueError(f"--jobs is {options.jobs}; it must be at least 1")
    options.output.mkdir(parents=True, exist_ok=True)
    if options.json is not None:
        outputs.file(options.json)  # now, because it may be in that folder
    chosen = [each for each in experiments() if each.name in options.only]
    if options.quick:
        chosen = [each.quick() for each in chosen]
    cases = [case for each in chosen for case in each.cases]
    found = run_all(cases, options.jobs, lambda line: print(line, flush=True))
    told = [(each, {case.label: found[case] for case in each.cases}) for each in chosen]
    flags = [*(["--only", *options.only] if len(chosen) < len(experiments()) else [])]
    flags += ["--quick"] if options.quick else []
    path = write(options.output, " ".join(["python -m scripts.reproduce", *flags, "--output DIR"]), told)
    if options.json is not None:
        results = {each.name: {label: plain(one) for label, one in ours.items()} for each, ours in told}
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    refused = [case.label for case, result in found.items() if result["verdict"]["outcome"] != "pass"]
    print(f"SIMULATED: {len(found)} cases, {len(refused)} refused by the gate; {path}")
    return 1 if refused else 0


if __name__ == "__main__":
    verb.run(main)
