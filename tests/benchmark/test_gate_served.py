"""The gate reads the names of `vllm bench serve`, and holds a client's figures to what it saw."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmark.gate import served, settings, shape
from benchmark.gate.gate import audit
from benchmark.gate.law import Figures, rule
from recipes.schema.reader import load
from tests.serving.server import TINY
from tests.simulation.queue import honest

Result = dict[str, Any]
COUNTS = {
    "duration_s": "duration",
    "requests": "num_prompts",
    "prompt_tokens": "total_input_tokens",
    "output_tokens": "total_output_tokens",
    "requests_per_s": "request_throughput",
    "output_tokens_per_s": "output_throughput",
    "total_tokens_per_s": "total_token_throughput",
}
OBJECTIVES = {"ttft": 60.0, "tpot": 12.0, "e2el": 250.0, "itl": 25.0}


def good(record: Result) -> bool:
    """Counted here, from the times of tokens."""
    gaps = np.diff(record["piece_times_s"])
    first_s, last_s = (record["piece_times_s"][at] - record["arrival_s"] for at in (0, -1))
    spent = {"ttft": first_s, "e2el": last_s, "tpot": gaps.mean(), "itl": gaps.max()}
    return all(1e3 * spent[name] <= most for name, most in OBJECTIVES.items())


def in_time(record: Result) -> int:
    """Tokens that met their own deadline, one by one."""
    deadline_s, met = record["arrival_s"] + OBJECTIVES["ttft"] / 1e3, 0
    for time_s in record["piece_times_s"]:
        met += time_s <= deadline_s
        deadline_s += OBJECTIVES["tpot"] / 1e3
    return met


def by_their_names(seed: int) -> Result:
    """An honest result as a client of a server has it."""
    result = honest(seed)
    told = {theirs: result.pop(ours) for ours, theirs in COUNTS.items()}
    for ours, theirs in (("ttft_ms", "ttft"), ("tpot_ms", "tpot"), ("itl_ms", "itl"), ("e2e_ms", "e2el")):
        for part, value in result.pop(ours).items():
            told[f"{ {'p50': 'median'}.get(part, part) }_{theirs}_ms"] = value
    del result["runs_output_tokens_per_s"]
    for record in result["records"]:
        record["piece_times_s"] = record.pop("token_times_s")
    records = result["records"]
    num_good = sum(good(record) for record in records)
    first_s = [record["first_token_s"] - record["arrival_s"] for record in records]
    stay_s = sum(record["finish_s"] - record["arrival_s"] for record in records)
    return {
        **result,
        **told,
        "itl_gaps": told["total_output_tokens"] - result["completed"],
        "goodput": OBJECTIVES,
        "request_goodput": num_good / told["duration"],
        "good_share": num_good / told["num_prompts"],
        "p50_ttft_ms": told["median_ttft_ms"],
        "std_ttft_ms": 1e3 * float(np.std(first_s)),
        "mean_in_flight": stay_s / told["duration"],
        "errors": {},
        "rejected": 0,
        "fluidity": sum(in_time(record) for record in result["records"]) / told["total_output_tokens"],
        "client": {"late_ms": {"p99": 1.0}, "lag_ms": {"p99": 2.0}},
    }


@pytest.mark.parametrize("seed", [1, 2, 7])
def test_an_honest_result_passes_under_their_names(seed: int) -> None:
    result = by_their_names(seed)
    are_good = [good(record) for record in result["records"]]
    assert 0 < sum(are_good) < len(are_good), "the objectives tell requests apart"
    verdict = audit(result)
    assert verdict.passed, verdict.describe()["refused"]
    assert {"Little", "recount", "goodput", "fluidity", "client on time", "both names"} <= {
        *verdict.describe()["passed"]
    }


def scale(name: str, by: float) -> Callable[[Result], None]:
    return lambda result: result.update({name: result[name] * by})


def put(name: str, value: object) -> Callable[[Result], None]:
    return lambda result: result.update({name: value})


def join_pieces(result: Result) -> None:
    result["records"][3]["piece_tokens"] = [1, 2]


def hide_a_pause(result: Result) -> None:
    del result["records"][3]["piece_times_s"][1]


@pytest.mark.parametrize(
    ("tamper", "law"),
    [
        (scale("request_throughput", 1.3), "rate x duration"),
        (scale("mean_ttft_ms", 0.5), "recount"),
        (scale("mean_itl_ms", 0.8), "recount"),
        (scale("p99_itl_ms", 0.8), "recount"),
        (scale("itl_gaps", 0.5), "recount"),
        (hide_a_pause, "recount"),
        (join_pieces, "tokens by request"),
        (scale("request_goodput", 2), "goodput"),
        (put("request_goodput", 0.0), "goodput"),
        (put("requests_per_s", 99.0), "both names"),
        (put("ttft_ms", {"p99": 0.1}), "both names"),
        (scale("p50_ttft_ms", 0.1), "both names"),
        (scale("std_ttft_ms", 0.1), "spreads"),
        (scale("good_share", 0.5), "goodput"),
        (scale("mean_in_flight", 0.5), "in flight"),
        (put("errors", {"HTTP 500: busy": 3}), "errors"),
        (put("rejected", 3), "errors"),
        (put("fluidity", 1.2), "fluidity"),
        (scale("fluidity", 1.1), "fluidity"),
        (put("client", {"late_ms": {"p99": 1.0}, "lag_ms": {"p99": 900.0}}), "client on time"),
        (put("client", {"late_ms": {"p99": 900.0}}), "client on time"),
    ],
)
def test_a_tampered_one_does_not(tamper: Callable[[Result], None], law: str) -> None:
    result = copy.deepcopy(by_their_names(1))
    tamper(result)
    assert law in audit(result).describe()["refused"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"goodput": {"e2e": 5}}, "goodput.e2e is no objective; there are ttft, tpot, itl, e2el"),
        ({"errors": 3}, "errors is 3; it must be an object of counts"),
        ({"errors": {"busy": "3"}}, "errors of 'busy' is '3'; it must be a finite number"),
    ],
)
def test_what_cannot_be_read_is_named(fields: Result, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        audit(by_their_names(1) | fields)


def test_times_that_are_none_are_named() -> None:
    result = by_their_names(1)
    result["records"][0]["piece_times_s"] = 5
    with pytest.raises(ValueError, match="a time of request 0: 5 is given where a list of times must be"):
        audit(result)


def test_who_asked_for_nothing_was_not_late() -> None:
    nobody = {"records": [], "requests": 0, "completed": 0, "failed": 0, "fluidity": 1.0}
    told = audit(nobody | {"goodput": {"ttft": 5, "tpot": 1}}).describe()
    assert "no record asks for a token" in told["not_checkable"]["fluidity"]


def test_a_file_of_vllm_is_audited() -> None:
    """Its names, and no records; the gaps of its ITL are between pieces, and not told."""
    told = {
        "duration": 10.0,
        "completed": 100,
        "failed": 0,
        "num_prompts": 100,
        "request_rate": "inf",
        "total_input_tokens": 1000,
        "total_output_tokens": 5000,
        "request_throughput": 10.0,
        "output_throughput": 500.0,
        "total_token_throughput": 600.0,
        "mean_ttft_ms": 50.0,
        "median_ttft_ms": 45.0,
        "p99_ttft_ms": 90.0,
        "mean_itl_ms": 40.0,
    }
    assert audit(told).passed
    wrong = audit({**told, "request_throughput": 48.2, "itls": [[0.04]] * 100}).describe()["refused"]
    assert list(wrong) == ["rate x duration"]


def test_a_late_client_says_that_the_machine_was_busy_and_what_to_do() -> None:
    late = by_their_names(1) | {"client": {"late_ms": {"p99": 1.0}, "lag_ms": {"p99": 900.0}}}
    why = audit(late).describe()["refused"]["client on time"]
    assert "client.lag_ms.p99 is 900" in why
    assert "the client's machine was too busy to measure this server: run again" in why


def told_by_a_server() -> Result:
    """What a result holds of a server that said how it runs."""
    recipe = load(TINY).described()
    sizes = {"num_slots": 32, "num_pages": 1023, "page_size": 16}
    readings = [[0.5, 1.0, 3, 0, 0.1], [1.0, 1.5, 32, 4, 0.2]]
    columns = ["at_s", "wall_s", "running", "waiting", "kv_usage"]
    return {
        "server": {"recipe": recipe, **sizes},
        "metrics": {
            "before": {"requests": 0.0},
            "after": {"requests": 9.0},
            "columns": columns,
            "readings": readings,
        },
    }


def test_a_servers_own_words_agree() -> None:
    (law,) = settings.LAWS[1:]
    assert rule(law, told_by_a_server()).outcome == "pass"


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (lambda told: told["server"].update(num_slots=64), "num_slots"),
        (lambda told: told["server"].update(num_pages=1024), "num_pages"),
        (lambda told: told["server"].update(page_size=32), "page_size"),
        (lambda told: told["server"]["recipe"]["model"].pop("path"), "model.path"),
        (lambda told: told["server"]["recipe"]["scheduler"].update(policy="best"), "policy"),
        (lambda told: told["server"]["recipe"]["cache"].update(num_pages=-4), "num_pages"),
        (lambda told: told["metrics"]["readings"].append([2.0, 2.5, 33, 0, 0.1]), "the most that ran"),
    ],
)
def test_a_servers_words_that_disagree_are_refused(tamper: Callable[[Result], Any], said: str) -> None:
    told = told_by_a_server()
    tamper(told)
    (law,) = settings.LAWS[1:]
    ruling = rule(law, told)
    assert (ruling.outcome, said in ruling.why) == ("refused", True), ruling.why


def test_a_server_counts_the_same_before_and_after() -> None:
    told = told_by_a_server()
    assert shape.alike(Figures(told)) is None
    del told["metrics"]["before"]["requests"]
    assert "metrics.before has no requests" in str(shape.alike(Figures(told)))


@pytest.mark.parametrize(("when", "count"), [("before", 0.5), ("after", 8.9), ("before", 10.0)])
def test_a_servers_counters_are_whole_and_grow(when: str, count: float) -> None:
    told = told_by_a_server()
    assert served.counters(Figures(told)) is None
    told["metrics"][when]["requests"] = count
    assert f"metrics.{when}.requests" in str(served.counters(Figures(told)))
