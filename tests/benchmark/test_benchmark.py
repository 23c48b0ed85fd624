"""Benchmarks say what happened; how fast it was is not for a test."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.reference import AttentionMetadata, Windows
from benchmark.gate.gate import audit
from benchmark.micro import device, host
from benchmark.offline import offline
from continuous_batching.batch import Batch
from models.config import layer_specs
from recipes.assembly.engine import build
from recipes.assembly.families import model_config
from recipes.schema.reader import read
from scripts.benchmark import main

RECIPE = "recipes/tiny/cpu.yaml"
QUICK = ["device.compile=false", "device.threads=1"]
WINDOWED = [  # a small model, whose second layer has a window of 24 tokens and 4 pages
    *("model.config.model_type=qwen2", "model.config.use_sliding_window=true"),
    *("model.config.sliding_window=24", "model.config.max_window_layers=1"),
    *("model.config.num_hidden_layers=2", "model.config.hidden_size=48", "model.config.vocab_size=500"),
    "cache.num_window_pages=5",
]


def test_the_host_benchmark_runs_what_it_says() -> None:
    scheduler = host.full_scheduler(num_slots=4, page_size=16, num_steps=10, chunk_tokens=0)
    assert len(scheduler.slots.busy) == 4
    batch = scheduler.schedule(0.0)
    assert (batch.stops - batch.starts == 1).all()
    assert (batch.starts >= host.CONTEXT_TOKENS[0]).all()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_the_offline_benchmark_counts_every_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"id": f"{n}", "prompt_token_ids": [7] * (20 + n), "max_tokens": 5 + n, "ignore_eos": True}
        for n in range(6)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    main(["offline", RECIPE, *QUICK, "--trace", str(trace), "--json"])
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
    assert result["verdict"] == audit(result), "the file can be audited as it is"
    assert list(result["verdict"]["refused"]) == ["samples"], "six requests are few"
    assert {"Little", "recount", "tokens by request"} <= {*result["verdict"]["passed"]}
    ranks = ["parallel.tensor=2"]  # all of which forget what a run computed before the next one
    main(["offline", RECIPE, *ranks, *QUICK, "--trace", str(trace)])
    table = capsys.readouterr().out
    assert "verdict                refused; samples: 6 requests were answered; 30 are the least\n" in table
    assert "records" not in table


def test_samples_that_the_figures_leave_out_are_not_audited_as_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"id": "a", "prompt_token_ids": [7] * 20, "max_tokens": 5, "n": 3, "ignore_eos": True}
    trace.write_text(json.dumps(line) + "\n")
    main(["offline", RECIPE, *QUICK, "--trace", str(trace), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert "mean_in_system" not in result
    assert list(result["verdict"]["refused"]) == ["samples"]
    assert "mean_in_system is absent" in result["verdict"]["not_checkable"]["Little"]


def test_a_run_with_drafts_passes_the_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {
            "id": f"{n}",
            "prompt_token_ids": [(n * 37 + 7 * k) % 200 + 5 for k in range(12)] * 3,
            "max_tokens": 40,
            "temperature": 0,
            "ignore_eos": True,
        }
        for n in range(32)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    drafted = ["speculation.kind=ngram", "speculation.adaptive=fixed"]
    main(["offline", RECIPE, *drafted, *QUICK, "--trace", str(trace), "--runs", "1", "--json"])
    result = json.loads(capsys.readouterr().out)
    counters = result["counters"]["after"]
    assert 0 < counters["accepted_tokens"] < counters["draft_tokens"]
    assert result["max_tokens_per_step"] == 5
    assert {"spans", "computed tokens", "clock"} <= {*result["verdict"]["passed"]}


@pytest.mark.parametrize("at_once", [False, True])
def test_requests_may_all_come_at_once(tmp_path: Path, at_once: bool) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"prompt_token_ids": [7] * 9, "max_tokens": 2, "ignore_eos": True}
    trace.write_text(
        "".join(json.dumps({"id": f"{n}", "arrival_s": n / 10, **line}) + "\n" for n in range(3))
    )
    options = Namespace(recipe=RECIPE, overrides=QUICK, profile=None, trace=str(trace), runs=1)
    records = offline.measured(options, at_once=at_once)["records"]
    assert [each["arrival_s"] for each in records] == pytest.approx([0, 0, 0] if at_once else [0, 0.1, 0.2])


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\n", r"trace\.jsonl holds no request$"), (b'\n{"id": "\xff"}', "line 2: not UTF-8 at column 9")],
    ids=["none", "bytes"],
)
def test_a_trace_of_no_use_is_refused_before_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    monkeypatch.setattr(offline, "build", lambda recipe: pytest.fail("it was built"))
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        main(["offline", RECIPE, "--trace", str(trace)])


@pytest.mark.parametrize(
    "arguments",
    [
        ["offline", RECIPE, "--trace", "none", "--runs", "0"],
        ["device", RECIPE, "--repeats", "0"],
        ["host", "--steps", "0"],
    ],
)
def test_nothing_is_measured_no_times(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "'0' must be an integer from 1 to" in capsys.readouterr().err


def test_a_trace_that_the_recipe_cannot_serve_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"id": "a", "prompt_token_ids": [5]}\n{"id": "b", "prompt_token_ids": [5000000]}\n')
    with pytest.raises(ValueError, match=r"1 of 2 requests failed: prompt holds the token id 5000000"):
        main(["offline", RECIPE, "device.compile=false", "--trace", str(trace)])


def test_the_device_benchmark_measures_steps_against_their_floors(capsys: pytest.CaptureFixture[str]) -> None:
    loads = ["--decode", "1x40,3x64,99x64", "--prefill", "2x32", "--mixed", "2x40+1x32", "--repeats", "2"]
    main(["device", RECIPE, *QUICK, *loads, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert all(rate > 0 for rate in result["rates"].values())
    assert result["machine"]["triton"]
    one, three, beyond, prompts, mixed = result["steps"]
    assert beyond["not_measured"] == "99 decodes at 64: 32 slots of 2048 tokens do not hold it"
    for step in (one, three, prompts):
        assert step["step_ms"] > 0
        assert step["share_of_copy_rate"] > 0
    assert mixed["over_sum_of_parts"] == pytest.approx(mixed["step_ms"] / sum(mixed["parts_ms"]), rel=0.01)


def test_the_device_benchmark_gives_windows_the_pages_that_a_query_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = build(read("recipes/bench/llama_125m.yaml", [*QUICK, *WINDOWED], None).recipe)
    slots, attention = built.runner.slots, built.runner.attention
    (table,) = slots.window_tables
    for load, first, stop in ((device.StepLoad(2, 60), 2, 4), (device.StepLoad(0, 0, 1, 50), 0, 4)):
        device.batch_of(built, load)
        pages = table[: len(load.stops), first:stop]
        assert sorted({*pages.flat}) == [1, 2, 3, 4]
        assert not table.sum() - pages.sum(), "other entries are the null page"
    with pytest.raises(ValueError, match=r"^3 decodes at 60: takes 6 pages; the cache holds 4$"):
        device.batch_of(built, device.StepLoad(3, 60))

    planned, attended = [], set()
    plan, attend = attention.plan, attention.attend

    def watched_plan(batch: Batch, pages: Any, places: Any, windows: Windows = None) -> AttentionMetadata:
        planned.append((plan(batch, pages, places, windows), windows))
        return planned[-1][0]

    def watched_attend(query: Tensor, keys: Tensor, values: Tensor, metadata: Any, layer: int) -> Tensor:
        (windows,) = (windows for each, windows in planned if each is metadata)
        attended.add((layer, windows))
        return attend(query, keys, values, metadata, layer)

    monkeypatch.setattr(attention, "plan", watched_plan)
    monkeypatch.setattr(attention, "attend", watched_attend)
    assert device.attention_s(built, device.StepLoad(2, 60), 1) > 0
    assert attended == {(0, (None,)), (1, (24,))}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_its_device_every_figure_of_the_device_benchmark_is_not_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = "recipes/bench/qwen3_8b_cuda.yaml"
    main(["device", recipe])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| ") and not line.startswith("| load")]
    assert [len(row) for row in rows] == [7, 7, 7, 7, 4]
    assert {cell.rstrip(" |") for row in rows for cell in row[1:]} == {"not measured"}
    assert "rates: not measured" in lines
    assert lines[-1].startswith("not measured: device.kind: torch ")
    main(["device", recipe, "--json"])
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert all("finds no CUDA device" in step["not_measured"] for step in steps)
    with pytest.raises(ValueError, match=r"device\.kind: 'gpu' is not allowed"):
        main(["device", recipe, "device.kind=gpu"])


def test_the_device_benchmark_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    loads = ["--decode", "1x40,99x64", "--prefill", "", "--mixed", "2x40+1x32", "--repeats", "1"]
    main(["device", RECIPE, *QUICK, *loads])
    lines = capsys.readouterr().out.splitlines()
    one, beyond, mixed = (line for line in lines if " decodes at " in line and line.startswith("|"))
    assert "not measured" not in one
    assert beyond.count("not measured") == 6
    assert "not measured" not in mixed


@pytest.mark.slow
def test_attention_over_latents_is_timed_within_its_step_alone(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ["recipes/bench/deepseek_v3.2_4_layers.yaml", "model.config.num_hidden_layers=1"]
    loads = ["--decode", "1x300", "--prefill", "", "--mixed", "", "--repeats", "1"]
    main(["device", *recipe, "cache.num_pages=5", *loads])
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line for line in lines if " decodes at " in line)
    assert row.split(" | ")[5:] == ["not measured", "not measured |"]
    assert "not measured: attention over latents is not timed by itself" in lines


def test_floors_count_what_a_step_reads_and_multiplies() -> None:
    config = replace(model_config(read(RECIPE).recipe), layers=layer_specs((None, 8)))
    load = device.StepLoad(3, 20, 1, 10)
    page = 2 * config.num_kv_heads * config.head_dim * config.dtype_bytes
    weights = config.weight_bytes - (not config.tie_embeddings) * (
        config.vocab_size * config.hidden_size * config.dtype_bytes
    )
    assert device.read_bytes(config, load) == weights + page * (3 * 20 + 10 + 4 * 8)
    pairs = 3 * 20 + 55 + 3 * 8 + (36 + 2 * 8)  # by hand: each query and each position it sees
    heads = config.num_heads * config.head_dim
    inner, kv = config.intermediate_size, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv + 3 * inner)
    products = 13 * 2 * layer + 4 * config.vocab_size * config.hidden_size
    assert device.operations(config, load) == pytest.approx(2 * products + 4 * heads * pairs, rel=0.01)


@pytest.mark.slow
def test_the_same_trace_is_served_beside_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"prompt_token_ids": [7] * 9, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    trace.write_text("".join(json.dumps({"id": str(n), "arrival_s": n, **line}) + "\n" for n in range(3)))
    main(["beside", RECIPE, *QUICK, "--trace", str(trace), "--runs", "1", "--json", "--static", "2"])
    result = json.loads(capsys.readouterr().out)
    assert result["output_tokens"] == 15
    assert {each["arrival_s"] for each in result["records"]} == {0}, "as for transformers"
    assert result["transformers_batch_size"] == 2
    assert result["times_transformers"] == pytest.approx(
        result["output_tokens_per_s"] / result["transformers_output_tokens_per_s"], rel=0.01
    )
    assert result["times_transformers_cpu"] == pytest.approx(
        result["transformers_cpu_s"] / result["clock"]["cpu_s"], rel=0.01
    )
