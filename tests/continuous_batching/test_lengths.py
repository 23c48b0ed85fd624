"""The numbers of drafts follow what rows and steps have shown, and never cost throughput.

Steps take the time that a cost model gives and guesses are right as often as a test sets, so all is
deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from continuous_batching.batch import Batch
from continuous_batching.engine import Engine, Step
from continuous_batching.policies.batching import StallFree
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import (
    Acceptance,
    Fixed,
    Lengths,
    Source,
    Throughput,
    Verdicts,
    Worth,
)
from continuous_batching.speculation.proposer import Guesses
from continuous_batching.speculation.speculation import Speculation
from continuous_batching.step_time import StepTime
from kv_cache.pages import Index, PagePool
from simulation.replica import Clock, SimulatedRunner
from tests.pairs import pairs
from tests.thorough import cases, first_quick

Cost = Callable[[int, int, int], float]  # seconds of tokens, spans and drafts
ANSWER_TOKENS = 700


class Chance:
    """Guesses the token 0 that is right, or another, each row as often as its own rate says."""

    def __init__(self, rates: list[float], clock: Clock, guess_s: float) -> None:
        self.rates = np.array(rates)
        self.random = np.random.default_rng(7)
        self.clock, self.guess_s = clock, guess_s
        self.num_asked = 0

    def guess(self, rows: Index, most: int) -> Guesses:
        self.num_asked += 1
        self.clock.now_s += self.guess_s
        wrong = self.random.random((len(rows), most)) >= self.rates[rows, None]
        return Guesses(wrong.astype(np.int32), np.full(len(rows), most))


@dataclass
class Costs:
    cost: Cost
    noise: float = 0.0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(1)

    def step_s(self, batch: Batch, slots: SlotPool) -> float:
        seconds = self.cost(batch.num_tokens, batch.num_spans, batch.num_drafts)
        return seconds * (1 + self.noise * float(self.random.exponential()))


def served(
    rates: list[float],
    cost: Cost,
    lengths: Callable[[SlotPool, StepTime], Lengths] | None,
    *,
    most: int = 4,
    noise: float = 0.0,
    overlap: bool = False,
    host_s: float = 0.0,
    guess_s: float = 0.0,
    change: Callable[[Engine, Chance, Step], None] | None = None,
) -> tuple[float, Engine]:
    """Tokens a second of as many rows as there are rates; `lengths` None is plain."""
    clock, num = Clock(), len(rates)
    slots, step_time = SlotPool(num, ANSWER_TOKENS + 16, 16), StepTime()
    proposer = Chance(rates, clock, guess_s)
    scheduler = Scheduler(
        slots,
        PagePool(num * 50),
        StallFree(),
        max_batch_tokens=num * 16,
        vocab_size=8,
        speculation=lengths and Speculation(slots, proposer, lengths(slots, step_time), most),
        step_time=step_time,
    )
    engine = Engine(scheduler, SimulatedRunner(clock, Costs(cost, noise), slots), clock, overlap=overlap)
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    for number in range(num):
        engine.add(Request(str(number), np.arange(4), params))
    while len(slots.busy) == num or engine.scheduler.counters.steps == 0:  # all of them, to the first end
        clock.now_s += host_s
        step = engine.step()
        assert step is not None
        if change is not None:
            change(engine, proposer, step)
    return engine.scheduler.counters.sampled_tokens / clock.now_s, engine


def memory_bound(tokens: int, spans: int, drafts: int) -> float:
    return max(0.010, tokens * 0.0002)


def cpu(tokens: int, spans: int, drafts: int) -> float:
    """As measured with the tiny model on two cores: the first draft changes how attention is computed."""
    return 0.011 + 0.0008 * tokens + 0.003 * (drafts > 0) + 0.0003 * spans * (drafts > 0)


def compute_bound(tokens: int, spans: int, drafts: int) -> float:
    return 0.001 + 0.001 * tokens


def tiles(tokens: int, spans: int, drafts: int) -> float:
    return 0.004 + 0.002 * -(-tokens // 16)


def graphs(tokens: int, spans: int, drafts: int) -> float:
    """A step with drafts is launched operator by operator, others as a captured graph."""
    return 0.030 if drafts else 0.010 + 0.00001 * tokens


COSTS: list[Cost] = [memory_bound, cpu, compute_bound, tiles, graphs]


@cache
def plain_rate(cost: Cost, num: int, noise: float) -> float:
    """Tokens a second without guesses, however many of them would be right."""
    return served([0.0] * num, cost, None, noise=noise)[0]


@pytest.mark.parametrize(
    ("cost", "num", "rate", "noise"),
    first_quick(
        2,
        pairs(
            *(COSTS, cases([1, 16], [1, 4, 16, 64])),
            *(cases([0.0, 0.3, 0.8], [0.0, 0.3, 0.6, 0.8, 0.95]), [0.0, 0.15]),
        ),
    ),
)
def test_throughput_never_falls_below_plain(cost: Cost, num: int, rate: float, noise: float) -> None:
    adaptive, _ = served([rate] * num, cost, Throughput, noise=noise)
    assert adaptive >= 0.98 * plain_rate(cost, num, noise)


@pytest.mark.parametrize(("cost", "num"), [(memory_bound, 1), (cpu, 8), (tiles, 8)])
def test_it_gains_nearly_what_all_drafts_gain_where_they_pay(cost: Cost, num: int) -> None:
    fixed, _ = served([0.95] * num, cost, lambda *_: Fixed())
    adaptive, _ = served([0.95] * num, cost, Throughput)
    plain, _ = served([0.95] * num, cost, None)
    assert fixed > 1.5 * plain
    assert adaptive >= 0.95 * fixed


def test_each_row_has_drafts_by_its_own_acceptance() -> None:
    rates = [0.95, 0.05] * 8
    fixed, _ = served(rates, cpu, lambda *_: Fixed())
    plain, _ = served(rates, cpu, None)
    drafted = np.zeros(len(rates))

    def count(engine: Engine, proposer: Chance, step: Step) -> None:
        if engine.scheduler.counters.steps > 60:
            np.add.at(drafted, step.batch.slots, step.batch.stops - step.batch.starts - 1)

    adaptive, _ = served(rates, cpu, Throughput, change=count)
    assert adaptive > 1.05 * max(plain, fixed)
    assert drafted[::2].sum() > 8 * drafted[1::2].sum()


@pytest.mark.parametrize("overlap", [False, True])
def test_it_comes_back_from_zero(overlap: bool) -> None:
    """Guesses are wrong at first, and right from step 300 on."""
    seen: list[int] = []

    def turn(engine: Engine, proposer: Chance, step: Step) -> None:
        proposer.rates[:] = 0.0 if len(seen) < 300 else 0.95
        seen.append(step.batch.num_drafts)

    def cost(tokens: int, spans: int, drafts: int) -> float:
        return cpu(tokens, spans, drafts) if len(seen) < 300 else memory_bound(tokens, spans, drafts)

    plain, _ = served([0.0], cost, None, overlap=overlap)
    adaptive, _ = served([0.0], cost, Throughput, overlap=overlap, change=turn)
    assert sum(each > 0 for each in seen[100:300]) <= 4, "at zero it hardly drafts"
    assert sum(each > 0 for each in seen[300:]) > 20, "it came back"
    assert adaptive > plain


@pytest.mark.parametrize("rate", cases([0.95], [0.0, 0.95]))
def test_steps_hardly_wait_for_guesses_that_do_not_pay(rate: float) -> None:
    waits: list[bool] = []

    def note(engine: Engine, proposer: Chance, step: Step) -> None:
        waits.append(not len(step.batch.unknown))

    served([rate] * 64, compute_bound, Throughput, overlap=True, change=note)
    assert sum(waits[200:]) <= len(waits[200:]) / 40
    served([0.95], memory_bound, Throughput, overlap=True, change=note)
    assert all(waits[-20:]), "what pays is waited for"


def test_an_estimate_follows_its_request_to_another_row() -> None:
    slots = SlotPool(2, 8, 4)
    slots.number[:] = 0, 1
    acceptance = Acceptance(slots)
    rows = np.array([0, 1])
    prior = acceptance.rates(rows)
    assert (prior == prior[0, 0]).all()
    for _ in range(20):
        acceptance.learn(Verdicts(rows, np.array([4, 4]), np.array([4, 0])))
    good, bad = acceptance.rates(rows).T
    assert good.min() > 0.8 > 0.2 > bad[0]
    slots.number[:] = 1, 0  # both were preempted, and came back in the other's row
    assert np.allclose(acceptance.rates(rows).T, [bad, good])
    slots.number[:] = 2, 0
    new = acceptance.rates(rows).T[0]
    assert bad[0] < new[0] < good[0], "a new request is like all of them"
    slots.number[:] = 2, 1
    assert np.allclose(acceptance.rates(rows).T[1], bad)


def test_first_guesses_say_nothing_of_later_ones() -> None:
    slots = SlotPool(1, 8, 4)
    acceptance, row = Acceptance(slots), np.array([0])
    acceptance.learn(Verdicts(row, np.array([3]), np.array([3])))
    before = acceptance.rates(row)
    for _ in range(30):
        acceptance.learn(Verdicts(row, np.array([1]), np.array([0])))
    after = acceptance.rates(row)
    assert after[0, 0] < 0.2
    assert after[1, 0] == before[1, 0]


def test_guesses_after_a_wrong_one_say_nothing() -> None:
    slots, row = SlotPool(1, 8, 4), np.array([0])
    few, many = Acceptance(slots), Acceptance(slots)
    few.learn(Verdicts(row, np.array([2]), np.array([1])))
    many.learn(Verdicts(row, np.array([6]), np.array([1])))
    assert (few.rates(row) == many.rates(row)).all()


def test_the_source_s_formula_chooses_the_source_s_lengths() -> None:
    def best(*shares: tuple[int, int]) -> int:
        source = Source(base=5, least=1, most=8, window=4)
        for right, guessed in shares:
            source.learn(Verdicts(np.array([0]), np.array([guessed]), np.array([right])))
        return source.best()

    assert best() == 5, "nothing is known"
    assert best((0, 4), (0, 4)) == 5, "a rate below 0.001"
    assert best((4, 4)) == 8
    assert best((1, 4)) == 1  # (1 + a + a^2) / 1.2 is less than (1 + a) / 1.1
    assert best((1, 2)) == 2
    assert best((3, 4)) == 5
    assert best((0, 4), *[(4, 4)] * 4) == 8, "of a window"


@pytest.mark.parametrize(("cost", "rate"), [(memory_bound, 0.95), (compute_bound, 0.3), (tiles, 0.95)])
def test_guesses_that_cost_the_host_more_than_they_bring_are_hardly_made(cost: Cost, rate: float) -> None:
    """A guess that takes a fifth of the step, as of a small model on a slow host."""
    guess_s = cost(32, 32, 0) / 5

    def count(engine: Engine, proposer: Chance, step: Step) -> None:
        asked.append(proposer.num_asked)

    asked: list[int] = []
    plain, _ = served([rate] * 32, cost, None)
    adaptive, _ = served([rate] * 32, cost, Throughput, guess_s=guess_s, change=count)
    free, _ = served([rate] * 32, cost, Throughput)
    if free < 1.3 * plain:
        assert asked[-1] - asked[100] <= (len(asked) - 100) / 10
        assert adaptive >= 0.93 * plain, "64 of 700 steps are there to learn"
    else:
        assert adaptive >= 1.05 * plain


def test_guesses_that_pay_by_little_are_made_on() -> None:
    worth, asked = Worth(), 0
    for _ in range(2000):
        asked += worth.asks
        worth.observe(8, 11 if worth.asks else 8, 1.3e-3 if worth.asks else 1e-3)
    assert asked >= 0.95 * 2000


def test_guesses_that_pay_again_are_made_again() -> None:
    worth, asked = Worth(), []
    for number in range(4000):
        asked.append(worth.asks)
        brought = 8 if number < 1500 else 12
        worth.observe(8, brought if worth.asks else 8, 1.1e-3 if worth.asks else 1e-3)
    assert sum(asked[200:1500]) <= 130
    assert sum(asked[2500:]) >= 1400


def test_another_load_is_learnt_anew() -> None:
    worth, asked = Worth(), []
    for number in range(1000):
        asked.append(worth.asks)
        num_rows, cost = (64, 1.2) if number < 500 else (1, 1.0)
        worth.observe(
            num_rows, (1 + worth.asks) * num_rows if num_rows == 1 else num_rows, cost if worth.asks else 1.0
        )
    assert sum(asked[200:500]) <= 60
    assert sum(asked[501:]) >= 480


def test_one_long_step_is_the_machine_s_business() -> None:
    worth, asked = Worth(), 0
    for number in range(1000):
        asked += worth.asks
        worth.observe(8, 12 if worth.asks else 8, 0.5 if number == 300 else 1e-3)
    assert asked >= 950
