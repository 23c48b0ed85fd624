"""What the README says is so: its commands run and print what it shows, its tables are those of the code.

Each `bash` block runs as it stands in a copy of the tree; `bash slow` takes a minute, and `bash figures`,
which compile, many: these run with THOROUGH=1. A `text` block after it shows lines that it prints, whatever
the numbers, with `...` for what is left out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from recipes.schema.keys import table
from recipes.schema.recipe import ROOT, Recipe
from serving.text.request_fields import parse_request
from tests.thorough import THOROUGH

README, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "out")
Tables = list[list[list[str]]]

MARKS = {
    "bash": [],
    "bash slow": [pytest.mark.slow],
    "bash figures": [
        pytest.mark.slow,
        pytest.mark.timeout(3600),
        pytest.mark.skipif(not THOROUGH, reason="many minutes: THOROUGH=1 asks for them"),
        pytest.mark.skipif(shutil.which("g++") is None, reason="the recipes of the figures compile"),
    ],
}


@cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path) -> list[tuple[str, str]]:
    """Kind and content of each block that has a kind."""
    return re.findall(r"^```(\w[\w ]*)\n(.*?)^```$", read(path), re.MULTILINE | re.DOTALL)


def tables(path: Path) -> Tables:
    """The cells of each table, its head among them."""
    found = re.findall(r"(?:^\|.*\|\n)+", read(path), re.MULTILINE)
    return [[re.split(r" *\| *", line)[1:-1] for line in each.splitlines()] for each in found]


def named(path: Path) -> list[list[str]]:
    """What the first column of each table names, as code."""
    return [[name for row in each for name in re.findall(r"`([\w.]+)`", row[0])] for each in tables(path)]


def commands() -> list[object]:
    """Each block of commands, with what it is said to print."""
    found = blocks(README)
    after = [content if kind == "text" else "" for kind, content in found[1:]] + [""]
    return [
        pytest.param(content, shown, id=title(content), marks=MARKS[kind])
        for (kind, content), shown in zip(found, after)
        if kind.startswith("bash")
    ]


def numbers(path: Path) -> list[list[list[list[str]]]]:
    """The numbers in each cell of each table."""
    return [[[re.findall(r"\d+(?:[.,]\d+)*", cell) for cell in row] for row in each] for each in tables(path)]


def title(block: str) -> str:
    """A block's first command, in short."""
    command = re.search(r"(?:bash|python(?: -m)?) \S+(?: [a-z]\S+)?", block)
    assert command, block
    return command[0]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree that has the environment of this Python."""
    copy = tmp_path_factory.mktemp("readme") / "tree"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    (copy / ".venv").symlink_to(sys.prefix)
    return copy


def printed(block: str, tree: Path) -> list[str]:
    """The lines that a block prints; each of its commands must succeed."""
    environment = os.environ | {
        "PATH": f"{tree}/.venv/bin{os.pathsep}{os.environ['PATH']}",
        "PYTEST_ADDOPTS": "--collect-only -q",  # for the test command: the tests are running already
        "MYPY_CACHE_DIR": str(ROOT / ".mypy_cache"),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def pattern(line: str) -> str:
    """Fits a shown line, with any number in place of a number."""
    escaped = re.escape(" ".join(line.split()))
    any_number = re.sub(r"\d[\d,]*(\\\.\d+)?", lambda _: r"\d[\d.,]*", escaped)
    return any_number.replace(r"\.\.\.", ".*")


@pytest.mark.parametrize(("block", "shown"), commands())
def test_a_command_prints_what_is_shown(block: str, shown: str, tree: Path) -> None:
    output = "\n".join(" ".join(line.split()) for line in printed(block, tree))
    lines = [line for line in shown.splitlines() if line]
    absent = [line for line in lines if not re.search(f"^{pattern(line)}$", output, re.MULTILINE)]
    assert not absent, output


def test_the_keys_are_those_of_a_recipe() -> None:
    assert table(Recipe) in read(README)


def test_the_fields_of_a_request_are_those_that_are_read() -> None:
    with pytest.raises(ValueError, match="the fields are ") as caught:
        parse_request({"": 0}, None)
    fields = str(caught.value).partition("the fields are ")[2].split(", ")
    assert sorted(fields) in [sorted(names) for names in named(README)]


def test_the_fields_of_an_answer_are_those_that_are_written(tree: Path) -> None:
    block = next(content for kind, content in blocks(README) if kind == "bash" and "--input" in content)
    answers = [json.loads(line) for line in printed(block, tree)]
    fields = {name for answer in answers for name in answer}
    assert sorted(fields) in [sorted(names) for names in named(README)]


def test_code_is_quoted_as_it_is() -> None:
    sources = [path.read_text(encoding="utf-8") for path in ROOT.glob("recipes/*/model.py")]
    quoted = [content for kind, content in blocks(README) if kind == "python"]
    assert quoted
    assert all(any(content in source for source in sources) for content in quoted)


@pytest.mark.parametrize("path", [README, CHINESE], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", read(path)) if "://" not in link]
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_chinese_readme_says_the_same() -> None:
    assert blocks(CHINESE) == blocks(README)
    assert named(CHINESE) == named(README)
    assert numbers(CHINESE) == numbers(README)
    levels = [re.findall("^(#+) ", read(path), re.MULTILINE) for path in (CHINESE, README)]
    assert levels[0] == levels[1]
