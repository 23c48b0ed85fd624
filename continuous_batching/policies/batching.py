"""Define the policies: which busy slots get how many tokens in a step, and when new requests join.

`Static` and `PrefillFirst` are what continuous batching is compared with, `Orca` batches by iteration,
`StallFree` is the default, and `Split` gives prompts and decodes a budget each. The interface is defined in
`policy`, the sizes of chunks in `prefill_budget`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from continuous_batching.batch import Batch
from continuous_batching.policies.policy import (
    ALL,
    NO_ROOM,
    Busy,
    Policy,
    Room,
    Waiting,
    in_order,
    whole_prompts,
)
from continuous_batching.policies.prefill_budget import Chunks, Limit, LongPrompts
from continuous_batching.request import Request
from kv_cache.pages import Index


@dataclass(frozen=True, slots=True)
class Static(Policy):
    """Starts a full batch together and runs it to its longest request; no request joins it.

    It starts when `batch_size` requests wait, or when the first of them has waited `max_wait_s`. This is the
    batching of FasterTransformer and of the static rows in the sources' tables, kept for comparison. It
    deviates for the better: no padding is computed, and a finished request's pages are free at once.
    """

    batch_size: int
    max_wait_s: float

    def room(self, busy: Busy, budget: int, waiting: Waiting) -> Room:
        """Admit a whole batch into an empty table, and nothing otherwise."""
        ready = waiting.num_requests >= self.batch_size or waiting.longest_s >= self.max_wait_s
        if len(busy.todo) or busy.num_others or not ready:
            return NO_ROOM
        return Room(ALL, self.batch_size)  # prompts beyond the budget are chunked, before the first decode

    def reserve(self, request: Request) -> int:
        """Reserve the whole prompt and the longest answer, because a static batch is never preempted."""
        return request.num_prompt_tokens + request.params.max_tokens - 1

    def share(self, busy: Busy, budget: int) -> Index:
        """Grant prompts first, oldest first; decodes start when all prompts are computed."""
        order = np.argsort(busy.decodes, kind="stable")
        granted = np.empty_like(busy.todo)
        granted[order] = in_order(busy.todo[order], budget)
        return granted


class Orca(Policy):
    """Batches by iteration, first come first served, with whole prompts and reserved answers (Orca).

    Prompts join the running decodes, which wait for them, after Algorithm 1 of "Orca: A Distributed Serving
    System for Transformer-Based Generative Models" (OSDI 2022). Its `n_slots` are the cache's tokens, its
    `max_bs` the slot table, its `n_workers` the scheduler's `depth`: with 1, every admitted request is in
    every batch. It deviates in two ways. A request reserves its own prompt and answer, where the paper's
    `max_tokens` is the same for all. And a step has a budget of tokens: a prompt that does not fit beside the
    decodes and the prompts before it is computed in a later step, still as a whole.
    """

    whole: bool = True

    def room(self, busy: Busy, budget: int, waiting: Waiting) -> Room:
        """Return the tokens that the busy slots leave of the step."""
        left = budget - int(busy.todo.sum())
        return Room(left, waiting.num_requests, whole=True) if left > 0 else NO_ROOM

    def reserve(self, request: Request) -> int:
        """Reserve the whole prompt and the longest answer.

        So no admitted request is preempted for pages.
        """
        return request.num_prompt_tokens + request.params.max_tokens - 1

    def share(self, busy: Busy, budget: int) -> Index:
        """Grant the decodes, and whole prompts up to the first that does not fit."""
        decodes = busy.decodes
        prompts = np.where(decodes, 0, busy.todo)
        granted: Index = decodes + whole_prompts(prompts, budget - int(np.count_nonzero(decodes)))
        return granted


class PrefillFirst(Policy):
    """Computes new prompts first and whole; the decodes stop while there are any.

    This is the order of vLLM before it chunked prompts ("Efficient Memory Management for Large Language Model
    Serving with PagedAttention", SOSP 2023), which fills the table fast and lets every running answer stall.
    It deviates in two ways: a preempted request queues by its arrival and is computed as a prompt, where vLLM
    brings swapped ones back before it looks at the queue; and no share of the pages is kept back as a
    watermark, because pages are promised at admission.
    """

    whole: bool = True

    def room(self, busy: Busy, budget: int, waiting: Waiting) -> Room:
        """Return what the running prompts leave of the step; decodes do not count."""
        left = budget - int(busy.todo[~busy.decodes].sum())
        return Room(left, waiting.num_requests, whole=True) if left > 0 else NO_ROOM

    def reserve(self, request: Request) -> int:
        """Reserve the known tokens and the first token of the answer."""
        return len(request.tokens) + 1

    def share(self, busy: Busy, budget: int) -> Index:
        """Grant whole prompts up to the first that does not fit."""
        return whole_prompts(np.where(busy.decodes, 0, busy.todo), budget)


class StallFree(Policy):
    """Schedules decodes first, then running chunks, then new prompts, against one token budget (Sarathi).

    No running request waits for the prompt of a new one. After "Taming Throughput-Latency Tradeoff in LLM
    Inference with Sarathi-Serve" (OSDI 2024). It deviates in three ways: pages are promised for what a
    request knows (its prompt), not taken up front, so a chunk's pages are taken when it is computed; partly
    computed prompts may be preempted like any slot; and short prompts may overtake long ones (`LongPrompts`),
    where Sarathi's go strictly by arrival.

    `chunks` bounds the prompt tokens of a step; with None, only the budget does.
    """

    def __init__(self, chunks: Chunks | None = None, long_prompts: LongPrompts | None = None) -> None:
        self._chunks = chunks
        self._long_prompts = long_prompts

    def room(self, busy: Busy, budget: int, waiting: Waiting) -> Room:
        """Return the prompt tokens that the busy slots leave of the step."""
        limit = self._limit(busy, budget)
        wanted = np.minimum(busy.todo, limit.each)
        wanted[busy.decodes] = 0
        if self._long_prompts is None:
            left, longs, of_longs = limit.total - int(wanted.sum()), ALL, ALL
        else:
            left, longs, of_longs = self._long_prompts.left(busy, wanted, limit.total)
        if left <= 0:
            return NO_ROOM
        return Room(left, waiting.num_requests, False, limit.newcomer, longs, of_longs)

    def reserve(self, request: Request) -> int:
        """Reserve the known tokens and the first token of the answer."""
        return len(request.tokens) + 1

    def share(self, busy: Busy, budget: int) -> Index:
        """Grant one token to each decode and the rest to the chunks, oldest first."""
        limit, decodes = self._limit(busy, budget), busy.decodes
        wanted = np.where(decodes, 0, np.minimum(busy.todo, limit.each))
        share = in_order if self._long_prompts is None else self._long_prompts.sharing(busy)
        granted: Index = decodes + share(wanted, limit.total)
        return granted

    def observe(self, batch: Batch, took_s: float) -> None:
        """Pass the step on to the control of the chunk size."""
        if self._chunks is not None:
            self._chunks.observe(batch, took_s)

    def _limit(self, busy: Busy, budget: int) -> Limit:
        return self._limit_of(busy, budget - int(np.count_nonzero(busy.decodes)))

    def _limit_of(self, busy: Busy, left: int) -> Limit:
        return Limit(left) if self._chunks is None else self._chunks.limit(busy, left)


class Split(StallFree):
    """Splits a step into one budget for prompts and one for decodes; neither uses what the other leaves.

    Prompts get at most `prompt_tokens` tokens of a step, however few decodes there are. This follows the
    mixed scheduler of the article "Dynamic batching" (动态批处理; `MaxPrefillTokens`, `MaxDecodeTokens`,
    `PrefillDecodeRatio`), with four changes. The ratio divides the step's budget, while the article declares
    it and never reads it. A chunk that exceeds the rest of the prompts' budget is shortened, while the
    article skips it, so that a long prompt may never run. Requests are taken in order of arrival, while the
    article takes them in the order of a map. A recipe must leave one token for each slot's decode, while the
    article may starve the same decodes at every step.
    """

    def __init__(
        self, prompt_tokens: int, chunks: Chunks | None = None, long_prompts: LongPrompts | None = None
    ) -> None:
        super().__init__(chunks, long_prompts)
        self._prompt_tokens = prompt_tokens

    def _limit(self, busy: Busy, budget: int) -> Limit:
        left = budget - int(np.count_nonzero(busy.decodes))
        return self._limit_of(busy, min(left, self._prompt_tokens))
