"""On a processor with AVX-512 the sources' branches for AVX2 pass the tests of those for AVX-512.

`tests/models/test_cpu_products.py` compares the products of both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.schema.recipe import ROOT
from tests.models.test_cpu_products import compiler
from tests.patience import PATIENCE_S

OF_SOURCES = [f"tests/{name}.py" for name in ("attention/test_cpu_source", "attention/test_recurrent")]
OF_SOURCES += ["tests/models/test_rowwise.py"]


def has_avx512() -> bool:
    info = Path("/proc/cpuinfo")
    return info.is_file() and "avx512f" in info.read_text()


@pytest.mark.slow
@pytest.mark.skipif(not has_avx512(), reason="the tests themselves take the branches of this processor")
@pytest.mark.parametrize("module", OF_SOURCES)
def test_sources_compiled_for_avx2_pass_their_tests(module: str, tmp_path: Path) -> None:
    environment = os.environ | {
        "CXX": compiler(tmp_path, "-march=x86-64-v3"),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", module]
    done = subprocess.run(
        [*command, "-m", "not slow"],
        cwd=ROOT,
        env=environment,
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert (tmp_path / "runs").is_file(), "nothing was compiled"
