"""The parts of a CPU's step, which are timed without counting anything twice."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmark.micro import parts
from continuous_batching.batch import Batch
from recipes.schema.recipe_error import RecipeError
from scripts.benchmark import main

NOTHING = np.empty(0, np.int64)
TINY = ("recipes/tiny/cpu.yaml", "device.compile=false", "device.threads=1")


def test_a_part_is_timed_without_the_parts_within_it() -> None:
    now_s = 0.0

    def pass_s(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    times = parts.PartTimes(clock=lambda: now_s)
    inner = times.of(parts.ATTENTION, lambda: pass_s(2))

    def outer() -> None:
        pass_s(1)
        inner()
        inner()
        pass_s(4)

    row = np.zeros(1, np.int64)
    for stop, kind in ((1, parts.DECODES), (3, parts.PROMPTS)):
        times.planned(Batch(row, row, row + stop, NOTHING, NOTHING, NOTHING))
        times.of(parts.DECODER, outer)()
        times.ended()
        assert times.steps[kind] == 1
        assert times.spent[kind] == {parts.ATTENTION: 4, parts.DECODER: 5}
    inner()
    times.ended()
    assert times.steps.total() == 2, "nothing was computed"


def test_every_part_of_a_served_trace_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"id": "0", "prompt_token_ids": list(range(5, 25)), "max_tokens": 3, "ignore_eos": True}
    trace.write_text(json.dumps(line))
    main(["device", "--parts", *TINY, "--trace", str(trace), "--json"])
    kinds = json.loads(capsys.readouterr().out)["kinds"]
    assert [kinds[kind]["steps"] for kind in (parts.DECODES, parts.PROMPTS)] == [2, 1]
    for kind in kinds.values():
        assert set(kind["parts_s"]) == set(parts.PARTS)
        assert kind["processor_s"] == pytest.approx(sum(kind["parts_s"].values()), abs=0.01)
    main(["device", "--parts", *TINY, "--trace", str(trace)])
    printed = capsys.readouterr().out
    assert all(f"| {part} |" in printed for part in parts.PARTS)


def test_a_device_that_does_not_wait_is_refused() -> None:
    with pytest.raises(RecipeError, match="no CPU"):
        main(["device", "--parts", "recipes/tiny/npu.yaml", "device.virtual=true", "--trace", "trace.jsonl"])
