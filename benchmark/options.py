"""How do the verbs read their options and show their results?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any


def numbers(text: str) -> list[int]:
    """A comma-separated list of positive integers."""
    values = [int(each) for each in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text}: each must be at least 1")
    return values


def at_least(least: int) -> Callable[[str], int]:
    """Reads an integer from `least` on."""

    def integer(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least {least}")
        return int(text)

    return integer


def add_json(parser: argparse.ArgumentParser) -> None:
    """Whether programs read the result."""
    parser.add_argument("--json", action="store_true", help="print JSON rather than a table")


def verdict_line(verdict: Mapping[str, Any]) -> str:
    """What the gate says of a result, on one line."""
    return "; ".join([verdict["outcome"], *(f"{law}: {why}" for law, why in verdict["refused"].items())])


def show(result: Any, options: argparse.Namespace, print_table: Callable[[Any], None]) -> None:
    """Print a result as it was asked for."""
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print_table(result)
