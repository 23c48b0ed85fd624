"""Told when requests came and how long steps took, a simulation decides as the engine did."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from continuous_batching.recording.format import Entry, Header, Scheduled, read_entries
from continuous_batching.recording.replay import Divergence
from continuous_batching.scheduling.scheduler import Scheduler
from recipes.assembly.scheduler import scheduler_from
from scripts.generate import main as generate
from scripts.trace import main as make_trace
from tests.simulation.recorded import follow, recorded_run
from tests.thorough import cases, first_quick

TIGHT = ["cache.num_pages=24", "scheduler.num_slots=8", "scheduler.max_batch_tokens=48"]
CASES = {
    "sharing": ([], ["--system-prompts", "2:64"]),
    "preempting in chunks": (TIGHT, []),
    "with work ahead": (["scheduler.overlap=true", "scheduler.num_slots=8"], ["--system-prompts", "2:64"]),
    "prompts first": (["scheduler.policy=prefill_first", "scheduler.max_batch_tokens=2048"], []),
    "in full batches": (
        ["scheduler.policy=static", "scheduler.batch_size=4", "scheduler.max_wait_ms=20"],
        [],
    ),
}


def recording(folder: Path, overrides: list[str], options: list[str]) -> list[Entry]:
    lengths = ["--prompt-tokens", "uniform:10:110", "--output-tokens", "uniform:2:40", "--vocab-size", "256"]
    files = ["--output", str(folder / "in.jsonl"), "--requests", "30", "--rate", "60"]
    make_trace([*files, *lengths, *options])
    generate(
        [
            "recipes/tiny/cpu.yaml",
            "device.threads=1",
            *overrides,
            f"scheduler.record={folder / 'recording'}",
            "--input",
            str(folder / "in.jsonl"),
            "--output",
            str(folder / "out.jsonl"),
        ]
    )
    with open(folder / "recording", "rb") as file:
        return list(read_entries(file))


def fresh(entries: list[Entry]) -> Callable[[], Scheduler]:
    header = entries[0]
    assert isinstance(header, Header)
    return lambda: scheduler_from(header.facts)


@pytest.mark.parametrize("case", first_quick(0, cases(["preempting in chunks", "with work ahead"], [*CASES])))
def test_the_simulation_decides_as_the_engine_did(case: str, tmp_path: Path) -> None:
    overrides, options = CASES[case]
    entries = recording(tmp_path, overrides, options)
    scheduler = fresh(entries)()
    num_steps = follow(recorded_run(entries), scheduler, overlap="scheduler.overlap=true" in overrides)
    assert num_steps == sum(isinstance(each, Scheduled) for each in entries) > 20
    counters = scheduler.counters
    assert (counters.hit_tokens > 0) == bool(options)
    assert (counters.preemptions > 0) == (overrides == TIGHT)
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert counters.sampled_tokens >= sum(len(each["token_ids"]) for each in answers)
    if case == "preempting in chunks":
        recorded = recorded_run(entries)
        _, first = recorded.arrivals[0]
        end_s = recorded.moments[-1].now_s
        recorded.arrivals[0] = end_s + 1.0, first  # told late, the simulation cannot but decide otherwise
        with pytest.raises(Divergence, match="the simulation"):
            follow(recorded, fresh(entries)())
