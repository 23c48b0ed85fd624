"""What a picture of a run shows is what its steps did."""

from __future__ import annotations

import numpy as np

from benchmark.charts import accepted
from benchmark.run_record import Timeline
from continuous_batching.request import Request, SamplingParams
from continuous_batching.speculation.lengths import Fixed
from continuous_batching.speculation.speculation import Speculation
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.models.test_draft_identity import Knowing


def test_right_drafts_are_drawn_where_they_were_checked() -> None:
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
