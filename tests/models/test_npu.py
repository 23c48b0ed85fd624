"""Which calls does an engine on an NPU make, and does a test reach every line that makes them?"""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention.products import product
from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from recipes.build import build
from recipes.devices import start
from recipes.reader import load
from recipes.recipe import ROOT
from tests.attention.test_attention import Bench, shape
from tests.devices import has_npu, operators, section, settings

pytestmark = [pytest.mark.npu, pytest.mark.skipif(not has_npu(), reason="torch_npu is not installed")]

FUSED_ATTENTION = "npu_fused_infer_attention_score"
NUM_LAYERS = 4


def engine_of(*overrides: str) -> Engine:
    few = ["cache.num_pages=64", "scheduler.num_slots=6", "scheduler.max_batch_tokens=48"]
    return build(load(ROOT / "recipes/tiny/cpu.yaml", [*settings("npu"), *few, *overrides]))


def requests() -> list[Request]:
    """Prompts longer and shorter than a page and a chunk."""
    random = np.random.default_rng(3)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return [
        Request(str(number), random.integers(3, 300, length), params)
        for number, length in enumerate((5, 70, 16, 1, 33, 90, 17))
    ]


def serve(
    engine: Engine, calls: Counter[str] | None = None
) -> tuple[list[list[int]], list[tuple[bool, int]]]:
    """The answers; and of each step whether it was decodes alone, and how many calls of attention it made."""
    made, steps = requests(), []
    for request in made:
        engine.add(request)
    while engine.has_work:
        before = 0 if calls is None else calls[FUSED_ATTENTION]
        step = engine.step()
        assert step is not None
        only_decodes = step.batch.num_tokens == step.batch.num_spans
        steps.append((only_decodes, 0 if calls is None else calls[FUSED_ATTENTION] - before))
    return [request.answer.tolist() for request in made], steps


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each operator of torch_npu is called by its name."""
    start(section("npu"))
    import torch_npu

    counted: Counter[str] = Counter()

    def watch(name: str) -> None:
        inner = getattr(torch_npu, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return inner(*args, **kwargs)

        call.out = getattr(inner, "out", None)  # type: ignore[attr-defined] # the form for captures, not counted
        monkeypatch.setattr(torch_npu, name, call)

    for name in (FUSED_ATTENTION, "npu_scatter_pa_kv_cache", "npu_scatter_nd_update_", "npu_add_rms_norm"):
        watch(name)
    return counted


def test_a_mixed_batch_is_one_call_a_layer(calls: Counter[str]) -> None:
    engine = engine_of()
    calls.clear()
    _, steps = serve(engine, calls)
    assert {count for _, count in steps} == {NUM_LAYERS}
    assert {only_decodes for only_decodes, _ in steps} == {True, False}
    assert calls["npu_scatter_pa_kv_cache"] == NUM_LAYERS * len(steps)
    assert calls["npu_add_rms_norm"] == (2 * NUM_LAYERS - 1) * len(steps)


def test_the_950_takes_decodes_and_longer_spans_apart(calls: Counter[str]) -> None:
    attention = operators("npu", "fused", shape(windows=(None,)))[1]
    attention.product = product("950", "")  # type: ignore[attr-defined]
    bench = Bench(attention)
    for spans, expected in (({0: 5, 2: 20}, 1), ({0: 1, 2: 1}, 1), ({0: 1, 2: 1, 1: 30, 3: 2}, 2)):
        calls.clear()
        bench.step(spans)
        assert calls[FUSED_ATTENTION] == expected


def test_without_the_scatter_of_pages_rows_are_scattered(
    calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch_npu

    bench = Bench(operators("npu", "fused", shape())[1])
    monkeypatch.delattr(torch_npu, "npu_scatter_pa_kv_cache")
    bench.step({0: 20, 3: 1})
    bench.step({3: 1, 0: 1, 1: 33})
    assert calls["npu_scatter_nd_update_"] == 2 * 2 * len(bench.shape.windows)


def test_more_graphs_than_streams_are_refused() -> None:
    deep = "model.config={model_type: llama, vocab_size: 64, hidden_size: 64, num_hidden_layers: 99,"
    deep += " num_attention_heads: 1, num_key_value_heads: 1, intermediate_size: 64, eos_token_id: 2}"
    many = ["device.graphs=512", "scheduler.num_slots=1024", "scheduler.max_batch_tokens=1024"]
    with pytest.raises(ValueError, match="asks for 36 graphs of 99 layers; the 910B holds 18: lower it"):
        engine_of("model.path=null", deep, "model.weights=random", *many)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["device.virtual_fp32=false"], r"model\.dtype is float32; .*: set model\.dtype to bfloat16, or set"),
        (["cache.page_size=24"], r"cache\.page_size is 24; .*: set 128, or set"),
        (["device.product=950"], r"device\.virtual: the stand-in does not start: .*Ascend910B1.*another"),
        (
            ["device.virtual=false", "device.virtual_fp32=false"],
            r"device\.virtual: this process has a stand-in",
        ),
    ],
)
def test_what_does_not_go_is_refused_in_one_line(overrides: list[str], words: str) -> None:
    start(section("npu"))
    with pytest.raises(ValueError, match=words) as caught:
        engine_of(*overrides)
    assert "\n" not in str(caught.value)


def test_every_start_and_every_result_says_virtual(
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from scripts import generate
    from scripts.benchmark import __main__ as benchmark

    monkeypatch.chdir(ROOT)
    trace, answers = tmp_path / "trace.jsonl", tmp_path / "answers.jsonl"
    trace.write_text(json.dumps({"id": "a", "prompt": "1+1=", "max_tokens": 3, "temperature": 0}) + "\n")
    npu = settings("npu")
    with caplog.at_level(logging.WARNING):
        generate.main(["recipes/tiny/cpu.yaml", *npu, "--input", str(trace), "--output", str(answers)])
    assert any("VIRTUAL" in line for line in caplog.messages)
    assert json.loads(answers.read_text())["device"] == "VIRTUAL"
    benchmark.main(["offline", "recipes/tiny/cpu.yaml", *npu, "--trace", str(trace), "--json"])
    assert "VIRTUAL" in json.loads(capsys.readouterr().out)["machine"]["device"]
