"""Serve the requests of a trace with an engine in this process, alone or beside transformers."""

from __future__ import annotations

import argparse
import gc
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmark.options import recipe_of
from benchmark.run_record import Result, RunClock, Timeline, hardware, summarise
from borders.files import check_rereadable
from continuous_batching.engine import Engine
from continuous_batching.inspection import usage
from models.layers.dtypes import TORCH_DTYPES
from recipes.assembly import versions
from recipes.assembly.engine import BuiltEngine, build
from recipes.assembly.families import model_config
from recipes.machine import start
from recipes.schema.recipe import Recipe
from serving.answers.jobs import Job
from serving.offline import Record, lines_in, read_jobs, run_jobs
from serving.text.tokenizer import Text

OF_EACH_RUN = ("output_tokens_per_s", "output_tokens", "duration_s")


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
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def run(options: argparse.Namespace) -> Result:
    """Return the run of median throughput, after one uncounted run, so that no figure includes a compilation.

    Raises ValueError where a request failed.
    """
    return measured(options, at_once=False)


def measured(options: argparse.Namespace, *, at_once: bool) -> Result:
    """Return what `run` returns; `at_once`, all requests come at the start, whatever times the trace has."""
    recipe = recipe_of(options)
    text = Text.of(recipe)
    load_trace(options.trace, text)  # read before the model is built, so that a bad file fails at once
    trace, built = Path(options.trace).name, build(recipe)
    engine = built.engine
    results: list[Result] = []
    for number in range(1 + options.runs):
        jobs = load_trace(options.trace, text)
        if at_once:
            for job in jobs:
                for request in (job.request, *job.request.followers):
                    request.arrival_s = 0.0
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


def run_beside(options: argparse.Namespace) -> Result:
    """Serve the same trace with transformers in the same run, in static batches.

    They take requests in the order of the trace, pad them to the longest prompt, and run until the longest
    answer ends; tokens beyond a request's own length are not counted. Both engines get the same model in the
    same dtype, on the same device, and the same requests, which all come at once, whatever times the
    trace has. Random weights differ between them; greedy tokens are then not compared, and no answer ends
    before its length. The processor time of both is read beside the throughput, since other work on the
    machine changes it less.
    """
    recipe = recipe_of(options)
    ours = measured(options, at_once=True)  # static batches wait for no arrival either
    gc.collect()  # the engine has gone out of scope, and gives its memory back
    if recipe.device.kind != "cpu":
        torch.accelerator.empty_cache()
    jobs = load_trace(options.trace, Text.of(recipe))
    model = _model(recipe)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    runs = []
    for _ in range(1 + options.runs):
        began_s = time.process_time()
        rate = _serve_batches(model, jobs, options.static)
        runs.append((rate, time.process_time() - began_s))
    theirs, cpu_s = sorted(runs[1:])[options.runs // 2]  # the first is left out, because it is cold
    beside = {
        "transformers_batch_size": options.static,
        "transformers_output_tokens_per_s": round(theirs, 2),
        "transformers_cpu_s": round(cpu_s, 6),
        "times_transformers": round(ours["output_tokens_per_s"] / theirs, 3),
        "times_transformers_cpu": round(cpu_s / ours["clock"]["cpu_s"], 3),
    }
    return {**ours, **beside}


def _model(recipe: Recipe) -> Any:
    import transformers  # imported here because it takes seconds

    place, dtype = start(recipe.device).device, TORCH_DTYPES[model_config(recipe).dtype]
    if recipe.model.path is not None and recipe.model.weights == "checkpoint":
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(recipe.model.path, dtype=dtype)
        return model.to(place).eval()
    if recipe.model.path is not None:
        config = transformers.AutoConfig.from_pretrained(recipe.model.path)
    else:
        assert recipe.model.config is not None, "a recipe has a model.path or a model.config"
        said = dict(recipe.model.config)
        config = transformers.AutoConfig.for_model(said.pop("model_type"), **said)
    with torch.device(place):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _serve_batches(model: Any, jobs: Sequence[Job], size: int) -> float:
    """Serve in static batches of `size` requests, whose prompts are padded on their left."""
    began = time.perf_counter()
    for first in range(0, len(jobs), size):
        batch = [job.request for job in jobs[first : first + size]]
        prompts = [torch.tensor(request.tokens, dtype=torch.long) for request in batch]
        tokens, mask = (
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left").to(model.device)
            for rows in (prompts, [torch.ones_like(prompt) for prompt in prompts])
        )
        longest = max(request.params.max_tokens for request in batch)
        with torch.inference_mode():
            made = model.generate(
                tokens, attention_mask=mask, max_new_tokens=longest, do_sample=False, pad_token_id=0
            )
        if made.shape[1] != tokens.shape[1] + longest:
            raise ValueError(
                f"transformers ended after {made.shape[1] - tokens.shape[1]} of {longest} tokens"
            )
    return sum(job.request.params.max_tokens for job in jobs) / (time.perf_counter() - began)
