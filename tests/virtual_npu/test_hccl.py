"""Collectives of several virtual NPUs through torch_npu's own process group: right, or refused with names."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from recipes.schema.recipe import ROOT
from tests.patience import PATIENCE_S
from tests.serving.warm import start_session
from tests.thorough import cases
from tests.virtual_npu.compiled import compiled

pytestmark = pytest.mark.npu
SHARED = Path("/dev/shm")
SAID = "rank: "  # begins each line that a rank says of itself


def left_behind() -> set[str]:
    """Shared memory whose maker has ended; other tests may run ranks at the same time."""
    return {each.name for each in SHARED.glob("virtual-hccl-*") if not runs(int(each.name.split("-")[2]))}


def runs(process: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def ranks(folder: Path, size: int, mode: str, **environment: str) -> list[tuple[str, int]]:
    """What each rank printed, and its status."""
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(tempfile.TemporaryFile()) for _ in range(size)]
        processes = [
            start_session(
                "tests.virtual_npu.hccl_rank",
                [str(rank), str(size), str(folder), mode],
                os.environ | environment,
                file,
            )
            for rank, file in enumerate(files)
        ]
        told = []
        for rank, (process, file) in enumerate(zip(processes, files, strict=True)):
            if mode == "stopped" and rank == size - 1:
                process.send_signal(signal.SIGKILL)
            status = process.wait(PATIENCE_S)
            file.seek(0)
            told.append((said_by(file.read().decode()), status))
    return told


def said_by(printed: str) -> str:
    """What a rank has said of itself, or else the end of its log."""
    lines = [each.removeprefix(SAID) for each in printed.splitlines() if each.startswith(SAID)]
    return "\n".join(lines) or printed[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("size", cases([3], [2, 3]))
def test_every_collective_does_what_torch_says(tmp_path: Path, size: int) -> None:
    before = left_behind()
    assert ranks(tmp_path, size, "right") == [("all right", 0)] * size
    assert left_behind() <= before


def test_ranks_that_disagree_or_are_killed_are_named_at_once(tmp_path: Path) -> None:
    before = left_behind()
    (one, _), (other, status) = ranks(tmp_path, 2, "wrong")
    of_one, of_other = one.splitlines(), other.splitlines()
    assert (len(of_one), len(of_other), status) == (4, 3, -signal.SIGKILL), (one, other)
    assert (
        "rank 0 calls all_reduce of 4 x float32 by sum, and rank 1 calls all_reduce of 5 x float32"
        in of_one[0]
    )
    assert (
        "rank 1 calls all_reduce of 5 x float32 by sum, and rank 0 calls all_reduce of 4 x float32"
        in of_other[0]
    )
    assert "rank 0 calls mm_all_reduce of 16 x bfloat16 by sum, and rank 1 calls all_reduce" in of_one[1]
    assert "rank 1 calls all_reduce of 16 x bfloat16 by sum, and rank 0 calls mm_all_reduce" in of_other[1]
    assert "carries tokens to experts and another collective" in of_one[2]
    assert "make a group for each" in of_other[2]
    assert re.search(
        r"rank 0 waits in all_reduce of 4 x float32 by sum for rank 1, whose process \d+ has ended", of_one[3]
    )
    assert left_behind() <= before


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_what_it_did_last(tmp_path: Path) -> None:
    (one, _), _ = ranks(tmp_path, 2, "stopped", HCCL_EXEC_TIMEOUT="5")
    assert re.search(
        r"rank 0 waits in all_reduce .* for rank 1 \(process \d+\), which did not come within 5 s", one
    )
    assert re.search(r"it ended broadcast of 3 x float32 with root 0 \d+\.\d s ago", one)


def test_a_rank_that_leaves_after_its_part_is_not_missed(tmp_path: Path) -> None:
    program = compiled("leaving", tmp_path, "-Wl,--wrap=fcntl")
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_values_are_those_of_the_wheel() -> None:
    """Its own header is C++, so they are written down again."""
    from virtual_npu import libraries

    theirs = (libraries.wheel() / "torch_npu/include/third_party/hccl/inc/hccl/hccl_types.h").read_text()
    ours = (ROOT / "virtual_npu/cann/communicator.h").read_text()
    pairs = re.findall(r"\b(HCCL_(?:E|REDUCE|DATA_TYPE)_\w+|HCCL_SUCCESS) = (\d+)", ours)
    assert len(pairs) == 8 + 4 + 12
    for name, value in pairs:
        assert re.search(rf"\b{name} = {value}\b", theirs), name
