"""The rule by which beams go on: against plain enumeration, and what must hold of any choice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuous_batching.request import Hypothesis, SamplingParams
from continuous_batching.samples.beam_search import choose, is_over, keep, place, score
from tests.each_of import each_of


def found(*scores: float) -> list[Hypothesis]:
    empty = np.empty(0, dtype=np.int32)
    return [Hypothesis(empty, each, each, "stop", ()) for each in scores]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32), width=st.integers(2, 8), num_beams=st.integers(1, 8), stops=st.integers(0, 4)
)
def test_the_best_live_on_and_only_the_very_best_end(
    seed: int, width: int, num_beams: int, stops: int
) -> None:
    random = np.random.default_rng(seed)
    num_candidates = width + stops
    totals = -random.integers(0, 12, (num_beams, num_candidates)) / 4.0  # some are equal
    tokens = np.stack([random.permutation(50)[:num_candidates] for _ in range(num_beams)])
    ends = np.zeros_like(tokens, dtype=bool)
    for row in ends:
        row[random.permutation(num_candidates)[: int(random.integers(0, stops + 1))]] = True
    order = sorted(
        np.ndindex(totals.shape), key=lambda at: (-totals[at], at[0], tokens[at])
    )  # equals: the better beam's first, then the smaller token
    living, ended = choose(totals, tokens, ends, width)
    assert list(zip(*living)) == [at for at in order if not ends[at]][:width]
    assert list(zip(*ended)) == [at for at in order[:width] if ends[at]]
    assert len(living[0]) == width


@settings(max_examples=200, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), width=st.integers(2, 8), begun=st.booleans())
def test_beams_move_no_more_than_they_must(seed: int, width: int, begun: bool) -> None:
    random = np.random.default_rng(seed)
    seats = random.permutation(20)[:width].tolist()
    rows = random.permutation(seats).tolist() if begun else seats[:1]
    parents = random.integers(0, len(rows), width).tolist()
    placed = place(rows, parents, seats)
    assert sorted(placed) == sorted(seats)
    for row in set(rows):
        heirs = [at for at, parent in enumerate(parents) if rows[parent] == row]
        assert not heirs or placed[heirs[0]] == row  # the best stays, so that nobody moves onto a parent


def test_only_the_best_hypotheses_are_kept_the_earlier_of_equals() -> None:
    first, second, third = found(-1.0, -2.0, -1.0)
    assert keep([first, second, third], 2) == [first, third]


@each_of(
    "early, penalty, best, over",
    [
        (True, 1.0, -0.1, True),  # there are as many answers as beams, which is enough
        (False, 1.0, -8.1, True),  # -8.1 / 4 is worse than -2
        (False, 1.0, -7.9, False),
        ("never", 1.0, -8.1, False),  # it may become -8.1 / 10
        ("never", 1.0, -20.1, True),
        ("never", 0.0, -2.1, True),
        ("never", -1.0, -0.6, True),  # longer is worse: at best -0.6 * 4
        ("never", -1.0, -0.4, False),
        (False, 1.0, -8.0, True),  # no better is not enough
    ],
)
def test_a_search_ends_when_transformers_does(
    early: bool | str, penalty: float, best: float, over: bool
) -> None:
    params = SamplingParams(
        max_tokens=10,
        beam_width=2,
        length_penalty=penalty,
        early_stopping=early,
    )
    assert is_over(found(-1.0, -2.0), best, 4, params) == over
    assert not is_over(found(-1.0), best, 4, params)


def test_a_score_is_a_log_probability_over_a_length() -> None:
    assert score(-6.0, 3, SamplingParams(beam_width=2, length_penalty=2.0)) == pytest.approx(-6 / 9)


@each_of(
    "fields, message",
    [
        (
            {"beam_width": 2, "length_penalty": 11.0},
            "length_penalty is 11.0; it must be a number from -10 to 10",
        ),
        ({"early_stopping": True}, "early_stopping is true; it must be left out without beam_width"),
        ({"beam_width": 2, "top_k": 5}, "top_k is 5; it must be left out"),
        ({"beam_width": 2, "min_p": 0.5}, "min_p is 0.5; it must be left out"),
        ({"beam_width": 2, "stop": ("x",)}, r'stop is \["x"\]; it must be left out beside beam_width'),
    ],
)
def test_what_contradicts_a_search_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)
