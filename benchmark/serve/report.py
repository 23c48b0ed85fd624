"""Compare results on one page: `python -m scripts.benchmark report A [B ...] --output report.html`.

They are results of `serve`, `offline` or `vllm bench serve` as JSON, or folders of a sweep.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmark.gate.gate import audit
from benchmark.gate.result import read_result
from benchmark.gate.table import parts_of, under_ours
from benchmark.serve import charts, html_page
from borders.whole_file import whole_file
from recipes.schema.command_line import keep_apart

Result = dict[str, Any]
ROWS = {  # the gate's name of a figure -> its label, and whether more of it is better
    "completed": ("requests answered", None),
    "failed": ("requests failed", False),
    "rejected": ("of these rejected", False),
    "duration_s": ("seconds", None),
    "requests_per_s": ("requests/s", True),
    "request_goodput": ("requests/s within objectives", True),
    "fluidity": ("share of tokens in time", True),
    "output_tokens_per_s": ("output tokens/s", True),
    "total_tokens_per_s": ("all tokens/s", True),
    **{
        f"{name}_ms.{part}": (f"{name.upper()} {part}, ms", False)
        for name in ("ttft", "tpot", "itl", "e2e")
        for part in ("mean", "p50", "p90", "p99")
    },
    "mean_in_flight": ("requests on their way, mean", None),
    "mean_batch": ("requests in a step, mean", None),
    "mean_page_use": ("pages in use, mean share", None),
    "metrics.mean_kv_usage": ("pages in use, mean share, by the server", None),
    "prefix_hit_rate": ("prompt tokens found cached", True),
    "metrics.prefix_hit_rate": ("prompt tokens found cached, by the server", True),
    "preemptions": ("preemptions", False),
    "metrics.preemptions": ("preemptions, by the server", False),
}
FACTS = ("recipe", "overrides", "profile", "base_url", "model_id", "date", "trace", "request_rate", "loop")
GAUGES = {"running": "requests running", "waiting": "requests waiting", "kv_usage": "share of pages in use"}


@dataclass(frozen=True, slots=True)
class Side:
    """One reported result; if it is the best of a sweep, `points` has all results in order of rate."""

    name: str
    result: Result
    points: Sequence[Result] = ()


def read(path: Path) -> Side:
    """Read a result, or a sweep; raises ValueError or OSError for anything else."""
    if path.is_dir():
        points = sorted((_result(each) for each in path.glob("rate-*.json")), key=rate_of)
        if not points:
            raise ValueError(f"{path} holds no rate-*.json; it must be the folder of a sweep")
        best = max(points, key=_good_per_s)
        return Side(path.name, best, points)
    return Side(path.stem, _result(path))


def _good_per_s(result: Result) -> float:
    good: float = result["request_goodput" if "request_goodput" in result else "requests_per_s"]
    return good


def rate_of(result: Mapping[str, Any]) -> float:
    """Return the offered requests a second; inf for all at once, 0 for the trace's own times."""
    rate = result["request_rate"]
    return math.inf if rate == "inf" else float(rate or 0)


def _result(path: Path) -> Result:
    fields = read_result(path)
    try:
        verdict = audit(fields).describe()  # audited again, since the file may have been changed
    except ValueError as error:
        raise ValueError(f"{path} is no result of a benchmark: {error}") from error
    itl_ms = parts_of(fields, "itl_ms")  # the gate ignores it where the gaps were not counted
    return {**({"itl_ms": itl_ms} if itl_ms else {}), **under_ours(fields), "verdict": verdict}


def figure(result: Mapping[str, Any], name: str) -> float | None:
    """Return a figure by its dotted name, or None."""
    value: Any = result
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, (int, float)) else None


def write(sides: Sequence[Side], path: Path) -> None:
    """Write the page of one side, or of several side by side."""
    title = " against ".join(side.name for side in sides[:2])
    title += f" and {len(sides) - 2} more" if len(sides) > 2 else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(html_page.page(f"Benchmark: {title}", _parts(sides)))


