"""Measure how a server bears increasing load: one run of `serve` at each rate, each in its own file.

An interrupted sweep continues where it was: a rate whose file exists and is whole is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark.gate.gate import audit
from benchmark.gate.result import read_result
from benchmark.serve.measure import ServePlan, measure, plan_of, save

Result = dict[str, Any]
WITHIN = 0.99  # least share of requests within the objectives at a rate that a server is said to bear


def finished(path: Path, said: dict[str, object]) -> Result | None:
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


def run(options: argparse.Namespace) -> None:
    """Measure each rate, and print a line for each; then write the page."""
    plan = plan_of(options, None)
    from benchmark.serve import report  # matplotlib takes a second to load

    print(f"{'offered/s':>10}{'served/s':>10}{'good/s':>10}{'TTFT p99':>12}{'ITL p99':>12}  verdict")
    borne: list[float] = []
    for rate, result in results(plan, options):
        print(row(rate, result), flush=True)
        if result.get("good_share", 0) >= WITHIN and not result["verdict"]["refused"]:
            borne.append(rate)
    if plan.objectives is not None:
        most = f"{max(borne):g} requests/s" if borne else "none of these rates"
        print(f"within the objectives for {WITHIN:.0%} of requests: {most}")
    page = options.result_dir / "report.html"
    report.write([report.read(options.result_dir)], page)
    print(page)


def results(plan: ServePlan, options: argparse.Namespace) -> Iterator[tuple[float, Result]]:
    """Yield the result at each rate."""
    for rate in options.request_rates:
        salted = {"cache_salt": f"rate {rate:g}", **plan.extra}  # no rate finds what one before computed
        point = replace(plan, request_rate=rate, extra=salted)
        path = options.result_dir / f"rate-{rate:g}.json"
        result = finished(path, point.settings())
        if result is None:
            result = measure(point)
            save(path, result)
        yield rate, result


def row(rate: float, result: Result) -> str:
    """Format one line of the table."""
    numbers = [result["request_throughput"], result.get("request_goodput")]
    cells = "".join("-".rjust(10) if value is None else f"{value:>10.3f}" for value in numbers)
    for name in ("p99_ttft_ms", "p99_itl_ms"):
        cells += "-".rjust(12) if result.get(name) is None else f"{result[name]:>12.2f}"
    verdict = result["verdict"]
    return f"{rate:>10g}{cells}  {', '.join([verdict['outcome'], *verdict['refused']])}"
