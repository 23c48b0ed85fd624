"""Throughput of an engine in this process, as users of other engines know it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmark import main

ENGINE = ["recipes/tiny/cpu.yaml", "device.compile=false", "device.threads=1"]


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_throughput_of_random_requests(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--num-prompts", "31", "--input-len", "9", "--output-len", "5")
    result = told(capsys, "offline", "--at-once", *ENGINE, *sizes, "--runs", "3")
    assert (result["num_requests"], result["total_num_tokens"]) == (31, 31 * 14)
    assert result["tokens_per_second"] == pytest.approx(31 * 14 / result["elapsed_time"], rel=0.01)
    assert sorted(result["runs_duration_s"])[1] == result["elapsed_time"], "each batch has its seconds"
    assert result["offered_per_s"] is None, "all come at once"
    assert result["verdict"]["outcome"] == "pass"
    assert all(len(record["token_times_s"]) == 5 for record in result["records"])
    assert result["metrics"]["readings"][-1][2] == 0, "nobody waits at the end"


def test_throughput_of_a_trace_knows_no_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"id": f"{n}", "prompt_token_ids": [5, n], "max_tokens": 2, "arrival_s": 3000 * n} for n in (0, 1)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = told(capsys, "offline", "--at-once", *ENGINE, "--trace", str(trace))
    assert result["elapsed_time"] < 3000
    with pytest.raises(ValueError, match="--trace says what is asked for"):
        main(["offline", "--at-once", *ENGINE, "--trace", str(trace), "--output-len", "2"])
