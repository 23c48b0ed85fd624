"""Stages of layers take the same steps, with the slots as they were when a step was made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from attention.reference import Attention
from continuous_batching.batch import Batch, StateCut
from continuous_batching.request import Request, SamplingParams
from continuous_batching.slots import SlotPool
from devices.shapes import AttentionShape
from kv_cache.device.storage import KVCache, LayerPages
from kv_cache.pages import PageCopy
from models.checkpoint import weights
from models.decoder import Decoder
from models.ops.reference import Ops
from models.parallel.group import ALONE, StageLinks
from models.parallel.share import Share
from models.sampling.follower import FollowerSampler
from models.sampling.sampler import Best
from models.step.graphs import StepOutputs
from models.step.stage_runner import StageRunner
from tests.models.tensor_rank import Kept
from tests.models.test_share import WHOLE

PAGE_SIZE, LEN = 4, 6


class Neighbours(StageLinks):
    """Stages of which nothing comes but ones, and which keep what they are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.received, self.sent = 0, list[Tensor]()

    def receive(self, x: Tensor) -> Tensor:
        self.received += 1
        return x.fill_(1)

    def send(self, x: Tensor) -> None:
        self.sent.append(x)


class TakesAll:
    """Captured steps of any batch, which compute nothing."""

    def __init__(self) -> None:
        self.filled_batches, self.num_run = list[Batch](), 0

    def takes(self, batch: Batch) -> bool:
        return True

    def filled(self, batch: Batch) -> Any:
        self.filled_batches.append(batch)
        return Filled(batch)

    def run(self, filled: Any, last: object, drafts: object) -> StepOutputs:
        self.num_run += 1
        tokens = torch.zeros(filled.batch.num_tokens, dtype=torch.int64)
        return StepOutputs(torch.zeros(len(tokens), 3), Best(tokens, tokens), None)


class Filled:
    """What of a filled step a runner reads."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch


def runner_of(stage: int, *, is_scoring: bool = False) -> tuple[StageRunner, Neighbours, Kept]:
    """One of two stages, with a request in row 0; of the last, the logits are kept."""
    share = Share(stage=stage, stages=2)
    part = share.part(WHOLE)
    sizes = (part.num_heads, part.num_kv_heads, part.head_dim)
    shape = AttentionShape(*sizes, PAGE_SIZE, part.head_dim**-0.5, torch.float32, part.windows)
    links, attention, kept = Neighbours(), Attention(shape), Kept()
    decoder = Decoder(WHOLE, Ops(), attention, ALONE, share, links)
    weights.random(decoder, 11)
    slots = SlotPool(2, 16, PAGE_SIZE)
    params = SamplingParams(prompt_logprobs=1 if is_scoring else None)
    request = Request("a", np.arange(5, 5 + LEN), params)
    request.number = 0
    row = slots.take(request)
    slots.page_table[row, :2] = 1, 2
    cache = KVCache([LayerPages(attention.new_planes)] * part.num_layers, PAGE_SIZE, [4])
    sampler = kept if share.is_last else FollowerSampler()
    return StageRunner(decoder, cache, attention, sampler, slots), links, kept


def span(start: int, stop: int) -> Batch:
    rows = np.zeros(1, np.int64)
    return Batch(rows, rows + start, rows + stop, rows, rows, rows + stop)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("is_scoring", "is_captured"), [(False, True), (True, False)])
def test_both_stages_launch_the_steps_that_score_a_prompt_and_replay_others(
    stage: int, is_scoring: bool, is_captured: bool
) -> None:
    runner, links, _ = runner_of(stage, is_scoring=is_scoring)
    graphs = runner.graphs = TakesAll()
    runner.run(span(2, 3))
    assert graphs.num_run == len(graphs.filled_batches) == is_captured
    assert links.received + len(links.sent) == (not is_captured)


def test_the_leader_computes_a_step_when_it_is_asked_for_as_it_was_when_it_was_made() -> None:
    expected = []
    for is_moved in (False, True):
        runner, links, kept = runner_of(1)
        runner.run(span(0, LEN - 1))
        assert links.received == 1
        wait = runner.start(span(LEN - 1, LEN))
        assert links.received == 1, "the stages before have its next batch by now"
        if is_moved:
            runner.slots.page_table[:] = 3
        wait()
        assert links.received == 2
        expected.append(kept.logits[-1])
    assert torch.equal(*expected)


class NoDrafts:
    """A drafter that has nothing to say."""

    graphs = None

    def capture(self, target: object) -> None:
        pass

    def run(self, batch: Batch) -> None:
        pass

    def finish(self) -> None:
        pass


@pytest.mark.parametrize("leaves_states", [False, True])
def test_a_state_that_a_step_leaves_is_left_before_the_copies_of_the_next_take_its_page(
    leaves_states: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter has these copies made when the next step is started, which nothing else waits for."""
    runner, links, _ = runner_of(1)
    runner.drafter = NoDrafts()
    computed: list[int] = []

    def apply(copies: tuple[PageCopy, ...]) -> None:
        computed.extend(links.received for _ in copies)

    monkeypatch.setattr(runner.cache, "apply", apply)
    cuts = (StateCut(0, 2, 3),) if leaves_states else ()
    copies = (PageCopy(np.array([1]), np.array([3]), group=1),)
    waits = [runner.start(replace(span(0, 4), cuts=cuts)), runner.start(replace(span(4, 5), copies=copies))]
    assert computed == [leaves_states]
    for wait in waits:
        wait()
    assert links.received == 2
    assert computed == [leaves_states], "they are made once"


def test_masks_are_begun_while_the_stages_before_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _, kept = runner_of(1)
    begun: list[list[int]] = []
    monkeypatch.setattr(kept, "prepare", lambda rows, targets, slots: begun.append(targets.tolist()))
    wait = runner.start(span(LEN - 1, LEN))
    assert begun == [[LEN]]
    wait()
    assert begun == [[LEN]]


def test_a_captured_step_of_the_leader_has_its_inputs_before_it_is_run() -> None:
    runner, _, _ = runner_of(1)
    graphs = runner.graphs = TakesAll()
    waits = [runner.start(span(LEN - 1, LEN)) for _ in range(2)]
    assert (len(graphs.filled_batches), graphs.num_run) == (2, 0)
    for wait in waits:
        wait()
    assert graphs.num_run == 2


def test_a_stage_before_the_last_sends_at_once_what_it_has_computed_and_has_no_logits() -> None:
    runner, links, _ = runner_of(0)
    wait = runner.start(span(0, LEN))
    (sent,) = links.sent
    assert sent.shape == (2, LEN, WHOLE.hidden_size)
    assert not len(wait().tokens)
    assert runner.decoder.logits(sent[0]).shape == (LEN, 0)


def test_the_leader_hears_that_a_stage_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    links, seen = StageLinks(before=1, after=0), []

    def waits(*_: object) -> None:
        seen.append(links.inside)

    monkeypatch.setattr(dist, "recv", waits)
    monkeypatch.setattr(dist, "isend", waits)
    links.send(links.receive(torch.zeros(1)))
    assert seen == ["receive", "send"]
    assert not links.inside
