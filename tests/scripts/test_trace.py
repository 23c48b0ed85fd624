"""A trace is what was asked for, the same each time, and what `generate` reads."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.trace import lengths, main, requests, summary
from serving.offline import Job, read_jobs


def made(count: int = 8, rate_per_s: float = math.inf, seed: int = 3, prompt: str = "uniform:5:20") -> Any:
    return requests(count, rate_per_s, lengths(prompt), lengths("uniform:2:9"), vocab_size=50, seed=seed)


def lens(trace: list[dict[str, Any]]) -> list[int]:
    return [len(each["prompt_token_ids"]) for each in trace]


def test_its_lines_are_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    arguments = "--requests 6 --rate 4 --prompt-tokens 7 --output-tokens lognormal:30:0.5 --vocab-size 50"
    main([*arguments.split(), "--output", str(path)])
    lines = path.read_text(encoding="utf-8").splitlines()
    jobs = list(read_jobs(lines, None))
    assert [job.request.id for job in jobs if isinstance(job, Job)] == ["0", "1", "2", "3", "4", "5"]
    for line, job in zip(map(json.loads, lines), jobs):
        assert isinstance(job, Job)
        assert job.request.num_prompt_tokens == 7
        assert job.request.params.max_tokens == line["max_tokens"]
        assert job.request.params.temperature == 0
        assert job.request.params.ignore_eos
        assert job.request.arrival_s == line["arrival_s"]
    assert capsys.readouterr().out == summary([json.loads(line) for line in lines]) + "\n"


def test_a_seed_draws_the_same_lengths_and_prompts_at_every_rate() -> None:
    at_once, spread = made(), made(rate_per_s=2.0)
    assert at_once == made()
    assert [each | {"arrival_s": 0.0} for each in spread] == at_once
    assert lens(made(seed=4)) != lens(at_once)
    assert [each["max_tokens"] for each in made(prompt="9")] == [each["max_tokens"] for each in at_once]


def test_requests_arrive_by_a_poisson_process() -> None:
    arrivals_s = [each["arrival_s"] for each in made(count=4000, rate_per_s=5.0, prompt="1")]
    gaps_s = np.diff([0.0, *arrivals_s])
    assert (gaps_s >= 0).all()
    assert gaps_s.mean() == pytest.approx(1 / 5, rel=0.06)
    assert gaps_s.std() == pytest.approx(1 / 5, rel=0.1)
    assert {each["arrival_s"] for each in made()} == {0.0}


def test_lengths_are_distributed_as_asked() -> None:
    random = np.random.default_rng(0)
    assert set(lengths("7")(random, 100).tolist()) == {7}
    assert set(lengths("uniform:3:5")(random, 300).tolist()) == {3, 4, 5}
    drawn = lengths("lognormal:140:0.5")(random, 20_000)
    assert drawn.mean() == pytest.approx(140, rel=0.02)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.02)
    assert lengths("lognormal:1:2")(random, 1000).min() == 1


def test_token_ids_stay_within_the_vocabulary() -> None:
    tokens = {token for each in made(count=60) for token in each["prompt_token_ids"]}
    assert tokens == set(range(50))


@pytest.mark.parametrize(
    "text", ["", "0", "3.5", "uniform:3", "uniform:5:4", "uniform:1:2:3", "lognormal:nan:1", "zipf:3"]
)
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no length; write N, uniform:LEAST:MOST or"):
        lengths(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--requests 0 --vocab-size 5", "--requests is 0; it must be above 0"),
        ("--requests 1 --vocab-size -5", "--vocab-size is -5; it must be above 0"),
        ("--requests 1 --vocab-size 5 --rate nan", "--rate is nan; it must be above 0"),
        ("--requests 1 --vocab-size 5 --seed -1", "--seed is -1; it must be 0 or more"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    both = ["--prompt-tokens", "3", "--output-tokens", "3", "--output", str(path)]
    with pytest.raises(ValueError, match=message):
        main([*arguments.split(), *both])
    assert not path.exists()
