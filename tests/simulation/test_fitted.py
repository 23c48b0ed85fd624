"""Costs that steps were made of are found again, and what is fitted can be kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from continuous_batching.batch import Batch
from continuous_batching.engine import Engine, Step
from continuous_batching.slots import SlotPool
from simulation.fitted import NAMES, Fitted, Timed, features, fit, non_negative
from simulation.serve import serve
from tests.simulation.test_serve import requests, scheduler


class Made:
    """A device of known costs, and noise."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.costs_s = np.zeros(len(NAMES))
        for name, cost_s in (
            ("step", 2e-3),
            ("tokens up to 8", 1e-3),
            ("tokens", 1e-4),
            ("context of decodes", 1e-6),
        ):
            self.costs_s[NAMES.index(name)] = cost_s

    def step_s(self, batch: Batch, slots: SlotPool) -> float:
        return float(features(batch) @ self.costs_s) * float(self.random.lognormal(0, 0.05))


class Bursts(Made):
    """The same, with a neighbour that halves its speed for 40 steps of each 200."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def step_s(self, batch: Batch, slots: SlotPool) -> float:
        self.num_steps += 1
        return super().step_s(batch, slots) * (2 if self.num_steps // 40 % 5 == 0 else 1)


def fitted_to(device: Made) -> Fitted:
    steps: list[Timed] = []

    def observe(engine: Engine, step: Step) -> None:
        steps.append(Timed(features(step.batch), step.end_s - step.start_s))

    serve(requests(300, 30.0), scheduler(), device, observe=observe)
    return fit(steps)


def test_slow_steps_come_together() -> None:
    real = serve(requests(300, 30.0, seed=1), scheduler(), Bursts()).figures()
    foretold = serve(requests(300, 30.0, seed=1), scheduler(), fitted_to(Bursts())).figures()
    assert foretold["tpot_ms"]["p99"] == pytest.approx(real["tpot_ms"]["p99"], rel=0.1)


def test_a_held_out_trace_is_foretold() -> None:
    fitted = fitted_to(Made())
    assert (fitted.costs_s >= 0).all()
    real = serve(requests(300, 30.0, seed=1), scheduler(), Made()).figures()
    foretold = serve(requests(300, 30.0, seed=1), scheduler(), fitted).figures()
    assert foretold["output_tokens_per_s"] == pytest.approx(real["output_tokens_per_s"], rel=0.02)
    for name, part, within in (("tpot_ms", "p50", 0.03), ("itl_ms", "p99", 0.05), ("ttft_ms", "p50", 0.05)):
        assert foretold[name][part] == pytest.approx(real[name][part], rel=within)


def test_the_least_squares_have_no_better_neighbour() -> None:
    random = np.random.default_rng(3)
    left, right = random.normal(size=(40, 6)), random.normal(size=40)
    found = non_negative(left, right)
    gain = left.T @ (right - left @ found)  # Kuhn and Tucker: flat where above 0, downhill at 0
    assert (found >= 0).all()
    assert (found == 0).any()
    assert np.allclose(gain[found > 0], 0, atol=1e-9)
    assert (gain[found == 0] <= 1e-9).all()


def test_costs_are_kept(tmp_path: Path) -> None:
    fitted = fit([Timed(np.arange(1.0, 12.0), 0.5), Timed(np.ones(11), 0.25)])
    fitted.save(tmp_path / "costs.json")
    again = Fitted.load(tmp_path / "costs.json")
    assert np.array_equal(again.costs_s, fitted.costs_s)
    assert again.ratios is not None
    assert np.array_equal(again.ratios, replace(fitted).ratios)
    costs_s = dict.fromkeys(NAMES, 1e-3)
    for other in ({}, {"costs_s": costs_s, "spread": [0.9, 1.1]}, {"costs_s": costs_s, "ratios": []}):
        (tmp_path / "other.json").write_text(json.dumps(other), encoding="utf-8")
        with pytest.raises(ValueError, match="holds no costs"):
            Fitted.load(tmp_path / "other.json")
    with pytest.raises(ValueError, match="nothing was computed"):
        fit([])
