"""No race of threads in the virtual device: no data race, no endless wait, nothing done out of order."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.thorough import THOROUGH
from tests.virtual_npu.compiled import compiled, compiler

STEPS = 4000 if THOROUGH else 200
SANITIZERS = {
    "threads": ["-fsanitize=thread"],
    "memory": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
EMPTY = "int main(void) { return 0; }\n"


@pytest.mark.slow
@pytest.mark.npu
@pytest.mark.parametrize("kind", SANITIZERS)
def test_threads_that_hammer_the_device_find_no_race(kind: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty.c"
    empty.write_text(EMPTY)
    probe = [*compiler(), *SANITIZERS[kind], str(empty), "-o", str(tmp_path / "empty")]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip(f"{probe[0]} has no {' '.join(SANITIZERS[kind])}")
    if subprocess.run([tmp_path / "empty"], capture_output=True, check=False).returncode:
        pytest.skip(f"no program with {' '.join(SANITIZERS[kind])} starts on this machine")
    program = compiled("hammer", tmp_path, *SANITIZERS[kind])
    done = subprocess.run(
        [program, str(STEPS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=os.environ | {"ASAN_OPTIONS": "detect_leaks=0"},  # what torch_npu never destroys
    )
    if "ThreadSanitizer: unexpected memory mapping" in done.stderr:  # a chance that so much memory brings
        pytest.skip("this kernel places memory at random where no race can be looked for (vm.mmap_rnd_bits)")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
