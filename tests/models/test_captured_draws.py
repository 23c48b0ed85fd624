"""Captured steps choose the tokens that steps of single launches choose, and leave them to the next step."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from continuous_batching.batch import NOT_FINITE, Batch
from continuous_batching.constraints import Constraint
from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams, packed_ids
from continuous_batching.speculation.lengths import Fixed
from continuous_batching.speculation.speculation import Speculation
from models.sampling import draw_columns
from models.sampling.sampler import Sampler
from models.step.graphs import DecodeGraphs
from models.step.runner import ModelRunner
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import settings, stand_in_alone
from tests.knowing import Knowing
from tests.matchers import Staircase
from tests.thorough import cases, first_quick

pytestmark = [pytest.mark.npu, stand_in_alone]

BOTH = [False, True]
ALLOWED, LIKELIEST, WORDS = range(300, 340), 301, ((320,), (301, 301))
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "top-k": {"temperature": 1.3, "top_k": 7},
    "all three": {"temperature": 1.1, "top_k": 40, "top_p": 0.7, "min_p": 0.02},
    "temperature": {"temperature": 1.0},
    "penalty": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3},
    "log-probabilities": {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
    "masks": {
        "temperature": 0.8,
        "allowed_token_ids": packed_ids(ALLOWED),
        "bad_words": WORDS,
        "logit_bias": {77: 100.0, LIKELIEST: 100.0},
    },
    "grammar": {"temperature": 1.5, "grammar": "a staircase"},
}


def engine_of(*, graphs: int, overlap: bool, drafts: int = 0) -> Engine:
    overrides = [*settings("npu"), "cache.num_pages=60", "scheduler.num_slots=5", f"device.graphs={graphs}"]
    overrides += ["scheduler.max_batch_tokens=16", f"scheduler.overlap={str(overlap).lower()}"]
    if drafts:
        overrides += ["speculation.kind=ngram", f"speculation.max_tokens={drafts}"]
    return build(load(ROOT / "recipes/tiny/cpu.yaml", overrides)).engine


def requests(ways: list[str]) -> list[Request]:
    """Of different lengths."""
    random = np.random.default_rng(11)
    made = []
    for number, way in enumerate(ways):
        params = SamplingParams(
            max_tokens=int(random.integers(3, 15)), seed=number, ignore_eos=way != "grammar", **PARAMS[way]
        )
        request = Request(str(number), random.integers(5, 1000, int(random.integers(1, 20))), params)
        request.constraint = Constraint(Staircase) if way == "grammar" else None
        made.append(request)
    return made


def serve(engine: Engine, ways: list[str]) -> list[tuple[list[int], str | None]]:
    """The answers of requests that come and go while others decode."""
    made = requests(ways)
    for number, request in enumerate(made):
        engine.add(request)
        if number % 3:
            engine.step()
    while engine.has_work:
        engine.step()
    return [(request.answer.tolist(), request.finish_reason) for request in made]


@cache
def eager_answers(*ways: str) -> list[tuple[list[int], str | None]]:
    """What steps of single launches answer, one after another."""
    return serve(engine_of(graphs=0, overlap=False), [*ways])


@pytest.mark.slow
@pytest.mark.parametrize("width", cases([4], [1, 4]))
def test_drafts_are_checked_in_captured_steps(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = ["top-p", "greedy", "temperature", "greedy", "penalty", "top-k", "log-probabilities"]
    expected = eager_answers(*ways)
    engine = engine_of(graphs=24, overlap=True, drafts=3)
    stories = {
        each.id: [*each.prompt.tolist(), *answer] for each, (answer, _) in zip(requests(ways), expected)
    }
    slots, runner = engine.slots, engine.runner
    engine.scheduler.speculation = Speculation(
        slots, Knowing(slots, lambda asked: stories[asked.id], 1024, 0.7), Fixed(), 3
    )
    assert isinstance(runner, ModelRunner)
    assert runner.graphs is not None
    if width == 1:
        runner.graphs.span_rows.clear()
    replayed, replay = [], torch.npu.NPUGraph.replay
    monkeypatch.setattr(
        torch.npu.NPUGraph, "replay", lambda graph: replayed.append(id(graph)) or replay(graph)
    )
    assert serve(engine, ways) == expected
    graphs = {id(step.graph) for (_, each), step in runner.graphs.steps.items() if each == width}
    assert len([each for each in replayed if each in graphs]) > 5
    assert engine.scheduler.counters.accepted_tokens > 5


@pytest.mark.parametrize(
    ("ways", "overlaps"),
    first_quick(
        1,
        [
            (["top-p", "greedy", "all three", "top-k", "top-p", "greedy", "top-k"], cases([True], BOTH)),
            (
                ["temperature", "greedy", "top-p", "temperature", "temperature", "top-k", "greedy"],
                cases([False], BOTH),
            ),
            (
                ["penalty", "log-probabilities", "greedy", "top-k", "top-p", "all three", "top-p", "top-k"],
                cases([True], BOTH),
            ),
            (["masks", "greedy", "grammar", "top-k", "masks", "greedy"], cases([True], BOTH)),
        ],
    ),
    ids=[
        "drawn in the graph",
        "drawn by turns in it and outside",
        "with changed and reported logits",
        "with masks",
    ],
)
def test_tokens_are_those_of_steps_that_are_not_captured(
    ways: list[str], overlaps: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = eager_answers(*ways)
    replayed: list[object] = []
    replay = torch.npu.NPUGraph.replay
    monkeypatch.setattr(torch.npu.NPUGraph, "replay", lambda graph: replayed.append(graph) or replay(graph))
    for overlap in overlaps:
        engine = engine_of(graphs=4, overlap=overlap)
        draws = {id(step.draw) for step in engine.runner.graphs.steps.values()}
        replayed.clear()
        assert serve(engine, ways) == expected
        drawn = [id(graph) in draws for graph in replayed]
        assert 0 < sum(drawn) < len(drawn)
    for way, (answer, _) in zip(ways, expected):
        if way == "masks":  # whose likeliest token ends a word
            assert LIKELIEST in answer
            assert set(answer) <= set(ALLOWED) - {320}
            assert (LIKELIEST, LIKELIEST) not in pairwise(answer)
        elif way == "grammar":
            assert answer == [415, 416, 417, 418, 419, 2][: len(answer)]


def test_columns_keep_every_bit_and_leave_out_what_changes_nothing() -> None:
    floats = {name: np.array([0.1, 1e-38, 3.0], np.float32) * n for n, name in enumerate(draw_columns.FLOATS)}
    places = np.array([3, 4, 5, 2, 3, 4])
    given = {**floats, "k_places": places, "drawn": np.array([1, 0, 1])}
    found = draw_columns.unpacked(torch.from_numpy(draw_columns.packed(given, 3)))
    assert {name: found[name].tolist() for name in given} == {
        name: each.tolist() for name, each in given.items()
    }
    sparse = draw_columns.unpacked(torch.from_numpy(draw_columns.packed({"excess": floats["excess"]}, 3)))
    assert not sparse["min_p"].any()
    assert not sparse["k_places"].any()
    assert sparse["drawn"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("graphs", first_quick(1, [4, 0]))
def test_what_is_no_token_is_not_looked_up_by_the_step_after_it(
    graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is ahead of the device, which found no token for a row: the others go on."""
    ways = ["top-p", "greedy", "top-k", "greedy"]
    expected = eager_answers(*ways)
    engine = engine_of(graphs=graphs, overlap=True)
    runner: Any = engine.runner
    begin, failed = runner._begin, []

    def after_a_failure(batch: Any) -> Any:
        if len(batch.unknown) > 1 and batch.is_one_token_each and not failed:
            failed.append(runner.slots.requests[batch.slots[batch.unknown[0]]].id)
            place = int(runner._last.places(batch)[0])
            runner._last.tokens[place] = NOT_FINITE
            if runner.graphs is not None:
                runner.graphs._table[place] = NOT_FINITE
        return begin(batch)

    monkeypatch.setattr(runner, "_begin", after_a_failure)
    found = serve(engine, ways)
    assert len(failed) == 1
    others = [number for number in range(len(ways)) if str(number) not in failed]
    assert [found[number] for number in others] == [expected[number] for number in others]


