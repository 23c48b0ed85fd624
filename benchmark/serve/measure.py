"""Measure how fast a server answers: one run of a trace, from the server's description to the verdict.

Each request is sent at its time, and the client records whether it kept its own times. A sweep is one run at
each rate, each in its own file. An interrupted sweep continues where it was: a rate whose file exists and is
whole is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import re
import resource
import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import takewhile
from pathlib import Path
from typing import Any

import aiohttp
from tqdm import tqdm

from benchmark.gate.gate import audit, with_verdict
from benchmark.gate.result import read_result
from benchmark.options import verdict_line
from benchmark.run_record import RunClock
from benchmark.serve import figures
from benchmark.serve.client import (
    ClientAnswer,
    ClientRun,
    StreamingClient,
    TraceRequest,
    at_rate,
    authorization,
    clients,
    digest,
    read_requests,
)
from borders.files import whole_file
from recipes.assembly import versions

LOOK_S = 0.02  # seconds between two measurements of how late the event loop is
READY_S = 0.5  # seconds between two checks of a starting server
PAGE_TIMEOUT = aiohttp.ClientTimeout(10.0)  # seconds to wait for a server's description of itself
_SECRET = re.compile(r"api_?key|passw|secret|hf_token|auth|^token$", re.IGNORECASE)
KEPT_OPEN_S = 2.0  # seconds that idle connections stay open; servers close theirs after five seconds or more
TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between two pieces",
    "e2el": "whole request",
}
WITHIN = 0.99  # least share of requests within the objectives at a rate that a server is said to bear
COLUMNS = ("mean", "median", "std", "p90", "p99")
ROW_LABELS = {  # rows of the table, where the result has them
    "completed": "requests answered",
    "failed": "failed",
    "rejected": "of these rejected (busy)",
    "duration": "seconds",
    "request_throughput": "requests/s",
    "request_goodput": "requests/s within objectives",
    "good_share": "share of requests within them",
    "output_throughput": "output tokens/s",
    "total_token_throughput": "all tokens/s",
    "mean_in_flight": "requests on their way, mean",
    "max_concurrent_requests": "requests on their way, most",
}


async def send(
    server: StreamingClient,
    asks: Sequence[TraceRequest],
    loops: Sequence[Sequence[TraceRequest]] | None,
    max_concurrency: int | None,
    on_answer: Callable[[ClientAnswer], None],
) -> ClientRun:
    """Send requests at their times, or the `loops` of each client; calls `on_answer` when an answer ends.

    `max_concurrency` bounds how many are in flight at once.
    """
    run = ClientRun()
    bodies = {
        ask.id: ask.body(server.model, server.seed + number, server.extra) for number, ask in enumerate(asks)
    }
    limit = asyncio.Semaphore(max_concurrency or len(asks))
    gc.collect()
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()  # a pause of the collector would be counted as the server's
    clock, start_s = RunClock(), time.perf_counter()
    lag = asyncio.create_task(_watch_loop(run.lags_s))

    async def one(ask: TraceRequest, due_s: float | None) -> None:
        free_s = time.perf_counter()
        answer = ClientAnswer(ask, late_s=0.0 if due_s is None else free_s - due_s, due_s=due_s)
        async with limit:
            run.now += 1
            run.most = max(run.most, run.now)
            await server.ask(answer, bodies.pop(ask.id))
            run.now -= 1
        answer.held_s = answer.sent_s - free_s
        run.answers.append(answer)
        on_answer(answer)

    async def client(asks: Sequence[TraceRequest]) -> None:
        for ask in asks:
            await one(ask, None)

    try:
        if loops is not None:
            await asyncio.gather(*map(client, loops))
        else:
            await _open(asks, start_s, one)
    finally:
        lag.cancel()
        if not was_frozen:  # what the caller has frozen stays so
            gc.unfreeze()
    run.passed = clock.read()
    return run


async def _open(
    asks: Sequence[TraceRequest],
    start_s: float,
    one: Callable[[TraceRequest, float], Coroutine[Any, Any, None]],
) -> None:
    """Send each request when it is due, whether or not earlier ones have ended."""
    tasks = []
    for ask in asks:
        due_s = start_s + ask.due_s
        if (rest_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(rest_s)
        tasks.append(asyncio.create_task(one(ask, due_s)))
    await asyncio.gather(*tasks)


async def _watch_loop(lags_s: list[float]) -> None:
    while True:
        due_s = time.perf_counter() + LOOK_S
        await asyncio.sleep(LOOK_S)
        lags_s.append(time.perf_counter() - due_s)


@dataclass(frozen=True, slots=True)
class ServePlan:
    """The plan of one measure. `request_rate` None keeps the trace's own times.

    A `salt` is no setting: it is sent as `cache_salt` so that this measure alone finds what it computed.
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
    salt: str = ""
    objectives: figures.Objectives | None = None
    request_timeout_s: float = 600.0
    ready_timeout_s: float = 0.0
    progress: bool = False

    def load(self) -> tuple[list[TraceRequest], list[list[TraceRequest]] | None]:
        """Return what is sent, and each client's part of a closed loop; a rate replaces times and loops."""
        asks = [ask.limited(self.extra) for ask in self.asks]
        if self.request_rate is not None:
            return at_rate(asks, self.request_rate, self.seed), None
        return asks, clients(asks)

    @property
    def sent(self) -> Mapping[str, Any]:
        """The fields that are sent with each request."""
        return {**self.extra, "cache_salt": self.salt} if self.salt else self.extra

    def settings(self) -> dict[str, object]:
        """Return the settings that make two results comparable; the model only where it was named."""
        rate = self.request_rate
        named = {} if self.model is None else {"model_id": self.model}
        return {
            "benchmark": "serve",
            "base_url": self.base_url,
            **named,
            "backend": "openai-chat" if self.asks[0].chat else "openai",
            "endpoint": self.endpoint,
            "trace": self.trace,
            "trace_sha256": self.trace_sha256,
            "num_prompts": len(self.asks),
            "request_rate": "inf" if rate == math.inf else rate,
            "max_concurrency": self.max_concurrency,
            "seed": self.seed,
            "warm_up_runs": self.num_warmups or None,  # None: the server's earlier load is unknown
            "extra_body": dict(self.extra),
            "goodput": self.objectives,
        }


