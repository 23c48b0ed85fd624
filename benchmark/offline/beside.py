"""Serve the same trace with transformers in the same run, in static batches.

They take requests in the order of the trace, pad them to the longest prompt, and run until the
longest answer ends; tokens beyond a request's own length are not counted. Both engines get the same model in
the same dtype, on the same device, and the same requests, which all come at once. Random weights differ
between them; greedy tokens are then not compared, and no answer ends before its length. The processor time of
both is read beside the throughput, since other work on the machine changes it less.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmark.offline import offline
from benchmark.options import recipe_of
from models.layers.dtypes import TORCH_DTYPES
from recipes.assembly.families import model_config
from recipes.machine import start
from recipes.schema.recipe import Recipe
from serving.answers.jobs import Job


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return output tokens a second and processor seconds of both, and how many times ours are better."""
    recipe = recipe_of(options)
    ours = offline.run(options)
    _give_back(recipe)
    jobs = offline.load_trace(options.trace, offline.text_of(recipe))
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


def _give_back(recipe: Recipe) -> None:
    """Release the device's memory, now that the engine has gone out of scope."""
    gc.collect()
    if recipe.device.kind != "cpu":
        torch.accelerator.empty_cache()


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
