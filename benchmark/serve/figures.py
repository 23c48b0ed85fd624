"""Compute the figures of a run, under the names that `vllm bench serve` gives them.

A latency X has `mean_X_ms`, `median_X_ms`, `std_X_ms` and percentiles such as `p99_X_ms`; X is ttft (first
piece), tpot ((last - first piece) / (tokens - 1)), itl (between two pieces) or e2el (last piece); ttft and
e2el count from when the request was sent. Beside them are what was good of a run, by objectives, which count
from when a request was due, and what the server's own `/metrics` say, which are read once a second.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from benchmark.gate.recount import meets
from benchmark.gate.table import under_theirs
from benchmark.run_record import figures_of
from benchmark.serve.client import ClientAnswer, ClientRun, authorization
from simulation.run_totals import rounded

Result = dict[str, Any]
Objectives = Mapping[str, float]  # the most ms of each latency, by name; `itl` bounds every gap of an answer
EVERY_S = 1.0
# Each figure has the names that vLLM, its older versions and SGLang give it.
GAUGES = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
}
COUNTERS = {
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits"),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "requests": ("vllm:request_success_total", "vllm:request_success"),
    "prompt_tokens": ("vllm:prompt_tokens_total", "vllm:prompt_tokens", "sglang:prompt_tokens_total"),
    "output_tokens": (
        "vllm:generation_tokens_total",
        "vllm:generation_tokens",
        "sglang:generation_tokens_total",
    ),
}
TIMES = {  # histograms in seconds, of requests that have ended
    "queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}
NAMED_TIMES = ("queue", "prefill")  # means of the others would differ from the client's, which waits longer
SETTLE_S = 2.0  # seconds for counters that a server updates shortly after its answers
COUNTERS |= {f"{name}_s": (f"{metric}_sum",) for name, metric in TIMES.items()}
COUNTERS |= {f"{name}_count": (f"{metric}_count",) for name, metric in TIMES.items()}
LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^\n]*\})? +(\S+)", re.MULTILINE)


def summarise(run: ClientRun, objectives: Objectives | None) -> Result:
    """Return rates and latencies, what the gate needs beside them, and a record of each request."""
    kept, answers = records(run), run.answers
    figures = figures_of(kept, [each.ask.due_s for each in answers])
    per_s = 1 / figures["duration_s"] if figures["duration_s"] > 0 else 0.0
    present_s = sum(each.get("finish_s", each["end_s"]) - each["arrival_s"] for each in kept)
    in_flight = rounded(present_s * per_s, 4)
    done = [each for each in kept if "error" not in each]
    # Some servers tell of cached tokens only where there are any.
    tells = any(each.get("cached_tokens") is not None for each in done)
    asked_for = sum(each["prompt_tokens"] or 0 for each in done) if tells else 0
    num_cached = sum(each.get("cached_tokens") or 0 for each in done)
    good: Result = {}
    if objectives is not None:
        num_good = sum(meets(each, objectives) for each in done)
        good = {"request_goodput": rounded(num_good * per_s, 4), "good_share": round(num_good / len(kept), 4)}
    return {
        **under_theirs(figures),
        "rejected": sum(each.rejected for each in answers),
        "errors": kinds([each["error"] for each in kept if "error" in each]),
        **good,
        **({"prefix_hit_rate": round(num_cached / asked_for, 4)} if asked_for else {}),
        "mean_in_flight": in_flight,
        "max_concurrent_requests": run.most,
        # W is the time of answered requests.
        **({"mean_in_system": in_flight} if not figures["failed"] else {}),
        "client": client(run),
        "records": kept,
    }


def kinds(errors: Sequence[str]) -> dict[str, int]:
    """Count errors that differ at most in their numbers and ids; each kind has the text of its first."""
    alike: dict[str, list[str]] = {}
    for error in errors:
        alike.setdefault(re.sub(r"(?<!HTTP )\b[\w.-]*\d[\w.-]*", "#", error), []).append(error)
    return {each[0]: len(each) for each in sorted(alike.values(), key=len, reverse=True)}


def client(run: ClientRun) -> Result:
    """Return how late the client itself was: sending what was due, and running its event loop."""
    late_s = [each.late_s for each in run.answers]
    cpu = run.passed["cpu_s"] / run.passed["monotonic_s"]
    return {
        "late_ms": _spread(late_s),
        "lag_ms": _spread(run.lags_s or [0.0]),
        "held_ms": _spread([each.held_s for each in run.answers]),
        "cpu_share": round(cpu, 4),
    }


def records(run: ClientRun) -> list[Result]:
    """Return a record of each request; times count from the first that was sent."""
    origin_s = min(each.sent_s for each in run.answers)
    return [_record(each, origin_s) for each in sorted(run.answers, key=lambda each: each.sent_s)]


def _record(answer: ClientAnswer, origin_s: float) -> Result:
    record: Result = {
        "id": answer.ask.id,
        "arrival_s": round(answer.sent_s - origin_s, 6),
        "end_s": round(answer.end_s - origin_s, 6),
        **({} if answer.due_s is None else {"due_s": round(answer.due_s - origin_s, 6)}),
        "late_ms": _ms(answer.late_s),
        "held_ms": _ms(answer.held_s),
        "max_tokens": answer.ask.max_tokens,
    }
    if answer.error is not None:
        return {**record, "finish_reason": "error", "error": answer.error}
    times_s = [round(each - origin_s, 6) for each in answer.piece_times_s]
    record |= {
        "first_token_s": times_s[0],
        "finish_s": times_s[-1],
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
        "finish_reason": answer.finish_reason,
        "piece_times_s": times_s,
    }
    if answer.cached_tokens is not None:
        record["cached_tokens"] = answer.cached_tokens
    if answer.piece_tokens is not None and set(answer.piece_tokens) != {1}:
        record["piece_tokens"] = answer.piece_tokens
    return record


def _spread(values_s: Sequence[float]) -> Result:
    p50, p99 = np.percentile(values_s, [50, 99])
    return {"p50": _ms(p50), "p99": _ms(p99), "max": _ms(max(values_s))}


def _ms(value_s: float) -> float:
    return round(float(value_s) * 1e3, 3)


def parse_metrics(text: str) -> dict[str, float]:
    """Parse the known figures of Prometheus' text; several engines are summed, `kv_usage` is averaged."""
    found: dict[str, list[float]] = {}
    for name, value in LINE.findall(text):
        if name.startswith(("vllm:", "sglang:")):
            try:
                found.setdefault(name, []).append(float(value))
            except ValueError:  # not a number, so not a known figure
                continue
    figures = {}
    for figure, names in (GAUGES | COUNTERS).items():
        values = next((found[name] for name in names if name in found), None)
        if values:
            figures[figure] = sum(values) / (len(values) if figure == "kv_usage" else 1)
    return figures


