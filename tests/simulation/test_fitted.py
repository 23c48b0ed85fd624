"""Costs that steps were made of are found again, and what is fitted can be kept."""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from dataclasses import replace
from functools import cache
from statistics import median

import numpy as np
import pytest

from continuous_batching.batch import Batch
from continuous_batching.engine import Engine, Step
from continuous_batching.slots import SlotPool
from simulation.fitted import (
    NAMES,
    Fitted,
    Timed,
    Vector,
    features,
    fit,
    in_words,
    loads,
    non_negative,
    spread,
    trust,
)
from simulation.replica import serve
from tests.simulation.test_serve import requests, scheduler
from tests.thorough import cases


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


@cache
def fitted_to(device: type[Made]) -> Fitted:
    steps: list[Timed] = []

    def observe(engine: Engine, step: Step) -> None:
        steps.append(Timed(features(step.batch), step.end_s - step.start_s))

    serve(requests(300, 30.0), scheduler(), device(), observe=observe)
    return fit(steps)


def decodes(spans: int) -> Vector:
    """Features of a step that yields a token for each of so many short requests."""
    counted = {"step": 1, "tokens": spans, "spans": spans, "sampled": spans}
    return np.array([float(counted.get(name, 0)) for name in NAMES])


def test_a_load_is_not_taken_for_the_size_of_the_batches_that_it_makes() -> None:
    """Where steps are slow, requests gather. Costs that know no load charge it to the large batches."""
    random = np.random.default_rng(2)
    steps: list[Timed] = []
    for at in range(3000):
        is_slow = at // 100 % 3 == 0
        spans = 4 if random.random() < (0.9 if is_slow else 0.1) else 1
        work_s = 1e-3 * (3 + 0.5 * spans) * (2.5 if is_slow else 1.0) * random.lognormal(0, 0.05)
        steps.append(Timed(decodes(spans), work_s))
    costs_s = fit(steps).costs_s
    of_one, of_four = (float(decodes(spans) @ costs_s) for spans in (1, 4))
    assert of_four / of_one == pytest.approx(5 / 3.5, rel=0.35)  # it would be 107 % too much without loads


def test_loads_of_stretches_are_found_again() -> None:
    random = np.random.default_rng(5)
    modelled_s = random.uniform(1e-3, 2e-2, 960)
    made = np.where(np.arange(960) // 96 % 2 == 0, 1.0, 3.0)
    stalled = np.where(np.arange(960) % 50 == 0, 20.0, 1.0)  # a stall is no load
    found = loads(made * stalled * random.lognormal(0, 0.05, 960))
    assert found == pytest.approx(made / 2, rel=0.05)
    kept = spread(modelled_s * made, modelled_s, made)
    assert [kept.ratio(5e-3, at) for at in (0, 100)] == pytest.approx([1.0, 3.0])


@pytest.mark.slow
def test_a_held_out_trace_is_foretold() -> None:
    fitted = fitted_to(Made)
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


def test_costs_are_kept() -> None:
    fitted = fit([Timed(np.arange(1.0, 12.0), 0.5), Timed(np.ones(11), 0.25)] * 150)
    again = Fitted.from_json(fitted.in_json().encode(), "costs.json")
    assert again.in_json() == fitted.in_json()
    assert np.array_equal(again.costs_s, fitted.costs_s)
    assert again.trust == fitted.trust
    with pytest.raises(ValueError, match="nothing was computed"):
        fit([])
    with pytest.raises(ValueError, match="step 1 took 0 s by the recording's clock"):
        fit([Timed(np.ones(11), 0.25), Timed(np.ones(11), 0.0)])


def test_costs_that_were_changed_are_refused() -> None:
    whole = fit([Timed(np.arange(1.0, 12.0), 0.5), Timed(np.ones(11), 0.25)]).in_json().encode()
    for bit in range(0, 8 * len(whole), cases(13, 1)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        with suppress(UnicodeDecodeError, json.JSONDecodeError):
            if json.loads(data) == json.loads(whole):
                continue  # a space became another
        with pytest.raises(ValueError, match=r"costs\.json holds no costs \("):
            Fitted.from_json(data, "costs.json")
    for other in (b"{}", b"[]", b"[" * 100_000, b'{"crc32": 0}'):
        with pytest.raises(ValueError, match="holds no costs"):
            Fitted.from_json(other, "costs.json")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        pytest.param("costs_s", "step", 10**400, id="huge"),
        ("costs_s", "step", float("nan")),
        ("largest", "tokens", -1),
        ("sizes", "up_to_s", [0.5]),
        ("sizes", "ratios", []),
        ("sizes", "ratios", [[]]),
        ("sizes", "ratios", [1.0]),
        ("sizes", "ranks", []),
        ("sizes", "ranks", [1.0]),
        ("sizes", "ranks", [[0.5]]),
        ("sizes", "loads", [1.0]),
        ("trust", "steps", "many"),
        ("trust", "median_error", None),
    ],
)
def test_costs_that_make_no_sense_are_refused_though_their_checksum_is_right(
    section: str, key: str, value: object
) -> None:
    fields = json.loads(fit([Timed(np.arange(1.0, 12.0), 0.5), Timed(np.ones(11), 0.25)]).in_json())
    del fields["crc32"]
    fields[section][key] = value
    crc32 = zlib.crc32(json.dumps(fields, sort_keys=True).encode())
    with pytest.raises(ValueError, match=r"costs\.json holds no costs \("):
        Fitted.from_json(json.dumps(fields | {"crc32": crc32}).encode(), "costs.json")


