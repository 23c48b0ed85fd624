"""Serve requests with an engine in this process: a trace, or random requests that all come at once.

The latter are measured in the terms of `vllm bench throughput`. The seconds of each run are those of `vllm
bench latency`, until the last request of a batch of one size has ended.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from benchmark.options import recipe_of
from benchmark.run_clock import RunClock
from benchmark.run_record import Result, Timeline, accounts, hardware, readings, summarise
from benchmark.workloads.synthetic import SyntheticLoad, draw_requests, lengths
from borders.files import check_rereadable
from continuous_batching.engine import Engine
from continuous_batching.inspection import usage
from recipes.assembly import versions
from recipes.assembly.engine import BuiltEngine, build
from recipes.assembly.families import model_config
from recipes.schema.recipe import Recipe
from serving.answers.jobs import Job
from serving.offline import Record, lines_in, read_jobs, run_jobs
from serving.text.request_fields import parse_request
from serving.text.tokenizer import Text

USUAL_SIZES = (64, 512, 128)  # prompts, their tokens, and those of each answer


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


def measure(
    options: argparse.Namespace, recipe: Recipe, text: Text | None, trace: str, load: Callable[[], list[Job]]
) -> Result:
    """Return the run of median throughput, after one uncounted run, so that no figure includes a compilation.

    `trace` says what `load` returns. Raises ValueError where a request failed.
    """
    built = build(recipe)
    engine = built.engine
    results: list[tuple[Result, Timeline, float]] = []
    for number in range(1 + options.runs):
        jobs = load()
        clock = RunClock()
        timeline, records = serve(engine, text, jobs)
        passed = clock.read()
        if refused := [record["error"] for record in records if "error" in record]:
            raise ValueError(f"{trace}: {len(refused)} of {len(records)} requests failed: {refused[0]}")
        cache = cache_figures(built)
        engine.forget_prefixes()
        if number:
            requests = [job.request for job in jobs]
            figures = summarise(engine, requests, timeline)
            figures |= {"clock": passed, **accounts(engine, requests, timeline, figures["duration_s"])}
            results.append((figures, timeline, min(request.arrival_s for request in requests)))
    results.sort(key=lambda result: result[0]["output_tokens_per_s"])
    figures, timeline, origin_s = results[options.runs // 2]
    where = versions.describe(built.device_name)
    return {
        "recipe": options.recipe,
        "overrides": list(options.overrides),
        "profile": options.profile,
        "trace": trace,
        "machine": where,
        "runs_output_tokens_per_s": [each["output_tokens_per_s"] for each, _, _ in results],
        "runs_output_tokens": [each["output_tokens"] for each, _, _ in results],
        "runs_duration_s": [each["duration_s"] for each, _, _ in results],
        "cache_after_all_runs": cache,
        "counters_after_all_runs": asdict(engine.scheduler.counters),
        "metrics": readings(timeline, origin_s, engine.scheduler.pool.num_pages - 1),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "warm_up_runs": 1,
        "warm_up_counted": 0,
        **hardware(built, recipe, where),
        **figures,
    }


def run(options: argparse.Namespace) -> Result:
    """Serve a trace and return its figures."""
    recipe = recipe_of(options)
    text = text_of(recipe)
    load_trace(options.trace, text)  # read before the model is built, so that a bad file fails at once
    load = partial(load_trace, options.trace, text)
    return measure(options, recipe, text, Path(options.trace).name, load)


def at_once(found: list[Job]) -> list[Job]:
    """Set the arrival of all requests to 0."""
    for job in found:
        for request in (job.request, *job.request.followers):
            request.arrival_s = 0.0
    return found


def run_at_once(options: argparse.Namespace) -> Result:
    """Serve a trace without its times, or random requests; returns figures under vLLM's names too."""
    sizes = (options.num_prompts, options.input_len, options.output_len)
    recipe = recipe_of(options)
    text = text_of(recipe)
    if options.trace is not None:
        if any(sizes):
            raise ValueError(
                "--trace says what is asked for; leave out --num-prompts, --input-len, --output-len"
            )
        load_trace(options.trace, text)  # read before the model is built, so that a bad file fails at once
    num_prompts, input_len, output_len = (given or usual for given, usual in zip(sizes, USUAL_SIZES))
    drawn = SyntheticLoad(
        lengths(str(input_len)), lengths(str(output_len)), model_config(recipe).vocab_size, options.seed
    )

    def load() -> list[Job]:
        if options.trace is not None:
            return at_once(load_trace(options.trace, text))
        return [Job(parse_request(line, None)) for line in draw_requests(drawn, num_prompts)]

    said = f"{num_prompts} prompts of {input_len} tokens, answers of {output_len}"
    result = measure(options, recipe, text, options.trace or said, load)
    named = {
        "elapsed_time": result["duration_s"],
        "num_requests": result["requests"],
        "total_num_tokens": result["prompt_tokens"] + result["output_tokens"],
        "requests_per_second": result["requests_per_s"],
        "tokens_per_second": result["total_tokens_per_s"],
    }
    return {**named, **result}
