"""Every seeded fault finds its place, changes the code there, and names a test that is there to kill it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.mutation.__main__ import main
from tests.mutation.every import FAULTS
from tests.mutation.fault import KINDS, Fault, TextFault, read
from tests.mutation.warm import read_until

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''\
def take(pages, count=4):  # of the pool
    """Take pages."""
    if count:
        held = f"{pages}"  # a comment

        while (
            count > len(pages)
        ):
            wait("née", eps=1e-6)
    elif pages:
        note({"first": pages[0], "last": pages[-1]})
    return pages[:count]


class Pool:
    size: int = 8

    @property
    def free(self):
        return len(self.pages) - self.held

    @free.setter
    def free(self, pages):
        self.pages = pages
        self.held = 0
'''


def test_every_fault_finds_its_place_and_changes_the_code_there(tmp_path: Path) -> None:
    """Any test would kill one that is no Python, or uses an unknown name, which proves nothing."""
    text_of = cache(lambda file: (ROOT / file).read_text(encoding="utf-8"))
    problems = []
    for name, fault in FAULTS.items():
        try:
            changed = fault.applied_to(text_of(fault.file))
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        if fault.file.endswith(".py"):
            (tmp_path / f"{name}.py").write_text(changed, encoding="utf-8")
        if shapes(fault.old) == shapes(fault.new):
            problems.append(f"{name}: it changes nothing")
    assert not problems, "\n".join(problems)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821,F822,F823"]
    done = subprocess.run(
        [*ruff, "--output-format", "concise", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout.replace(f"{tmp_path}/", "") + done.stderr


def shapes(code: str) -> list[object]:
    """What the code is in Python, and its words where it is another language."""
    found = [nodes and [ast.dump(each) for each in nodes] for nodes in (read(code, kind) for kind in KINDS)]
    return found if any(found) else code.split()


def test_every_fault_names_a_test_that_exists() -> None:
    """Where a test was renamed or deleted, the fault needs its new name or another that fails."""
    gone = {name: fault.killed_by for name, fault in FAULTS.items() if not exists(fault.killed_by)}
    assert not gone
    assert not exists("tests/mutation/test_mutation.py::test_that_is_not_there")


def exists(test: str) -> bool:
    file, _, name = test.partition("::")
    return name in defined_in(ROOT / file) or (not name and bool(defined_in(ROOT / file)))


@cache
def defined_in(path: Path) -> set[str]:
    """What the file defines as tests, and the names that it gives to state machines."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return set(re.findall(r"^(?:(?:async )?def )?([Tt]est\w+)(?:\(| = )", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("place", "old", "new", "before", "after"),
    [
        pytest.param("take", "count>len( pages )", "count", "count > len(pages)", "(count)", id="expression"),
        pytest.param("Pool.free", "property", "cached", "@property", "@(cached)", id="decorator"),
        pytest.param("take", "eps=1e-6", "eps=0, n=1", "eps=1e-6", "eps=0, n=1", id="keyword arguments"),
        pytest.param("take", '"first": pages[0]', "", '"first": pages[0], ', " ", id="item"),
        pytest.param("take", 'wait("née", eps=1e-6)', "", 'wait("née", eps=1e-6)', "pass", id="whole body"),
        pytest.param(
            "Pool.free",
            "self.pages = pages\nself.held = 0",
            "if pages:\n    self.held = 0\nself.pages = pages",
            "self.pages = pages\n        self.held = 0",
            "if pages:\n            self.held = 0\n        self.pages = pages",
            id="several statements",
        ),
        pytest.param(
            "take",
            "while count > len(pages): ...",
            "if count:\n    if pages: ...",
            'while (\n            count > len(pages)\n        ):\n            wait("née", eps=1e-6)',
            'if count:\n            if pages:\n                wait("née", eps=1e-6)',
            id="any body",
        ),
        pytest.param(
            "take",
            "if pages: ...",
            "if not pages: ...",
            "elif pages:\n        note(",
            "else:\n        if not pages:\n            note(",
            id="elif",
        ),
        pytest.param(
            "",
            "def take(pages, count=4): ...",
            "def take(pages): ...",
            ", count=4):  # of the pool",
            "):",
            id="header",
        ),
    ],
)
def test_a_fault_changes_its_code_and_no_other(
    place: str, old: str, new: str, before: str, after: str
) -> None:
    changed = Fault(f"pool.py::{place}", old, new, "", "").applied_to(SOURCE)
    assert SOURCE.count(before) == 1
    assert changed == SOURCE.replace(before, after)


