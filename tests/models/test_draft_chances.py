"""The tokens of accepted runs have the probabilities that they have without drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine
from continuous_batching.policies.batching import StallFree
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Fixed
from continuous_batching.speculation.proposer import Guesses
from continuous_batching.speculation.speculation import Speculation
from kv_cache.pages import Index, PageCopy, PagePool
from models.ops.reference import Ops
from models.sampling.sampler import Sampler

VOCABULARY, NUM_NEW, NUM_REQUESTS = 5, 6, 3000
CHANCES = np.random.default_rng(4).dirichlet(np.full(VOCABULARY, 0.6), VOCABULARY)  # chances after each token


def by_chance(found: np.ndarray, wanted: np.ndarray, freedom: int) -> float:
    """The probability of counts as far from what is wanted (chi-square)."""
    statistic = ((found - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2).float()))


class Chain:
    """A model whose next token depends on the last alone, behind the real sampler."""

    def __init__(self, slots: SlotPool) -> None:
        self._slots, self._sampler = slots, Sampler((), VOCABULARY, Ops())

    def run(self, batch: Batch) -> Sampled:
        last = self._slots.token_ids[batch.owners, batch.targets - 1]
        logits = torch.from_numpy(np.log(CHANCES[last])).float()
        return self._sampler.run(logits, batch.owners, batch.targets, self._slots)

    def resize(self, num_pages: Sequence[int], copies: tuple[PageCopy, ...]) -> None:
        raise AssertionError("nobody asks for it")


class Likeliest:
    """Guesses the likeliest tokens."""

    def __init__(self, slots: SlotPool) -> None:
        self._slots = slots

    def guess(self, rows: Index, most: int) -> Guesses:
        last, tokens = self._slots.token_ids[rows, self._slots.num_tokens[rows] - 1], []
        for _ in range(most):
            last = CHANCES[last].argmax(axis=1)
            tokens.append(last)
        return Guesses(np.stack(tokens, axis=1).astype(np.int32), np.full(len(rows), most))


def test_each_token_of_a_run_has_the_chance_that_it_has_without_drafts() -> None:
    slots = SlotPool(200, 16, 4)
    scheduler = Scheduler(
        slots,
        PagePool(1000),
        StallFree(),
        max_batch_tokens=2000,
        vocab_size=VOCABULARY,
        prefix_sharing=False,
        speculation=Speculation(slots, Likeliest(slots), Fixed(), 4),
        seed=7,
    )
    engine = Engine(scheduler, Chain(slots), clock=lambda: 0.0)
    requests = [Request(str(each), [2], SamplingParams(max_tokens=NUM_NEW)) for each in range(NUM_REQUESTS)]
    for request in requests:
        engine.add(request)
    places: dict[int, list[int]] = {}  # the tokens that were booked, by their place in their run
    while engine.has_work:
        step = engine.step()
        assert step is not None
        run = np.cumsum(np.r_[True, step.owners[1:] != step.owners[:-1]]) - 1
        ahead = np.arange(len(run)) - np.searchsorted(run, run)
        for place in range(5):
            places.setdefault(place, []).append(int((ahead == place).sum()))
    assert all(sum(places[place]) > 100 for place in range(4)), "hardly a run had so many tokens"
    answers = np.stack([each.answer for each in requests])
    chances = CHANCES[2]
    for place in range(NUM_NEW):  # each place of an answer, whatever run brought it
        counts = np.bincount(answers[:, place], minlength=VOCABULARY)
        assert by_chance(counts, NUM_REQUESTS * chances, VOCABULARY - 1) > 1e-4, place
        chances = chances @ CHANCES
    for place in range(1, NUM_NEW):  # and what follows what
        pairs = np.zeros((VOCABULARY, VOCABULARY))
        np.add.at(pairs, (answers[:, place - 1], answers[:, place]), 1)
        wanted = pairs.sum(axis=1, keepdims=True) * CHANCES
        common = wanted > 5
        freedom = int(common.sum()) - VOCABULARY
        assert by_chance(pairs[common], wanted[common], freedom) > 1e-4, place
