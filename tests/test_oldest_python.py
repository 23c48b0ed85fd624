"""Everything works in the oldest Python that setup.sh takes, 3.10.

There a stream failed as a whole at `asyncio.timeout`, and an engine that did not end by itself took the
server with it: what asyncio raises after a time was no TimeoutError yet. Newer syntax and built-in names are
refused by ruff.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, metadata

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.test_imports import MAY_IMPORT, ROOT, files, name, nodes, text

OLDEST = (3, 10)
ALL = files(*MAY_IMPORT, "tests")
# What newer versions have brought to modules, and "" for modules that they brought
NEWER = {
    "asyncio": {"Barrier", "Runner", "TaskGroup", "eager_task_factory", "timeout", "timeout_at"},
    "contextlib": {"chdir"},
    "datetime": {"UTC"},
    "enum": {"EnumCheck", "ReprEnum", "StrEnum", "member", "nonmember", "property", "verify"},
    "hashlib": {"file_digest"},
    "inspect": {"getasyncgenstate", "getmembers_static", "markcoroutinefunction"},
    "itertools": {"batched"},
    "logging": {"getHandlerByName", "getHandlerNames", "getLevelNamesMapping"},
    "math": {"cbrt", "exp2", "sumprod"},
    "operator": {"call"},
    "re": {"NOFLAG"},
    "sys": {"activate_stack_trampoline", "exception", "monitoring"},
    "threading": {"setprofile_all_threads", "settrace_all_threads"},
    "tomllib": {""},
    "typing": {
        *("LiteralString", "Never", "NotRequired", "Required", "Self", "TypeAliasType", "TypeVarTuple"),
        *("Unpack", "assert_never", "assert_type", "dataclass_transform", "override", "reveal_type"),
    },
}
# What a file has in it that may use one of them
MODULES, NAMES = "|".join(NEWER), "|".join({each for names in NEWER.values() for each in names if each})
MAYBE = re.compile(
    rf"\b(?:{MODULES})\.(?:{NAMES})\b|^ *from (?:{MODULES}) import (?:\([^)]*|.*)\b(?:{NAMES})\b"
    r"|\btomllib\b|\bTimeoutError\b",
    re.MULTILINE,
)


def newer(module: Iterable[ast.AST]) -> list[str]:
    """What of a module only newer Pythons have."""
    found, imported = [], set()
    for node in module:
        if isinstance(node, ast.Import):
            imported |= {each.name for each in node.names}
            found += [each.name for each in node.names if "" in NEWER.get(each.name, ())]
        elif isinstance(node, ast.ImportFrom):
            known = NEWER.get(node.module or "", set())
            found += [f"{node.module}.{each.name}" for each in node.names if known & {"", each.name}]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [ast.unparse(node)] if node.attr in NEWER.get(node.value.id, ()) else []
        elif isinstance(node, ast.Name) and node.id == "TimeoutError":
            found.append(node.id)
    return [each for each in found if each != "TimeoutError" or "asyncio" in imported]


def test_nothing_is_newer_than_the_oldest_python() -> None:
    found = {name(path): newer(nodes(path)) for path in ALL if MAYBE.search(text(path))}
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio\nasync def f():\n    async with asyncio.timeout(1): pass",
        "import asyncio\ntry: f()\nexcept TimeoutError: pass",
        "from typing import Self",
        "import tomllib",
        "from tomllib import load",
    ],
)
def test_what_is_newer_is_found(source: str) -> None:
    assert MAYBE.search(source)
    assert newer(ast.walk(ast.parse(source)))


def refuses_oldest(pin: Requirement) -> bool:
    """Whether this version, as far as it is installed here, cannot be installed there."""
    try:
        said = metadata(pin.name)
    except PackageNotFoundError:
        return False
    oldest = "{}.{}".format(*OLDEST)
    is_one_version = str(pin.specifier).startswith("==")
    is_for_oldest = pin.marker is None or pin.marker.evaluate({"python_version": oldest})
    is_here = pin.specifier.contains(said["Version"])
    return (
        is_one_version
        and is_for_oldest
        and is_here
        and not SpecifierSet(said["Requires-Python"] or "").contains(oldest)
    )


def test_every_pin_can_be_installed_there() -> None:
    pins = [
        Requirement(line)
        for path in ROOT.glob("requirements*.txt")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert not [str(pin) for pin in pins if refuses_oldest(pin)]


def test_setup_takes_the_same_one() -> None:
    setup = (ROOT / "scripts/setup.sh").read_text(encoding="utf-8")
    assert f"{OLDEST[0]}.{OLDEST[1]} | " in setup
    assert f"{OLDEST[0]}.{OLDEST[1] - 1}" not in setup
