"""Parse what options of benchmarks take, check that outputs can be written, run in turns, and print results.

An output is checked before a command runs, so that no run is lost for a missing folder. The parsers of text
raise ArgumentTypeError, and those of paths OSError.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from recipes.schema.numbers import RATES_PER_S, real
from recipes.schema.reader import load
from recipes.schema.recipe import Recipe

PICTURES = (".png", ".svg", ".pdf")
LAYOUTS = ("mooncake", "burstgpt", "sharegpt")
LATENCIES = ("ttft", "tpot", "itl", "e2el")
T = TypeVar("T")
rate = real(*RATES_PER_S, endless=True)  # requests a second; `inf` for all at once


def recipe_of(options: argparse.Namespace) -> Recipe:
    """Return the recipe that a verb's options name; raises RecipeError."""
    return load(options.recipe, options.overrides, options.profile)


def file(text: str | Path) -> Path:
    """Return a path at which a file can be written; raises OSError for another."""
    path = Path(text)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: make the folder {path.parent} first")
    return _may_write(path, path if path.exists() else path.parent)


def picture(text: str) -> Path:
    """Return a path for a picture; raises ArgumentTypeError for a name that names no kind of picture."""
    path = file(text)
    if path.suffix not in PICTURES:
        kinds = ", ".join(PICTURES)
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a picture; it must end in {kinds}")
    return path


def folder(text: str) -> Path:
    """Return a folder in which files can be written, once it and its parents are made; raises OSError."""
    path = Path(text)
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{path} cannot be a folder: {there} is a file")
    return _may_write(path, there)


def _may_write(path: Path, there: Path) -> Path:
    if not os.access(there, os.W_OK):
        raise PermissionError(f"{path} cannot be written: {there} may not be written to")
    return path


def url(text: str) -> str:
    """Parse a server's URL, without the slash at its end, and without /v1."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no URL; write http://HOST:PORT")
    return text.rstrip("/").removesuffix("/v1")


def body(text: str) -> dict[str, Any]:
    """Parse a request's fields from JSON."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object, such as '{{\"top_p\": 0.9}}'")
    return fields


def rates(text: str) -> list[float]:
    """Parse rates, separated by commas."""
    return [rate(each) for each in text.split(",")]


def source(text: str) -> tuple[str, Path]:
    """Parse the layout and the file of a public trace from `LAYOUT:FILE`."""
    layout, _, path = text.partition(":")
    if layout not in LAYOUTS or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is no source; write {', '.join(LAYOUTS)}, and :FILE")
    return layout, Path(path)


def objective(text: str) -> tuple[str, float]:
    """Parse the objective of a latency from `NAME:MILLISECONDS`."""
    name, _, value = text.partition(":")
    if name in LATENCIES and value:
        return name, real(1e-6, 1e9)(value)
    known = ", ".join(LATENCIES)
    raise argparse.ArgumentTypeError(f"{text!r} is no objective; write {known} and :MILLISECONDS")


def why(error: Exception) -> str:
    """Return why a line or an entry of a file cannot be read, in a few words."""
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start}"
    if isinstance(error, UnicodeEncodeError):
        return f"half a surrogate pair at character {error.start} of a turn's value"
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return "the JSON is nested too deeply" if isinstance(error, RecursionError) else str(error)


def value_at(result: Mapping[str, Any], name: str) -> Any:
    """Return what a result has under a dotted name, or None."""
    value: Any = result
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def known_figure(result: Mapping[str, Any], name: str) -> float | None:
    """Return a figure by its dotted name, or None where the result has none."""
    value = value_at(result, name)
    return value if isinstance(value, (int, float)) else None


def show(result: Any, *, as_json: bool, print_table: Callable[[Any], None]) -> None:
    """Print a result in the requested form."""
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_table(result)


def verdict_line(verdict: Mapping[str, Any]) -> str:
    """Return the gate's verdict on one line."""
    return "; ".join([verdict["outcome"], *(f"{law}: {why}" for law, why in verdict["refused"].items())])


def markdown(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    head, *body = (f"| {' | '.join(map(str, cells))} |" for cells in [heads, *rows])
    return "\n".join([head, f"|{'---|' * len(heads)}", *body])


class Column(NamedTuple):
    """A column of a table: the dotted name of what a row has, its heading, and the format of a value."""

    name: str
    heading: str
    form: str = "{}"

    def cell(self, row: Mapping[str, Any], absent: str = "") -> str:
        """Return the cell of a row, or `absent` where the row has no such value."""
        value = value_at(row, self.name)
        return absent if value is None else self.form.format(value)


def table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]], absent: str = "") -> str:
    """Return rows as a table in Markdown."""
    return markdown(
        [each.heading for each in columns], ([each.cell(row, absent) for each in columns] for row in rows)
    )


def named_rows(rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows that have a name, as rows whose column `name` has it."""
    return [{"name": name, **row} for name, row in rows.items()]


def in_turns(ways: Mapping[str, Callable[[int], T]], rounds: int, warm_ups: int = 1) -> dict[str, list[T]]:
    """Run each way once a round, with the round's number: other work on the machine then affects all alike.

    Returns what each way gave by round, without the rounds that warm up, which come first.
    """
    given: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(warm_ups + rounds):
        for name, way in ways.items():
            given[name].append(way(number))
    return {name: of_way[warm_ups:] for name, of_way in given.items()}


def medians(rounds: Sequence[Mapping[str, float]], digits: int = 4) -> dict[str, float]:
    """Return the median of each figure over rounds, which all have the same figures."""
    return {name: round(statistics.median(each[name] for each in rounds), digits) for name in rounds[0]}


def print_figures(result: Mapping[str, Any]) -> None:
    """Print the figures of one run, one a line; details of each request, moment or key are for programs."""
    for name, value in result.items():
        if name in ("records", "counters", "settings", "digests"):
            continue
        if name == "verdict" and isinstance(value, dict):
            value = verdict_line(value)
        elif isinstance(value, dict):
            value = ", ".join(f"{key} {each}" for key, each in value.items())
        print(f"{name:22} {value}")
