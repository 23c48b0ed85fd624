"""An answer holds only tokens that its request allows, and none of its bad words."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from continuous_batching.request import Request, SamplingParams, packed_ids
from models.sampling.token_masks import banned_tokens
from tests.each_of import each_of
from tests.lazy import transformers
from tests.models.test_sampler import EOS, Row, V, edited, sample, some_logits, token
from tests.models.test_sampler_engine import make_engine, requests, serve

WORDS = ((4,), (5, 6), (5, 6, 7), (9, 9), (6, 5, 6))


def changed(params: SamplingParams, answer: tuple[int, ...] = (), seed: int = 0) -> Tensor:
    return edited(Row(some_logits(seed), params, (1, 5), answer))


@each_of("seed", range(20))
def test_bad_words_are_those_of_transformers_within_the_answer(seed: int) -> None:
    random = np.random.default_rng(seed)
    answer = tuple(random.choice([4, 5, 6, 7, 9], size=int(random.integers(1, 8))).tolist())
    logits = some_logits(seed)
    expected = transformers.NoBadWordsLogitsProcessor([list(word) for word in WORDS])(
        torch.tensor([answer]), logits[None]
    )
    assert changed(SamplingParams(bad_words=WORDS), answer, seed).equal(expected[0])


def test_the_prompt_is_no_beginning_of_a_bad_word() -> None:
    assert math.isfinite(changed(SamplingParams(bad_words=((5, 6),)))[6])  # the prompt ends with 5
    assert changed(SamplingParams(bad_words=((5, 6),)), (5,))[6] == -math.inf
    assert banned_tokens(((5, 6),), np.array([], dtype=np.int32)) == []


def test_what_is_not_allowed_is_suppressed_as_by_transformers() -> None:
    allowed = [3, 11, 40, 47]
    others = [each for each in range(V) if each not in allowed]
    logits = some_logits()
    expected = transformers.SuppressTokensLogitsProcessor(others)(torch.tensor([[1]]), logits[None])[0]
    assert changed(SamplingParams(allowed_token_ids=packed_ids(reversed(allowed)))).equal(expected)


def test_masks_hold_whatever_else_changes_the_logits() -> None:
    """Neither a bias nor a penalty brings a masked token back, and min_tokens masks on its own."""
    params = SamplingParams(
        allowed_token_ids=packed_ids([4, 8, 9, EOS]),
        bad_words=((8, 4),),
        logit_bias={30: 100.0, 4: 100.0},
        repetition_penalty=0.5,
        presence_penalty=-2.0,
        min_tokens=5,
    )
    scores = changed(params, (8,))
    assert torch.isfinite(scores).nonzero().flatten().tolist() == [8, 9]


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.9}])
def test_only_allowed_tokens_are_chosen_and_log_probabilities_are_the_model_s(
    fields: dict[str, float],
) -> None:
    allowed = [2, 9, 33]
    params = SamplingParams(allowed_token_ids=packed_ids(allowed), logprobs=1, **fields)
    found = sample([Row(some_logits(), params, seed=seed) for seed in range(40)])
    assert set(found.tokens.tolist()) <= set(allowed)
    logprobs = some_logits().log_softmax(-1)
    for index, entry in found.logprobs.items():
        assert entry.logprob == pytest.approx(float(logprobs[found.tokens[index]]), abs=1e-5)
        assert entry.top[0][0] == int(logprobs.argmax()), "the likeliest of all, allowed or not"


def test_sets_of_neighbours_do_not_mix() -> None:
    sets = [[3, 5], [40], [3, 5], list(range(V)), [0]]
    rows = [Row(some_logits(n), SamplingParams(temperature=0, allowed_token_ids=packed_ids(each)))
            for n, each in enumerate(sets)]  # fmt: skip
    rows.insert(2, Row(some_logits(9), SamplingParams(temperature=0)))
    assert sample(rows).tokens.tolist() == [token(row) for row in rows]
    for row, found in zip([*rows[:2], *rows[3:]], np.delete(sample(rows).tokens, 2)):
        assert int(found) in np.frombuffer(row.params.allowed_token_ids or b"", dtype=np.int32)


def test_a_request_that_leaves_itself_no_token_ends_alone_and_by_its_own_fault() -> None:
    stuck = SamplingParams(allowed_token_ids=packed_ids([10]), bad_words=((10, 10),), max_tokens=9)
    bad, good = serve(make_engine(2, 17), [Request("bad", np.array([5]), stuck), requests()[0]])
    assert (bad.finish_reason, bad.is_at_fault, bad.answer.tolist()) == ("error", True, [10])
    assert bad.error is not None
    assert bad.error.startswith("allowed_token_ids, bad_words and min_tokens together leave no token")
    assert (good.finish_reason, good.is_at_fault) == ("length", False)


def test_masks_hold_in_beams_which_are_refused_where_too_few_tokens_go_on() -> None:
    allowed, words = [10, 11, 12, 13, 14, 15, 3], ((11, 12), (14,), (13, 13))  # 3 ends answers
    params = SamplingParams(
        max_tokens=12, beam_width=3, allowed_token_ids=packed_ids(allowed), bad_words=words
    )
    (found,) = serve(make_engine(4, 40), [Request("a", np.array([5, 11]), params)])
    assert len(found.hypotheses) == 3
    for each in found.hypotheses:
        tokens = each.tokens.tolist()
        assert set(tokens) <= set(allowed)
        assert math.isfinite(each.score)
        for word in words:
            assert all(tuple(tokens[at : at + len(word)]) != word for at in range(len(tokens)))
    few = SamplingParams(beam_width=4, allowed_token_ids=packed_ids(allowed), bad_words=words)
    with pytest.raises(ValueError, match="beam_width is 4; there may be only 3 tokens that go on"):
        make_engine(4, 40).add(Request("b", np.array([5]), few))
    same_end = ((11, 12), (10, 12), (13, 12), (50,))  # one of the six that go on may be missing
    params = SamplingParams(
        max_tokens=4, beam_width=4, allowed_token_ids=packed_ids(allowed), bad_words=same_end
    )
    (found,) = serve(make_engine(4, 40), [Request("c", np.array([5]), params)])
    assert len(found.hypotheses) == 4