def measure(plan: ServePlan) -> dict[str, Any]:
    """Return the result of one measure; raises ValueError if no server answers, or the warm-up fails."""
    few, many = resource.getrlimit(resource.RLIMIT_NOFILE)
    if few < many:
        resource.setrlimit(resource.RLIMIT_NOFILE, (many, many))  # each request in flight holds a socket
    return asyncio.run(_measure(plan))


async def _measure(plan: ServePlan) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=plan.request_timeout_s, sock_connect=30)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_OPEN_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        pages = {name: await _stated(session, plan.base_url + name) for name in ("/v1/models", "/version")}
        described = {name: said for name, said in pages.items() if said is not None}
        model = plan.model or _model(described, plan.base_url)
        server = StreamingClient(session, plan.base_url, plan.endpoint, model, plan.seed, plan.sent)
        await _warm_up(server, plan)
        info = _without_keys(await _stated(session, f"{plan.base_url}/server_info"))
        watch = figures.MetricsReadings(session, f"{plan.base_url}/metrics")
        watching = asyncio.create_task(watch.go_on()) if await watch.look() else None
        asks, loops = plan.load()
        with tqdm(total=len(asks), unit="req", disable=None if plan.progress else True) as bar:
            outcome = await send(server, asks, loops, plan.max_concurrency, lambda answer: bar.update())
        if watching is not None:
            watching.cancel()
            await watch.settle()
    result = {
        **plan.settings(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model_id": model,
        "loop": "open" if loops is None else f"closed, {len(loops)} clients",
        "machine": versions.describe(),
        "clock": outcome.passed,
        "server": info if isinstance(info, dict) else None,
        "server_said": described,
        **figures.summarise(outcome, plan.objectives),
        "metrics": watch.describe(),
        "warm_up_counted": 0,
    }
    return with_verdict(result)


async def _stated(session: aiohttp.ClientSession, url: str) -> Any:
    """Return the JSON of a server's page, None where it has none; raises ValueError if nobody answers."""
    try:
        async with session.get(url, headers=authorization(), timeout=PAGE_TIMEOUT) as response:
            return await response.json(content_type=None) if response.status == 200 else None
    except (aiohttp.ClientConnectionError, aiohttp.InvalidURL, asyncio.TimeoutError) as error:
        raise ValueError(f"{url}: nobody answers there: {error}") from error
    except (aiohttp.ClientError, ValueError):
        return None


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
    await server.ask(answer, ask.body(server.model, plan.seed, plan.sent))
    return answer


def _begun_by(beginning: str, content: Any) -> Any:
    """Return a prompt or messages of the same length that begin by this text; ids are reversed."""
    match content:
        case str():
            return beginning + content[len(beginning) :]
        case [int(), *_]:
            return content[::-1]
        case [first, *rest]:
            return [_begun_by(beginning, first), *rest]
        case {"content": [*parts]}:
            return {**content, "content": [{"type": "text", "text": beginning}, *parts]}
        case {"content": said}:
            return {**content, "content": _begun_by(beginning, said or "")}
    return content


async def _warm_up(server: StreamingClient, plan: ServePlan) -> None:
    """Send requests that are not counted, with beginnings of their own: none is cached for the trace."""
    for number in range(plan.num_warmups):
        ask = plan.asks[number % len(plan.asks)]
        name = f"warm-up-{number}"
        ask = replace(ask, id=name, content=_begun_by(f"{name} ", ask.content))
        until_s = time.perf_counter() + plan.ready_timeout_s
        answer = await _answer(server, plan, ask)
        while answer.unready and time.perf_counter() < until_s:
            await asyncio.sleep(READY_S)
            answer = await _answer(server, plan, ask)
        if answer.error is not None:
            raise ValueError(f"{server.url(ask)}: the warm-up request failed: {answer.error}")


def plan_of(options: argparse.Namespace, request_rate: float | None) -> ServePlan:
    """Return the run that the options describe; raises ValueError where it is not possible."""
    asks, skipped = read_requests(options.trace, skip_bad=options.skip_bad)
    for reason in skipped:
        print(f"skipped {reason}", file=sys.stderr)
    same = ("base_url", "endpoint", "model", "max_concurrency", "num_warmups", "seed", "request_timeout_s")
    return ServePlan(
        asks=asks[: options.num_prompts],
        trace=options.trace.name,
        trace_sha256=digest(options.trace),
        request_rate=request_rate,
        extra={**({"ignore_eos": True} if options.ignore_eos else {}), **options.extra_body},
        objectives=dict(options.goodput) if options.goodput else None,
        ready_timeout_s=options.ready_check_timeout_sec,
        progress=True,
        **{name: getattr(options, name) for name in same},
    )


def run(options: argparse.Namespace) -> dict[str, object]:
    """Serve the trace, save the result where that is asked for, and return it."""
    result = measure(plan_of(options, options.request_rate))
    if options.save_result:
        path = options.result_dir / (options.result_filename or filename(result))
        save(path, result)
        print(path, file=sys.stderr)
    return result


def filename(result: Mapping[str, Any]) -> str:
    """Return a file name made of rate, model and time."""
    per_s = result["request_rate"]
    times = "trace" if per_s is None else f"{per_s}qps"
    model = Path(str(result["model_id"])).name
    return f"serve-{times}-{model}-{str(result['date'])[:19].replace(':', '')}.json"


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(json.dumps(result) + "\n")


def print_table(result: Mapping[str, Any]) -> None:
    """Print the figures of one run."""
    for name, label in ROW_LABELS.items():
        if result.get(name) is not None and (result[name] or name != "rejected"):
            print(f"{label:34}{result[name]:>12,}")
    print(f"\n{'ms':34}" + "".join(f"{column:>12}" for column in COLUMNS))
    for name, title in TITLES.items():
        values = [result.get(f"{column}_{name}_ms") for column in COLUMNS]
        if values[0] is not None:
            print(f"{title:34}" + "".join(f"{value:>12,.2f}" for value in values))
    client, metrics = result["client"], result.get("metrics") or {}
    late_ms, lag_ms = client["late_ms"]["p99"], client["lag_ms"]["p99"]
    print(f"\nclient: late p99 {late_ms} ms, event loop p99 {lag_ms} ms late")
    if server_figures := [
        f"{name} {value}" for name, value in metrics.items() if not isinstance(value, (list, dict))
    ]:
        print(f"server: {', '.join(server_figures).replace('_', ' ')}")
    for error, count in result["errors"].items():
        print(f"failed {count:,}: {error}")
    print(verdict_line(result["verdict"]))


def finished(path: Path, said: dict[str, object]) -> dict[str, Any] | None:
    """Return an existing result, audited again, since the file may have been changed.

    Returns None where there is none that can be read. Raises ValueError for a result of other settings.
    """
    try:
        result = read_result(path)
    except FileNotFoundError:
        return None
    except ValueError as damage:
        print(f"{damage}; it is measured again", file=sys.stderr)
        return None
    if "verdict" not in result:
        return None
    other = [name for name, value in said.items() if result.get(name) != json.loads(json.dumps(value))]
    if other:
        raise ValueError(
            f"{path} is of another sweep: its {', '.join(other)} differ; choose another --result-dir"
        )
    return {**result, "verdict": audit(result)}


def run_sweep(options: argparse.Namespace) -> None:
    """Measure each rate, and print a line for each; then write the page."""
    plan = plan_of(options, None)
    from benchmark.serve import report  # matplotlib takes a second to load

    print(f"{'offered/s':>10}{'served/s':>10}{'good/s':>10}{'TTFT p99':>12}{'ITL p99':>12}  verdict")
    bears: dict[float, bool] = {}
    for rate, result in sweep(plan, options):
        print(sweep_row(rate, result), flush=True)
        bears[rate] = result.get("good_share", 0) >= WITHIN and not result["verdict"]["refused"]
    if plan.objectives is not None:
        borne = [*takewhile(bears.__getitem__, sorted(bears))]  # a rate counts only if all lower ones do
        most = f"{borne[-1]:g} requests/s" if borne else "none of these rates"
        print(f"within the objectives for {WITHIN:.0%} of requests: {most}")
    page = options.result_dir / "report.html"
    report.write([report.read(options.result_dir)], page)
    print(page)


def sweep(plan: ServePlan, options: argparse.Namespace) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the result at each rate."""
    for rate in options.request_rates:
        # Each measure begins with no prompt of it cached, but its settings are those of the one it continues
        own = {} if "cache_salt" in plan.extra else {"cache_salt": f"rate {rate:g}"}
        point = replace(plan, request_rate=rate, extra={**own, **plan.extra})
        path = options.result_dir / f"rate-{rate:g}.json"
        result = finished(path, point.settings())
        if result is None:
            salt = f"{own['cache_salt']}, {secrets.token_hex(8)}" if own else ""
            result = measure(replace(point, salt=salt))
            save(path, result)
        yield rate, result


def sweep_row(rate: float, result: dict[str, Any]) -> str:
    """Format one line of the table."""
    numbers = [result["request_throughput"], result.get("request_goodput")]
    cells = "".join("-".rjust(10) if value is None else f"{value:>10.3f}" for value in numbers)
    for name in ("p99_ttft_ms", "p99_itl_ms"):
        cells += "-".rjust(12) if result.get(name) is None else f"{result[name]:>12.2f}"
    verdict = result["verdict"]
    return f"{rate:>10g}{cells}  {', '.join([verdict['outcome'], *verdict['refused']])}"
