"""A small exact queue: requests wait in order for slots, and each step gives every one that runs a token.

Its results have the fields that a benchmark writes, counted here and not by the code under test.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Result = dict[str, Any]
FAILED_S = 0.5  # when the one that fails comes
PARTS = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}


def figures(values_s: list[float], parts: list[str]) -> dict[str, float]:
    """Mean and percentiles in milliseconds, with three decimals."""
    found = {"mean": float(np.mean(values_s))}
    found |= {part: float(np.percentile(values_s, PARTS[part])) for part in parts}
    return {part: round(value * 1e3, 3) for part, value in found.items()}


def served(seed: int, num_requests: int | None = None) -> tuple[list[Result], list[float], list[int], int]:
    """The requests' records, the steps' ends, the spans of each step, and the slots."""
    random = np.random.default_rng(seed)
    count = num_requests or int(random.integers(35, 70))
    num_slots, rate = int(random.integers(2, 12)), float(random.uniform(2, 60))
    arrivals_s = np.cumsum(random.exponential(1 / rate, count))
    prompts, wanted = random.integers(5, 200, count), random.integers(2, 25, count)
    waiting = list(range(count))
    running: list[int] = []
    records: dict[int, list[float]] = {}  # the times of each request's tokens
    ends_s: list[float] = []
    spans: list[int] = []
    now_s = 0.0
    while waiting or running:
        if not running and arrivals_s[waiting[0]] > now_s:
            now_s = float(arrivals_s[waiting[0]])
        new: list[int] = []
        while waiting and len(running) + len(new) < num_slots and arrivals_s[waiting[0]] <= now_s:
            new.append(waiting.pop(0))
        running += new
        now_s += 0.004 + 0.0005 * len(running) + 0.00005 * int(prompts[new].sum()) + random.exponential(0.001)
        ends_s.append(now_s)
        spans.append(len(running))
        for each in running:
            records.setdefault(each, []).append(now_s)
        running = [each for each in running if len(records[each]) < wanted[each]]
    lines = [
        {
            "id": str(each),
            "arrival_s": round(float(arrivals_s[each]), 6),
            "first_token_s": round(times[0], 6),
            "finish_s": round(times[-1], 6),
            "prompt_tokens": int(prompts[each]),
            "max_tokens": int(wanted[each]) + (stopped := int(random.integers(0, 2))),
            "output_tokens": len(times),
            "finish_reason": "stop" if stopped else "length",
            "token_times_s": [round(time, 6) for time in times],
        }
        for each, times in sorted(records.items())
    ]
    return lines, ends_s, spans, num_slots


def present(records: list[Result], begin: str, duration_s: float) -> float:
    """How many requests were between two of their times on average, walking through all events in order."""
    events = sorted([(r[begin], 1) for r in records] + [(r["finish_s"], -1) for r in records])
    area, number, before_s = 0.0, 0, 0.0
    for time_s, change in events:
        area += number * (time_s - before_s)
        number, before_s = number + change, time_s
    return area / duration_s


def summarised(records: list[Result], parts: list[str]) -> Result:
    """The figures that follow from records alone."""
    gaps = [float(gap) for r in records for gap in np.diff(r["token_times_s"])]
    tokens = [r["output_tokens"] for r in records]
    duration_s = max(r["finish_s"] for r in records) - min(r["arrival_s"] for r in records)
    prompt, output = sum(r["prompt_tokens"] for r in records), sum(tokens)
    spans_s = [(r["finish_s"] - r["first_token_s"]) / (r["output_tokens"] - 1) for r in records]
    return {
        "requests": len(records),
        "completed": len(records),
        "failed": 0,
        "duration_s": round(duration_s, 4),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": round(len(records) / duration_s, 3),
        "output_tokens_per_s": round(output / duration_s, 2),
        "total_tokens_per_s": round((prompt + output) / duration_s, 2),
        "ttft_ms": figures([r["first_token_s"] - r["arrival_s"] for r in records], parts),
        "tpot_ms": figures(spans_s, parts),
        "itl_ms": figures(gaps, parts),
        "e2e_ms": figures([r["finish_s"] - r["arrival_s"] for r in records], parts),
        "least_output_tokens": min(tokens),
        "most_output_tokens": max(tokens),
    }


def honest(seed: int, num_requests: int | None = None) -> Result:
    """One result, with records; some have failures, no minima, or no rate of arrivals."""
    records, ends_s, spans, num_slots = served(seed, num_requests)
    result = summarised(records, list(PARTS) if seed % 2 else ["p50", "p90", "p99"])
    arrivals_s = [each["arrival_s"] for each in records] + ([FAILED_S] if seed % 5 == 0 else [])
    spread_s = max(arrivals_s) - min(arrivals_s)
    result |= {
        "warm_up_runs": 1,
        "warm_up_counted": 0,
        "offered_per_s": round((len(arrivals_s) - 1) / spread_s, 4) if seed % 3 else None,
        "mean_batch": round(float(np.mean(spans)), 2),
        "steps": len(ends_s),
        "slots": num_slots,
        "preemptions": 0,
        "max_tokens_per_step": 1,
        "device_profile": "h200",
        "num_devices": 1,
        "weight_bytes_per_step": 15e9,  # 4.8 TB/s read them in less than the shortest step
        "kv_bytes_per_token": 147456,
        "mean_running": round(present(records, "first_token_s", result["duration_s"]), 4),
        "mean_in_system": round(present(records, "arrival_s", result["duration_s"]), 4),
        "runs_output_tokens_per_s": [result["output_tokens_per_s"] * factor for factor in (0.9, 1, 1.2)],
        "records": records,
    }
    if seed % 5 == 0:
        error = {"id": "bad", "arrival_s": FAILED_S, "error": "too long", "finish_reason": "error"}
        result |= {"requests": len(records) + 1, "failed": 1, "records": [*records, error]}
    return result
