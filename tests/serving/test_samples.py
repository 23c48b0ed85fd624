"""Several answers to one prompt, drawn or searched: which, in which order, and what each line says."""

from __future__ import annotations

import json

import numpy as np
import pytest

from continuous_batching.request import Request, TokenLogprobs
from recipes.assembly.engine import build
from recipes.schema.reader import load
from serving.answers.answers import SampleAnswers
from serving.offline import read_jobs, run_jobs
from serving.text.tokenizer import Text, TextOptions


def samples_of(num_samples: int, num_answers: int) -> SampleAnswers:
    requests = [Request(str(number), np.arange(3)) for number in range(num_samples)]
    requests[0].followers = requests[1:]
    return SampleAnswers(requests[0], None, TextOptions(), num_answers)


def end(samples: SampleAnswers, index: int, *logprobs: float, reason: str = "stop") -> list[tuple[int, int]]:
    """The answers that are known when a sample ends, each as its index and its sample."""
    entries = [TokenLogprobs(0, value, ()) for value in logprobs]
    return [(each.index, each.sample) for each in samples.push(index, [0] * len(entries), entries, reason)]


def test_all_samples_that_were_asked_for_are_answers_as_they_end() -> None:
    samples = samples_of(2, 2)
    assert end(samples, 1, -9.0) == [(1, 1)]
    assert end(samples, 0, -1.0) == [(0, 0)]


def test_the_best_samples_are_answers_when_all_have_ended() -> None:
    samples = samples_of(4, 2)
    assert end(samples, 3, reason="error") == end(samples, 1, -1.0) == end(samples, 0, -3.0, -3.0) == []
    assert end(samples, 2, -2.0) == [(0, 1), (1, 2)]


def test_equal_samples_answer_in_the_order_of_their_numbers() -> None:
    samples = samples_of(3, 2)
    assert end(samples, 1, -1.0) == end(samples, 2, -2.0) == []
    assert end(samples, 0, -1.0) == [(0, 0), (1, 1)]


def test_a_sample_that_ended_takes_no_more_tokens() -> None:
    samples = samples_of(2, 2)
    end(samples, 0, -1.0)
    assert end(samples, 0, -1.0) == samples.end(0, "abort") == []
    assert samples.num_open == 1


def test_the_best_hypotheses_come_out_best_first() -> None:
    engine = build(load("recipes/tiny/cpu.yaml", ["device.compile=false", "device.threads=1"])).engine
    text = Text.load("recipes/tiny/weights")
    lines = [
        {"id": "three", "prompt": "One day", "beam_width": 5, "n": 3, "max_tokens": 12, "logprobs": 1},
        {"id": "one", "prompt": "348+275=", "beam_width": 4, "max_tokens": 8},
        {"id": "wide", "prompt": "348+275=", "beam_width": 100, "max_tokens": 8},
    ]
    records = list(run_jobs(engine, text, list(read_jobs(map(json.dumps, lines), text))))
    (wide,) = (each for each in records if each["id"] == "wide")
    assert "beam_width is 100; " in wide["error"]
    (one,) = (each for each in records if each["id"] == "one")
    assert one["text"] == "623"
    assert one["finish_reason"] == "stop"
    assert "index" not in one
    assert "logprobs" not in one
    assert one["score"] == pytest.approx(one["cumulative_logprob"] / len(one["token_ids"]))
    three = [each for each in records if each["id"] == "three"]
    assert [each["index"] for each in three] == [0, 1, 2]
    assert sorted((each["score"] for each in three), reverse=True) == [each["score"] for each in three]
    assert len({each["text"] for each in three}) == 3
    for each in three:
        assert sum(line["logprob"] for line in each["logprobs"]) == pytest.approx(each["cumulative_logprob"])
        assert [line["token"] for line in each["logprobs"]] == each["token_ids"]
        assert each["first_token_s"] is not None
