"""The figures and the picture of a run show what its steps did."""

from __future__ import annotations

import numpy as np

from benchmark.run_record import StepRecord, Timeline, means_over_time, percentiles
from continuous_batching.request import Request, SamplingParams
from continuous_batching.speculation.lengths import Fixed
from continuous_batching.speculation.speculation import Speculation
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.models.test_draft_identity import Knowing


def test_right_drafts_are_drawn_where_they_were_checked() -> None:
    from benchmark.charts import accepted  # imported here because it imports matplotlib

    recipe = load(ROOT / "recipes/tiny/cpu.yaml", ["scheduler.num_slots=3", "device.compile=false"])
    engine = build(recipe).engine
    stories: dict[str, list[int]] = {}
    for share in (0.0, 0.7):  # the first run tells what the second one guesses
        if stories:
            knowing = Knowing(engine.slots, stories, share)
            engine.scheduler.speculation = Speculation(engine.slots, knowing, Fixed(), 3)
        timeline = Timeline(engine.scheduler.counters)
        params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
        made = [Request(str(number), np.arange(5, 9 + number), params) for number in range(5)]
        for request in made:
            engine.add(request)
        while engine.has_work:
            step = engine.step()
            assert step is not None
            timeline.record(engine, step)
        if not stories:
            assert accepted(timeline) == {}
            stories |= {each.id: each.tokens.tolist() for each in made}
    counts = [count for step in timeline.steps for count in step.num_accepted]
    assert sum(counts) == engine.scheduler.counters.accepted_tokens > 10
    drawn = sum(len(stretches) for stretches in accepted(timeline).values())
    assert drawn == sum(count > 0 for count in counts)


def test_means_over_time_count_idle_time_and_no_gap_between_steps() -> None:
    def step(start_s: float, end_s: float, running: int, waiting: int, ended: int) -> StepRecord:
        return StepRecord(start_s, end_s, [0], ["a"], [1], [True], 0, running, waiting, ended)

    steps = [step(0, 1, 2, 1, 1), step(1.5, 2, 2, 0, 2), step(8, 9, 1, 0, 1)]
    assert means_over_time(steps, [0, 0, 0, 8], 10.0) == {"mean_running": 0.5, "mean_in_system": 0.6}
    long = [step(0, 1, 2, 0, 1), step(1, 2, 2, 0, 2)]
    assert means_over_time(long, [0, 0, 0.25], 2.0)["mean_in_system"] == 2.375, "it came during a step"


def test_percentiles_are_in_milliseconds() -> None:
    assert percentiles([0.001, 0.002, 0.003]) == {"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98}
    assert percentiles([]) == {}
