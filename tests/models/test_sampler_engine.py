"""A request draws the same tokens alone, in company, and after preemption."""

from __future__ import annotations

import numpy as np
import torch

from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine
from continuous_batching.policies.batching import StallFree
from continuous_batching.request import Request, SamplingParams, packed_ids
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.pages import PagePool
from models.sampling.sampler import Sampler

V, EOS = 60, 3
TABLE = torch.randn(V, V, generator=torch.Generator().manual_seed(0)) * 2
KINDS = [
    {},
    {"temperature": 0.7, "top_p": 0.8},
    {"top_k": 6, "logprobs": 2},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "frequency_penalty": 0.4, "min_tokens": 10},
    {"min_p": 0.05, "logit_bias": {4: 2.0}, "stop_token_ids": (9,)},
    {"allowed_token_ids": packed_ids(range(10, 30))},
    {"bad_words": ((12,), (20, 21), (25, 25))},
    {"allowed_token_ids": packed_ids(range(10, 16)), "bad_words": ((11, 12),), "temperature": 0.0},
    {"allowed_token_ids": packed_ids(range(10, 16)), "min_tokens": 5, "frequency_penalty": 1.0},
]


class TableRunner:
    """The logits depend on the last token alone; the sampler is the real one."""

    def __init__(self, slots: SlotPool) -> None:
        self.slots, self.sampler = slots, Sampler((EOS,), V)

    def run(self, batch: Batch) -> Sampled:
        rows = batch.owners
        last = self.slots.token_ids[rows, batch.targets - 1]
        return self.sampler.run(TABLE[torch.from_numpy(last).long()], rows, batch.targets, self.slots)


def make_engine(num_slots: int, num_pages: int) -> Engine:
    slots = SlotPool(num_slots, max_tokens=64, page_size=4)
    scheduler = Scheduler(
        slots, PagePool(num_pages), StallFree(), max_batch_tokens=16, vocab_size=V, eos_token_ids=(EOS,)
    )
    return Engine(scheduler, TableRunner(slots))


def requests() -> list[Request]:
    return [
        Request(
            str(n),
            np.array([5, 6, n % V]),
            SamplingParams(max_tokens=30, seed=n // 2, **KINDS[n % len(KINDS)]),
        )
        for n in range(30)
    ]


def serve(engine: Engine, asked: list[Request]) -> list[Request]:
    for request in asked:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return asked


def test_neighbours_and_preemption_change_no_token() -> None:
    together = serve(make_engine(8, 24), requests())
    assert sum(request.num_preemptions for request in together) > 10
    for request, alone in zip(together, requests()):
        serve(make_engine(1, 17), [alone])
        assert request.answer.tolist() == alone.answer.tolist(), request.params
        assert request.logprobs == alone.logprobs
        assert request.finish_reason == alone.finish_reason
        answer, params = request.answer.tolist(), request.params
        assert EOS not in answer[: params.min_tokens]
        if params.allowed_token_ids is not None:
            assert set(answer) <= {EOS, *np.frombuffer(params.allowed_token_ids, dtype=np.int32).tolist()}
        for word in params.bad_words:
            assert all(tuple(answer[at : at + len(word)]) != word for at in range(len(answer)))


def test_a_request_without_a_seed_gets_one_from_the_engines() -> None:
    params = SamplingParams(max_tokens=20)
    first, second = (
        serve(make_engine(4, 40), [Request(str(n), np.array([5]), params) for n in range(3)])
        for _ in range(2)
    )
    assert [r.answer.tolist() for r in first] == [r.answer.tolist() for r in second]
    assert len({tuple(r.answer.tolist()) for r in first}) == 3
