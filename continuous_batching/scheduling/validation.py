"""Which requests can never be served, and are refused with a reason?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from continuous_batching.policies.policy import Policy
from continuous_batching.refusal import BadRequest
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
    """Raise BadRequest for samples of one prompt whose ids are not all different."""
    ids = {leader.id}
    for each in leader.followers:
        same = np.array_equal(each.prompt, leader.prompt) and each.cache_salt == leader.cache_salt
        assert same, f"{each.id} cannot follow {leader.id}"
        if each.id in ids:
            raise BadRequest(
                "id",
                "is sampled twice",
                value=each.id,
                fix="give each sample an id of its own",
                subject=f"request {each.id}",
            )
        ids.add(each.id)


def check_request(
    request: Request, vocab_size: int, stop_tokens: Index, slots: SlotPool, pool: PagePool
) -> None:
    """Raise BadRequest for a request whose tokens do not exist or that could never fit."""
    _check_tokens(request, vocab_size)
    if request.params.beam_width:
        _check_beams(request, vocab_size, len(stop_tokens), slots)
    subject, longest, width = f"request {request.id}", longest_tokens(request), request.params.beam_width
    if longest > slots.max_tokens:
        raise BadRequest(
            None,
            f"may grow to {longest} tokens; the limit is {slots.max_tokens} (scheduler.max_request_tokens)",
            value=longest,
            limit=slots.max_tokens,
            fix="shorten the prompt or max_tokens",
            subject=subject,
        )
    capacity = _capacity(slots, pool)
    if longest > capacity:
        raise BadRequest(
            None,
            f"may grow to {longest} tokens; the cache holds {capacity}",
            value=longest,
            limit=capacity,
            fix="shorten the prompt or max_tokens, or give the cache more pages",
            subject=subject,
        )
    needed, usable = most_pages(request, slots.page_size), pool.num_pages - 1
    if needed > usable:
        raise BadRequest(
            "beam_width",
            f"may need {needed} pages for {width} beams; the cache has {usable}",
            value=needed,
            limit=usable,
            fix="lower beam_width or max_tokens, or give the cache more pages",
            subject=subject,
        )


def _check_tokens(request: Request, vocab_size: int) -> None:
    """Every token id of the prompt and of the biases is one of the model's."""
    subject, prompt, last_id = f"request {request.id}", request.prompt, vocab_size - 1
    if not len(prompt):
        raise BadRequest("prompt", "has an empty prompt; it needs at least one token", subject=subject)
    known = f"the model's go from 0 to {last_id}"
    outside = (prompt < 0) | (prompt > last_id)
    if outside.any():
        token = int(prompt[outside.argmax()])
        raise BadRequest(
            "prompt", f"holds the token id {token}; {known}", value=token, limit=last_id, subject=subject
        )
    for token in request.params.logit_bias:
        if not 0 <= token <= last_id:
            raise BadRequest(
                "logit_bias",
                f"biases the token id {token}; {known}",
                value=token,
                limit=last_id,
                subject=subject,
            )


def _check_beams(request: Request, vocab_size: int, num_stops: int, slots: SlotPool) -> None:
    """There are slots for all beams, and enough tokens to go on with."""
    subject, width = f"request {request.id}", request.params.beam_width
    if width > slots.num_slots:
        raise BadRequest(
            "beam_width",
            f"searches with {width} beams; {slots.num_slots} requests run at once (scheduler.num_slots), and"
            " each beam counts as one",
            value=width,
            limit=slots.num_slots,
            fix="lower beam_width",
            subject=subject,
        )
    if width + num_stops > vocab_size:
        raise BadRequest(
            "beam_width",
            f"searches with {width} beams and {num_stops} tokens that end them; the vocabulary has"
            f" {vocab_size}",
            value=width,
            limit=vocab_size - num_stops,
            fix="lower beam_width",
            subject=subject,
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