def test_a_device_that_cannot_capture_draws_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """No source says whether it can: the probe of verify_npu.sh finds out."""
    draw, captured = Sampler.draw, []

    def refused(self: Sampler, logits: torch.Tensor, *others: Any) -> torch.Tensor:
        if torch.npu.is_current_stream_capturing():
            captured.append(len(logits))
            raise RuntimeError("aclnnSort: not in a capture\nand where it happened")
        return draw(self, logits, *others)

    monkeypatch.setattr(Sampler, "draw", refused)
    with pytest.raises(
        ValueError, match=r"\(aclnnSort: not in a capture\); run `bash scripts/verify_npu.sh`"
    ):
        engine_of(graphs=4, overlap=False)
    assert captured == [4]


def test_updates_are_not_sent_behind_the_replay_that_waits_for_them() -> None:
    ways = ["top-p", "greedy", "top-k", "greedy"]
    expected = eager_answers(*ways)
    engine = engine_of(graphs=4, overlap=True)
    with torch.npu.stream(engine.runner.attention.update_stream):
        assert serve(engine, ways) == expected


def test_inputs_stay_until_a_slow_device_has_copied_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It begins a step once the host has sent the next one, or has none to send."""
    ways = ["top-p", "greedy", "top-k", "greedy"]
    expected = eager_answers(*ways)
    engine = engine_of(graphs=4, overlap=True)
    runner: Any = engine.runner
    begin, land = runner._begin, engine._land
    other, held = torch.npu.Stream(), list[Any]()

    @torch.inference_mode()  # The steps run inside of it, as the runner's do.
    def release() -> None:
        while held:
            held.pop().record(other)

    def begin_later(batch: Any) -> Any:
        gate = torch.npu.ExternalEvent()
        gate.wait(torch.npu.current_stream())
        chosen = begin(batch)
        release()
        held.append(gate)
        return chosen

    def land_all(started: Any) -> Any:
        if not engine._started:
            release()
        return land(started)

    monkeypatch.setattr(runner, "_begin", begin_later)
    monkeypatch.setattr(engine, "_land", land_all)
    assert serve(engine, ways) == expected


def test_a_capture_that_cannot_begin_leaves_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(graphs=0, overlap=False)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("there is no room for another graph")

    monkeypatch.setattr(torch.npu.NPUGraph, "capture_begin", refuse)
    before = torch.npu.current_stream()
    with pytest.raises(RuntimeError, match="no room"):
        engine.runner.capture(4)
    assert torch.npu.current_stream() == before


def test_as_many_captured_steps_as_there_are_stages_wait_with_inputs_of_their_own():
    runner = engine_of(graphs=0, overlap=False).runner
    parts = runner.decoder, runner.cache, runner.attention, runner.sampler, runner.slots
    graphs = DecodeGraphs(*parts, 1, 1, stages=3)
    graphs.capture()
    made = requests(["greedy"] * 3)
    rows = []
    for number, request in enumerate(made):
        request.number = number
        rows.append(runner.slots.take(request))
    filled = []
    for row in rows:
        span = np.array([row])
        filled.append(graphs.filled(Batch(span, span * 0, span * 0 + 1, span * 0, span, span * 0 + 1)))
    assert [int(each.inputs.columns[0, 0]) for each in filled] == [request.prompt[0] for request in made]
