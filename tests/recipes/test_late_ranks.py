"""An engine over ranks starts though one of them loads or compiles far longer than the others."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from models.parallel.group import Group
from recipes.cluster.in_ranks import in_ranks
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT, Recipe
from tests.device_kinds import stand_in_alone
from tests.patience import PATIENCE_S
from tests.thorough import THOROUGH, cases

LATE_S = cases(8, 60)  # more than a step may take, which is 5 s on a CPU
# Python reads it when it starts. A rank imports its attention after it has joined the others.
LATE = f"""
import importlib.abc, sys, time

class Late(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        is_of_a_rank = "follower_process" in sys.argv[0]
        if name in ("attention.cpu.attention", "attention.npu.fused_attention") and is_of_a_rank:
            sys.meta_path.remove(self)
            time.sleep({LATE_S})

sys.meta_path.insert(0, Late())
"""


def generated(*options: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.generate", *options, "--prompt", "12+7=", "--max-tokens", "3"]
    return subprocess.run(
        [*command, "parallel.tensor=2"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


CPU = pytest.param(["recipes/tiny/cpu.yaml"], id="cpu")
NPU = pytest.param(
    ["recipes/tiny/npu.yaml", "device.virtual=true"],
    id="virtual_npu",
    marks=[pytest.mark.npu, stand_in_alone],
)


@pytest.mark.slow
@pytest.mark.parametrize("options", cases([CPU], [CPU, NPU]))
def test_a_rank_that_loads_far_longer_than_the_others_is_waited_for(
    options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LATE)
    done = generated(*options, environment={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout.strip()) == (0, "19"), done.stderr


@pytest.mark.slow
def test_a_start_that_takes_too_long_names_the_rank_and_the_key(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LATE.replace(f"sleep({LATE_S})", "sleep(600)"))
    limit = "parallel.start_timeout_s=2"
    done = generated("recipes/tiny/cpu.yaml", limit, environment={"PYTHONPATH": str(tmp_path)})
    assert done.returncode != 0
    assert re.search(
        r"the start of the engine has not progressed for 2 s"
        r" \(rank 0[:,] .*rank 1 \(process \d+ on .*\): .*\)"
        r"; raise parallel\.start_timeout_s if these ranks need longer",
        done.stderr,
    ), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not THOROUGH, reason="THOROUGH=1 asks for it")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_ranks_that_find_nothing_compiled_start(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    done = generated("recipes/tiny/cpu.yaml", "device.compile=auto", environment=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "19"), done.stderr
    assert list(tmp_path.glob("*/*/*.so")), "nothing was compiled"


def waits_or_dies(recipe: Recipe, group: Group) -> None:
    """What each rank of the next test does."""
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.meet("a meeting that one does not reach")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_ends_is_told_though_the_first_waits_for_it() -> None:
    recipe = load("recipes/tiny/cpu.yaml", ["parallel.tensor=2"])
    with pytest.raises(OSError, match=r"a rank has ended: rank 1 \(-9\)"):
        in_ranks(recipe, waits_or_dies)


def never_ends(recipe: Recipe, group: Group) -> None:
    """What each rank of the next test does."""
    time.sleep(10 * PATIENCE_S)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_ranks_that_have_no_result_in_time_are_ended() -> None:
    recipe = load("recipes/tiny/cpu.yaml", ["parallel.tensor=2"])
    with pytest.raises(OSError, match=r"ranks have no result after 1 s: 0, 1"):
        in_ranks(recipe, never_ends, within_s=1)
    for each in multiprocessing.active_children():
        each.join(PATIENCE_S)
        assert each.exitcode == -signal.SIGKILL
