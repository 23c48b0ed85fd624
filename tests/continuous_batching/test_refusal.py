"""A refusal holds as data what its line says in words."""

from __future__ import annotations

import numpy as np
import pytest

from borders.refusal import BadRequest
from continuous_batching.policies.batching import StallFree
from continuous_batching.request import Request, SamplingParams, packed_ids
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.pages import PagePool
from tests.each_of import each_of


def refused(request: Request) -> BadRequest:
    """By a scheduler that has taken "here"."""
    slots = SlotPool(num_slots=2, max_tokens=32, page_size=4)
    scheduler = Scheduler(
        slots, PagePool(9), StallFree(), max_batch_tokens=16, vocab_size=100, eos_token_ids=(2,)
    )
    scheduler.add(Request("here", np.arange(3, 6)))
    with pytest.raises(BadRequest) as refusal:
        scheduler.add(request)
    assert len(scheduler.waiting) == 1, "what is refused changes nothing"
    return refusal.value


def test_a_value_out_of_range_names_its_field_value_and_limit() -> None:
    with pytest.raises(BadRequest) as refusal:
        SamplingParams(top_p=2)
    bad = refusal.value
    assert (bad.field, bad.value, bad.limit) == ("top_p", 2, "a number from 0 to 1")
    assert str(bad) == "top_p is 2; it must be a number from 0 to 1"
    assert repr(bad) == "BadRequest('top_p is 2; it must be a number from 0 to 1', field='top_p')"


def test_a_place_within_a_field_is_no_part_of_its_name() -> None:
    with pytest.raises(BadRequest) as refusal:
        SamplingParams(logit_bias={7: 101.0})
    assert (refusal.value.field, refusal.value.place) == ("logit_bias", "[7]")
    assert str(refusal.value) == "logit_bias[7] is 101.0; it must be a number from -100 to 100"
    assert str(refusal.value.of_field("bias")) == "bias[7] is 101.0; it must be a number from -100 to 100"


@each_of(
    "request_, field, value, limit",
    [
        (Request("a", np.array([5, 100])), "prompt", 100, 99),
        (Request("a", np.array([5]), SamplingParams(logit_bias={200: 1})), "logit_bias", 200, 99),
        (Request("a", np.array([5]), SamplingParams(beam_width=3)), "beam_width", 3, 2),
        (Request("a", np.array([5]), SamplingParams(max_tokens=50)), "max_tokens", 51, 32),
        (Request("a", np.full(40, 5)), "prompt", 56, 32),
        (Request("a", np.array([5]), SamplingParams(bad_words=((5, 100),))), "bad_words", 100, 99),
        (
            Request("a", np.array([5]), SamplingParams(allowed_token_ids=packed_ids([7, 101]))),
            "allowed_token_ids",
            101,
            99,
        ),
        (Request("a", np.array([-1])), "prompt", -1, 99),
        (Request("here", np.array([5])), "id", "here", None),
    ],
)
def test_the_scheduler_says_what_is_wrong_and_by_how_much(
    request_: Request, field: str | None, value: object, limit: object
) -> None:
    bad = refused(request_)
    assert (bad.field, bad.value, bad.limit) == (field, value, limit)
    assert (request_.id in str(bad).split()) == (field == "id"), "a client does not know the engine's ids"
    assert "scheduler." not in str(bad), "nor the recipe"


def test_a_long_value_is_cut() -> None:
    assert str(BadRequest("stop", value="x" * 100, limit="short")) == (
        f'stop is "{"x" * 56}...; it must be short'
    )


def test_a_search_has_no_samples_beside_it() -> None:
    leader = Request("a", np.arange(3, 6), SamplingParams(beam_width=2, max_tokens=2))
    leader.followers = [Request("b", np.arange(3, 6), SamplingParams(beam_width=2, max_tokens=2))]
    bad = refused(leader)
    assert (bad.field, bad.value) == ("beam_width", 2)
