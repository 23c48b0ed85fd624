"""What can never be served, and is refused with a reason?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from continuous_batching.policies.policy import Policy
from continuous_batching.request import Request
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index, PagePool

GiveUp = Literal["nothing", "cached", "running"]


def check_budget(max_batch_tokens: int, policy: Policy, slots: SlotPool) -> None:
    """Raise ValueError for a step that is too small for this policy and these slots."""
    if max_batch_tokens < slots.num_slots:
        raise ValueError(
            f"max_batch_tokens is {max_batch_tokens}; it must be at least num_slots ({slots.num_slots}),"
            " so that every slot can decode in every step"
        )
    if policy.whole and max_batch_tokens < slots.max_tokens:
        raise ValueError(
            f"max_batch_tokens is {max_batch_tokens}; this policy computes prompts whole, and a request"
            f" may have {slots.max_tokens} tokens: raise it, or lower scheduler.max_request_tokens"
        )


def check_samples(leader: Request) -> None:
    """Raise ValueError for samples of one prompt that could not be told apart."""
    ids = {leader.id}
    for each in leader.followers:
        same = np.array_equal(each.prompt, leader.prompt) and each.cache_salt == leader.cache_salt
        assert same, f"{each.id} cannot follow {leader.id}"
        if each.id in ids:
            raise ValueError(f"request {each.id} is sampled twice; give each sample an id of its own")
        ids.add(each.id)


def check_request(
    request: Request, vocab_size: int, stop_tokens: Index, slots: SlotPool, pool: PagePool
) -> None:
    """Raise ValueError for a request whose tokens do not exist or that could never fit."""
    name, prompt, last_id = f"request {request.id}", request.prompt, vocab_size - 1
    if not len(prompt):
        raise ValueError(f"{name} has an empty prompt; it needs at least one token")
    outside = (prompt < 0) | (prompt > last_id)
    if outside.any():
        strange = int(prompt[outside.argmax()])
        raise ValueError(f"{name} holds the token id {strange}; the model's go from 0 to {last_id}")
    for token in request.params.logit_bias:
        if not 0 <= token <= last_id:
            raise ValueError(f"{name} biases the token id {token}; the model's go from 0 to {last_id}")
    longest, width = longest_tokens(request), request.params.beam_width
    if width > slots.num_slots:
        raise ValueError(
            f"{name} searches with {width} beams; {slots.num_slots} requests run at once"
            " (scheduler.num_slots), and each beam counts as one: lower beam_width"
        )
    num_stops = len(stop_tokens)
    if width and width + num_stops > vocab_size:
        raise ValueError(
            f"{name} searches with {width} beams and {num_stops} tokens that end them;"
            f" the vocabulary has {vocab_size}: lower beam_width"
        )
    if longest > slots.max_tokens:
        raise ValueError(
            f"{name} may grow to {longest} tokens; the limit is {slots.max_tokens}"
            " (scheduler.max_request_tokens): shorten the prompt or max_tokens"
        )
    capacity = _capacity(slots, pool)
    if longest > capacity:
        raise ValueError(
            f"{name} may grow to {longest} tokens; the cache holds {capacity}:"
            " shorten the prompt or max_tokens, or give the cache more pages"
        )
    needed = most_pages(request, slots.page_size)
    if needed > pool.num_pages - 1:
        raise ValueError(
            f"{name} may need {needed} pages for {width} beams; the cache has {pool.num_pages - 1}:"
            " lower beam_width or max_tokens, or give the cache more pages"
        )


def check_resize(
    num_pages: int,
    give_up: GiveUp,
    pool: PagePool,
    num_idle: int,
    page_size: int,
    accepted: Sequence[Request],
) -> None:
    """Raise ValueError for a pool too small for what is held, or for a request that was accepted.

    `num_idle` of the held pages are cached and used by nobody.
    """
    pages, tokens, width = max(
        ((most_pages(each, page_size), longest_tokens(each), each.params.beam_width) for each in accepted),
        default=(1, 1, 0),
    )
    needed = 1 + pages
    if num_pages < needed:
        beams = f" in {width} beams" if width else ""
        raise ValueError(
            f"{num_pages} pages cannot hold the longest accepted request, {tokens} tokens{beams};"
            f" resize to at least {needed}, or end it first"
        )
    running = pool.num_held - num_idle
    least = {"nothing": pool.num_held, "cached": running, "running": 0}[give_up]
    if num_pages - 1 < least:
        raise ValueError(
            f"{num_pages} pages are fewer than the {pool.num_held} held ({running} by running requests, the"
            f" others cached); resize to at least {least + 1}, or allow more to be given up than {give_up}"
        )


def most_pages(request: Request, page_size: int) -> int:
    """The most pages that a request may come to hold, with all its beams; the last token is never cached."""
    longest = max(1, -(-(longest_tokens(request) - 1) // page_size))
    shared = request.num_prompt_tokens // page_size
    return longest + max(0, request.params.beam_width - 1) * (longest - shared)


def longest_allowed(slots: SlotPool, pool: PagePool) -> int:
    """The most tokens that any request may come to."""
    return min(slots.max_tokens, _capacity(slots, pool))


def _capacity(slots: SlotPool, pool: PagePool) -> int:
    return (pool.num_pages - 1) * slots.page_size + 1  # the last token is never cached


def longest_tokens(request: Request) -> int:
    """The most tokens that a request may come to, prompt and answer."""
    return request.num_prompt_tokens + request.params.max_tokens