@dataclass(slots=True)
class MetricsReadings:
    """Readings of a server's figures; the first and the last frame the run."""

    session: aiohttp.ClientSession
    url: str
    readings: list[dict[str, float]] = field(default_factory=list)

    async def look(self) -> bool:
        """Take one reading; returns whether there was one. A server without metrics has none."""
        try:
            async with self.session.get(self.url, headers=authorization()) as response:
                figures = parse_metrics(await response.text()) if response.status == 200 else {}
        except (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError):
            return False  # it may be busy; the next reading may succeed, and a run without any says so
        if figures:
            self.readings.append(figures)
        return bool(figures)

    async def go_on(self) -> None:
        """Take readings until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.look()

    async def settle(self) -> None:
        """Take the last reading once the server has nothing left to do, or when it does not come to rest."""
        until_s = time.perf_counter() + SETTLE_S
        while await self.look() and time.perf_counter() < until_s:
            figures = self.readings[-1]
            if not figures.get("running") and not figures.get("waiting"):
                return
            self.readings.pop()
            await asyncio.sleep(SETTLE_S / 10)

    def describe(self) -> dict[str, object] | None:
        """Return means of gauges, counters and their growth; None if there are no readings.

        What a client waits for its first token beyond `mean_queue_ms` and `mean_prefill_ms` is not due to the
        engine: it is spent in HTTP, in text processing, and between processes and machines.
        """
        if not self.readings:
            return None
        within = self.readings[1:-1]  # the first and the last reading are of an idle server
        means = {
            f"mean_{name}": round(float(np.mean(values)), 4)
            for name in GAUGES
            if (values := [figures[name] for figures in within if name in figures])
        }
        first, last = self.readings[0], self.readings[-1]
        counted = [name for name in COUNTERS if name in first and name in last]
        grown = {name: last[name] - first[name] for name in counted}
        queries, hits = grown.pop("prefix_queries", 0), grown.pop("prefix_hits", None)
        if hits is not None and queries > 0:
            grown["prefix_hit_rate"] = round(hits / queries, 4)
        for name in ("requests", "prompt_tokens", "output_tokens"):
            grown.pop(name, None)  # the client has its own, which the gate compares with these counters
        for name in TIMES:
            taken_s, count = grown.pop(f"{name}_s", 0.0), grown.pop(f"{name}_count", 0)
            if count and name in NAMED_TIMES:
                means[f"mean_{name}_ms"] = round(1e3 * taken_s / count, 3)
        return {
            **means,
            **grown,
            "before": {name: round(first[name], 6) for name in counted},
            "after": {name: round(last[name], 6) for name in counted},
        }
