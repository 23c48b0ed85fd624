"""Results that verbs really measured pass the gate.

Every verb whose results are quoted is run here on the tiny model.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from benchmark.gate.gate import audit
from scripts.benchmark import main
from tests.benchmark.openai_server import Stub, running
from tests.thorough import THOROUGH, cases

Result = dict[str, Any]
ENGINE = ["recipes/tiny/cpu.yaml", "device.compile=false", "device.threads=1"]
SETTINGS = (  # of the engine, and of the trace: tokens of prompts that are the same, and seconds between two
    ([], 0, 0.005),
    (["scheduler.overlap=true", "scheduler.num_slots=4"], 0, 0.0),
    (["cache.num_pages=24", "scheduler.num_slots=6", "scheduler.max_batch_tokens=32"], 0, 0.002),
    (["scheduler.policy=orca", "scheduler.num_slots=3"], 48, 0.001),
    (["scheduler.policy=static", "scheduler.batch_size=4", "scheduler.max_wait_ms=5"], 0, 0.004),
    (["scheduler.policy=prefill_first", "cache.prefix_sharing=false"], 32, 0.0),
)
SMALL_VERBS = {
    "host": ["--slots", "4", "--page-sizes", "16", "--steps", "10", "--chunk", "16"],
    "device": [*ENGINE, "--decode", "2x32", "--prefill", "1x32", "--mixed", "1x32+1x32", "--repeats", "2"],
}
ASKED: tuple[tuple[list[str], dict[str, object]], ...] = (
    (["scheduler.overlap=true", "scheduler.num_slots=2"], {"ignore_eos": False}),
    (["scheduler.overlap=true"], {"beam_width": 3, "n": 2}),
    ([], {"stop": ["e"]}),
    (["scheduler.max_queue_wait_s=0.001", "scheduler.num_slots=2"], {}),
)


def told(*arguments: str) -> Result:
    with redirect_stdout(StringIO()) as printed:
        main([*arguments, "--json"])
    return json.loads(printed.getvalue())


def write(path: Path, lines: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def trace(path: Path, shared: int, every_s: float, seed: int = 0) -> str:
    """Requests whose prompts and answers differ in length."""
    drawn = random.Random(seed)
    lines: list[dict[str, object]] = [
        {
            "id": f"r{number}",
            "prompt_token_ids": [7] * shared
            + [drawn.randrange(3, 900) for _ in range(drawn.randrange(5, 60))],
            "max_tokens": drawn.randrange(2, 9),
            "arrival_s": round(number * every_s, 4),
            "temperature": 0,
            "ignore_eos": bool(number % 2),
        }
        for number in range(31)
    ]
    return write(path, lines)


def offline(folder: Path, number: int, seed: int = 0, runs: int = 1) -> Result:
    overrides, shared, every_s = SETTINGS[number]
    path = trace(folder / f"{number}-{seed}.jsonl", shared, every_s, seed)
    return told("offline", *ENGINE, *overrides, "--trace", path, "--runs", str(runs))


def served(folder: Path, seed: int = 0) -> Result:
    path = trace(folder / f"served-{seed}.jsonl", 0, 0.004, seed)
    objectives = ("--goodput", "ttft:500000", "tpot:500000")
    with running(Stub(first_s=0.01, gap_s=0.002)) as stub:
        return told("serve", "--base-url", stub.url, "--trace", path, *objectives)


def refused(result: Result) -> set[str]:
    """The laws that refuse a result, but for one: a busy machine makes a client late, and it may say so."""
    return {*audit(result)["refused"]} - {"client on time"}


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in cases([2, 3], [1, 2, 3, 4, 5]))]
)
def test_an_engine_s_result_passes_in_each_setting(tmp_path: Path, number: int) -> None:
    result = offline(tmp_path, number, runs=2 if number == 3 else 1)
    assert not refused(result)
    assert {"counters", "computed tokens", "cache", "memory", "clocks", "digests"} <= {
        *result["verdict"]["passed"]
    }


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [pytest.param(*each, marks=[] if "beam_width" in each[1] else pytest.mark.slow) for each in ASKED],
)
def test_honest_searches_stops_and_timeouts_pass(
    tmp_path: Path, overrides: list[str], asked: dict[str, object]
) -> None:
    lines: list[dict[str, object]] = [
        {"id": f"r{n}", "prompt_token_ids": [5 + n] * 9, "max_tokens": 6, "temperature": 0, **asked}
        for n in range(31)
    ]
    result = told("offline", *ENGINE, *overrides, "--trace", write(tmp_path / "trace.jsonl", lines))
    assert refused(result) <= {"samples"}  # of few that were in time


@pytest.mark.slow
@pytest.mark.skipif(not THOROUGH, reason="a hundred runs take minutes; THOROUGH=1 makes them")
def test_a_hundred_honest_results_pass(tmp_path: Path) -> None:
    found = [offline(tmp_path, number, seed) for seed in range(14) for number in range(len(SETTINGS))]
    found += [served(tmp_path, seed) for seed in range(16)]
    assert not Counter(law for result in found for law in refused(result))
