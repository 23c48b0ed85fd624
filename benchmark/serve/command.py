"""Measure how fast a server answers.

`python -m scripts.benchmark serve --base-url URL --trace FILE.jsonl`
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark import outputs
from benchmark.options import add_json, show, verdict_line
from benchmark.serve import trace_requests
from benchmark.serve.objectives import Objectives, objective
from borders.whole_file import whole_file
from recipes.schema.numbers import MOST_COUNT, MOST_SEED, MOST_WAIT_S, RATES_PER_S, real, whole

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between two pieces",
    "e2el": "whole request",
}
COLUMNS = ("mean", "median", "std", "p90", "p99")
TOLD = {  # rows of the table, where the result has them
    "completed": "requests answered",
    "failed": "failed",
    "rejected": "of these rejected (busy)",
    "retried": "tried again",
    "duration": "seconds",
    "request_throughput": "requests/s",
    "request_goodput": "requests/s within objectives",
    "good_share": "share of requests within them",
    "fluidity": "share of tokens in time",
    "output_throughput": "output tokens/s",
    "total_token_throughput": "all tokens/s",
    "mean_in_flight": "requests on their way, mean",
    "max_concurrent_requests": "requests on their way, most",
}


rate = real(*RATES_PER_S, endless=True)  # requests a second; `inf` for all at once


def url(text: str) -> str:
    """Parse a server's URL, without the slash at its end, and without /v1."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no URL; write http://HOST:PORT")
    return text.rstrip("/").removesuffix("/v1")


def body(text: str) -> dict[str, Any]:
    """Parse a request's fields from JSON."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object, such as '{{\"top_p\": 0.9}}'")
    return fields


def names(text: str) -> list[str]:
    """Parse latencies by name."""
    given = text.split(",")
    if unknown := [each for each in given if each not in LATENCIES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no latency; there are {', '.join(LATENCIES)}")
    return given


def percentiles(text: str) -> list[float]:
    """Parse percentiles, separated by commas."""
    return [real(0, 100)(each) for each in text.split(",")]


def add_load_arguments(parser: argparse.ArgumentParser, *, needs_url: bool) -> None:
    """Add the options for what is sent, and where; the names are those of `vllm bench serve`."""
    add = parser.add_argument
    add("--base-url", type=url, required=needs_url, metavar="URL", help="of any OpenAI-compatible server")
    add("--trace", type=Path, required=True, metavar="FILE.jsonl", help="requests, as `generate` reads them")
    add("--skip-bad", action="store_true", help="report lines that cannot be read, and go on")
    add("--endpoint", metavar="PATH", help="if not /v1/completions, for chats /v1/chat/completions")
    add("--model", metavar="NAME", help="if not the first that the server names")
    add("--num-prompts", type=whole(1, 10**9), metavar="N", help="the first N of the trace")
    add(
        "--max-concurrency", type=whole(1, MOST_COUNT), metavar="N", help="most requests on their way at once"
    )
    add(
        "--num-warmups",
        type=whole(0, MOST_COUNT),
        default=1,
        metavar="N",
        help="requests before, not counted",
    )
    add(
        "--seed",
        type=whole(0, MOST_SEED),
        default=0,
        help="of drawn arrivals, and of requests without a seed",
    )
    add("--ignore-eos", action="store_true", help="every answer goes to its full length")
    add("--extra-body", type=body, default={}, metavar="JSON", help="fields for every request; null: none")
    add("--goodput", nargs="+", type=objective, metavar="NAME:MS", help="objectives: ttft, tpot, itl, e2el")
    add("--metric-percentiles", type=percentiles, default=[99.0], metavar="P,P,...")
    add("--request-timeout-s", type=real(1e-3, MOST_WAIT_S), default=600.0, metavar="SECONDS")
    add(
        "--ready-check-timeout-sec",
        type=real(0, MOST_WAIT_S),
        default=60.0,
        metavar="S",
        help="for a server that starts",
    )
    add("--retry-rejected", action="store_true", help="come again when a busy server says so")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options of the verb."""
    add_load_arguments(parser, needs_url=True)
    add = parser.add_argument
    add("--request-rate", type=rate, metavar="PER_S", help="Poisson, or inf; if not, the trace's own times")
    add("--percentile-metrics", type=names, default=list(LATENCIES), metavar="NAME,...", help="in the table")
    add("--save-result", action="store_true", help="write the result, with a record of each request")
    add("--result-dir", type=outputs.folder, default=Path(), metavar="FOLDER")
    add("--result-filename", metavar="NAME")
    add_json(parser)


def plan(options: argparse.Namespace, request_rate: float | None) -> Any:
    """Return the run that the options describe; raises ValueError where it is not possible."""
    try:
        from benchmark.serve.measure import ServePlan
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; bash scripts/setup.sh bench installs it") from error
    asks, skipped = trace_requests.read(options.trace, skip_bad=options.skip_bad)
    for reason in skipped:
        print(f"skipped {reason}", file=sys.stderr)
    return ServePlan(
        base_url=options.base_url or "",
        asks=asks[: options.num_prompts],
        trace=options.trace.name,
        trace_sha256=trace_requests.digest(options.trace),
        endpoint=options.endpoint,
        model=options.model,
        request_rate=request_rate,
        max_concurrency=options.max_concurrency,
        num_warmups=options.num_warmups,
        seed=options.seed,
        extra={**({"ignore_eos": True} if options.ignore_eos else {}), **options.extra_body},
        objectives=Objectives(dict(options.goodput)) if options.goodput else None,
        parts=options.metric_percentiles,
        request_timeout_s=options.request_timeout_s,
        ready_timeout_s=options.ready_check_timeout_sec,
        retry_rejected=options.retry_rejected,
        progress=True,
    )


def main(options: argparse.Namespace) -> None:
    """Serve the trace, and print or save the result."""
    from benchmark.serve import measure

    result = measure.run(plan(options, options.request_rate))
    if options.save_result:
        path = options.result_dir / (options.result_filename or filename(result))
        save(path, result)
        print(path, file=sys.stderr)
    show(result, options, lambda each: print_table(each, options.percentile_metrics))


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


def print_table(result: Mapping[str, Any], shown: list[str]) -> None:
    """Print the figures of one run."""
    for name, label in TOLD.items():
        if result.get(name) is not None and (result[name] or name not in ("rejected", "retried")):
            print(f"{label:34}{result[name]:>12,}")
    columns = [*COLUMNS, *(name for name in _parts(result) if name not in COLUMNS)]
    print(f"\n{'ms':34}" + "".join(f"{column:>12}" for column in columns))
    for name in shown:
        values = [result.get(f"{column}_{name}_ms") for column in columns]
        if values[0] is not None:
            print(f"{LATENCIES[name]:34}" + "".join(f"{value:>12,.2f}" for value in values))
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


def _parts(result: Mapping[str, Any]) -> list[str]:
    """Return the percentiles that a result has, in order, without the median."""
    found = {name.partition("_")[0] for name in result if name.startswith("p") and name.endswith("_e2el_ms")}
    found -= {"p50"}
    return sorted(found, key=lambda name: float(name[1:]) if math.isfinite(float(name[1:])) else 0)
