"""No race of threads in the virtual device: no data race, no endless wait, nothing done out of order."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.thorough import THOROUGH
from virtual_npu import libraries

HERE = Path(__file__).resolve().parent
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
    compiler = os.environ.get("CC", "cc")
    try:
        include = libraries.wheel() / "torch_npu" / "include"
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no compiler '{compiler}'")
    empty, program = tmp_path / "empty.c", tmp_path / "hammer"
    empty.write_text(EMPTY)
    options = [compiler, "-std=gnu11", "-O1", "-g", *SANITIZERS[kind]]
    probe = [*options, str(empty), "-o", str(tmp_path / "empty")]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip(f"{compiler} has no {' '.join(SANITIZERS[kind])}")
    if subprocess.run([tmp_path / "empty"], capture_output=True, check=False).returncode:
        pytest.skip(f"no program with {' '.join(SANITIZERS[kind])} starts on this machine")
    sources = [str(path) for path in [*libraries.SOURCES, HERE / "hammer.c"] if path.suffix == ".c"]
    # -rdynamic: the device looks up PyGILState_Check, which the program has instead of Python
    command = [
        *options,
        f"-I{include}",
        "-rdynamic",
        *sources,
        "-o",
        str(program),
        "-lpthread",
        "-ldl",
        "-lrt",
        "-lm",
    ]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
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
