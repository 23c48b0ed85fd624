"""Say which operator and argument each release of torch_npu has, by a table read out of their wheels.

`python -m scripts.torch_npu_releases` makes the table. Releases whose wheels say the same share one column,
which is named after the first of them. `python -m devices.torch_npu_releases VERSION` prints what a release
lacks on a 910B, and fails where there is anything; scripts/setup.sh asks it with the Python of an image, that
has no packages of this project.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from devices.torch_npu_calls import ALL, ON_ALL, ON_FUSED, OperatorCall, calls_of, lacking

if TYPE_CHECKING:
    from devices.ascend_limits import AscendProduct

FILE = Path(__file__).with_name("torch_npu_releases.json")


@dataclass(frozen=True, slots=True)
class Release:
    """What a wheel says of the operators that are called here: the texts of their schemas.

    Compilers may leave no text of an operator of ATB; there the type of the function behind it is known.
    """

    schemas: Mapping[str, tuple[str, ...]]
    functions: Mapping[str, str]
    absent_names: tuple[str, ...] = ()  # names that its `torch_npu.npu` lacks

    def arguments_of(self, operator: str) -> Sequence[Collection[str]]:
        """Return the names of an operator's arguments, for each schema that the release has of it."""
        return [arguments_in(text) for text in self.schemas.get(operator, ())]

    def lacks(self, calls: Sequence[OperatorCall] = ALL) -> tuple[str, ...]:
        """Return what these calls find missing, in words."""
        absent = [f"torch_npu.npu.{name}" for name in self.absent_names]
        return (*absent, *lacking(calls, self.arguments_of))


@cache
def releases() -> Mapping[str, Release]:
    """Return every release of the table by its version, the oldest first."""
    table = json.loads(FILE.read_text(encoding="utf-8"))
    columns = {name: _column(table, name) for name in dict.fromkeys(table["releases"].values())}
    return {version: columns[column] for version, column in table["releases"].items()}


def completed(found: Mapping[str, Release]) -> dict[str, Release]:
    """Give operators without a text the schema of another release whose function has the same type."""
    texts = {
        (operator, kind): release.schemas[operator]
        for release in found.values()
        for operator, kind in release.functions.items()
        if operator in release.schemas
    }
    filled = {}
    for version, release in found.items():
        functions = release.functions.items()
        lent = {each: texts[each, kind] for each, kind in functions if (each, kind) in texts}
        filled[version] = replace(release, schemas={**lent, **release.schemas})
    return filled


@cache
def supported(product: AscendProduct) -> tuple[str, ...]:
    """Return the releases that have every call that this product needs, the oldest first."""
    return tuple(version for version, each in releases().items() if not each.lacks(calls_of(product)))


def public(version: str) -> str:
    """Return a version without what a build adds to it: 2.9.0.post1+git4c901a4 is 2.9.0.post1."""
    return version.partition("+")[0]


def arguments_in(schema: str) -> tuple[str, ...]:
    """Return the names of the arguments in a schema's text."""
    inside = schema[schema.index("(") + 1 : schema.rindex(" ->")].rstrip().removesuffix(")")
    parts, depth, part = [], 0, ""
    for letter in inside + ",":
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += letter
    return tuple(each.partition("=")[0].split()[-1] for each in parts if each not in ("", "*"))


def table_of(found: Mapping[str, Release]) -> dict[str, Any]:
    """Return the table of these releases, given from the oldest to the newest, as JSON has it."""
    columns: dict[str, Release] = {}
    absent: dict[str, list[str]] = {}
    of_release: dict[str, str] = {}
    for version, release in completed(found).items():
        like = next((name for name, each in columns.items() if each == release), version)
        columns.setdefault(like, release)
        of_release[version] = like
        if release.absent_names:
            absent[like] = list(release.absent_names)
    return {
        "releases": of_release,
        "schemas": _rows({name: each.schemas for name, each in columns.items()}),
        "functions": _rows(
            {name: {key: (kind,) for key, kind in each.functions.items()} for name, each in columns.items()}
        ),
        "absent_names": absent,
    }


def _rows(columns: Mapping[str, Mapping[str, tuple[str, ...]]]) -> dict[str, dict[str, str]]:
    """Return for each operator the columns, as one text, in which it has each of its schemas."""
    rows: dict[str, dict[str, str]] = {}
    for operator in sorted({each for column in columns.values() for each in column}):
        row: dict[str, list[str]] = {}
        for name, column in columns.items():
            for text in column.get(operator, ()):
                row.setdefault(text, []).append(name)
        rows[operator] = {text: " ".join(names) for text, names in row.items()}
    return rows


def _column(table: Mapping[str, Any], name: str) -> Release:
    found = {
        kind: {
            operator: texts
            for operator, row in table[kind].items()
            if (texts := tuple(text for text, names in row.items() if name in names.split()))
        }
        for kind in ("schemas", "functions")
    }
    functions = {operator: texts[0] for operator, texts in found["functions"].items()}
    return Release(found["schemas"], functions, tuple(table["absent_names"].get(name, ())))


def main(version: str) -> int:
    """Print what this release lacks on a 910B; returns 0 where it lacks nothing."""
    release = releases().get(public(version))
    lacks = ("it is in no table",) if release is None else release.lacks((*ON_ALL, *ON_FUSED))
    print("; ".join(lacks))
    return int(bool(lacks))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
