"""Define the option that all verbs share, and print their results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option for output that programs read."""
    parser.add_argument("--json", action="store_true", help="print JSON rather than a table")


def verdict_line(verdict: Mapping[str, Any]) -> str:
    """Return the gate's verdict on one line."""
    return "; ".join([verdict["outcome"], *(f"{law}: {why}" for law, why in verdict["refused"].items())])


def show(result: Any, options: argparse.Namespace, print_table: Callable[[Any], None]) -> None:
    """Print a result in the requested form."""
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print_table(result)


def print_figures(result: Mapping[str, Any]) -> None:
    """Print the figures of one run, one a line; details of each request, moment or key are for programs."""
    for name, value in result.items():
        if name in ("records", "metrics", "counters", "counters_after_all_runs", "settings", "digests"):
            continue
        if name == "verdict" and isinstance(value, dict):
            value = verdict_line(value)
        elif isinstance(value, dict):
            value = ", ".join(f"{key} {each}" for key, each in value.items())
        print(f"{name:22} {value}")
