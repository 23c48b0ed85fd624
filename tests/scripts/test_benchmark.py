"""Benchmarks say what happened; how fast it was is not for a test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.benchmark import host, kv
from scripts.benchmark.__main__ import main
from scripts.benchmark.timeline import percentiles

RECIPE = "recipes/tiny/cpu.yaml"


def test_the_host_benchmark_measures_decodes_and_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    main(["host", "--slots", "2,5", "--page-sizes", "16", "--chunk", "32", "--steps", "40", "--json"])
    rows = json.loads(capsys.readouterr().out)["host"]
    assert [row["slots"] for row in rows] == [2, 5]
    for row in rows:
        for figures in (row["decode"], row["decode_and_32_token_chunk"]):
            assert 0 < figures["p50_us"] <= figures["p99_us"]


def test_the_host_benchmark_runs_what_it_says() -> None:
    scheduler = host.full_scheduler(num_slots=4, page_size=16, num_steps=10, chunk_tokens=0)
    assert len(scheduler.slots.busy) == 4
    batch = scheduler.schedule(0.0)
    assert (batch.stops - batch.starts == 1).all()
    assert (batch.starts >= host.CONTEXT_TOKENS[0]).all()


def test_the_kv_benchmark_measures_pages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kv, "COPIED_BYTES", 4 * 2**20)
    monkeypatch.setattr(kv, "PROMPT_TOKENS", 1024)
    main(["kv", "--page-sizes", "16,128", "--repeats", "2", "--requests", "20", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [row["page_size"] for row in result["prefix"]] == [16, 128]
    assert result["take_and_release_1024_pages_us"] > 0
    for row in (*result["prefix"], *result["copies"]):
        assert all(figure > 0 for figure in row.values())


def test_few_places_in_small_pages_stay_unused() -> None:
    assert kv.unused(1, 50)["unused_share"] == 0
    assert 0 < kv.unused(16, 50)["unused_share"] < 0.04


def test_the_offline_benchmark_counts_every_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {
            "id": f"{n}",
            "prompt_token_ids": [7] * (20 + n),
            "max_tokens": 5 + n,
            "temperature": 0,
            "ignore_eos": True,
        }
        for n in range(6)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    main(["offline", RECIPE, "device.compile=false", "device.threads=1", "--trace", str(trace), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["requests"] == result["completed"] == 6
    assert result["output_tokens"] == sum(5 + n for n in range(6))
    assert result["prompt_tokens"] == sum(20 + n for n in range(6))
    assert result["output_tokens_per_s"] == pytest.approx(
        result["output_tokens"] / result["duration_s"], rel=0.01
    )
    assert result["ttft_ms"]["p50"] <= result["e2e_ms"]["p50"]
    assert 1 <= result["mean_batch"] <= 6
    assert result["machine"]["torch"]
    cache = result["cache_after_all_runs"]
    assert cache["held_pages"] == 0
    assert cache["idle_pages"] > 0
    assert cache["hit_rate"] == pytest.approx(result["prefix_hit_rate"], abs=0.01)


def test_a_trace_with_a_bad_line_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"id": "a", "prompt_token_ids": [1]}\n{"id": "b"}\n')
    with pytest.raises(ValueError, match=r"trace.jsonl: line 2"):
        main(["offline", RECIPE, "--trace", str(trace)])


def test_percentiles_are_in_milliseconds() -> None:
    assert percentiles([0.001, 0.002, 0.003]) == {"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98}
    assert percentiles([]) == {}


def test_a_trace_that_the_recipe_cannot_serve_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"id": "a", "prompt_token_ids": [5]}\n{"id": "b", "prompt_token_ids": [5000000]}\n')
    with pytest.raises(ValueError, match=r"1 of 2 requests failed: request b holds the token id 5000000"):
        main(["offline", RECIPE, "device.compile=false", "--trace", str(trace)])
