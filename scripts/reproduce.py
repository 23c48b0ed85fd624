"""Reproduce the sources' experiments in simulation; every figure must pass the gate, and none is measured.

    python -m scripts.reproduce --output DIR [--only NAME ...] [--quick] [--jobs N] [--json FILE]

The command writes DIR/reproduced.md. Its exit status is 1 if the gate refuses a result.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmark import options as kinds
from benchmark.reproduce import experiments, reproduce
from recipes.schema import verb
from recipes.schema.numbers import whole


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m scripts.reproduce",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    names = [each.name for each in experiments()]
    add = top.add_argument
    add("--output", type=kinds.folder, required=True, metavar="DIR")
    add("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    add("--quick", action="store_true", help="little load: whether all goes, not what it gives")
    add(
        "--jobs",
        type=whole(1, 1024),
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes (default: one a core)",
    )
    add("--json", type=Path, metavar="FILE", help="all figures of all cases")
    return top


def main(argv: list[str]) -> int:
    """Run and print; raises ValueError or OSError for what cannot be done."""
    options = parser().parse_args(argv)
    known = experiments()
    chosen = [each for each in known if each.name in options.only]
    if options.quick:
        chosen = [each.quick() for each in chosen]
    flags = [*(["--only", *options.only] if len(chosen) < len(known) else [])]
    flags += ["--quick"] if options.quick else []
    command = " ".join(["python -m scripts.reproduce", *flags, "--output DIR"])
    num_cases, num_refused, path = reproduce(chosen, command, options.output, options.jobs, options.json)
    print(f"SIMULATED: {num_cases} cases, {num_refused} refused by the gate; {path}")
    return 1 if num_refused else 0


if __name__ == "__main__":
    verb.run(main)
