"""A beam search from a line of JSON: what is asked, what is refused, what comes out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from continuous_batching.request import SamplingParams
from recipes.assembly.engine import build
from recipes.schema.reader import load
from serving.offline import read_jobs, run_jobs
from serving.text.request_fields import parse_request
from serving.text.tokenizer import Text

IDS = {"id": "a", "prompt_token_ids": [1, 2]}


def test_the_fields_of_a_search() -> None:
    fields = {"beam_width": 4, "length_penalty": 0.5, "early_stopping": "never", "n": 3, "temperature": 0}
    request = parse_request(IDS | fields, None)
    assert request.params == SamplingParams(
        beam_width=4, length_penalty=0.5, early_stopping="never", temperature=0.0
    )
    assert request.followers == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 4, "best_of": 4}, "best_of is 4; it must be left out beside beam_width"),
        ({"beam_width": 4, "n": 5}, r"n is 5; it must be at most beam_width \(4\)"),
        ({"beam_width": 129}, "beam_width is 129; it must be an integer from 0 to 128"),
        ({"beam_width": 1}, "beam_width is 1; it must be 0"),
        ({"beam_width": 2.5}, "beam_width is 2.5; it must be an integer"),
        (
            {"beam_width": 4, "early_stopping": "soon"},
            'early_stopping is "soon"; it must be true, false or "never"',
        ),
        ({"beam_width": 4, "early_stopping": 1}, "early_stopping is 1; it must be true"),
        ({"beam_width": 4, "length_penalty": "long"}, 'length_penalty is "long"; it must be a number'),
        ({"beam_width": 4, "temperature": 0.7}, "temperature is 0.7; it must be left out beside beam_width"),
        ({"beam_width": 4, "top_p": 0.9}, "top_p is 0.9; it must be left out beside beam_width"),
        ({"beam_width": 4, "seed": 1}, "seed is 1; it must be left out beside beam_width"),
        ({"length_penalty": 2}, "length_penalty is 2.0; it must be left out without beam_width"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_request(IDS | fields, None)


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
