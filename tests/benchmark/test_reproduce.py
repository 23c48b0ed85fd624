"""The sources' experiments run, and what must hold between their results does, whatever the figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.reproduce import experiments
from recipes.schema.recipe import ROOT
from scripts.reproduce import main


@pytest.mark.slow
def test_what_must_hold_holds_in_results_that_the_gate_passes(tmp_path: Path) -> None:
    names = ["static_continuous", "whole_chunked", "compaction"]
    command = ["--quick", "--jobs", "1", "--output", str(tmp_path), "--json", str(tmp_path / "all.json")]
    assert main([*command, "--only", *names]) == 0  # the gate passes all
    text = (tmp_path / "reproduced.md").read_text(encoding="utf-8")
    assert "SIMULATED, not measured" in text
    assert "`ascend910`: assumed" in text
    results: dict[str, dict[str, dict[str, Any]]] = json.loads((tmp_path / "all.json").read_bytes())
    for cases in results.values():
        for label, result in cases.items():
            assert next(iter(result)) == "SIMULATED"
            assert result["completed"] == result["requests"]
            assert f"| {label} |" in text
    batching = results["static_continuous"]
    for rate in ("50/s", "all at once"):
        good = [batching[f"{name}, {rate}"]["request_goodput"] for name in ("static 64", "continuous 64")]
        assert good[0] <= good[1]
    prompts = results["whole_chunked"]
    longest = [prompts[name]["itl_ms"]["max"] for name in ("whole beside decodes, 8/s", "chunks of 512, 8/s")]
    assert longest[1] < longest[0]
    assert results["compaction"]["never"]["copied_pages"] == 0
    assert results["compaction"]["every 10 steps"]["copied_pages"] > 0


def test_the_page_has_each_case_once_and_each_claim_with_its_verdict() -> None:
    lines = (ROOT / "docs/measured/reproduced.md").read_text(encoding="utf-8").splitlines()
    labels = []
    for each in experiments():
        labels += [case.label for case in each.cases] + [f"*claimed: {name}*" for name in each.claimed]
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| |")]
    assert [row[2 : row.index(" |", 2)] for row in rows] == labels
    claims = [line for line in lines if line.startswith("| *claimed")]
    assert all("| refused: " in line for line in claims)
