"""Whatever is guessed, every schedule gives each request the tokens it would get alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import strategies as st

from continuous_batching.engine import Engine
from continuous_batching.policies.batching import StallFree
from continuous_batching.policies.prefill_budget import AdaptiveChunks
from continuous_batching.queueing import FairShare, WaitingQueue
from continuous_batching.recording.format import Scheduled, read_entries, unpacked
from continuous_batching.recording.recorder import Recorder, RecordingFile
from continuous_batching.recording.replay import Replayed, replay
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Fixed
from continuous_batching.speculation.proposer import NGram
from continuous_batching.speculation.speculation import Speculation
from continuous_batching.step_time import StepTime
from kv_cache.pages import PagePool
from tests.continuous_batching import test_schedules
from tests.continuous_batching.checksum import VOCAB_SIZE, ChecksumRunner, story
from tests.continuous_batching.recount import recount
from tests.continuous_batching.test_schedules import (
    DEPTHS,
    EOS,
    Arrival,
    Made,
    Resizes,
    check_answers,
    over_schedules,
    serve,
)
from tests.knowing import Knowing
from tests.pairs import pairs
from tests.simulation.recorded import follow, recorded_run

Rightness = Literal["right", "wrong", "mixed", "ngram"]


def speculation(slots: SlotPool, rightness: Rightness, most: int, seed: int) -> Speculation:
    if rightness == "ngram":
        return Speculation(slots, NGram(slots), Fixed(), most)
    share = {"right": 1.0, "wrong": 0.0, "mixed": 0.7}[rightness]
    return Speculation(slots, Knowing(slots, story, VOCAB_SIZE, share, seed), Fixed(), most)


@st.composite
def schedulers(draw: st.DrawFn, depths: Sequence[int] = (1,)) -> Made:
    made = draw(test_schedules.schedulers(depths))
    scheduler, _ = made
    scheduler.speculation = speculation(
        scheduler.slots,
        draw(st.sampled_from(["right", "wrong", "mixed", "mixed", "ngram"])),
        draw(st.sampled_from([1, 2, 5, 20])),
        draw(st.integers(0, 9)),
    )
    return made


@over_schedules(20, 2500, schedulers(DEPTHS), overlap=st.booleans())
def test_every_schedule_with_drafts_gives_the_tokens_of_each_request_alone(
    made: Made, plan: list[Arrival], resizes: Resizes, overlap: bool
) -> None:
    scheduler, runner = made
    ended = serve(scheduler, runner, plan, resizes, overlap=overlap)
    check_answers(ended, runner.fail)
    assert not any(each.num_drafted for each in ended.values() if each.params.max_draft_tokens == 0)
    assert not len(scheduler.slots.busy)
    assert scheduler.pool.num_free + scheduler.prefix.num_idle == scheduler.pool.num_pages - 1


def small(rightness: Rightness, seed: int, most: int = 6) -> Scheduler:
    """One that must preempt, swap and compact."""
    slots, step_time = SlotPool(4, 48, 4), StepTime()
    return Scheduler(
        slots,
        PagePool(16),
        StallFree(AdaptiveChunks(step_time, 0.4, 1, 30, 1)),  # decides by the shapes and the times of steps
        step_time=step_time,
        max_batch_tokens=16,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        host_pool=PagePool(5),
        compact_every_steps=3,
        compact_pages_per_step=1,
        speculation=speculation(slots, rightness, most, seed),
    )


def recorded(path: Path, made: Scheduler, seed: int, *, overlap: bool) -> list[Request]:
    """Serve random requests and record it."""
    random, now = np.random.default_rng(seed), 0.0
    engine = Engine(
        made, ChecksumRunner(made.slots, made.pool, PagePool(5)), clock=lambda: now, overlap=overlap
    )
    engine.observer = Recorder({}, RecordingFile(path))
    finished: list[Request] = []
    to_come = 12
    while to_come or engine.has_work:
        if to_come and random.random() < 0.4:
            to_come -= 1
            prompt = np.tile(random.integers(0, 40, 4), 4)[: int(random.integers(1, 16))]
            allowed = None if to_come % 3 else int(random.integers(0, 3))
            longest = int(random.integers(1, 30))
            params = SamplingParams(max_tokens=longest, temperature=0.0, max_draft_tokens=allowed)
            engine.add(Request(str(to_come), prompt, params, arrival_s=now))
        if random.random() < 0.04 and len(made.slots.busy):
            engine.abort(made.slots.requests[int(random.choice(made.slots.busy))].id)
        step = engine.step()
        recount(made)
        finished += step.finished if step else []
        now += float(random.random())
    engine.observer.close()
    return finished


@pytest.mark.parametrize(
    ("rightness", "seed", "overlap"), pairs(["right", "mixed", "ngram"], range(4), [False, True])
)
def test_who_follows_a_recording_proposes_nothing(
    rightness: Rightness, seed: int, overlap: bool, tmp_path: Path
) -> None:
    """Neither a replay nor a simulation knows what the proposer knew: theirs would guess what is wrong."""
    made = small(rightness, seed)
    finished = recorded(tmp_path / "file", made, seed, overlap=overlap)
    with open(tmp_path / "file", "rb") as file:
        entries = list(read_entries(file))
    again = small("wrong", seed)
    steps = [each for each in replay(entries, again) if isinstance(each, Replayed)]
    assert [(each.id, each.answer.tolist()) for step in steps for each in step.finished] == [
        (each.id, each.answer.tolist()) for each in finished
    ]
    assert again.counters == made.counters
    assert again.speculation.accepted_by_position == made.speculation.accepted_by_position
    drafts = [unpacked(each.drafts) for each in entries if isinstance(each, Scheduled) and each.drafts]
    assert sum(map(len, drafts)) == made.counters.draft_tokens
    if rightness != "ngram":
        assert made.counters.accepted_tokens > 10
        simulated = small("wrong", seed)
        assert follow(recorded_run(entries), simulated, overlap=overlap) == len(steps)
        assert simulated.counters.accepted_tokens == made.counters.accepted_tokens


@pytest.mark.parametrize("victim", ["0", "1", "2"])
def test_tenants_are_charged_for_tokens_and_not_for_drafts(victim: str) -> None:
    slots = SlotPool(2, 64, 4)
    shares = FairShare(slots, {})
    scheduler = Scheduler(
        slots,
        PagePool(60),
        StallFree(),
        max_batch_tokens=30,
        vocab_size=VOCAB_SIZE,
        waiting=WaitingQueue(shares=shares),
        speculation=speculation(slots, "mixed", 6, int(victim)),
    )
    engine = Engine(scheduler, ChecksumRunner(slots, scheduler.pool), clock=lambda: 0.0)
    for tenant in ("a", "b"):
        prompt = np.arange(7) if tenant == "a" else np.arange(20, 27)
        engine.add(Request(tenant, prompt, SamplingParams(max_tokens=20, temperature=0), tenant=tenant))
    charged = {}
    while engine.has_work:
        engine.step()
        charged = {
            tenant: shares.served(tenant) for tenant in ("a", "b") if tenant in shares._index
        } or charged
    assert charged == {"a": 27.0, "b": 27.0}
    assert scheduler.counters.draft_tokens > scheduler.counters.accepted_tokens > 0
