"""The bounds that docs/security.md states are those of the program, and each has a test."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from recipes.schema.server_section import ServerSection
from tests.each_of import each_of
from tests.test_imports import ROOT

UNITS = {"MiB": 1, "bytes": 1, "s": 1, "characters": 1, "": 1}


def rows() -> list[list[str]]:
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    section = page.partition("## Bounds\n")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


SET = [row for row in rows() if row[2]]


def set_by(name: str) -> float:
    """What a key of the recipe is by default, or a constant is."""
    room, _, constant = name.rpartition(".")
    return getattr(ServerSection() if room == "server" else importlib.import_module(room), constant)


@each_of("said, name", [(row[1], row[2].strip("`")) for row in SET])
def test_a_bound_is_that_of_the_program(said: str, name: str) -> None:
    number, _, unit = said.partition(" ")
    assert unit in UNITS
    assert float(number) == set_by(name)


def test_no_key_or_constant_that_bounds_the_server_is_left_out() -> None:
    named = {row[2].strip("`") for row in SET}
    keys = {f"server.{name}" for name in ServerSection.__slots__ if name.startswith("max_")}
    constants = {
        f"serving.api.{room}.{name}"
        for room in ("protocol", "access", "streamed")
        for name in vars(importlib.import_module(f"serving.api.{room}"))
        if re.match(r"MOST_|WHOLE_|PATIENCE_|SLOWEST_", name)
    }
    assert keys | constants <= named


def test_each_place_that_believes_another_names_its_tests() -> None:
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    section = page.partition("## Who believes whom\n")[2].partition("\n##")[0]
    table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    assert len(table) > 20
    for place, who, *_, tests in table:
        named = re.findall(r"`([\w/.]*test_\w+\.py)`", tests)
        assert named or "believed" in who, place
        for path in named:
            assert (Path(__file__).parent / path).is_file(), path


@each_of("row", rows())
def test_each_bound_has_a_test(row: list[str]) -> None:
    for path, name in re.findall(r"`([\w/.]*test_\w+\.py)::(test_\w+)`", row[4]):
        assert f"def {name}(" in (Path(__file__).parent / path).read_text(encoding="utf-8"), (path, name)
    assert row[4] or row[0].startswith("and for each"), "nothing measures it"
