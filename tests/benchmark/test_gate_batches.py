"""The gate recounts what is told of batches, and of requests that all came at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmark.gate.gate import audit

Result = dict[str, Any]


def batches() -> Result:
    """What `latency` prints: 12 batches of 4 answers of 8 tokens."""
    latencies = [round(each, 6) for each in np.random.default_rng(0).uniform(0.08, 0.12, 12).tolist()]
    return {
        "avg_latency": sum(latencies) / 12,
        "latencies": latencies,
        "percentiles": {str(part): float(np.percentile(latencies, part)) for part in (10, 50, 99)},
        "batch_size": 4,
        "output_len": 8,
        "requests": 48,
        "completed": 48,
        "failed": 0,
        "output_tokens": 384,
        "duration_s": sum(latencies),
        "output_tokens_per_s": 384 / sum(latencies),
        "tpot_ms": {"mean": 11.0},
    }


def faster(result: Result) -> None:
    """All that is told of a batch's time by its own names, but not what it was computed with."""
    result["avg_latency"] /= 100
    result["latencies"] = [each / 100 for each in result["latencies"]]
    result["percentiles"] = {part: value / 100 for part, value in result["percentiles"].items()}


def faster_in_all(result: Result) -> None:
    faster(result)
    result["duration_s"] /= 100
    result["output_tokens_per_s"] *= 100


def put(**fields: object) -> Callable[[Result], None]:
    return lambda result: result.update(fields)


def test_honest_batches_pass() -> None:
    verdict = audit(batches()).describe()
    assert verdict["outcome"] == "pass", verdict["refused"]
    assert {"batches", "recount, batches", "whole batches"} <= {*verdict["passed"]}


@pytest.mark.parametrize(
    ("tamper", "law"),
    [
        (faster, "recount, batches"),
        (faster_in_all, "whole batches"),
        (put(avg_latency=0.05), "recount, batches"),
        (put(percentiles={"10": 9.0, "99": 0.0001}), "recount, batches"),
        (put(latencies=[0.1]), "batches"),
        (put(batch_size=8), "whole batches"),
        (put(output_len=16), "whole batches"),
    ],
)
def test_tampered_ones_do_not(tamper: Callable[[Result], None], law: str) -> None:
    result = batches()
    tamper(result)
    assert law in audit(result).describe()["refused"]


@pytest.mark.parametrize("latencies", [[], 5, [0.1, -0.1], ["fast"], [0.0] * 12])
def test_latencies_that_are_none_are_named(latencies: object) -> None:
    with pytest.raises(ValueError, match="latenc"):
        audit(batches() | {"latencies": latencies})


def at_once() -> Result:
    """What `vllm bench throughput` writes."""
    return {
        "elapsed_time": 20.0,
        "num_requests": 100,
        "total_num_tokens": 6000,
        "requests_per_second": 5.0,
        "tokens_per_second": 300.0,
    }


@pytest.mark.parametrize(
    ("fields", "law"),
    [
        ({}, None),
        ({"requests_per_s": 5.0, "duration_s": 20.0}, None),
        ({"tokens_per_second": 3000.0}, "all tokens"),
        ({"requests_per_s": 50.0}, "both names"),
        ({"duration_s": 2.0}, "both names"),
    ],
)
def test_the_names_of_throughput_are_known(fields: Result, law: str | None) -> None:
    refused = audit(at_once() | fields).describe()["refused"]
    assert list(refused) == ([law] if law else [])
