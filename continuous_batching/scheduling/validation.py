"""Refuse requests that can never be served, with the reason.

The checks compare a request with the vocabulary, the slot table and the page pool, so that every accepted
request can finish. Values that are wrong by themselves are refused by `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from borders.refusal import TOO_LONG, BadRequest
from continuous_batching.policies.policy import Policy
from continuous_batching.request import Request
from continuous_batching.slots import SlotPool
from kv_cache.groups import PageGroup
from kv_cache.pages import Index, PagePool

GiveUp = Literal["nothing", "cached", "running"]


def check_budget(max_batch_tokens: int, policy: Policy, slots: SlotPool) -> None:
    """Raise ValueError if a step's budget is too small for this policy and these slots."""
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
    """Raise BadRequest for samples of one prompt whose ids are not all different, or beside a beam search."""
    ids = {leader.id}
    if leader.followers and any(each.params.beam_width for each in (leader, *leader.followers)):
        raise BadRequest(
            "beam_width", value=leader.params.beam_width, limit="left out beside further samples"
        )
    for each in leader.followers:
        same = np.array_equal(each.prompt, leader.prompt) and each.cache_salt == leader.cache_salt
        same &= each.adapter == leader.adapter
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
    request: Request,
    vocab_size: int,
    stop_tokens: Index,
    slots: SlotPool,
    groups: Sequence[PageGroup],
) -> None:
    """Raise BadRequest for a request with unknown tokens or one that can never fit."""
    full, *others = groups
    _check_tokens(request, vocab_size)
    if len(request.known):
        _check_known(request)
    if request.params.beam_width:
        _check_beams(request, vocab_size, stop_tokens, slots)
    limit = longest_allowed(slots, full.pool)
    if longest_tokens(request) > limit:
        raise too_long(
            request.num_prompt_tokens,
            f"you requested {longest_tokens(request)} tokens ({request.num_prompt_tokens} in the prompt,"
            f" {request.params.max_tokens} in the completion)",
            limit,
            value=longest_tokens(request),
        )
    width, needed, usable = request.params.beam_width, pages_of(request, full), full.pool.num_pages - 1
    if needed > usable:
        size = slots.page_size
        raise BadRequest(
            "beam_width",
            f"is {width}, and so many beams may need room for {needed * size} tokens; there is room for"
            f" {usable * size}",
            value=width,
            limit=usable * size,
            fix="lower beam_width or max_tokens",
        )

    for group in others:
        needed, usable = pages_of(request, group), group.pool.num_pages - 1
        if needed > usable:
            raise BadRequest(
                "beam_width" if width else "max_tokens",
                f"needs {needed} {group.name}; the cache has {usable}",
                value=needed,
                limit=usable,
                fix="lower beam_width" if width else "give the cache more pages (cache.num_window_pages)",
                subject="this request",
            )


def is_here(request: Request) -> BadRequest:
    """Return the refusal of a request whose id is in use."""
    fix, subject = "give each an id of its own", f"request {request.id}"
    return BadRequest("id", "is being served already", value=request.id, fix=fix, subject=subject)


def too_long(num_prompt: int, asked: str, limit: int, *, value: int) -> BadRequest:
    """Return the refusal of a request that is longer than allowed, in the words of the OpenAI API."""
    return BadRequest(
        "prompt" if num_prompt >= limit else "max_tokens",
        f"is {limit} tokens. However, {asked}",
        value=value,
        limit=limit,
        fix="shorten the prompt" if num_prompt >= limit else "shorten the prompt or lower max_tokens",
        subject="This model's maximum context length",
        code=TOO_LONG,
    )


def _check_tokens(request: Request, vocab_size: int) -> None:
    """Check that every token id of the prompt and of the parameters is in the vocabulary."""
    prompt, params = request.prompt, request.params
    if not len(prompt):
        raise BadRequest("prompt", "is empty; it must hold at least one token")
    allowed = np.frombuffer(params.allowed_token_ids or b"", dtype=np.int32)
    biased = np.fromiter(params.logit_bias, dtype=np.int64, count=len(params.logit_bias))
    banned = np.array([token for word in params.bad_words for token in word], dtype=np.int64)
    for field, tokens in (
        ("prompt", prompt),
        ("known_token_ids", request.known),
        ("allowed_token_ids", allowed),
        ("logit_bias", biased),
        ("bad_words", banned),
        ("label_token_ids", np.array(params.label_token_ids, dtype=np.int64)),
    ):
        outside = (tokens < 0) | (tokens >= vocab_size)
        if outside.any():
            token = int(tokens[outside.argmax()])
            problem = f"holds the token id {token}; the model's go from 0 to {vocab_size - 1}"
            raise BadRequest(field, problem, value=token, limit=vocab_size - 1)


