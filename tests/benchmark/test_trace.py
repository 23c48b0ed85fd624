"""A trace is what was asked for, the same each time, and what `generate` reads, or refuses by its line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmark.serve.client import read_requests
from benchmark.workloads.synthetic import (
    SyntheticLoad,
    arrivals,
    draw_requests,
    lengths,
    levels,
    shared_prompts,
    shares,
)
from benchmark.workloads.traces import summary
from scripts.trace import main
from serving.offline import Job, read_jobs
from tests.each_of import each_of


def made(count: int = 8, prompt: str = "uniform:5:20", vocab_size: int = 50, **fields: Any) -> Any:
    load = SyntheticLoad(lengths(prompt), lengths("uniform:2:9"), vocab_size, **{"seed": 3, **fields})
    return draw_requests(load, count)


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


def test_lengths_that_no_model_takes_are_not_drawn() -> None:
    random = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"lognormal:1e\+06:3 drew .* tokens; 1048576 are the most: lower"):
        lengths("lognormal:1e6:3")(random, 1000)
    assert set(lengths("lognormal:9:1e200")(random, 9).tolist()) == {1}, "the mean is in what is never drawn"


NONE: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (
        lengths,
        "is no length; write N, uniform:LEAST:MOST, ",
        (
            *("", "0", "3.5", "uniform:3", "uniform:5:4", "uniform:1:2:3", "lognormal:nan:1", "zipf:3"),
            *("99999999999", "uniform:1:1048577", "lognormal:1e30:0", "9" * 5000),
        ),
    ),
    (
        arrivals,
        r"is no process of arrivals|(gamma|ramp|closed): '.*' must be a",
        ("", "gamma", "gamma:0", "ramp:nan", "closed:0", "closed:1.5", "poisson:3"),
    ),
    (shares, r"is no list of shares|must be a number from", ("", "a", "a=0", "a=1,a=2", "=1", "a=x")),
)


@each_of("read, words, texts", NONE)
def test_what_is_no_length_process_or_share_is_refused(read: Any, words: str, texts: tuple[str, ...]) -> None:
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match=words):
            read(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--requests 1 --vocab-size 5 --skip-bad", "--skip-bad has no meaning for a drawn trace"),
        ("--requests 1 --vocab-size 5 --arrivals gamma:2", "--arrivals gamma needs a --rate"),
        ("--requests 1 --vocab-size 5 --arrivals closed:2 --rate 3", "closed has no times: leave out --rate"),
        ("--requests 1 --vocab-size 5 --think-s 2", "--think-s is between the turns of a session"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    both = ["--prompt-tokens", "3", "--output-tokens", "3", "--output", str(path)]
    with pytest.raises(ValueError, match=message):
        main([*arguments.split(), *both])
    assert not path.exists()


def gaps_s(process: str, count: int = 4000, rate_per_s: float = 5.0) -> Any:
    trace = made(count, prompt="1", rate_per_s=rate_per_s, arrivals=arrivals(process))
    return np.diff([0.0, *(each["arrival_s"] for each in trace)])


def test_bursts_have_the_rate_and_the_variation_asked_for() -> None:
    bursty = gaps_s("gamma:3", count=20_000)
    assert bursty.mean() == pytest.approx(1 / 5, rel=0.06)
    assert bursty.std() / bursty.mean() == pytest.approx(3, rel=0.06)
    even = gaps_s("gamma:0.1")
    assert even.std() / even.mean() == pytest.approx(0.1, rel=0.06)


@pytest.mark.parametrize(("first", "last"), [(2.0, 20.0), (20.0, 2.0), (7.0, 7.0)])
def test_a_ramp_goes_evenly_from_rate_to_rate(first: float, last: float) -> None:
    arrival_s = np.cumsum(gaps_s(f"ramp:{last}", rate_per_s=first))
    end_s = 2 * 4000 / (first + last)
    assert arrival_s[-1] == pytest.approx(end_s, rel=0.06)
    for part in (0.25, 0.5, 0.75):  # the integral of the rate up to there
        due = part * end_s * (first + part * (last - first) / 2)
        assert (arrival_s < part * end_s).sum() == pytest.approx(due, rel=0.1)


def test_a_ramp_of_sessions_has_its_rates_in_requests() -> None:
    trace = made(4000, turns=lengths("4"), rate_per_s=2.0, arrivals=arrivals("ramp:20"))
    assert trace[-1]["arrival_s"] == pytest.approx(2 * 4000 / (2 + 20), rel=0.1)


def test_a_closed_loop_names_its_clients_and_has_no_times() -> None:
    trace = made(7, arrivals=arrivals("closed:3"))
    assert [each["id"] for each in trace] == ["0/0", "1/0", "2/0", "0/1", "1/1", "2/1", "0/2"]
    assert {each["arrival_s"] for each in trace} == {0.0}


def test_each_prompt_begins_with_a_shared_one() -> None:
    plain, shared = made(40), made(40, system_prompts=shared_prompts("3:uniform:30:40"))
    openings = {
        tuple(each["prompt_token_ids"][: len(each["prompt_token_ids"]) - len(own["prompt_token_ids"])])
        for each, own in zip(shared, plain)
    }
    assert len(openings) == 3
    assert all(30 <= len(each) <= 40 for each in openings)
    for each, own in zip(shared, plain):
        assert each["prompt_token_ids"][-len(own["prompt_token_ids"]) :] == own["prompt_token_ids"]


def test_a_session_goes_on_from_its_last_prompt_and_answer() -> None:
    trace = made(41, turns=lengths("uniform:1:4"), rate_per_s=4.0, think_s=2.0)
    assert len(trace) == 41
    assert [each["arrival_s"] for each in trace] == sorted(each["arrival_s"] for each in trace)
    by_id = {each["id"]: each for each in trace}
    followers = [name.split("/") for name in by_id if not name.endswith("/0")]
    assert followers
    for session, turn in followers:
        now, before = by_id[f"{session}/{turn}"], by_id[f"{session}/{int(turn) - 1}"]
        known = before["prompt_token_ids"]
        assert now["prompt_token_ids"][: len(known)] == known
        own = len(now["prompt_token_ids"]) - len(known) - before["max_tokens"]
        assert 5 <= own <= 20
        assert now["arrival_s"] >= before["arrival_s"]


def test_tenants_and_priorities_come_by_their_shares_and_a_session_keeps_its_own() -> None:
    trace = made(
        4000, prompt="1", turns=lengths("2"), tenants=shares("a=3,b=1"), priorities=levels("-1=1,5=9")
    )
    kinds = [(each["tenant"], each["priority"]) for each in trace]
    assert np.mean([tenant == "a" for tenant, _ in kinds]) == pytest.approx(0.75, abs=0.03)
    assert np.mean([priority == 5 for _, priority in kinds]) == pytest.approx(0.9, abs=0.03)
    of_session = {(each["id"].split("/")[0], kind) for each, kind in zip(trace, kinds)}
    assert len(of_session) == 2000


ABSURD: list[Any] = [-1, 1e300, 10**400, "12", True, [], {}, [[]], "x" * 10_000]


@each_of("key", ["arrival_s", "max_tokens", "n", "prompt_token_ids"])
@each_of("value", ABSURD)
def test_an_absurd_value_is_refused_by_its_line(key: str, value: Any, tmp_path: Path) -> None:
    fields = {"id": "a", "prompt_token_ids": [1], key: value}
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(fields) + "\n")
    if not (key == "n" and value is True):  # which Python takes for 1
        with pytest.raises(ValueError, match="line 1: ") as refusal:
            read_requests(path, skip_bad=False)
        assert len(str(refusal.value)) < 400
    (record,) = read_jobs([json.dumps(fields)], None)
    assert "line 1: " in record["error"]
    assert len(record["error"]) < 400
