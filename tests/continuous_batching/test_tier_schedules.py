"""Each request has the tokens that it would have alone, whatever pages a tier finds, when and how many."""

from __future__ import annotations

import copy
import io
import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from continuous_batching.recording.format import read_entries
from continuous_batching.recording.recorder import Recorder
from continuous_batching.recording.replay import replay
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.scheduling.validation import GiveUp
from tests.continuous_batching.checksum import ChecksumRunner
from tests.continuous_batching.test_schedules import Arrival, arrivals, check_answers, schedulers, serve
from tests.continuous_batching.tier import MemoryTier
from tests.thorough import cases


class InMemory:
    """A recording that is not written to a file."""

    def __init__(self) -> None:
        self.data = io.BytesIO()

    def write(self, record: bytes) -> None:
        self.data.write(record)

    close = write


@settings(
    max_examples=cases(20, 1000), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    made=schedulers(has_tier=True),
    plan=st.lists(arrivals, min_size=1, max_size=10),
    resizes=st.dictionaries(
        st.integers(0, 30),
        st.tuples(st.integers(-20, 20), st.sampled_from(["nothing", "cached", "running"])),
        max_size=3,
    ),
    overlap=st.booleans(),
    chance=st.integers(0, 2**32),
)
def test_every_schedule_gives_the_same_tokens_with_a_tier_that_several_engines_share(
    made: tuple[Scheduler, ChecksumRunner],
    plan: list[Arrival],
    resizes: dict[int, tuple[int, GiveUp]],
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
        recording = InMemory()
        recorder = Recorder({}, recording)
        ended = serve(scheduler, runner, plan, resizes, overlap=overlap, observer=recorder, tier=tier)
        recorder.close()
        check_answers(ended, runner.fail)
        late = [each for each in scheduler.tables.take_copies() if each.way == "from_tier"]
        assert len(tier.handed) == sum(len(each.targets) for each in late), "handed over, and never asked for"
        recording.data.seek(0)
        twin, _ = copy.deepcopy(made)
        for _ in replay(read_entries(recording.data), twin):
            pass
        assert twin.counters == scheduler.counters
