"""What does an engine in this process make of a trace?"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from continuous_batching.engine import Engine
from continuous_batching.gauges import read as read_gauges
from kv_cache.storage import KVCache
from recipes.build import build
from recipes.devices import start
from recipes.reader import read
from scripts.benchmark import machine
from scripts.benchmark.audited import accounts, hardware, with_verdict
from scripts.benchmark.timeline import Timeline, summarise
from serving.offline import Job, Record, read_jobs, run_jobs
from serving.text import Text


def load_trace(path: str, text: Text | None) -> list[Job | Record]:
    """The jobs of a JSONL file; raises ValueError for a line that is no request, because a benchmark of
    fewer requests than were asked for would not say so."""
    with open(path, encoding="utf-8") as file:
        jobs = list(read_jobs(file, text))
    refused = [job["error"] for job in jobs if not isinstance(job, Job)]
    if refused:
        raise ValueError(f"{path}: {refused[0]}")
    return jobs


def serve(engine: Engine, text: Text | None, jobs: Sequence[Job | Record]) -> tuple[Timeline, list[Record]]:
    """Run all jobs, recording every step."""
    timeline = Timeline(replace(engine.scheduler.counters))
    records = list(run_jobs(engine, text, jobs, observe=lambda step: timeline.record(engine, step)))
    return timeline, records


def forget_prefixes(engine: Engine) -> None:
    """Empty the prefix cache of an idle engine, so that runs do not feed on each other."""
    prefix = engine.scheduler.residency.prefix
    prefix.forget(prefix.chains.names)


def cache_figures(engine: Engine) -> dict[str, object]:
    """What the pools hold now, and what was moved in them since the engine was built."""
    config, page_size = engine.runner.config, engine.slots.page_size
    page_bytes = KVCache.page_bytes(
        config.num_layers, page_size, config.num_kv_heads, config.head_dim, config.dtype
    )
    figures = asdict(read_gauges(engine.scheduler, page_bytes))
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def run(
    recipe_path: str, overrides: Sequence[str], profile: str | None, trace_path: str, num_runs: int
) -> dict[str, object]:
    """The run of median throughput, after one that is not counted, so that no figure holds a compilation.

    The recipe, the versions and the machine stand beside the figures.
    """
    recipe = read(recipe_path, overrides, profile).recipe
    text = Text.load(recipe.model.path) if recipe.model.path else None
    load_trace(trace_path, text)  # before the model is built: a bad file fails at once
    engine = build(recipe)
    results: list[dict[str, object]] = []
    for number in range(1 + num_runs):
        jobs = load_trace(trace_path, text)
        timeline, records = serve(engine, text, jobs)
        refused = [record["error"] for record in records if "error" in record]
        if refused:
            raise ValueError(f"{trace_path}: {len(refused)} of {len(jobs)} requests failed: {refused[0]}")
        cache = cache_figures(engine)
        forget_prefixes(engine)
        if number:
            requests = [job.request for job in jobs if isinstance(job, Job)]
            figures = summarise(engine, requests, timeline)
            duration_s = float(str(figures["duration_s"]))
            results.append(figures | accounts(engine, requests, timeline.steps, duration_s))
    results.sort(key=lambda result: float(str(result["output_tokens_per_s"])))
    where = machine.describe(start(recipe.device).name)
    result = {
        "recipe": recipe_path,
        "overrides": list(overrides),
        "profile": profile,
        "trace": Path(trace_path).name,
        "machine": where,
        "runs_output_tokens_per_s": [result["output_tokens_per_s"] for result in results],
        "cache_after_all_runs": cache,
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "warm_up_runs": 1,
        "warm_up_counted": 0,
        **hardware(engine.runner.config, where, on_host=recipe.device.kind == "cpu"),
        **results[num_runs // 2],
    }
    return with_verdict(result)


def print_table(result: dict[str, object]) -> None:
    """Figures of one run, one a line."""
    for name, value in result.items():
        if name == "records":
            continue  # one line for each request is for programs
        if name == "verdict" and isinstance(value, dict):
            value = "; ".join([value["outcome"], *(f"{law}: {why}" for law, why in value["refused"].items())])
        elif isinstance(value, dict):
            value = ", ".join(f"{key} {each}" for key, each in value.items())
        print(f"{name:22} {value}")
