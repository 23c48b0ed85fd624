"""Define the option and the output that all verbs share."""

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
