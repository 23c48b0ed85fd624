"""Ranks wait for each other as long as is told: in collectives, in steps, and between stages."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmark.micro import collective
from continuous_batching.batch import Batch, Sampled
from continuous_batching.request import Request, SamplingParams
from continuous_batching.slots import SlotPool
from models.parallel.group import ALONE, StageLinks
from scripts.benchmark import main

pytestmark = pytest.mark.usefixtures("forked_ranks")

RECIPE = "recipes/tiny/cpu.yaml"
QUICK = ["device.compile=false", "device.threads=1"]


def test_collectives_are_timed_between_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        ["collective", RECIPE, "parallel.tensor=2", *QUICK, "--sizes", "64,4096", "--repeats", "2", "--json"]
    )
    found = json.loads(capsys.readouterr().out)["collective"]
    assert found["ranks"] == 2
    rows = [(row["method"], row["bytes"]) for row in found["calls"]]
    assert rows == [(name, size) for name in ("all_reduce", "all_gather", "broadcast") for size in (64, 4096)]
    assert all(row["us"] > 0 for row in found["calls"])
    with pytest.raises(ValueError, match=r"parallel\.tensor: one rank waits for nobody; set it to 2 or more"):
        main(["collective", RECIPE])


@pytest.mark.slow
def test_steps_of_ranks_are_held_against_what_is_said_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "collective",
            "--tensor",
            RECIPE,
            "parallel.tensor=2",
            *QUICK,
            "--requests",
            "3",
            "--rounds",
            "1",
            "--json",
        ]
    )
    found = json.loads(capsys.readouterr().out)["ranks"]
    assert list(found["ranks"]) == ["1", "2"]
    for row in found["ranks"].values():
        assert row["simulated_seconds"] == pytest.approx(row["seconds"] * (1 + row["error"]), rel=0.3)
    assert [row["bytes"] for row in found["sums"]] == sorted(row["bytes"] for row in found["sums"])
    assert all(figure >= 0 for figure in found["device"].values())
    with pytest.raises(ValueError, match=r"parallel\.tensor: ranks are held against one; set"):
        main(["collective", "--tensor", RECIPE])


@pytest.mark.slow
def test_waits_of_stages_are_measured_beside_those_that_are_simulated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["collective", "--pipeline", RECIPE, "parallel.pipeline=2", *QUICK, "--requests", "8", "--json"])
    found = json.loads(capsys.readouterr().out)["stages"]
    assert list(found["shares"]) == ["stage 1", "stage 2", "all", "simulated"]
    for row in found["shares"].values():
        assert list(row) == ["PB1", "PB2", "PB3", "busy"]
        assert all(0 <= share < 1 for share in row.values())
    assert found["shares"]["all"]["busy"] > 0
    assert sum(found["shares"]["simulated"].values()) > 0.5, "two stages that wait for nothing but each other"
    assert found["simulated_of_measured"] > 0


def test_stages_that_cannot_be_timed_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel\.pipeline: one stage waits for nobody; set it to 2"):
        main(["collective", "--pipeline", RECIPE])


def batch(row: int, start: int, stop: int) -> Batch:
    rows = np.array([row])
    return Batch(rows, rows * 0 + start, rows * 0 + stop, rows * 0, rows, rows * 0 + stop)


class Sends(StageLinks):
    """A stage before, for which one waits 1 s."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self._clock = clock

    def receive(self, x: Tensor) -> Tensor:
        self._clock[0] += 1.0
        return x


class Computes:
    """A runner that receives, and computes for 0.5 s when its result is asked for."""

    def __init__(self, links: StageLinks, clock: list[float]) -> None:
        self._links, self._clock = links, clock

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        def wait() -> Sampled:
            self._links.receive(torch.zeros(1))
            self._clock[0] += 0.5
            return Sampled(np.zeros(len(batch.owners), np.int64))

        return wait


def test_a_wait_counts_by_the_prompts_of_the_batches_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(collective.time, "perf_counter", lambda: clock[0])
    slots = SlotPool(1, 16, 4)
    row = slots.take(Request("a", np.arange(6), SamplingParams()))
    links = collective.TimedLinks(Sends(clock))
    runner = collective.TimedStage(Computes(links, clock), links, ALONE, slots, [])
    for start, stop in ((0, 3), (3, 6), (6, 7), (7, 8)):
        runner.start(batch(row, start, stop))()
    assert runner.waited_s == {"PB1": 1.0, "PB2": 2.0, "PB3": 1.0}
    assert [each.taken_s for each in runner.steps] == [0.5] * 4
