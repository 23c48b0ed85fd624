"""A draft model in captured steps: the same tokens, and a replay in place of each step's launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from attention.reference import Attention
from continuous_batching.batch import Batch
from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from models.step.graph_inputs import GraphInputs
from models.step.graphs import ladder
from models.step.runner import ModelRunner
from recipes.assembly.engine import build
from recipes.machine import Npu, start
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import settings, stand_in_alone
from tests.models.test_captured_draws import serve

pytestmark = [pytest.mark.npu, stand_in_alone]

WAYS = ["top-p", "greedy", "temperature", "greedy", "penalty", "top-k", "log-probabilities"]
MOST = 3
Answers = list[tuple[list[int], str | None]]


def engine_of(*, graphs: int, drafts: bool = True) -> Engine:
    overrides = [*settings("npu"), "cache.num_pages=60", "scheduler.num_slots=5", f"device.graphs={graphs}"]
    overrides += ["scheduler.max_batch_tokens=32", "scheduler.overlap=true"]
    if drafts:
        overrides += ["speculation.kind=draft", f"speculation.draft_path={ROOT / 'recipes/tiny/draft'}"]
        overrides += [f"speculation.max_tokens={MOST}", "speculation.adaptive=fixed"]
    return build(load(ROOT / "recipes/tiny/cpu.yaml", overrides)).engine


def runner_of(engine: Engine) -> ModelRunner:
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner


@pytest.fixture(scope="module")
def expected() -> Answers:
    """What is answered without drafts."""
    return serve(engine_of(graphs=0, drafts=False), WAYS)


@pytest.fixture(scope="module")
def num_right(expected: Answers) -> tuple[int, int]:
    """How many drafts are right where nothing is captured, once all are answered and twice."""
    eager, counts = engine_of(graphs=0), []
    for num_gone in (0, 5):
        eager.resize(eager.scheduler.pool.num_pages - num_gone)
        assert serve(eager, WAYS) == expected
        counts.append(eager.scheduler.counters.accepted_tokens)
    return counts[0], counts[1]


@pytest.mark.slow
def test_drafts_are_made_and_checked_in_captured_steps(expected: Answers, num_right: tuple[int, int]) -> None:
    engine = engine_of(graphs=24)
    runner = runner_of(engine)
    assert runner.graphs is not None
    assert runner.drafter is not None
    assert runner.drafter.graphs is not None
    assert serve(engine, WAYS) == expected
    assert engine.scheduler.counters.accepted_tokens == num_right[0] > 5
    pages = engine.scheduler.pool.num_pages
    engine.resize(pages - 5)  # what was captured before reads tensors that are gone
    assert serve(engine, WAYS) == expected
    assert engine.scheduler.counters.accepted_tokens == num_right[1]


def asked_in_a_step(engine: Engine) -> Counter[tuple[str, bool]]:
    """What a step with drafts asks of the device: of which kind, and whether within a graph."""
    machine = start(load(ROOT / "recipes/tiny/cpu.yaml", settings("npu")).device)
    assert isinstance(machine, Npu)
    assert machine.launch_log is not None
    for number in range(4):
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        engine.add(Request(str(number), np.arange(300 + number, 312 + number), params))
    for _ in range(4):
        engine.step()
    with machine.launch_log.reading() as asked:
        step = engine.step()
    assert step is not None
    assert step.batch.num_drafts == 4 * MOST
    return Counter((each.kind, each.in_graph) for each in asked)


@pytest.mark.slow
def test_a_step_of_the_draft_model_costs_a_replay_and_not_its_launches() -> None:
    eager, captured = (asked_in_a_step(engine_of(graphs=graphs)) for graphs in (0, 24))
    kinds = ("launch", False), ("to device", False), ("replay", False)
    assert [eager[kind] for kind in kinds] == [152, 19, 0]
    assert [captured[kind] for kind in kinds] == [8, 6, MOST + 1]


@pytest.mark.slow
def test_inputs_are_changed_once_the_device_has_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the steps that make drafts, which may be more than there are places for inputs."""
    noted: list[tuple[str, GraphInputs]] = []
    fill = GraphInputs.fill

    def filled(inputs: GraphInputs, batch: Batch) -> None:
        noted.append(("filled", inputs))
        fill(inputs, batch)

    def queued(device: torch.device) -> Callable[[], None]:
        inputs = noted[-1][1]
        noted.append(("copied", inputs))
        return lambda: noted.append(("waited", inputs))

    monkeypatch.setattr(GraphInputs, "fill", filled)
    monkeypatch.setattr("models.step.graphs.queued", queued)
    serve(engine_of(graphs=24), WAYS)
    last = dict[GraphInputs, str]()
    for what, inputs in noted:
        assert (what, last.get(inputs)) != ("filled", "copied")
        last[inputs] = what
    assert sum(what == "waited" for what, _ in noted) > 10


def test_where_the_device_holds_too_few_graphs_the_draft_model_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(
        Attention, "holds", lambda _, sizes, beside, joins: bool(asked.append((sizes, beside)))
    )
    engine = engine_of(graphs=12)
    drafter, graphs = runner_of(engine).drafter, runner_of(engine).graphs
    assert drafter is not None
    assert drafter.graphs is None
    assert graphs is not None
    others = ladder(2 * 5, 16)
    assert asked == [(graphs.sizes, len(others) + len(graphs.span_rows))]
