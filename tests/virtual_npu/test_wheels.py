"""An older wheel of torch_npu is reported with each schema that it lacks or that differs."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from recipes.schema.recipe import ROOT
from virtual_npu.operators import OPERATORS
from virtual_npu.wheels import main


def wheel(path: Path, *schemas: str) -> str:
    """A wheel whose one library holds these schemas among other text."""
    library = b"\x7fELF\0junk(Tensor\0" + b"\0".join(each.encode() for each in schemas) + b"\0\xff\0"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("torch_npu/lib/libtorch_npu.so", library)
        archive.writestr("torch_npu/README.md", OPERATORS[0].schema)
    return str(path)


SCHEMAS = [each.schema.partition("::")[2] for each in OPERATORS]


def test_a_wheel_with_every_schema_has_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([wheel(tmp_path / "same.whl", *SCHEMAS)]) == 0
    assert capsys.readouterr().out == f"same.whl: {len(SCHEMAS)} of {len(SCHEMAS)} operators are as here\n"


def test_what_is_absent_or_has_another_default_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [norm] = [each for each in SCHEMAS if each.startswith("npu_rms_norm(")]
    changed = re.sub(r"epsilon=[\d.e-]+", "epsilon=0.1", norm)
    rest = [each for each in SCHEMAS if each != norm and not each.startswith("npu_swiglu(")]
    assert main([wheel(tmp_path / "old.whl", changed, *rest)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"old.whl: {len(SCHEMAS) - 2} of {len(SCHEMAS)} operators are as here",
        "    npu::npu_rms_norm differs in epsilon",
        "    npu::npu_swiglu is not there in text",
    ]


def test_what_is_no_wheel_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.whl").write_text("no archive")
    assert main([str(tmp_path / "x.whl")]) == 2
    assert "x.whl cannot be read as a wheel: File is not a zip file" in capsys.readouterr().err


def test_the_manual_counts_the_operators_that_have_rules() -> None:
    text = (ROOT / "docs/ascend.md").read_text()
    (before,), ((now, others),) = (
        re.findall(pattern, text)
        for pattern in (r"(\d+) operators had rules here", r"of the (\d+) that have now, the other (\d+)")
    )
    assert int(now) == len(OPERATORS) == int(before) + int(others)