@pytest.mark.parametrize(
    ("place", "old", "problem"),
    [
        ("tke", "count", "pool.py has no tke; the nearest are take"),
        ("", "pages[:count]", "has 'pages[:count]' 0 times, not once"),  # `take` is a place of its own
        ("Pool.free", "self.held = 1", "'self.held = 1' 0 times, not once; nearest to it is 'self.held = 0'"),
        ("take", "count", "has 'count' 3 times, not once: in lines 3, 7, 12"),
        ("take", "count >", "'count >' and 'x' are not both code of one kind: expression, statements"),
    ],
)
def test_a_fault_whose_code_is_gone_says_what_stands_there(place: str, old: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        Fault(f"pool.py::{place}", old, "x", "", "").applied_to(SOURCE)


def test_a_fault_in_another_language_quotes_text() -> None:
    fault = TextFault("capture.c", "count += 1;", "", "", "")
    assert fault.applied_to("if (a) count += 1;\n") == "if (a) \n"
    with pytest.raises(ValueError, match=r"capture\.c has 'count \+= 1;' 2 times, not once"):
        fault.applied_to("count += 1; count += 1;")


def test_several_faults_may_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third, *_ = FAULTS
    assert main(["--list", "--only", third, first, "--only", second]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [first, second, third]


def test_unknown_faults_are_named() -> None:
    with pytest.raises(ValueError, match="there is no fault called neither, nothing; --list names them"):
        main(["--only", next(iter(FAULTS)), "nothing", "--only", "neither"])


def test_a_report_is_waited_for_until_its_line_its_end_or_its_time() -> None:
    reader, writer = os.pipe()
    assert read_until(reader, time.monotonic()) is None
    os.write(writer, b"{}\n")
    assert read_until(reader, time.monotonic() + 600) == b"{}\n"
    os.write(writer, b"{")
    os.close(writer)
    assert read_until(reader, time.monotonic() + 600) == b"{"
    os.close(reader)


@pytest.mark.slow
def test_a_fault_is_killed_or_not_by_the_test_that_it_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of the tests has the first, one that a test starts the second, and none sees the third."""
    here, elsewhere, unseen = "freed_while_shared", "ended_in_a_process", "salt_dropped"
    follower = "tests/continuous_batching/test_follower.py::"
    follows = "Follower(Beats(connection), made, runner, FACTS, apply=runner.make).follow()"
    in_order = follower + "test_a_rank_in_order_ends_in_order"
    ended = Fault(follower + "follow_in_process", follows, "raise SystemExit(3)", "", in_order)
    monkeypatch.setitem(FAULTS, elsewhere, ended)
    monkeypatch.setitem(FAULTS, unseen, replace(FAULTS[unseen], killed_by=FAULTS[here].killed_by))
    assert main(["--only", here, elsewhere, unseen, "--jobs", "1", "--timeout-s", "900"]) == 1
    said = capsys.readouterr().out
    for verdict in (
        r"  \(no fault\) .* s  passes",
        rf"  {here} .* s  killed by {FAULTS[here].killed_by}",
        rf"  {elsewhere} .* s  killed by {in_order}",
        rf"! {unseen} .* s  NOT KILLED by {FAULTS[here].killed_by}",
        rf"2 of 3 faults killed\n! {unseen}",
    ):
        assert re.search(f"^{verdict}$", said, re.MULTILINE), said
