"""The Triton kernels compile for their target GPUs within registers and shared memory.

That needs no GPU, and does not show that they are right there, or fast.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.pairs import pairs
from tests.test_imports import ROOT

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # a program's, by compute capability (CUDA's guide)
KINDS = ((True, False), (False, False), (False, True))  # few tokens, and the same bits in any batch
CASES: list[tuple[Any, ...]] = [
    (capability, dtype, head_dim, *kind)
    for capability, dtype, head_dim, kind in pairs(
        list(SHARED_BYTES), ["bfloat16", "float32"], [64, 80, 128, 256], KINDS
    )
]
CASES += pairs(
    list(SHARED_BYTES), ["bfloat16", "float32"], ["write", "join", "norm", "turn", "weigh", "multiply"]
)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    """What the compiler makes of each case, by its JSON."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels"],
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
def test_a_kernel_compiles_and_hardly_spills(
    case: tuple[Any, ...], compiled: dict[str, dict[str, Any]]
) -> None:
    capability, dtype, what = case[:3]
    found = compiled[json.dumps(case)]
    assert found["shared"] <= SHARED_BYTES[capability]
    assert found["stack"] <= 256, "registers are spilled to memory"
    multiplies = isinstance(what, int) or what == "multiply"
    assert found["uses_matrix_unit"] == (multiplies and dtype != "float32")