class Pauses(Made):
    """The same, where another process takes the core for 30 ms, once in 50 steps."""

    def step_s(self, batch: Batch, slots: SlotPool) -> float:
        return super().step_s(batch, slots) + (30e-3 if self.random.random() < 0.02 else 0.0)


@pytest.mark.slow
def test_a_pause_does_not_grow_with_the_step_that_it_falls_in() -> None:
    """A ratio that a short step had would make a prompt's step take many times as long."""
    real = serve(requests(300, 30.0, seed=1), scheduler(), Pauses()).figures()
    fitted = fitted_to(Pauses)
    foretold = [
        serve(requests(300, 30.0, seed=1), scheduler(), replace(fitted, seed=seed)).figures()
        for seed in range(3)
    ]
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        for part in ("p50", "p99"):
            is_now = median(each[name][part] for each in foretold)
            assert is_now == pytest.approx(real[name][part], rel=0.1), (name, part)


def judged(taken_s: Vector, modelled_s: Vector) -> list[str]:
    return trust(taken_s, modelled_s).doubts()


def test_a_fit_says_when_it_is_not_to_be_trusted() -> None:
    random = np.random.default_rng(0)
    modelled_s = random.uniform(1e-3, 2e-2, 1000)
    taken_s = modelled_s * random.lognormal(0, 0.1, 1000)
    assert judged(taken_s, modelled_s) == []
    (few,) = judged(taken_s[:100], modelled_s[:100])
    assert few == "100 steps are few; record at least 300"
    slower = taken_s * np.where(np.arange(1000) < 500, 1.0, 1.4)
    assert judged(slower, modelled_s)[0].startswith("steps took 38% longer for the same work in the second")
    spell = taken_s * np.where((np.arange(1000) >= 400) & (np.arange(1000) < 600), 0.5, 1.0)
    (changed,) = judged(spell, modelled_s)
    assert changed.startswith("a fifth of the recording took 4")
    assert changed.endswith(" less for the same work: the machine's load changed")
    pauses = taken_s * np.where((np.arange(1000) >= 500) & (np.arange(1000) % 40 == 0), 5.0, 1.0)
    (tail,) = judged(pauses, modelled_s)
    assert "the slowest 1 % of steps took" in tail
    noise = modelled_s * random.lognormal(0, 1.0, 1000)
    assert "half of the steps are more than" in judged(noise, modelled_s)[0]
    even = np.full(1000, 5e-3)
    assert "explains only 0%" in judged(even * random.lognormal(0, 0.25, 1000), even)[0]
    assert judged(even * random.lognormal(0, 0.02, 1000), even) == []


def test_steps_beyond_the_recorded_ones_are_a_doubt() -> None:
    fitted = fitted_to(Made)
    serve(requests(100, 30.0, seed=1), scheduler(), fitted)
    assert fitted.describe()["doubts"] == []
    small = replace(fitted, largest=fitted.largest / 4)
    serve(requests(100, 30.0, seed=1), scheduler(), small)
    said = small.describe()
    assert said["larger_than_recorded"] > 0.05
    (doubt,) = said["doubts"]
    assert doubt.endswith("of the simulated steps are larger than any recorded one")
    assert in_words(said).startswith("is not to be trusted: ")
