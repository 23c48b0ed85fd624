"""Every seeded fault finds its place and changes the code there, and a test kills it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.mutation.__main__ import FAULTS, GROUPS, HOST_TESTS, TESTS_OF, main
from tests.mutation.fault import KINDS, Fault, TextFault, read

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


def test_every_fault_finds_its_place_and_changes_the_code_there() -> None:
    text_of = cache(lambda file: (ROOT / file).read_text(encoding="utf-8"))
    problems = []
    for name, fault in FAULTS.items():
        try:
            changed = fault.applied_to(text_of(fault.file))
            if fault.file.endswith(".py"):
                compile(changed, fault.file, "exec")  # its warnings are errors here
        except (ValueError, SyntaxError) as error:
            problems.append(f"{name}: {error}")
        if shapes(fault.old) == shapes(fault.new):
            problems.append(f"{name}: it changes nothing")
    assert not problems, "\n".join(problems)


def shapes(code: str) -> list[object]:
    """What the code is in Python, and its words where it is another language."""
    found = [nodes and [ast.dump(each) for each in nodes] for nodes in (read(code, kind) for kind in KINDS)]
    return found if any(found) else code.split()


def test_faults_have_names_of_their_own_and_tests_that_exist() -> None:
    assert len(FAULTS) == sum(map(len, GROUPS)) >= 30
    assert all((ROOT / path).is_file() for path in sum(TESTS_OF.values(), HOST_TESTS))


@pytest.mark.parametrize(
    ("place", "old", "new", "before", "after"),
    [
        pytest.param("take", "count>len( pages )", "count", "count > len(pages)", "(count)", id="expression"),
        pytest.param("take", "4", "2", "count=4", "count=(2)", id="default"),
        pytest.param("Pool.free", "property", "cached", "@property", "@(cached)", id="decorator"),
        pytest.param("Pool", "size: int = 8", "size: int = 9", "= 8", "= 9", id="constant of a class"),
        pytest.param("take", "eps=1e-6", "", '"née", eps=1e-6', '"née", ', id="keyword argument"),
        pytest.param("take", "eps=1e-6", "eps=0, n=1", "eps=1e-6", "eps=0, n=1", id="keyword arguments"),
        pytest.param("take", '"first": pages[0]', "", '"first": pages[0], ', " ", id="item"),
        pytest.param("take", 'f"{pages}"', '""', 'f"{pages}"', '("")', id="f-string"),
        pytest.param("take", 'wait("née", eps=1e-6)', "", 'wait("née", eps=1e-6)', "pass", id="whole body"),
        pytest.param("take", "return pages[:count]", "", "return pages[:count]", "", id="one statement"),
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
    changed = Fault(f"pool.py::{place}", old, new, "").applied_to(SOURCE)
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
        Fault(f"pool.py::{place}", old, "x", "").applied_to(SOURCE)


def test_a_fault_in_another_language_quotes_text() -> None:
    fault = TextFault("capture.c", "count += 1;", "", "")
    assert fault.applied_to("if (a) count += 1;\n") == "if (a) \n"
    with pytest.raises(ValueError, match=r"capture\.c has 'count \+= 1;' 2 times, not once"):
        fault.applied_to("count += 1; count += 1;")


def test_an_unknown_fault_is_named() -> None:
    with pytest.raises(ValueError, match="there is no fault called nothing; --list names them"):
        main(["--only", "nothing"])


@pytest.mark.slow
def test_a_fault_is_killed_and_the_test_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "ngram_finds_itself", "--timeout-s", "900"]) == 0
    assert "killed by continuous_batching/test_ngram.py::" in capsys.readouterr().out
