"""Functions and scripts stay short, and what is public says what it is."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

from tests.test_imports import MAY_IMPORT, ROOT, files, name, nodes, text

LONGEST_FUNCTION, LONGEST_SCRIPT = 60, 90
MOST_IGNORED = 16  # places that the type checker passes over
# What DESIGN rules out, and the files and folders that may say it: a page is a block only in parameters of
# operators
WORDS = {
    r"\bclass \w*(Manager|Helper)\b": (),
    r"\bblock_(table|size)s?\b|\bslot_mapping\b": (
        "npu",
        "cuda",
        "cuda_candidates.py",
        "event_messages.py",
        "dashboard_names.py",
        "foreign_keys.py",
        "torch_npu_calls.py",
    ),
}

ROOMS = files(*MAY_IMPORT)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def test_a_function_fits_on_a_screen() -> None:
    functions = [
        (f"{name(path)}:{each.lineno} {each.name}", (each.end_lineno or 0) - each.lineno + 1)
        for path in ROOMS
        for each in nodes(path)
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    assert not [each for each in functions if each[1] > LONGEST_FUNCTION]


def test_what_is_public_says_what_it_is() -> None:
    modules = [name(path) for path in ROOMS if parsed(path).body and not ast.get_docstring(parsed(path))]
    assert not modules
    said = {each.name for path in ROOMS for each in public(parsed(path)) if ast.get_docstring(each)}
    silent = [
        f"{name(path)}:{each.lineno} {each.name}"
        for path in ROOMS
        for each in public(parsed(path))
        if each.name not in said and not speaks_for_itself(each)  # an override need not repeat its base
    ]
    assert not silent


def test_one_word_has_one_meaning() -> None:
    found = [
        (name(path), match[0])
        for word, allowed in WORDS.items()
        for path in ROOMS
        if not {path.name, path.parent.name} & {*allowed} and not name(path).startswith("virtual_npu/")
        for match in re.finditer(word, text(path))
    ]
    assert not found


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for path in ROOMS:
        for each in parsed(path).body:
            if isinstance(each, ast.ClassDef) and each.name[0] != "_":
                places.setdefault(each.name, []).append(name(path))
    assert not {class_name: found for class_name, found in places.items() if len(found) > 1}


def test_a_script_is_thin() -> None:
    lines = {path: len(text(path).splitlines()) for path in files("scripts")}
    assert not {name(path): count for path, count in lines.items() if count > LONGEST_SCRIPT}


def test_scripts_are_well_formed() -> None:
    for path in [*ROOT.glob("scripts/*.sh"), ROOT / ".ci/run"]:
        subprocess.run(["bash", "-n", path], check=True)
    assert (ROOT / ".ci/run").stat().st_mode & 0o100


def test_what_a_checker_passes_over_is_counted_and_says_why() -> None:
    """The reason stands behind the mark, or in a comment on the line before; test modules have no types."""
    marked = re.compile(r"# (type: ignore\[[\w-]+\]|noqa: (?!E402)\w+)(.*)")
    found, silent = [], []
    for path in [*ROOMS, *files("tests")]:
        lines = text(path).splitlines()
        for number, (before, line) in enumerate(zip(["", *lines], lines), 1):
            if (match := marked.search(line)) is None or path == Path(__file__):
                continue
            if match[1].startswith("type"):
                found.append((name(path), number))
            if not match[2].strip(" -,#") and not before.strip().startswith("# "):
                silent.append((name(path), number))
    assert not silent
    assert len(found) <= MOST_IGNORED, found
    assert not [each for each in found if Path(each[0]).name.startswith(("test_", "conftest"))]


def test_a_test_says_itself_how_long_it_waits() -> None:
    """For as long as a busy machine takes: httpx gives up after 5 s where nothing is said."""
    verbs = {"Client", "AsyncClient", "get", "head", "options", "post", "request", "stream"}
    asks = re.compile(rf"\bhttpx\.(?:{'|'.join(verbs)})\(")
    silent = [
        f"{name(path)}:{each.lineno}"
        for path in files("tests")
        if asks.search(text(path))
        for each in nodes(path)
        if isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and ast.unparse(each.func.value) == "httpx"
        and each.func.attr in verbs
        and not {"timeout", "transport"} & {keyword.arg for keyword in each.keywords}  # or it asks in-process
    ]
    assert not silent


def test_a_test_file_imports_what_takes_a_second_only_where_it_is_used() -> None:
    """Every worker collects every file; tests/lazy.py imports the rest at first use."""
    slow = re.compile(
        r"^(?:import|from) (?:matplotlib|openai|peft|schemathesis|transformers)\b", re.MULTILINE
    )
    assert not [name(path) for path in files("tests") if slow.search(text(path))]


def public(node: ast.Module | ast.ClassDef) -> list[Definition]:
    """The public classes and functions of a module, and the methods of such classes."""
    found: list[Definition] = []
    for each in node.body:
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and each.name[0] != "_":
            found.append(each)
            found += public(each) if isinstance(each, ast.ClassDef) else []
    return found


def speaks_for_itself(node: Definition) -> bool:
    """A property by its name and type, `main` by its module, a stub by what it stands for."""
    decorators = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
    return node.name == "main" or bool(decorators & {"property", "overload", "override", "setter"})


def parsed(path: Path) -> ast.Module:
    module = nodes(path)[0]
    assert isinstance(module, ast.Module)
    return module
