"""Every policy treats a prompt of one token as a prompt, and never as a decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuous_batching.engine import Engine
from continuous_batching.policies.batching import Orca, PrefillFirst, Split, StallFree, Static
from continuous_batching.policies.policy import Policy
from continuous_batching.policies.prefill_budget import AdaptiveChunks, FixedChunks, LongPrompts, StagedChunks
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from continuous_batching.step_time import StepTime
from kv_cache.pages import PagePool
from tests.continuous_batching.checksum import VOCAB_SIZE, ChecksumRunner, alone
from tests.thorough import cases

POLICIES: dict[str, Callable[[StepTime], Policy]] = {
    "stall_free": lambda _: StallFree(),
    "fixed chunks": lambda _: StallFree(FixedChunks(4)),
    "staged chunks": lambda _: StallFree(StagedChunks(2, 8, 3, 20, 2)),
    "adaptive chunks": lambda step_time: StallFree(AdaptiveChunks(step_time, 1.0, 1, 8, 1)),
    "long prompts": lambda _: StallFree(long_prompts=LongPrompts(1, 6)),
    "split": lambda _: Split(5),
    "orca": lambda _: Orca(),
    "prefill_first": lambda _: PrefillFirst(),
    "static": lambda _: Static(3, 0.0),
}
# Nearly all prompts have one token; each is (arrives at this step, tokens of the prompt, of the answer)
PLANS = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from([1, 1, 1, 1, 2, 9]), st.integers(1, 8)),
    min_size=1,
    max_size=10,
)


def steps_of(
    policy_of: Callable[[StepTime], Policy], plan: list[tuple[int, int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Serve a plan to its end, and check the answers; of each step the spans of prompts, the decodes, and the
    requests that had a token of their answer before it.
    """
    slots, now_s = SlotPool(4, 32, 2), 0.0
    pool = PagePool(1 + 4 * 9)  # nobody is preempted
    step_time = StepTime()
    scheduler = Scheduler(
        slots,
        pool,
        policy_of(step_time),
        max_batch_tokens=32,
        vocab_size=VOCAB_SIZE,
        prefix_sharing=False,
        step_time=step_time,
    )
    engine = Engine(scheduler, ChecksumRunner(slots, pool), clock=lambda: now_s)
    ended, step = [], 0
    while step <= 12 or engine.has_work:
        for number, (arrives_at, num_prompt, num_answer) in enumerate(plan):
            if arrives_at == step:
                params = SamplingParams(max_tokens=num_answer, temperature=0.0, ignore_eos=True, seed=0)
                prompt = np.random.default_rng(number).integers(0, VOCAB_SIZE, num_prompt)
                engine.add(Request(f"{number}", prompt, params, arrival_s=now_s))
        answering = int((slots.num_tokens > slots.num_prompt)[slots.busy].sum())
        done = engine.step()
        if done is not None and done.batch.num_spans:
            num_prompts = int((done.batch.starts < slots.num_prompt[done.batch.slots]).sum())
            yield num_prompts, done.batch.num_spans - num_prompts, answering
        ended += done.finished if done else []
        step, now_s = step + 1, now_s + 1.0
        assert step < 500, "no progress"
    assert len(ended) == len(plan)
    for request in ended:
        assert request.answer.tolist() == alone(request.prompt.tolist(), request.params.max_tokens)


@pytest.mark.parametrize("name", ["prefill_first", "static"])
@given(plan=PLANS)
@settings(max_examples=cases(25, 500), deadline=None)
def test_a_step_of_prompts_holds_no_decode(name: str, plan: list[tuple[int, int, int]]) -> None:
    for num_prompts, num_decodes, _ in steps_of(POLICIES[name], plan):
        assert not (num_prompts and num_decodes), f"{num_prompts} prompts beside {num_decodes} decodes"


@pytest.mark.parametrize("name", sorted(POLICIES.keys() - {"prefill_first", "static"}))
@given(plan=PLANS)
@settings(max_examples=cases(25, 500), deadline=None)
def test_every_step_gives_every_decode_its_token(name: str, plan: list[tuple[int, int, int]]) -> None:
    for _, num_decodes, answering in steps_of(POLICIES[name], plan):
        assert num_decodes == answering


def test_split_bounds_prompts_of_one_token_as_any_others() -> None:
    steps = list(steps_of(lambda _: Split(2), [(0, 1, 3)] * 4))
    assert [num_prompts for num_prompts, *_ in steps] == [2, 2, 0, 0], "prompts get two tokens of a step"
