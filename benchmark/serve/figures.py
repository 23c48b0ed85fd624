"""Compute the figures of a run, under the names that `vllm bench serve` gives them.

A latency X has `mean_X_ms`, `median_X_ms`, `std_X_ms` and percentiles such as `p99_X_ms`; X is ttft (first
piece), tpot ((last - first piece) / (tokens - 1)), itl (between two pieces) or e2el (last piece); ttft and
e2el count from when the request was sent. Beside them are what was good of a run, by objectives, and what the
server's own `/metrics` say, which are read once a second.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from benchmark.serve.client import ClientAnswer, ClientRun, authorization

PERCENTILES = (50, 90, 99)
Result = dict[str, object]
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


def latencies(done: Sequence[ClientAnswer]) -> tuple[Result, int]:
    """Return all four latencies in milliseconds, and the number of gaps between pieces."""
    gaps = [np.diff(each.piece_times_s) for each in done if len(each.piece_times_s) > 1]
    spent = [(each.piece_times_s[-1] - each.piece_times_s[0], each.output_tokens - 1) for each in done]
    values_s = {
        "ttft": np.array([each.piece_times_s[0] - each.sent_s for each in done]),
        "tpot": np.array([spent_s / count for spent_s, count in spent if count > 0]),
        "itl": np.concatenate(gaps) if gaps else np.array([]),
        "e2el": np.array([each.piece_times_s[-1] - each.sent_s for each in done]),
    }
    figures: Result = {}
    for name, values in values_s.items():
        if len(values):
            figures[f"mean_{name}_ms"] = _ms(values.mean())
            figures[f"median_{name}_ms"] = _ms(np.median(values))
            figures[f"std_{name}_ms"] = _ms(values.std())
            found = np.percentile(values, PERCENTILES)
            figures |= {f"p{part}_{name}_ms": _ms(value) for part, value in zip(PERCENTILES, found)}
    return figures, len(values_s["itl"])


def summarise(run: ClientRun, objectives: Objectives | None) -> Result:
    """Return rates, latencies, and what the gate needs beside them.

    Failed requests are counted, their tokens are not. The duration runs from the first request sent to the
    last piece or failure.
    """
    answers = sorted(run.answers, key=lambda each: each.sent_s)
    done = [each for each in answers if each.error is None]
    origin_s = answers[0].sent_s
    duration_s = max(_finish_s(each) for each in answers) - origin_s
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    num_input = sum(each.prompt_tokens or 0 for each in done)
    num_output = sum(each.output_tokens for each in done)
    lens = [each.output_tokens for each in done]
    asked = [each.ask.max_tokens for each in answers]
    figures, num_gaps = latencies(done)
    due_s = sorted(each.ask.due_s for each in answers)
    spread_s = due_s[-1] - due_s[0]
    in_flight = round(sum(_finish_s(each) - each.sent_s for each in answers) * per_s, 4)
    with_cached = [each for each in done if each.cached_tokens is not None]
    asked_for = sum(each.prompt_tokens or 0 for each in with_cached)
    num_cached = sum(each.cached_tokens or 0 for each in with_cached)
    return {
        "duration": round(duration_s, 6),
        "num_prompts": len(answers),
        "completed": len(done),
        "failed": len(answers) - len(done),
        "rejected": sum(each.rejected for each in answers),
        "ended_by": dict(Counter(sorted(str(each.finish_reason) for each in done))),
        "errors": kinds([each.error for each in answers if each.error is not None]),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": round(len(done) * per_s, 4),
        "output_throughput": round(num_output * per_s, 3),
        "total_token_throughput": round((num_input + num_output) * per_s, 3),
        **by_objectives(answers, objectives, per_s),
        **figures,
        "itl_gaps": num_gaps,
        **({"prefix_hit_rate": round(num_cached / asked_for, 4)} if asked_for else {}),
        "mean_in_flight": in_flight,
        "max_concurrent_requests": run.most,
        # W is the time of answered requests.
        **({"mean_in_system": in_flight} if len(done) == len(answers) else {}),
        "offered_per_s": round((len(answers) - 1) / spread_s, 4) if spread_s > 0 else None,
        "least_output_tokens": min(lens, default=None),
        "most_output_tokens": max(lens, default=None),
        "asked_output_tokens": None if None in asked else sum(filter(None, asked)),
        "client": client(run),
    }


def by_objectives(answers: Sequence[ClientAnswer], objectives: Objectives | None, per_s: float) -> Result:
    """Return how much of a run met the objectives; nothing where there are none."""
    if objectives is None:
        return {}
    num_good = sum(met(each, objectives) for each in answers)
    return {"request_goodput": round(num_good * per_s, 4), "good_share": round(num_good / len(answers), 4)}


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
        "tokens_counted_by_pieces": sum(not each.from_usage for each in run.answers if each.error is None),
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


def _finish_s(answer: ClientAnswer) -> float:
    return answer.end_s if answer.error is not None else answer.piece_times_s[-1]


def _spread(values_s: Sequence[float]) -> Result:
    p50, p99 = np.percentile(values_s, [50, 99])
    return {"p50": _ms(p50), "p99": _ms(p99), "max": _ms(max(values_s))}


def _ms(value_s: float) -> float:
    return round(float(value_s) * 1e3, 3)


def met(answer: ClientAnswer, most_ms: Objectives) -> bool:
    """Return whether an answer was whole and met all objectives."""
    if answer.error is not None:
        return False
    times_s = answer.piece_times_s
    spent_s = {"ttft": times_s[0] - answer.sent_s, "e2el": times_s[-1] - answer.sent_s}
    if answer.output_tokens > 1:
        spent_s["tpot"] = (times_s[-1] - times_s[0]) / (answer.output_tokens - 1)
    if len(times_s) > 1:
        spent_s["itl"] = float(np.diff(times_s).max())
    return all(1e3 * spent_s.get(name, 0.0) <= most for name, most in most_ms.items())


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
