"""The sources' experiments run, and what must hold between their results does, whatever the figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.reproduce.cases import Case, Offered, alone_s, chunked, num_good, run, static
from benchmark.reproduce.experiments import experiments, found
from scripts.reproduce import main

Results = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    folder = tmp_path_factory.mktemp("reproduced")
    names = ["static_continuous", "whole_chunked", "compaction"]
    command = ["--quick", "--jobs", "1", "--output", str(folder), "--json", str(folder / "all.json")]
    assert main([*command, "--only", *names]) == 0  # the gate passes all
    return folder, json.loads((folder / "all.json").read_text(encoding="utf-8"))


def test_every_result_says_what_it_is_and_passes_the_gate(told: tuple[Path, Results]) -> None:
    folder, results = told
    text = (folder / "reproduced.md").read_text(encoding="utf-8")
    assert "SIMULATED, not measured" in text
    assert "`ascend910`: assumed" in text
    for name, cases in results.items():
        assert (folder / "reproduced" / f"{name}.png").stat().st_size < 100_000
        for label, result in cases.items():
            assert next(iter(result)) == "SIMULATED"
            assert result["verdict"]["outcome"] == "pass", label
            assert result["completed"] == result["requests"]
            assert f"| {label} |" in text
    assert "*claimed: continuous*" in text
    assert "refused: served <= offered, Little, running" in text


def test_what_must_hold_holds(told: tuple[Path, Results]) -> None:
    _, results = told
    batching = results["static_continuous"]
    for rate in ("50/s", "all at once"):
        good = [batching[f"{name}, {rate}"]["request_goodput"] for name in ("static 64", "continuous 64")]
        assert good[0] <= good[1]
    prompts = results["whole_chunked"]
    longest = [prompts[name]["itl_ms"]["max"] for name in ("whole beside decodes, 8/s", "chunks of 512, 8/s")]
    assert longest[1] < longest[0]
    assert results["compaction"]["never"]["copied_pages"] == 0
    assert results["compaction"]["every 10 steps"]["copied_pages"] > 0


def test_the_largest_ratio_is_of_what_records_say() -> None:
    load = Offered(64, 4.0, answer_tokens=32, most_answer_tokens=64)
    cases = [
        Case("static even", load, static(64)).at(4.0),
        Case("continuous even", load, chunked(2048)).at(4.0),
    ]
    results = {case.label: run(case) for case in cases}
    pairs = {(each.ttft_ms, each.tpot_ms): each.times for each in found(results)}
    least, most = results.values()
    good = [num_good(each["records"], 1000.0, 50.0) / each["duration_s"] for each in (least, most)]
    assert pairs[1000.0, 50.0] == pytest.approx(good[1] / good[0])


def test_parts_cost_no_less_than_the_whole() -> None:
    case = Case("", Offered(1))
    assert alone_s(case, 2048, 2048) < alone_s(case, 2048, 512) < alone_s(case, 2048, 128)


def test_names_are_one_each_and_no_case_is_two() -> None:
    names = [each.name for each in experiments()]
    assert len({*names}) == len(names) == 5
    for each in experiments():
        labels = [case.label for case in each.cases]
        assert len({*labels}) == len(labels)
