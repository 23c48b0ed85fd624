"""Check whether a benchmark's result is possible.

    python -m scripts.audit FILE [--json]       FILE is what a benchmark printed with --json
    python -m scripts.audit --sources           audits the sources' own tables, row by row
    python -m scripts.audit --laws              lists each law and its statement

The exit status is 0 where a result passes, 1 where a law refuses it, 2 where the file cannot be used.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark.gate.gate import ANYWHERE, LAWS, audit, published
from benchmark.gate.result import read_result
from recipes.schema import verb


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m scripts.audit", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    what = top.add_mutually_exclusive_group(required=True)
    what.add_argument("file", nargs="?", type=Path, metavar="FILE")
    what.add_argument("--sources", action="store_true", help="audit the sources' tables")
    what.add_argument("--laws", action="store_true", help="name each law and what it says")
    top.add_argument("--json", action="store_true", help="print JSON rather than a table")
    return top


def main(argv: list[str]) -> int:
    """Audit; raises ValueError or OSError for a file that cannot be used."""
    options = parser().parse_args(argv)
    if options.laws:
        for law in (*LAWS, *ANYWHERE):
            print(f"{law.name:18} {law.statement}")
        return 0
    if options.sources:
        if options.json:
            found = [{"source": row.source, "row": row.name, **row.verdict} for row in published()]
            print(json.dumps(found, indent=2))
        else:
            _print_published()
        return 0
    try:
        verdict = audit(read_result(options.file))
    except ValueError as error:
        raise ValueError(f"{options.file}: {error}") from error
    if options.json:
        print(json.dumps(verdict, indent=2))
    else:
        _print_verdict(verdict)
    return int(verdict["outcome"] != "pass")


def _print_verdict(verdict: Mapping[str, Any]) -> None:
    """Print one law a line, the refused ones first."""
    statements = {law.name: law.statement for law in (*LAWS, *ANYWHERE)}
    passed = {name: statements[name] for name in verdict["passed"]}
    laws = {"refused": verdict["refused"], "pass": passed, "not checkable": verdict["not_checkable"]}
    for outcome, each in laws.items():
        for name, why in each.items():
            print(f"{outcome:14} {name:18} {why}")


def _print_published() -> None:
    """Print each published row, with each law that it breaks."""
    source = ""
    for row in published():
        if row.source != source:
            source = row.source
            print(source)
        for name, why in (row.verdict["refused"] or {"pass": ""}).items():
            print(f"  {row.name:30} {name:18} {why}")


if __name__ == "__main__":
    verb.run(main)