def _parts(sides: Sequence[Side]) -> Iterator[str]:
    for side, kind in zip(sides, cycle(html_page.KINDS)):
        verdict = side.result["verdict"]
        reasons = [f"{law}: {why}" for law, why in verdict["refused"].items()]
        shown = html_page.marked("; ".join([verdict["outcome"], *reasons]), verdict["outcome"])
        yield f"<p>{html_page.marked(side.name, kind)}: {shown}</p>"
    yield figures_table(sides)
    runs = [(side.name, side.result) for side in sides]
    if any(side.points for side in sides):
        yield "<h2>Rates</h2>" + html_page.pictures(_sweep_pictures(sides))
        for side in sides:
            yield from [f"<h3>{escape(side.name)}</h3>", points_table(side.points)] if side.points else []
    drawn = list(_pictures(runs))
    if drawn:
        yield "<h2>Pictures</h2>" + html_page.pictures(drawn)
    for side in sides:
        yield html_page.folded(f"{side.name}: what was run, where", facts_table(side.result))


def figures_table(sides: Sequence[Side]) -> str:
    """Return a table of all figures; for two sides, also the ratio of the second to the first."""
    rows = []
    for name, (label, more_is_better) in ROWS.items():
        values = [figure(side.result, name) for side in sides]
        if all(value is None for value in values):
            continue
        row = [label, *("-" if value is None else f"{value:,.4g}" for value in values)]
        if len(sides) == 2:
            row.append(_ratio(values[0], values[1], more_is_better))
        rows.append(row)
    heads = [html_page.marked(side.name, kind) for side, kind in zip(sides, cycle(html_page.KINDS))]
    return html_page.table(["", *heads, *(["times"] if len(sides) == 2 else [])], rows)


def points_table(points: Sequence[Result]) -> str:
    """Return a table of a sweep, one rate a row."""
    shown = ["requests_per_s", "request_goodput", "output_tokens_per_s", "ttft_ms.p50", "ttft_ms.p99"]
    shown += ["itl_ms.p50", "itl_ms.p99", "failed"]
    head = ["offered/s", *(ROWS[name][0] for name in shown), "verdict"]
    rows = []
    for point in points:
        values = [figure(point, name) for name in shown]
        cells = ["-" if value is None else f"{value:,.4g}" for value in values]
        outcome = point["verdict"]["outcome"]
        rows.append([f"{rate_of(point):g}", *cells, html_page.marked(outcome, outcome)])
    return html_page.table(head, rows)


def facts_table(result: Result) -> str:
    """Return a table of the facts that give figures their meaning: recipe, machine, server, client."""
    facts = {name: result[name] for name in FACTS if result.get(name) not in (None, [])}
    for group in ("machine", "server", "server_said", "client", "errors"):
        shown = result.get(group)
        if group == "errors" and isinstance(
            shown, list
        ):  # vllm writes a text for each request, empty where there was no error
            shown = Counter(str(each) for each in shown if each)
        if isinstance(shown, Mapping):
            facts |= {f"{group}: {name}": value for name, value in shown.items()}
    return html_page.table(["", ""], [[name, _text(value)] for name, value in facts.items()])


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _ratio(first: float | None, second: float | None, more_is_better: bool | None) -> str:
    if not first or second is None:
        return "-"
    times = second / first
    text = f"{times:.3g}"
    if more_is_better is None or 0.98 < times < 1.02:  # a second run differs as much by noise
        return text
    return html_page.marked(text, "better" if (times > 1) == more_is_better else "worse")


def _sweep_pictures(sides: Sequence[Side]) -> Iterator[tuple[str, str]]:
    sweeps = [(side.name, side.points) for side in sides]
    for latency in ("ttft", "itl", "e2e"):
        if any(f"{latency}_ms" in point for _, points in sweeps for point in points):
            image = charts.svg(partial(charts.curves, sweeps=sweeps, latency=latency))
            yield f"{latency.upper()} over throughput", image
    yield "Served, and good, over offered", charts.svg(partial(charts.goodput, sweeps=sweeps))


def _pictures(runs: charts.Named) -> Iterator[tuple[str, str]]:
    kept = [(name, result) for name, result in runs if result.get("records")]
    if kept:
        for latency in ("ttft", "itl"):
            image = charts.svg(partial(charts.distribution, runs=kept, latency=latency))
            yield f"Share of {latency.upper()} at most so long", image
    for name, result in kept:
        lanes = charts.svg(partial(charts.lanes, result=result))
        yield f"{name}: requests over time, light until the first token", lanes
    for column, label in GAUGES.items():
        if any(column in charts.columns(result) for _, result in runs):
            yield label, charts.svg(partial(charts.over_time, runs=runs, column=column, label=label))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `report`."""
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="one, or more to compare")
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE.html")


def main(options: argparse.Namespace) -> None:
    keep_apart(options.output, *options.results)
    write([read(path) for path in options.results], options.output)
    print(options.output)
