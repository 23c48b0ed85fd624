"""Several answers to one prompt: which, in which order, and what each line says."""

from __future__ import annotations

import json

import numpy as np
import pytest

from continuous_batching.request import Request, TokenLogprobs
from recipes.assembly.engine import build
from recipes.schema.reader import load
from serving.answers.answers import SampleAnswers
from serving.offline import read_jobs, run_jobs
from serving.text.request_fields import parse_request
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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n is 0; it must be an integer from 1 to 128"),
        ({"n": 129}, "n is 129; it must be an integer from 1 to 128"),
        ({"n": 3, "best_of": 2}, r"best_of is 2; it must be an integer from n \(3\) to 128"),
        ({"best_of": 500}, "best_of is 500"),
    ],
)
def test_counts_out_of_range_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_request({"id": "a", "prompt_token_ids": [1], **fields}, None)


def test_samples_have_ids_and_seeds_of_their_own() -> None:
    request = parse_request({"id": "a", "prompt_token_ids": [1], "n": 3, "seed": 7}, None)
    assert [each.id for each in request.followers] == ["a#1", "a#2"]
    assert [each.params.seed for each in (request, *request.followers)] == [7, 8, 9]


def test_one_line_comes_out_for_each_answer() -> None:
    engine = build(load("recipes/tiny/cpu.yaml", ["device.compile=false", "device.threads=1"])).engine
    text = Text.load("recipes/tiny/weights")
    lines = [
        {"id": "three", "prompt": "One day", "n": 3, "seed": 1, "temperature": 2.0, "max_tokens": 12},
        {"id": "best", "prompt": "One day", "best_of": 4, "seed": 1, "max_tokens": 12},
        {"id": "one", "prompt": "12+7=", "temperature": 0, "max_tokens": 6},
    ]
    records = list(run_jobs(engine, text, list(read_jobs(map(json.dumps, lines), text))))
    three = sorted((each for each in records if each["id"] == "three"), key=lambda each: each["index"])
    assert [each["index"] for each in three] == [0, 1, 2]
    assert len({each["text"] for each in three}) > 1
    (best,) = (each for each in records if each["id"] == "best")
    assert "index" not in best
    assert "logprobs" not in best
    assert engine.scheduler.counters.copied_pages > 0, "samples share the page that their prompt ends in"
