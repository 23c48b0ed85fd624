"""Results that pass the gate, small and complete enough for each law to have its say."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.simulation.queue import honest

Result = dict[str, Any]
OBJECTIVES = {"ttft": 60.0, "tpot": 12.0, "e2el": 250.0, "itl": 25.0}
THEIRS = {
    "duration_s": "duration", "requests": "num_prompts", "prompt_tokens": "total_input_tokens",
    "output_tokens": "total_output_tokens", "requests_per_s": "request_throughput",
    "output_tokens_per_s": "output_throughput", "total_tokens_per_s": "total_token_throughput",
}  # fmt: skip


def engine() -> Result:
    """A run of an engine in this process, and what it counted."""
    result = honest(1)
    computed = result["prompt_tokens"] + result["output_tokens"] - result["completed"]
    counted = {"prompt_tokens": result["prompt_tokens"], "sampled_tokens": result["output_tokens"]}
    counted |= {"computed_tokens": computed, "steps": result["steps"]}
    idle = dict.fromkeys(("hit_tokens", "preemptions", "lost_tokens", "refound_tokens"), 0)
    return {
        **result,
        "counters": {"before": dict.fromkeys(counted, 0) | idle, "after": counted | idle},
        "prefix_hit_rate": 0.0,
        "cache_after_all_runs": {"free_pages": 90, "idle_pages": 10},
        "settings": {"scheduler": {"num_slots": result["slots"]}},
        "num_pages": 100,
        "page_size": 16,
        "page_bytes": 16 * 147456,
        "computed_on": {"kind": "cuda", "count": 1, "virtual": False, "memory_gib": 139.0},
        "machine": {"device": "NVIDIA H200", "cpu": "x", "cores": 4, "torch": "2.9.0"},
        "clock": {
            "started_at": "2026-01-01T10:00:00+00:00",
            "ended_at": "2026-01-01T10:01:40+00:00",
            "monotonic_s": 100.0,
            "cpu_s": 150.0,
        },
    }


def client() -> Result:
    """What a client saw of a server, under the names of `vllm bench serve`, and what the server counted."""
    result = honest(1)
    told = {theirs: result.pop(ours) for ours, theirs in THEIRS.items()}
    for name, values_ms in latencies_ms(result["records"]).items():
        told[f"mean_{name}_ms"], told[f"std_{name}_ms"] = float(values_ms.mean()), float(values_ms.std())
        percents = {"min": 0, "median": 50, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
        told |= {f"{p}_{name}_ms": float(np.percentile(values_ms, each)) for p, each in percents.items()}
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        del result[name]
    records, count, seconds = result["records"], told["num_prompts"], told["duration"]
    for record in records:
        record |= {"piece_times_s": record.pop("token_times_s"), "end_s": record["finish_s"]}
        record |= {"due_s": record["arrival_s"]}
    begun = {"requests": 1, "prompt_tokens": 10, "output_tokens": 4, "itl_count": 3, "itl_s": 0.03}
    ended = {"requests": 1 + count, "prompt_tokens": 10 + told["total_input_tokens"]}
    ended |= {"output_tokens": 4 + told["total_output_tokens"], "itl_s": 0.9 * seconds, "itl_count": 9}
    for name, mean_ms in (("ttft", told["mean_ttft_ms"]), ("e2e", told["mean_e2el_ms"])):
        begun |= {f"{name}_count": 1, f"{name}_s": 0.5}
        ended |= {f"{name}_count": 1 + count, f"{name}_s": 0.5 + 0.9 * count * mean_ms / 1e3}
    num_good = sum(is_good(record) for record in records)
    return {
        **result,
        **told,
        "benchmark": "serve",
        "itl_gaps": told["total_output_tokens"] - result["completed"],
        "goodput": OBJECTIVES,
        "request_goodput": num_good / seconds,
        "good_share": num_good / count,
        "mean_in_flight": result["mean_in_system"],
        "ended_by": {
            reason: sum(each["finish_reason"] == reason for each in records) for reason in ("stop", "length")
        },
        "client": {"late_ms": {"p99": 1.0}, "lag_ms": {"p99": 2.0}},
        "metrics": {"before": begun, "after": ended},
    }


def latencies_ms(records: list[Result]) -> dict[str, NDArray[np.float64]]:
    """Each latency of each request, or of each gap."""
    times_s = [record["token_times_s"] for record in records]
    arrivals_s = [record["arrival_s"] for record in records]
    found_s = {
        "ttft": [times[0] - came for times, came in zip(times_s, arrivals_s)],
        "tpot": [(times[-1] - times[0]) / (len(times) - 1) for times in times_s],
        "itl": [gap for times in times_s for gap in np.diff(times)],
        "e2el": [times[-1] - came for times, came in zip(times_s, arrivals_s)],
    }
    return {name: 1e3 * np.array(values) for name, values in found_s.items()}


def is_good(record: Result) -> bool:
    """Whether it meets the objectives, by the times of its pieces."""
    gaps_s = np.diff(record["piece_times_s"])
    first_s, last_s = (record["piece_times_s"][at] - record["arrival_s"] for at in (0, -1))
    spent_s = {"ttft": first_s, "e2el": last_s, "tpot": gaps_s.mean(), "itl": gaps_s.max()}
    return all(1e3 * spent_s[name] <= most for name, most in OBJECTIVES.items())


def claim(kind: str, stated: float) -> Result:
    """A number that is stated in passing, and what it is made of."""
    return {"claim": {kind: stated, "factors": [2, 3], "divisors": [4], "plus": 1.5}}
