"""Serve requests with an engine in this process: a trace, or requests that are made for a question.

Random requests that all come at once are measured in the terms of `vllm bench throughput`, tokens a second of
many requests, and of `vllm bench latency`, the seconds until the last request of a batch of one size has
ended.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from benchmark.gate.gate import with_verdict
from benchmark.options import recipe_of
from benchmark.run_clock import RunClock
from benchmark.run_record import Result, Timeline, accounts, hardware, readings, summarise
from benchmark.workloads.synthetic import SyntheticLoad, draw_requests, lengths
from borders.files import check_rereadable
from continuous_batching.engine import Engine
from continuous_batching.inspection import usage
from recipes.assembly import versions
from recipes.assembly.engine import BuiltEngine, build
from recipes.schema.recipe import Recipe
from serving.answers.jobs import Job
from serving.offline import Record, lines_in, read_jobs, run_jobs
from serving.text.request_fields import parse_request
from serving.text.tokenizer import Text

INPUT_LEN, OUTPUT_LEN, NUM_PROMPTS = 512, 128, 64
PERCENTILES = (10, 25, 50, 75, 90, 99)


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


def check_answered(name: str, records: Sequence[Record]) -> None:
    """Raise ValueError where a request failed; `name` says whose requests they are."""
    refused = [record["error"] for record in records if "error" in record]
    if refused:
        raise ValueError(f"{name}: {len(refused)} of {len(records)} requests failed: {refused[0]}")


def cache_figures(built: BuiltEngine) -> Result:
    """Return what the pools hold now, and what was moved in them since the engine was built."""
    memory = built.memory
    figures = asdict(usage(built.engine.scheduler, memory.page_bytes, memory.further_page_bytes))
    lacking = [name for name, has in (("window_", memory.windows), ("state_", memory.num_states)) if not has]
    figures = {name: value for name, value in figures.items() if not name.startswith(tuple(lacking))}
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def measure(
    described: Result,
    recipe: Recipe,
    text: Text | None,
    load: Callable[[BuiltEngine], list[Job | Record]],
    num_runs: int,
) -> Result:
    """Return the run of median throughput, after one uncounted run, so that no figure includes a compilation.

    The versions and the machine are added to the figures, with what `described` says of the run.
    """
    built = build(recipe)
    engine = built.engine
    results: list[tuple[Result, Timeline, float]] = []
    for number in range(1 + num_runs):
        jobs = load(built)
        clock = RunClock()
        timeline, records = serve(engine, text, jobs)
        passed = clock.read()
        check_answered(str(described["trace"]), records)
        cache = cache_figures(built)
        engine.forget_prefixes()
        if number:
            requests = [job.request for job in jobs if isinstance(job, Job)]
            figures = summarise(engine, requests, timeline)
            duration_s = figures["duration_s"]
            figures |= {"clock": passed, **accounts(engine, requests, timeline, duration_s)}
            results.append((figures, timeline, min(request.arrival_s for request in requests)))
    results.sort(key=lambda result: result[0]["output_tokens_per_s"])
    figures, timeline, origin_s = results[num_runs // 2]
    num_pages = engine.scheduler.pool.num_pages - 1
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


def run(options: argparse.Namespace) -> Result:
    """Serve a trace and return its figures."""
    recipe = recipe_of(options)
    text = Text.load(recipe.model.path) if recipe.model.path else None
    load_trace(options.trace, text)  # read before the model is built, so that a bad file fails at once
    described = {**_asked(options), "profile": options.profile, "trace": Path(options.trace).name}
    return measure(described, recipe, text, lambda _: load_trace(options.trace, text), options.runs)


def _asked(options: argparse.Namespace) -> Result:
    return {"recipe": options.recipe, "overrides": list(options.overrides)}


def random_jobs(
    built: BuiltEngine, num_prompts: int, input_len: int, output_len: int, seed: int
) -> list[Job | Record]:
    """Return random requests of one size that come at once, the same for the same seed."""
    vocab_size = built.config.vocab_size
    load = SyntheticLoad(lengths(str(input_len)), lengths(str(output_len)), vocab_size, seed)
    return [Job(parse_request(line, None)) for line in draw_requests(load, num_prompts)]


def at_once(found: list[Job | Record]) -> list[Job | Record]:
    """Set the arrival of all requests to 0."""
    for job in found:
        if isinstance(job, Job):
            for request in (job.request, *job.request.followers):
                request.arrival_s = 0.0
    return found


def run_at_once(options: argparse.Namespace) -> Result:
    """Serve a trace without its times, or random requests; returns figures under vLLM's names too."""
    sizes = (options.num_prompts, options.input_len, options.output_len)
    if options.trace is not None and any(sizes):
        raise ValueError("--trace says what is asked for; leave out --num-prompts, --input-len, --output-len")
    recipe = recipe_of(options)
    text = Text.load(recipe.model.path) if recipe.model.path else None
    if options.trace is not None:
        load_trace(options.trace, text)  # read before the model is built, so that a bad file fails at once
    num_prompts, input_len, output_len = (
        given or usual for given, usual in zip(sizes, (NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN))
    )

    def load(built: BuiltEngine) -> list[Job | Record]:
        if options.trace is not None:
            return at_once(load_trace(options.trace, text))
        return random_jobs(built, num_prompts, input_len, output_len, options.seed)

    drawn = f"{num_prompts} prompts of {input_len} tokens, answers of {output_len}"
    result = measure({**_asked(options), "trace": options.trace or drawn}, recipe, text, load, options.runs)
    named = {
        "elapsed_time": result["duration_s"],
        "num_requests": result["requests"],
        "total_num_tokens": result["prompt_tokens"] + result["output_tokens"],
        "requests_per_second": result["requests_per_s"],
        "tokens_per_second": result["total_tokens_per_s"],
    }
    return with_verdict({**named, **result})


