"""Serve a trace with an engine in this process."""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmark import outputs
from benchmark.gate.gate import with_verdict
from benchmark.offline.accounts import accounts, hardware
from benchmark.offline.timeline import Timeline, readings, summarise
from benchmark.options import add_json, show, verdict_line
from benchmark.run_clock import RunClock
from borders.file_bounds import check_rereadable
from continuous_batching.engine import Engine
from continuous_batching.inspection import usage
from recipes.assembly import versions
from recipes.assembly.engine import BuiltEngine, build
from recipes.schema.command_line import add_recipe
from recipes.schema.numbers import MOST_COUNT, whole
from recipes.schema.reader import read
from recipes.schema.recipe import Recipe
from serving.answers.jobs import Job
from serving.offline import Record, lines_in, read_jobs, run_jobs
from serving.text.tokenizer import Text


def load_trace(path: str, text: Text | None) -> list[Job | Record]:
    """Return the jobs of a JSONL file.

    Raises ValueError where there are none, and for a line that is no request, because a benchmark of fewer
    requests than were asked for would not say so.
    """
    check_rereadable(Path(path))
    jobs = list(read_jobs(lines_in(path), text))
    refused = [job["error"] for job in jobs if not isinstance(job, Job)]
    if refused:
        raise ValueError(f"{path}: {refused[0]}")
    if not jobs:
        raise ValueError(f"{path} holds no request")
    return jobs


def serve(engine: Engine, text: Text | None, jobs: Sequence[Job | Record]) -> tuple[Timeline, list[Record]]:
    """Run all jobs, recording every step."""
    timeline = Timeline(replace(engine.scheduler.counters))
    records = list(run_jobs(engine, text, jobs, observe=lambda step: timeline.record(engine, step)))
    return timeline, records


def cache_figures(built: BuiltEngine) -> dict[str, object]:
    """Return what the pools hold now, and what was moved in them since the engine was built."""
    figures = asdict(usage(built.engine.scheduler, built.memory.page_bytes))
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def run(
    recipe_path: str,
    overrides: Sequence[str],
    profile: str | None,
    trace_path: str,
    num_runs: int,
    plot: Path | None = None,
) -> dict[str, object]:
    """Serve a trace and return its figures; `plot` is the path of a chart to draw."""
    recipe = read(recipe_path, overrides, profile).recipe
    text = Text.load(recipe.model.path) if recipe.model.path else None
    load_trace(trace_path, text)  # read before the model is built, so that a bad file fails at once
    described: dict[str, object] = {"recipe": recipe_path, "overrides": list(overrides), "profile": profile}
    described["trace"] = Path(trace_path).name
    return measure(described, recipe, text, lambda _: load_trace(trace_path, text), num_runs, plot)


def measure(
    described: dict[str, object],
    recipe: Recipe,
    text: Text | None,
    load: Callable[[BuiltEngine], list[Job | Record]],
    num_runs: int,
    plot: Path | None = None,
) -> dict[str, object]:
    """Return the run of median throughput, after one uncounted run, so that no figure includes a compilation.

    The versions and the machine are added to the figures, with what `described` says of the run.
    """
    built = build(recipe)
    engine = built.engine
    results: list[tuple[dict[str, object], Timeline, float]] = []
    for number in range(1 + num_runs):
        jobs = load(built)
        clock = RunClock()
        timeline, records = serve(engine, text, jobs)
        passed = clock.read()
        refused = [record["error"] for record in records if "error" in record]
        if refused:
            raise ValueError(
                f"{described['trace']}: {len(refused)} of {len(jobs)} requests failed: {refused[0]}"
            )
        cache = cache_figures(built)
        engine.forget_prefixes()
        if number:
            requests = [job.request for job in jobs if isinstance(job, Job)]
            figures = summarise(engine, requests, timeline)
            duration_s = float(str(figures["duration_s"]))
            figures |= {"clock": passed, **accounts(engine, requests, timeline, duration_s)}
            results.append((figures, timeline, min(request.arrival_s for request in requests)))
    results.sort(key=lambda result: float(str(result[0]["output_tokens_per_s"])))
    figures, timeline, origin_s = results[num_runs // 2]
    num_pages = engine.scheduler.pool.num_pages - 1
    if plot is not None:
        from benchmark.offline.charts import save_run  # matplotlib

        save_run(plot, timeline, origin_s, num_pages)
    where = versions.describe(built.device_name)
    result = {
        **described,
        "machine": where,
        "runs_output_tokens_per_s": [each["output_tokens_per_s"] for each, _, _ in results],
        "runs_output_tokens": [each["output_tokens"] for each, _, _ in results],
        "runs_duration_s": [each["duration_s"] for each, _, _ in results],
        "cache_after_all_runs": cache,
        "counters_after_all_runs": asdict(engine.scheduler.counters),
        "metrics": readings(timeline, origin_s, num_pages),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "warm_up_runs": 1,
        "warm_up_counted": 0,
        **hardware(built, recipe, where),
        **figures,
    }
    return with_verdict(result)


def print_table(result: dict[str, object]) -> None:
    """Print the figures of one run, one a line."""
    for name, value in result.items():
        if name in ("records", "metrics", "counters", "counters_after_all_runs", "settings", "digests"):
            continue  # details of each request, moment or key are for programs
        if name == "verdict" and isinstance(value, dict):
            value = verdict_line(value)
        elif isinstance(value, dict):
            value = ", ".join(f"{key} {each}" for key, each in value.items())
        print(f"{name:22} {value}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `offline`."""
    add_trace_arguments(parser)
    parser.add_argument("--plot", type=outputs.picture, metavar="FILE.png", help="slots and pages over time")


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for recipe, trace and number of runs."""
    add_recipe(parser)
    add = parser.add_argument
    add("--trace", required=True, metavar="FILE.jsonl", help="requests, as `generate` reads them")
    add(
        "--runs",
        type=whole(1, MOST_COUNT),
        default=1,
        metavar="N",
        help="counted runs; the median is reported",
    )
    add_json(parser)


def main(options: argparse.Namespace) -> None:
    given = (options.recipe, options.overrides, options.profile, options.trace, options.runs)
    result = run(*given, options.plot)
    show(result, options, print_table)
