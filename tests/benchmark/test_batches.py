"""Throughput and latency of an engine in this process, as users of other engines know them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.gate.gate import audit
from benchmark.offline.offline import batch_figures
from scripts.benchmark import main

ENGINE = ["recipes/tiny/cpu.yaml", "device.compile=false", "device.threads=1"]


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_throughput_of_random_requests(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--num-prompts", "31", "--input-len", "9", "--output-len", "5")
    result = told(capsys, "offline", "--at-once", *ENGINE, *sizes)
    assert (result["num_requests"], result["total_num_tokens"]) == (31, 31 * 14)
    assert result["tokens_per_second"] == pytest.approx(31 * 14 / result["elapsed_time"], rel=0.01)
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


def test_latency_of_batches(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--batch-size", "3", "--input-len", "9", "--output-len", "4")
    result = told(
        capsys, "offline", "--one-batch", *ENGINE, *sizes, "--num-iters", "10", "--num-iters-warmup", "1"
    )
    assert len(result["latencies"]) == 10
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 10, abs=1e-5)
    assert result["percentiles"]["10"] <= result["percentiles"]["50"] <= result["percentiles"]["99"]
    assert (result["requests"], result["output_tokens"]) == (30, 120)
    assert result["verdict"] == audit(result).describe()
    assert result["verdict"]["outcome"] == "pass"
    assert "roofline" in result["verdict"]["passed"] + list(result["verdict"]["not_checkable"])


def test_latencies_are_those_of_their_closed_forms() -> None:
    counts = {"requests": 2, "completed": 2, "failed": 0, "prompt_tokens": 8, "output_tokens": 6}
    runs = [{**counts, "duration_s": each, "tpot_ms": {"mean": 2.0}} for each in (1.0, 2.0, 3.0)]
    result = batch_figures(runs)
    assert result["avg_latency"] == 2.0
    assert result["percentiles"] == {"10": 1.2, "25": 1.5, "50": 2.0, "75": 2.5, "90": 2.8, "99": 2.98}
    assert result["output_tokens_per_s"] == 3.0


def test_a_batch_that_cannot_be_served_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"cannot serve such a batch: .* context length is 2048 tokens"):
        main(["offline", "--one-batch", *ENGINE, "--input-len", "999999"])