def run_one_batch(options: argparse.Namespace) -> Result:
    """Serve one batch of requests again and again."""
    recipe = recipe_of(options)
    built = build(recipe)
    engine = built.engine
    sizes = {name: getattr(options, name) for name in ("batch_size", "input_len", "output_len")}
    runs: list[Result] = []
    clock = RunClock()
    for number in range(options.num_iters_warmup + options.num_iters):
        if number == options.num_iters_warmup:
            clock = RunClock()
        batch = random_jobs(built, options.batch_size, options.input_len, options.output_len, options.seed)
        timeline, records = serve(engine, None, batch)
        check_answered(f"{options.recipe} cannot serve such a batch", records)
        engine.forget_prefixes()
        if number >= options.num_iters_warmup:
            requests = [job.request for job in batch if isinstance(job, Job)]
            runs.append(summarise(engine, requests, timeline))
    where = versions.describe(built.device_name)
    return with_verdict(
        {
            **_asked(options),
            "machine": where,
            **sizes,
            **batch_figures(runs),
            "clock": clock.read(),
            "warm_up_runs": options.num_iters_warmup,
            "warm_up_counted": 0,
            "max_tokens_per_step": 1,
            **hardware(built, recipe, where),
        }
    )


def batch_figures(runs: list[Result]) -> Result:
    """Return the latencies of the batches, and their summary."""
    latencies = [run["duration_s"] for run in runs]
    names = ("requests", "completed", "failed", "prompt_tokens", "output_tokens")
    sums = {name: sum(run[name] for run in runs) for name in names}
    spent_ms = [run["tpot_ms"]["mean"] for run in runs if run["tpot_ms"]]
    at = np.percentile(latencies, PERCENTILES).tolist()
    return {
        "avg_latency": round(float(np.mean(latencies)), 6),
        "latencies": latencies,
        "percentiles": {str(part): round(value, 6) for part, value in zip(PERCENTILES, at)},
        **sums,
        "duration_s": round(sum(latencies), 4),
        "output_tokens_per_s": round(sums["output_tokens"] / sum(latencies), 2),
        **({"tpot_ms": {"mean": round(float(np.mean(spent_ms)), 3)}} if spent_ms else {}),
    }
