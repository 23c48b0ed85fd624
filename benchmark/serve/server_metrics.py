"""Read a server's `/metrics` once a second while it is loaded."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from benchmark.run_clock import with_wall
from benchmark.serve.client import authorization

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


def parse(text: str) -> dict[str, float]:
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
    """Readings, each with its time on the client's clock; the first and the last frame the run."""

    session: aiohttp.ClientSession
    url: str
    # Each reading: the client's clock, the wall clock, and the figures.
    readings: list[tuple[float, float, dict[str, float]]] = field(default_factory=list)

    async def look(self) -> bool:
        """Take one reading; returns whether there was one. A server without metrics has none."""
        try:
            async with self.session.get(self.url, headers=authorization()) as response:
                figures = parse(await response.text()) if response.status == 200 else {}
        except (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError):
            return False  # it may be busy; the next reading may succeed, and a run without any says so
        if figures:
            wall_s, now_s = with_wall(time.perf_counter)
            self.readings.append((now_s, wall_s, figures))
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
            figures = self.readings[-1][2]
            if not figures.get("running") and not figures.get("waiting"):
                return
            self.readings.pop()
            await asyncio.sleep(SETTLE_S / 10)

    def describe(self, origin_s: float) -> dict[str, object] | None:
        """Return means of gauges, counters and their growth, and the readings; None if there are none.

        What a client waits for its first token beyond `mean_queue_ms` and `mean_prefill_ms` is not due to the
        engine: it is spent in HTTP, in text processing, and between processes and machines.
        """
        if not self.readings:
            return None
        within = self.readings[1:-1]  # the first and the last reading are of an idle server
        means = {
            f"mean_{name}": round(float(np.mean(values)), 4)
            for name in GAUGES
            if (values := [figures[name] for _, _, figures in within if name in figures])
        }
        first, last = self.readings[0][2], self.readings[-1][2]
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
        columns = [name for name in GAUGES if name in self.readings[0][2]]
        return {
            **means,
            **grown,
            "before": {name: round(first[name], 6) for name in counted},
            "after": {name: round(last[name], 6) for name in counted},
            "columns": ["at_s", "wall_s", *columns],
            "readings": [
                [
                    round(at_s - origin_s, 6),
                    round(wall_s, 6),
                    *(figures.get(name) for name in columns),
                ]
                for at_s, wall_s, figures in self.readings
            ],
        }
