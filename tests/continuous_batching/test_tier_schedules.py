"""Each request has the tokens that it would have alone, whatever pages a tier finds, when and how many."""

from __future__ import annotations

import copy
import random

from hypothesis import strategies as st

from continuous_batching.recording.recorder import Recorder
from continuous_batching.recording.replay import replay
from tests.continuous_batching.test_recorder import Memory
from tests.continuous_batching.test_schedules import (
    Arrival,
    Made,
    Resizes,
    check_answers,
    over_schedules,
    schedulers,
    serve,
)
from tests.continuous_batching.tier import MemoryTier


@over_schedules(10, 1000, schedulers(has_tier=True), overlap=st.booleans(), chance=st.integers(0, 2**32))
def test_every_schedule_gives_the_same_tokens_with_a_tier_that_several_engines_share(
    made: Made,
    plan: list[Arrival],
    resizes: Resizes,
    overlap: bool,
    chance: int,
) -> None:
    drawn, pages = random.Random(chance), dict[bytes, bytes]()
    for _ in range(2):
        scheduler, runner = copy.deepcopy(made)
        tier = MemoryTier(
            runner,
            pages,
            wait=lambda: drawn.choice([0, 0, 1, 5]),
            most=lambda: drawn.choice([1000, 1000, 1, 0]),
        )
        recording = Memory()
        recorder = Recorder({}, recording)
        ended = serve(scheduler, runner, plan, resizes, overlap=overlap, observer=recorder, tier=tier)
        recorder.close()
        check_answers(ended, runner.fail)
        late = [each for each in scheduler.tables.take_copies() if each.way == "from_tier"]
        assert len(tier.handed) == sum(len(each.targets) for each in late), "handed over, and never asked for"
        twin, _ = copy.deepcopy(made)
        for _ in replay(recording.entries(), twin):
            pass
        assert twin.counters == scheduler.counters
