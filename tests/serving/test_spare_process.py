"""Does a spare process give way while it imports, and no longer?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recipes.schema.recipe import ROOT
from serving.engine.spare_process import AUTOGROUP, LAST

TELL = """
import importlib, os, threading
from serving.engine import spare_process

def told(module):
    of_thread = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    group = spare_process.AUTOGROUP
    print(module, of_thread, group.read_text().split()[-1] if group.exists() else "-")

importlib.import_module = told
spare_process.import_gently("large")
told("after")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_it_gives_way_while_it_imports() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TELL],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        start_new_session=True,  # as the engine's: the niceness of a session is set
    )
    before, during, after = done.stdout.splitlines()
    has_group = AUTOGROUP.exists()
    assert before == f"numpy 0 {0 if has_group else '-'}"
    assert during == f"large {LAST} {LAST if has_group else '-'}"
    assert after == f"after 0 {0 if has_group else '-'}"


def test_it_goes_on_as_the_module_it_is_told(tmp_path: Path) -> None:
    brief = (
        "from serving.engine import spare_process; spare_process.LARGE = 'json'; import sys;"
        " spare_process.main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", brief, str(tmp_path / "done"), "serving.engine.main", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        start_new_session=True,
    )
    assert done.stdout.startswith("usage: python -m serving.engine.main")
    assert not done.stderr
    assert (tmp_path / "done").exists()
