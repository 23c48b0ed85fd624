"""Is every seeded fault still a fault, and does a test kill it?"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutation.__main__ import FAULTS, HOST_TESTS, TESTS_OF, main
from tests.mutation.fault import Fault

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_stands_once_in_its_file_and_parses(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    changed = fault.applied_to(text)
    if fault.file.endswith(".py"):
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    else:  # C, which the test of the fault compiles
        assert changed.split() != text.split()


def test_faults_have_names_of_their_own_and_tests_that_exist() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30
    assert all((ROOT / path).is_file() for path in sum(TESTS_OF.values(), HOST_TESTS))


def test_a_fault_whose_place_is_gone_says_so() -> None:
    fault = Fault("gone", "kv_cache/pages.py", "no such text", "", "")
    with pytest.raises(ValueError, match=r"fault gone: its old text stands 0 times in kv_cache/pages\.py"):
        fault.applied_to("")


def test_an_unknown_fault_is_named() -> None:
    with pytest.raises(ValueError, match="there is no fault called nothing; --list names them"):
        main(["--only", "nothing"])


@pytest.mark.slow
def test_a_fault_is_killed_and_the_test_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "ngram_finds_itself", "--timeout-s", "900"]) == 0
    assert "killed by continuous_batching/test_ngram.py::" in capsys.readouterr().out
