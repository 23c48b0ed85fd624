"""Serve the requests of a trace with an engine in this process."""

from __future__ import annotations

import argparse
import resource
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmark.options import recipe_of
from benchmark.run_clock import RunClock
from benchmark.run_record import Result, Timeline, hardware, summarise
from borders.files import check_rereadable
from continuous_batching.engine import Engine
from continuous_batching.inspection import usage
from recipes.assembly import versions
from recipes.assembly.engine import BuiltEngine, build
from recipes.schema.recipe import Recipe
from serving.answers.jobs import Job
from serving.offline import Record, lines_in, read_jobs, run_jobs
from serving.text.tokenizer import Text

OF_EACH_RUN = ("output_tokens_per_s", "output_tokens", "duration_s")


def text_of(recipe: Recipe) -> Text | None:
    """Return the text side of the recipe's model, if it has a folder."""
    return Text.load(recipe.model.path) if recipe.model.path else None


def load_trace(path: str, text: Text | None) -> list[Job]:
    """Return the jobs of a JSONL file.

    Raises ValueError where there are none, and for a line that is no request, because a benchmark of fewer
    requests than were asked for would not say so.
    """
    check_rereadable(Path(path))
    jobs = []
    for job in read_jobs(lines_in(path), text):
        if not isinstance(job, Job):
            raise ValueError(f"{path}: {job['error']}")
        jobs.append(job)
    if not jobs:
        raise ValueError(f"{path} holds no request")
    return jobs


def serve(engine: Engine, text: Text | None, jobs: Sequence[Job | Record]) -> tuple[Timeline, list[Record]]:
    """Run all jobs, recording every step."""
    timeline = Timeline(replace(engine.scheduler.counters))
    records = list(run_jobs(engine, text, jobs, observe=lambda step: timeline.record(engine, step)))
    return timeline, records


def cache_figures(built: BuiltEngine) -> Result:
    """Return what the pools hold now, and what was moved in them since the engine was built."""
    memory = built.memory
    figures = asdict(usage(built.engine.scheduler, memory.page_bytes, memory.further_page_bytes))
    lacking = [name for name, has in (("window_", memory.windows), ("state_", memory.num_states)) if not has]
    figures = {name: value for name, value in figures.items() if not name.startswith(tuple(lacking))}
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def run(options: argparse.Namespace) -> Result:
    """Return the run of median throughput, after one uncounted run, so that no figure includes a compilation.

    Raises ValueError where a request failed.
    """
    recipe = recipe_of(options)
    text = text_of(recipe)
    load_trace(options.trace, text)  # read before the model is built, so that a bad file fails at once
    trace, built = Path(options.trace).name, build(recipe)
    engine = built.engine
    results: list[Result] = []
    for number in range(1 + options.runs):
        jobs = load_trace(options.trace, text)
        clock = RunClock()
        timeline, records = serve(engine, text, jobs)
        passed = clock.read()
        if refused := [record["error"] for record in records if "error" in record]:
            raise ValueError(f"{trace}: {len(refused)} of {len(records)} requests failed: {refused[0]}")
        cache = cache_figures(built)
        engine.forget_prefixes()
        if number:
            figures = summarise(engine, [job.request for job in jobs], timeline)
            results.append({"clock": passed, **figures})
    results.sort(key=lambda each: each["output_tokens_per_s"])
    where = versions.describe(built.device_name)
    return {
        "recipe": options.recipe,
        "overrides": list(options.overrides),
        "profile": options.profile,
        "trace": trace,
        "machine": where,
        **{f"runs_{name}": [each[name] for each in results] for name in OF_EACH_RUN},
        "cache_after_all_runs": cache,
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "warm_up_runs": 1,
        "warm_up_counted": 0,
        **hardware(built, recipe, where),
        **results[options.runs // 2],
    }