def _check_known(request: Request) -> None:
    """Check that an answer which another engine has begun can go on: it is one sample and has not ended."""
    params, num_known = request.params, len(request.known)
    if request.followers or params.beam_width or params.pooling:
        raise BadRequest("known_token_ids", "go on in one sample; leave n, beam_width and pooling out")
    if num_known >= params.max_tokens:
        limit = params.max_tokens - 1
        problem = f"holds {num_known} tokens, and the answer ends at {params.max_tokens} (max_tokens)"
        raise BadRequest("known_token_ids", problem, value=num_known, limit=limit)


def _check_beams(request: Request, vocab_size: int, stop_tokens: Index, slots: SlotPool) -> None:
    """Check that there are slots for all beams, and enough tokens for them to continue with."""
    params = request.params
    width = params.beam_width
    if width > slots.num_slots:
        raise BadRequest(
            "beam_width",
            f"is {width}; {slots.num_slots} requests run at once, and each beam counts as one",
            value=width,
            limit=slots.num_slots,
            fix="lower beam_width",
        )
    allowed = np.arange(vocab_size)
    if params.allowed_token_ids is not None:
        allowed = np.frombuffer(params.allowed_token_ids, dtype=np.int32)
    # The worst case: each bad word lacks only its last token
    banned = [word[-1] for word in params.bad_words]
    going_on = len(np.setdiff1d(allowed, [*stop_tokens, *banned]))
    if width > going_on:
        raise BadRequest(
            "beam_width",
            f"is {width}; there may be only {max(0, going_on)} tokens that go on and may come next",
            value=width,
            limit=max(0, going_on),
            fix="lower beam_width",
        )


def check_resize(num_pages: int, give_up: GiveUp, group: PageGroup, accepted: Sequence[Request]) -> None:
    """Raise ValueError for a pool of a group too small for what is held, or for an accepted request."""
    pool, running, what = group.pool, group.num_used, group.name
    pages, tokens, width = max(
        ((pages_of(each, group), longest_tokens(each), each.params.beam_width) for each in accepted),
        default=(1, 1, 0),
    )
    needed = 1 + pages
    if num_pages < needed:
        beams = f" in {width} beams" if width else ""
        raise ValueError(
            f"{num_pages} {what} cannot hold the longest accepted request, {tokens} tokens{beams};"
            f" resize to at least {needed}, or end it first"
        )
    least = {"nothing": pool.num_held, "cached": running, "running": 0}[give_up]
    if num_pages - 1 < least:
        raise ValueError(
            f"{num_pages} {what} are fewer than the {pool.num_held} held ({running} by running requests, the"
            f" others cached); resize to at least {least + 1}, or allow more to be given up than {give_up}"
        )


def pages_of(request: Request, group: PageGroup) -> int:
    """Return the most pages of a group that a request may hold with all its beams.

    The last token is never cached. Every beam may have pages of its own behind the prompt.
    """
    longest = max(1, longest_tokens(request) - 1)
    of_a_row, shared = group.needed(longest), request.num_prompt_tokens // group.page_size
    own = min(of_a_row, -(-longest // group.page_size) - shared)
    return of_a_row + max(0, request.params.beam_width - 1) * own


def longest_allowed(slots: SlotPool, pool: PagePool) -> int:
    """Return the most tokens that any request may have, prompt and answer."""
    return min(slots.max_tokens, _capacity(slots, pool))


def _capacity(slots: SlotPool, pool: PagePool) -> int:
    return (pool.num_pages - 1) * slots.page_size + 1  # the last token is never cached


def longest_tokens(request: Request) -> int:
    """Return the most tokens that a request may have, prompt and answer."""
    return request.num_prompt_tokens + request.params.max_tokens
