"""Do the kernels compile for the GPUs that they are meant for, within their registers and shared memory?

Triton compiles without a GPU, but not where it interprets: so in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED_BYTES = {
    80: 163 * 1024,
    90: 227 * 1024,
}  # of a program, by compute capability (CUDA C++ Programming Guide, Compute Capabilities)

CASES = [
    (capability, dtype, head_dim, few, batch_invariant)
    for capability in (80, 90)
    for dtype in ("bfloat16", "float32")
    for head_dim in (64, 80, 128, 256)
    for few in (False, True)
    for batch_invariant in (False, True)
    if not (few and batch_invariant)  # batch-invariant tiles have one size
]


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """What the compiler says of each case, by its words."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.attention.compile_kernels"],
        input=json.dumps(CASES),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_attention_kernel_compiles_and_spills_next_to_nothing(
    case: tuple[Any, ...], compiled: dict[str, Any]
) -> None:
    capability, dtype, *_ = case
    found = compiled[json.dumps(case)]
    assert found["shared"] <= SHARED_BYTES[capability]
    assert found["stack"] <= 256, "registers are spilled to memory"
    assert found["uses_matrix_unit"] == (dtype != "float32")
