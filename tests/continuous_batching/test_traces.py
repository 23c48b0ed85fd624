"""Random traces over every policy, chunk control and queue order: what must hold holds for all of them.

Some requests search with beams, and the next step may be scheduled while this one runs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from continuous_batching.batch import Batch
from continuous_batching.engine import Engine, Step
from continuous_batching.policies.batching import Orca, PrefillFirst, Split, StallFree, Static
from continuous_batching.policies.policy import ALL, Policy
from continuous_batching.policies.prefill_budget import (
    AdaptiveChunks,
    Chunks,
    FixedChunks,
    LongPrompts,
    StagedChunks,
)
from continuous_batching.queueing import (
    Aged,
    EarliestDeadline,
    FairShare,
    QueueOrder,
    WaitingQueue,
    shortest_first,
)
from continuous_batching.recording.format import Chain, read_entries
from continuous_batching.recording.recorder import Recorder, RecordingFile
from continuous_batching.recording.replay import replay
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.preemption import fewest_lost, lowest_priority, youngest
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from continuous_batching.step_time import StepTime
from kv_cache.pages import PagePool
from tests.continuous_batching.checksum import VOCAB_SIZE, ChecksumRunner, alone, searched
from tests.continuous_batching.recount import recount
from tests.thorough import cases

LONGEST = 48
ORDERS: dict[str, QueueOrder] = {
    "fcfs": None,
    "sjf": shortest_first,
    "priority": Aged(priority_s=7.0, length_s=100.0),
    "deadline": EarliestDeadline(40.0),
}
POLICIES = ["stall_free", "split", "prefill_first", "orca", "static"]


class Trace:
    """All that one run is made of, drawn from a seed."""

    def __init__(self, seed: int, *, searches: bool = True) -> None:
        random = np.random.default_rng(seed)
        # each policy with each order comes round; the rest is drawn
        policy, order = POLICIES[seed % 5], list(ORDERS)[seed // 5 % 4]
        num_slots, page_size = int(random.integers(1, 6)), int(random.choice([1, 4, 16]))
        budget = num_slots + int(random.choice([1, 3, 12]))
        if policy in ("orca", "prefill_first"):
            budget = LONGEST + int(random.integers(0, 9))
        step_time = StepTime()
        chunks: Chunks = [
            None,
            FixedChunks(int(random.integers(1, 9))),
            StagedChunks(2, 8, 3, 24, 2),
            AdaptiveChunks(step_time, float(random.choice([1.2, 1.5, 2.5])), 1, 12, 2),
        ][int(random.integers(4))]
        long_prompts = [None, LongPrompts(1, 10), LongPrompts(2, 6)][int(random.integers(3))]
        fair = bool(random.integers(2))
        outrank = order == "priority" and bool(random.integers(2))
        least_pages = -(-LONGEST // page_size)
        num_pages = 1 + least_pages + int(random.integers(0, 1 + least_pages // 2))
        made: dict[str, Policy] = {
            "stall_free": StallFree(chunks, long_prompts),
            "split": Split(max(1, budget - num_slots), chunks, long_prompts),
            "prefill_first": PrefillFirst(),
            "orca": Orca(),
            "static": Static(int(random.integers(1, num_slots + 1)), 3.0),
        }
        slots = SlotPool(num_slots, LONGEST, page_size)
        host_pool = [None, PagePool(8), PagePool(80)][int(random.integers(3))]
        long_tokens = long_prompts.long_tokens if long_prompts and policy in ("stall_free", "split") else ALL
        weights = {"t0": float(random.choice([0.5, 1.0, 3.0]))}
        self.scheduler = Scheduler(
            slots,
            PagePool(num_pages),
            made[policy],
            step_time=step_time,
            waiting=WaitingQueue(ORDERS[order], FairShare(slots, weights) if fair else None, long_tokens),
            outrank=outrank,
            victim=[youngest, fewest_lost, lowest_priority][int(random.integers(3))],
            host_pool=host_pool,
            prefix_sharing=bool(random.integers(2)),
            max_batch_tokens=budget,
            vocab_size=VOCAB_SIZE,
        )
        self.policy = policy
        # who is admitted is who is next, and stays so
        self.in_order = policy != "static" and not fair and not outrank and long_tokens == ALL
        self.runner = ChecksumRunner(slots, self.scheduler.pool, host_pool)
        self.requests = [self._request(random, number) for number in range(int(random.integers(2, 12)))]
        self.cost_s = random.uniform(0.5, 1.5, 4000)  # one for each step
        self.overlap = policy != "static" and bool(random.integers(2))
        self.searches = searches and num_slots > 1 and bool(random.integers(2))
        for request in self.requests[::3] if self.searches else ():
            request.params = replace(request.params, beam_width=2)

    def _request(self, random: np.random.Generator, number: int) -> Request:
        prompt = np.arange(int(random.integers(1, 31)))  # a common beginning
        if random.integers(2):
            prompt = random.integers(0, VOCAB_SIZE, len(prompt))
        params = SamplingParams(
            max_tokens=int(random.integers(1, LONGEST - 30)), temperature=0.0, ignore_eos=True
        )
        return Request(
            str(number),
            prompt,
            params,
            tenant=f"t{random.integers(3)}",
            priority=int(random.integers(-2, 3)),
            arrival_s=float(random.integers(0, 40)),
        )


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def serve(trace: Trace, recorder: Recorder | None = None) -> tuple[bytes, dict[str, Request]]:
    """Run a trace to its end; the digest of all decisions, and who ended."""
    scheduler, clock, chain, digest = trace.scheduler, Clock(), Chain(), b""
    engine = Engine(scheduler, trace.runner, clock, overlap=trace.overlap)
    if recorder is not None:
        engine.observer = recorder
    pending = sorted(trace.requests, key=lambda request: (request.arrival_s, request.number))
    ended: dict[str, Request] = {}
    num_looks = 0
    while pending or engine.has_work:
        while pending and pending[0].arrival_s <= clock.now_s:
            add(engine, pending.pop(0))
        waiting = {request.id: request for request in scheduler.waiting.requests}
        step = engine.step()
        num_looks += 1
        clock.now_s += float(trace.cost_s[num_looks])
        if step is None:
            continue
        check_step(trace, step, waiting)
        if step.batch.num_spans:
            digest = chain.add(step.batch, scheduler.slots)
        if num_looks % 4 == 0:
            recount(scheduler)
        for request in step.finished:
            assert request.id not in ended
            ended[request.id] = request
    return digest, ended


def add(engine: Engine, request: Request) -> None:
    """Add a request; a search whose beams could never all fit is asked again without them."""
    try:
        engine.add(request)
    except ValueError:
        if not request.params.beam_width:
            raise
        request.params = replace(request.params, beam_width=0)
        engine.add(request)


def check_step(trace: Trace, step: Step, waiting: dict[str, Request]) -> None:
    """Budgets hold, and who was left waiting stands behind who was not."""
    scheduler, batch = trace.scheduler, step.batch
    assert batch.num_tokens <= scheduler.max_batch_tokens
    if not (
        trace.overlap or trace.searches
    ):  # else rows changed hands meanwhile, or beams wait for each other
        check_policy(trace, batch)
    if trace.in_order:
        still = {request.id for request in scheduler.waiting.requests if request.num_preemptions == 0}
        left = [scheduler.waiting.place(waiting[name]) for name in still & waiting.keys()]
        came = [
            scheduler.waiting.place(waiting[name])
            for name in waiting.keys() - still
            if waiting[name].num_preemptions == 0 and waiting[name].finish_reason != "timeout"
        ]
        assert max(came, default=(-math.inf, 0)) < min(left, default=(math.inf, 0)), "somebody was overtaken"


def check_policy(trace: Trace, batch: Batch) -> None:
    """A policy keeps its own word."""
    lens, slots = batch.stops - batch.starts, trace.scheduler.slots
    prompts = batch.starts < slots.num_prompt[batch.slots]
    decodes = ~prompts & (lens == 1)
    if trace.policy == "split":
        assert lens[~decodes].sum() <= trace.scheduler._policy._prompt_tokens
    if trace.policy == "prefill_first":
        assert decodes.all() or not decodes.any()
    if trace.policy in ("orca", "prefill_first"):
        whole = batch.stops[prompts] == slots.num_prompt[batch.slots[prompts]]
        assert whole.all() or len(batch.sampled) == batch.num_spans


def expected(request: Request) -> list[int]:
    """Its answer when it is alone."""
    prompt, params = request.prompt.tolist(), request.params
    if params.beam_width:
        return searched(prompt, params, frozenset())[0][0]
    return alone(prompt, params.max_tokens)


def check(seed: int) -> None:
    """One trace: everybody gets the tokens that it gets alone, nothing is left behind."""
    trace = Trace(seed)
    _, ended = serve(trace)
    assert ended.keys() == {request.id for request in trace.requests}
    for request in trace.requests:
        assert request.answer.tolist() == expected(request)
    scheduler = trace.scheduler
    assert not len(scheduler.slots.busy)
    assert scheduler.pool.num_held == scheduler.prefix.num_idle


@pytest.mark.parametrize("first", [0, 60])
def test_every_policy_and_order_serves_everybody(first: int) -> None:
    for seed in range(first, first + 60):
        check(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(120, cases(320, 10_000), 100))
def test_every_policy_and_order_serves_everybody_in_many_traces(first: int) -> None:
    for seed in range(first, first + 100):
        check(seed)


def test_the_same_trace_is_decided_the_same_twice() -> None:
    digests = [[serve(Trace(seed))[0] for seed in range(1000, 1020)] for _ in range(2)]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == len(digests[0]), "and different ones differently"


def test_a_recording_of_any_policy_and_order_is_decided_the_same_again(tmp_path: Path) -> None:
    for seed in range(2000, 2020):
        recorder = Recorder({}, RecordingFile(tmp_path / str(seed)))
        trace = Trace(seed, searches=False)
        for request in trace.requests[::3]:
            request.timeout_s = 12.0
        serve(trace, recorder)
        recorder.close()
        with open(tmp_path / str(seed), "rb") as file:
            steps = list(replay(read_entries(file), Trace(seed, searches=False).scheduler))
        assert len(steps) > trace.scheduler.counters.steps, "its steps, and what came in"
