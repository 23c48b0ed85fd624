"""A draft model, or a head, finds its keys wherever a row is moved, and never changes a token.

A head finds the features of the target that it reads as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from continuous_batching.batch import Batch
from continuous_batching.engine import Engine
from continuous_batching.policies.batching import StallFree
from continuous_batching.recording.format import Committed, Scheduled, read_entries
from continuous_batching.recording.recorder import Recorder, RecordingFile
from continuous_batching.recording.replay import Replayed, replay
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Fixed, Offers, Verdicts
from continuous_batching.speculation.proposer import DraftModel, DraftSpans, head_spans, model_spans
from continuous_batching.speculation.speculation import Speculation
from kv_cache.groups import WindowGroup
from kv_cache.pages import Index, PagePool
from tests.continuous_batching.checksum import VOCAB_SIZE, alone
from tests.continuous_batching.draft_checksum import DraftingRunner
from tests.continuous_batching.head_checksum import HeadRunner
from tests.continuous_batching.recount import recount
from tests.continuous_batching.test_draft_schedules import schedulers
from tests.continuous_batching.test_schedules import (
    Arrival,
    Made,
    Resizes,
    check_answers,
    over_schedules,
    serve,
)
from tests.simulation.recorded import follow, recorded_run
from tests.thorough import first_quick


class Wavering:
    """Gives rows drafts in some steps, and none for a while."""

    asks = True

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._pause = 0
        self.is_hopeful = True

    def choose(self, offers: Offers) -> Index:
        if self._pause:
            return np.zeros_like(offers.counts)
        return self._random.integers(0, offers.counts + 1)

    def learn(self, verdicts: Verdicts) -> None:
        pass

    def observe(self, batch: Batch, took_s: float, tokens: int) -> None:
        self._pause = self._pause - 1 if self._pause else int(self._random.choice([0, 0, 0, 2, 9]))
        self.is_hopeful = not self._pause


DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "overlap": st.booleans(),
    "most": st.sampled_from([1, 2, 5, 20]),
    "seed": st.one_of(st.none(), st.integers(0, 9)),
}


def drafting(slots: SlotPool, most: int, seed: int | None, spans: DraftSpans = model_spans) -> Speculation:
    lengths = Fixed() if seed is None else Wavering(seed)
    return Speculation(slots, DraftModel(), lengths, most, spans=spans)


def runner_of(
    scheduler: Scheduler, spans: DraftSpans, most: int, groups: Sequence[WindowGroup] = ()
) -> DraftingRunner | HeadRunner:
    """A device that drafts by a model of its own, or by a head that makes at most `most` a row."""
    pools = scheduler.slots, scheduler.pool, scheduler.host_pool
    return HeadRunner(*pools, most, groups) if spans is head_spans else DraftingRunner(*pools, groups)


@pytest.mark.parametrize("spans", first_quick(1, [model_spans, head_spans]))
@over_schedules(15, 2500, schedulers(), **DRAWN)
def test_its_keys_are_there_in_every_schedule(
    made: Made,
    plan: list[Arrival],
    resizes: Resizes,
    overlap: bool,
    most: int,
    seed: int | None,
    spans: DraftSpans,
) -> None:
    scheduler, runner = made
    scheduler.speculation = drafting(scheduler.slots, most, seed, spans)
    late = runner.late
    runner = runner_of(scheduler, spans, most, runner.groups)
    runner.late = late
    ended = serve(scheduler, runner, plan, resizes, overlap=overlap)
    check_answers(ended, runner.fail)
    assert not scheduler.slots.draft_lag[scheduler.slots.busy].any()


def crowded(slots: SlotPool, speculation: Speculation) -> Scheduler:
    """One that must preempt and swap."""
    return Scheduler(
        slots,
        PagePool(80 // slots.page_size),
        StallFree(),
        max_batch_tokens=24,
        vocab_size=VOCAB_SIZE,
        host_pool=PagePool(48 // slots.page_size),
        compact_every_steps=3,
        speculation=speculation,
    )


def small(
    seed: int | None = 0, spans: DraftSpans = model_spans, most: int = 6, page_size: int = 4
) -> tuple[Scheduler, DraftingRunner | HeadRunner]:
    slots = SlotPool(4, 64, page_size)
    made = crowded(slots, drafting(slots, most, seed, spans))
    return made, runner_of(made, spans, most)


def ask(
    made_of: tuple[Scheduler, DraftingRunner | HeadRunner], *, overlap: bool, path: Path | None = None
) -> list[Request]:
    now = 0.0
    engine = Engine(*made_of, clock=lambda: now, overlap=overlap)
    if path is not None:
        engine.observer = Recorder({}, RecordingFile(path))
    opening = np.arange(10)
    made = [
        Request(
            str(number),
            np.concatenate([opening, np.full(number, 20 + number)]),
            SamplingParams(max_tokens=34, temperature=0.0, ignore_eos=True, seed=number),
        )
        for number in range(7)
    ]
    waiting = list(made)
    while waiting or engine.has_work:
        if waiting:
            waiting[0].arrival_s = now
            engine.add(waiting.pop(0))
        engine.step()
        now += 1.0
        recount(engine.scheduler)
    engine.observer.close()
    return made


@pytest.mark.parametrize("most", [1, 3])
def test_entries_are_right_where_tokens_come_late(most: int) -> None:
    """The feature that the first token's entry is computed from again is still there behind its drafts'."""
    made = small(None, head_spans, most, 8)
    made[1].late = 0.3
    for request in ask(made, overlap=False):
        assert request.answer.tolist() == alone(request.prompt.tolist(), 34, seed=request.params.seed or 0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("spans", "most", "page_size", "least"),
    [(model_spans, 6, 4, 40), (head_spans, 1, 8, 10), (head_spans, 3, 8, 10), (head_spans, 6, 4, 10)],
)
def test_rows_lack_tokens_while_they_have_no_drafts_and_catch_up(
    spans: DraftSpans, most: int, page_size: int, least: int, overlap: bool
) -> None:
    scheduler, runner = small(0, spans, most, page_size)
    for request in ask((scheduler, runner), overlap=overlap):
        assert request.answer.tolist() == alone(request.prompt.tolist(), 34, seed=request.params.seed or 0)
    counters = scheduler.counters
    assert runner.num_caught_up > least
    assert counters.preemptions > 0
    assert counters.swapped_in_pages > 0
    assert counters.draft_tokens > counters.accepted_tokens > counters.draft_tokens / 5


def test_an_answer_is_shared_as_far_as_the_draft_model_has_computed_it() -> None:
    """Later requests find keys of both models in whatever they find."""
    for seed, most_found in ((None, 44), (3, 44)):
        scheduler, runner = small(seed=seed)
        engine = Engine(scheduler, runner, clock=lambda: 0.0)
        first = Request("first", np.arange(10), SamplingParams(max_tokens=34, temperature=0.0))
        engine.add(first)
        while engine.has_work:
            engine.step()
        after = Request("after", np.append(first.tokens, 5), SamplingParams(max_tokens=9, temperature=0.0))
        engine.add(after)
        while engine.has_work:
            engine.step()
        assert 10 < after.num_cached_tokens <= most_found
        assert after.answer.tolist() == alone(after.prompt.tolist(), 9)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_replay_makes_no_drafts(overlap: bool, tmp_path: Path) -> None:
    scheduler, runner = small()
    made = ask((scheduler, runner), overlap=overlap, path=tmp_path / "file")
    with open(tmp_path / "file", "rb") as file:
        entries = list(read_entries(file))
    assert not any(each.drafts for each in entries if isinstance(each, Scheduled))
    assert any(each.drafts for each in entries if isinstance(each, Committed))
    again, _ = small(seed=5)  # which would give other rows drafts
    steps = [each for each in replay(entries, again) if isinstance(each, Replayed)]
    answers = {each.id: each.answer.tolist() for step in steps for each in step.finished}
    assert answers == {each.id: each.answer.tolist() for each in made}
    assert again.counters == scheduler.counters
    simulated, _ = small(seed=5)
    assert follow(recorded_run(entries), simulated, overlap=overlap) == len(steps)
    assert simulated.counters.accepted_tokens == scheduler.counters.accepted_tokens
