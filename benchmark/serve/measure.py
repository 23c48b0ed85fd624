"""Serve a trace by a server: one run, from the server's description to the verdict."""

from __future__ import annotations

import asyncio
import math
import re
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import aiohttp
from tqdm import tqdm

from benchmark.gate.gate import with_verdict
from benchmark.serve import figures
from benchmark.serve.client import ClientAnswer, StreamingClient, authorization
from benchmark.serve.objectives import Objectives
from benchmark.serve.sending import SendSchedule, serve
from benchmark.serve.server_metrics import MetricsReadings
from benchmark.serve.trace_requests import TraceRequest, at_rate, clients
from recipes.assembly import versions

READY_S = 0.5  # seconds between two checks of a starting server
_INFO_S = 10.0  # seconds to wait for a server's description of itself
_SECRET = re.compile(r"api_?key|passw|secret|hf_token|auth|^token$", re.IGNORECASE)
KEPT_OPEN_S = 2.0  # seconds that idle connections stay open; servers close theirs after five seconds or more


@dataclass(frozen=True, slots=True)
class ServePlan:
    """The plan of one run. `request_rate` None keeps the trace's own times. `parts` are percentiles.

    `of` identifies the result further, such as by the recipe of a server that a sweep starts.
    """

    base_url: str
    asks: Sequence[TraceRequest]
    trace: str
    trace_sha256: str
    endpoint: str | None = None
    model: str | None = None
    request_rate: float | None = None
    max_concurrency: int | None = None
    num_warmups: int = 1
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    objectives: Objectives | None = None
    parts: Sequence[float] = figures.PERCENTILES
    request_timeout_s: float = 600.0
    ready_timeout_s: float = 0.0
    retry_rejected: bool = False
    progress: bool = False
    of: Mapping[str, object] = field(default_factory=dict)

    def load(self) -> SendSchedule:
        """Return what is sent when; a rate replaces the trace's times, and its loops."""
        asks = [ask.limited(self.extra) for ask in self.asks]
        if self.request_rate is not None:
            return SendSchedule(at_rate(asks, self.request_rate, self.seed), None, self.max_concurrency)
        return SendSchedule(asks, clients(asks), self.max_concurrency)

    def settings(self) -> dict[str, object]:
        """Return the settings that make two results comparable."""
        rate = self.request_rate
        return {
            "benchmark": "serve",
            **self.of,
            "backend": "openai-chat" if self.asks[0].chat else "openai",
            "endpoint": self.endpoint,
            "trace": self.trace,
            "trace_sha256": self.trace_sha256,
            "num_prompts": len(self.asks),
            "request_rate": "inf" if rate == math.inf else rate,
            "max_concurrency": self.max_concurrency,
            "seed": self.seed,
            "extra_body": dict(self.extra),
            "retry_rejected": self.retry_rejected,
            "goodput": None if self.objectives is None else dict(self.objectives.most_ms),
        }


def run(plan: ServePlan) -> dict[str, object]:
    """Return the result of one run; raises ValueError if no server answers, or the warm-up fails."""
    few, many = resource.getrlimit(resource.RLIMIT_NOFILE)
    if few < many:
        resource.setrlimit(resource.RLIMIT_NOFILE, (many, many))  # each request in flight holds a socket
    return asyncio.run(_run(plan))


async def _run(plan: ServePlan) -> dict[str, object]:
    timeout = aiohttp.ClientTimeout(total=plan.request_timeout_s, sock_connect=30)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_OPEN_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        described = await _describe(session, plan.base_url)
        model = plan.model or _model(described, plan.base_url)
        server = StreamingClient(
            session, plan.base_url, plan.endpoint, model, plan.seed, plan.extra, plan.retry_rejected
        )
        await _warm_up(server, plan)
        info = await _info(session, plan.base_url)
        watch = MetricsReadings(session, f"{plan.base_url}/metrics")
        watching = asyncio.create_task(watch.go_on()) if await watch.look() else None
        load = plan.load()
        with tqdm(total=len(load.asks), unit="req", disable=None if plan.progress else True) as bar:
            outcome = await serve(server, load, lambda answer: bar.update())
        if watching is not None:
            watching.cancel()
            await watch.settle()
    origin_s = min(each.sent_s for each in outcome.answers)
    result = {
        **plan.settings(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "base_url": plan.base_url,
        "model_id": model,
        "loop": "open" if load.loops is None else f"closed, {len(load.loops)} clients",
        "machine": versions.describe(),
        "clock": outcome.passed,
        "server": info,
        "server_said": described,
        **figures.summarise(outcome, plan.objectives, plan.parts),
        "metrics": watch.describe(origin_s),
        "warm_up_runs": plan.num_warmups or None,  # None: the server's earlier load is unknown
        "warm_up_counted": 0,
        "records": figures.records(outcome),
    }
    return with_verdict(result)


async def _describe(session: aiohttp.ClientSession, base_url: str) -> dict[str, Any]:
    """Return what the server says of itself, if it does: models (with a recipe, if named) and version."""
    described = {}
    for name in ("/v1/models", "/version"):
        try:
            async with session.get(base_url + name, headers=authorization()) as response:
                if response.status == 200:
                    described[name] = await response.json(content_type=None)
        except (aiohttp.ClientConnectionError, aiohttp.InvalidURL, asyncio.TimeoutError) as error:
            raise ValueError(f"{base_url}: nobody answers there: {error}") from error
        except (aiohttp.ClientError, ValueError):
            continue  # the server has no such page, or none in JSON
    return described


async def _info(session: aiohttp.ClientSession, base_url: str) -> dict[str, Any] | None:
    """Return the recipe, versions and machine of a server that states them; None for another server."""
    try:
        async with session.get(
            f"{base_url}/server_info", headers=authorization(), timeout=aiohttp.ClientTimeout(_INFO_S)
        ) as response:
            info = await response.json(content_type=None) if response.status == 200 else None
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError):
        return None  # a server is measured even if it states nothing
    return _without_keys(info) if isinstance(info, dict) else None


def _without_keys(described: Any) -> Any:
    """Remove what must not be kept in a file: some servers include their own key."""
    if isinstance(described, dict):
        return {name: _without_keys(value) for name, value in described.items() if not _SECRET.search(name)}
    return [_without_keys(each) for each in described] if isinstance(described, list) else described


def _model(described: Mapping[str, Any], base_url: str) -> str:
    try:
        return str(described["/v1/models"]["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{base_url}/v1/models names no model; give its name by --model") from error


async def _answer(server: StreamingClient, plan: ServePlan, ask: TraceRequest) -> ClientAnswer:
    answer = ClientAnswer(ask)
    await server.ask(answer, ask.body(server.model, plan.seed, plan.extra))
    return answer


async def _warm_up(server: StreamingClient, plan: ServePlan) -> None:
    """Send requests that are not counted; ids are reversed, so that the trace finds none of them cached."""
    for number in range(plan.num_warmups):
        ask = plan.asks[number % len(plan.asks)]
        content = ask.content[::-1] if ask.num_prompt is not None else ask.content
        ask = replace(ask, id=f"warm-up-{number}", content=content)
        until_s = time.perf_counter() + plan.ready_timeout_s
        answer = await _answer(server, plan, ask)
        while answer.unready and time.perf_counter() < until_s:
            await asyncio.sleep(READY_S)
            answer = await _answer(server, plan, ask)
        if answer.error is not None:
            raise ValueError(f"{server.url(ask)}: the warm-up request failed: {answer.error}")
