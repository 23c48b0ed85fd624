"""What a server says of itself, and what a client says of its sending, is held to its other sources."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from benchmark.gate import client, server
from benchmark.gate.law import Figures, rule

Result = dict[str, Any]
COUNTS = ("requests", "ttft_count", "queue_count", "prefill_count", "e2e_count")


def counters(requests: int, tokens: int, prompts: int, hits: int) -> Result:
    """Those of a server that has answered so many."""
    counted: Result = dict.fromkeys(COUNTS, requests)
    counted |= {"prompt_tokens": prompts, "prefix_queries": prompts, "prefix_hits": hits, "preemptions": 0}
    counted |= {"output_tokens": tokens, "itl_count": tokens - requests}
    times = {"queue_s": 0.01 * requests, "prefill_s": 0.02 * requests, "ttft_s": 0.04 * requests}
    return counted | times | {"itl_s": 0.3 * requests, "e2e_s": 0.34 * requests}


def result() -> Result:
    """Four requests of ten tokens each, a tenth of a second apart, after a warm-up."""
    records = [
        {
            "id": str(number),
            "due_s": round(0.1 * number - 0.001, 6),
            "late_ms": 1.0 + number,
            "held_ms": 0.0 if number < 2 else 2.5,
            "arrival_s": round(0.1 * number + 0.001 * number + (0.0 if number < 2 else 0.0025), 6),
            "finish_reason": "length",
            "output_tokens": 10,
            "piece_times_s": [0.5 + number, *(0.6 + number + each / 100 for each in range(8))],
            "piece_tokens": [1, 2, *[1] * 7],
            "cached_tokens": 5,
        }
        for number in range(4)
    ]
    machine = {"cpu": "x", "cores": 2, "python": "3.11.7", "numpy": "2", "torch": "2.13", "preloaded": "no"}
    return {
        "benchmark": "serve",
        "backend": "openai",
        "loop": "open",
        "base_url": "http://127.0.0.1:8000",
        "model_id": "tiny",
        "requests": 4,
        "completed": 4,
        "failed": 0,
        "prompt_tokens": 80,
        "output_tokens": 40,
        "offered_per_s": 10.0,
        "max_concurrent_requests": 4,
        "clock": {"monotonic_s": 2.0, "cpu_s": 0.5},
        "client": {
            "cpu_share": 0.25,
            "tokens_counted_by_pieces": 0,
            "lag_ms": {"p50": 0.5, "p99": 2.0, "max": 3.0},
        },
        "server": {
            "model": "tiny",
            "version": "0.1.0",
            "recipe": {"device": {"kind": "cpu", "virtual": False}},
            "machine": machine,
            "device": "x86_64",
            "num_slots": 8,
            "num_pages": 100,
            "page_size": 16,
        },
        "server_said": {
            "/version": {"version": "0.1.0", "python": "3.11.7", "torch": "2.13"},
            "/v1/models": {"data": [{"id": "tiny", "object": "model"}]},
        },
        "metrics": {
            "preemptions": 0,
            "prefix_hit_rate": 0.25,
            "mean_queue_ms": 10.0,
            "mean_prefill_ms": 20.0,
            "mean_running": 2.0,
            "mean_waiting": 0.0,
            "mean_kv_usage": 0.07,
            "before": counters(1, 10, 20, 5),
            "after": counters(5, 50, 100, 25),
            "columns": list(server.COLUMNS),
            "readings": [[-0.1, 9.0, 0, 0, 0.0], [0.9, 10.0, 2, 0, 0.07], [2.0, 11.1, 0, 0, 0.0]],
        },
        "records": records,
    }


def ruled(told: Result) -> dict[str, tuple[str, str]]:
    """Of each law the outcome, and why."""
    known = {**told, "requests_per_s": 2.0}
    found = [rule(law, known, told) for law in (*client.LAWS[:3], *server.LAWS)]
    return {ruling.law.name: (ruling.outcome, ruling.why) for ruling in found}


def test_an_honest_one_passes() -> None:
    assert {outcome for outcome, _ in ruled(result()).values()} == {"pass"}, ruled(result())


def put(path: str, value: object) -> Callable[[Result], None]:
    def tamper(told: Any) -> None:
        *way, last = [int(part) if part.isdecimal() else part for part in path.split(">")]
        for part in way:
            told = told[part]
        told[last] = value

    return tamper


@pytest.mark.parametrize(
    ("tamper", "law"),
    [
        (put("records>2>late_ms", 1.0), "sent when due"),
        (put("records>2>held_ms", 0.0), "sent when due"),
        (put("records>1>arrival_s", 0.2), "sent when due"),
        (put("records>3>due_s", None), "sent when due"),
        (put("offered_per_s", 11.0), "sent when due"),
        (put("offered_per_s", None), "sent when due"),
        (put("request_rate", 100.0), "client of itself"),
        (put("request_rate", "inf"), "client of itself"),
        (put("client>cpu_share", 0.1), "client of itself"),
        (put("client>lag_ms>p99", 0.2), "client of itself"),
        (put("client>tokens_counted_by_pieces", 9), "client of itself"),
        (put("max_concurrency", 3), "client of itself"),
        (put("backend", "openai 2"), "client of itself"),
        (put("loop", "closed, 2 clients"), "client of itself"),
        (put("base_url", "9ttp://x"), "client of itself"),
        (put("records>1>piece_tokens", None), "tokens of pieces"),
        (put("model_id", "large"), "server's words"),
        (put("server>model", "large"), "server's words"),
        (put("server>version", "0.2.0"), "server's words"),
        (put("server>recipe", None), "server's words"),
        (put("server>device", "Ascend910B4"), "server's words"),
        (put("server>machine>torch", "2.9"), "server's words"),
        (put("server_said>/v1/models>data>0>object", "card"), "server's words"),
        *((put(f"metrics>after>{name}", 9), "server's sums") for name in COUNTS),
        *((put(f"metrics>before>{name}", 0), "server's sums") for name in COUNTS),
        (put("metrics>after>itl_count", 50), "server's sums"),
        (put("metrics>after>itl_s", 3.0), "server's sums"),
        (put("metrics>after>ttft_s", 0.1), "server's sums"),
        (put("metrics>before>e2e_s", 0.1), "server's sums"),
        (put("metrics>after>prefix_hits", 26), "server's sums"),
        (put("metrics>after>prefix_queries", 101), "server's sums"),
        (put("metrics>columns>2", "busy"), "server's readings"),
        (put("metrics>mean_running", None), "server's readings"),
        (put("metrics>preemptions", None), "server's readings"),
        (put("metrics>readings>1>2", 5), "server's readings"),
        (put("metrics>readings>1>2", 1.5), "server's readings"),
        (put("metrics>readings>1>4", 0.0777), "server's readings"),
    ],
)
def test_a_tampered_one_does_not(tamper: Callable[[Result], None], law: str) -> None:
    told = copy.deepcopy(result())
    tamper(told)
    assert ruled(told)[law][0] == "refused", ruled(told)


def test_a_server_that_others_use_may_count_more() -> None:
    """Two requests of somebody else, one of which was on its way when the run began."""
    told = result()
    told["metrics"]["after"] = counters(7, 70, 140, 25)
    told["metrics"]["before"] |= {"ttft_count": 2, "itl_count": 10, "output_tokens": 12, "ttft_s": 0.06}
    told["metrics"]["readings"][0][2] = 1
    assert ruled(told)["server's sums"][0] == "pass", ruled(told)["server's sums"]


def test_a_server_of_somebody_else_is_asked_for_nothing() -> None:
    told = result() | {"server": {"recipe": {"name": "a cake"}}}
    assert ruled(told)["server's words"][0] == "not checkable"
    assert Figures(told).raw("server.recipe.name") == "a cake"
