"""Measure how long running answers wait while long prompts come in, whole and in chunks.

All slots but a few are kept answering, and a long prompt arrives at a fixed interval. The same requests are
served twice in this process: with whole prompts beside the decodes (orca), and in chunks (stall_free).
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmark.offline import offline
from benchmark.run_record import percentiles
from continuous_batching.request import Request, SamplingParams
from recipes.assembly import versions
from recipes.assembly.engine import build
from recipes.machine import start
from recipes.schema.reader import read
from serving.answers.jobs import Job


@dataclass(frozen=True, slots=True)
class StallLoad:
    """The requests that are served."""

    prompt_tokens: int  # tokens of a long prompt
    every_s: float  # interval between long prompts
    num_prompts: int
    num_answers: int  # answers that run beside them
    answer_tokens: int
    chunk_tokens: int

    def jobs(self, vocab_size: int) -> list[Job]:
        """Return new requests, the same at every call."""
        random = np.random.default_rng(0)
        return [Job(request) for request in self._requests(random, vocab_size)]

    def _requests(self, random: np.random.Generator, vocab_size: int) -> Iterator[Request]:
        for number in range(self.num_answers):
            params = SamplingParams(max_tokens=self.answer_tokens, temperature=0.0, ignore_eos=True)
            yield Request(f"answer {number}", random.integers(0, vocab_size, 16).astype(np.int32), params)
        for number in range(1, self.num_prompts + 1):
            prompt = random.integers(0, vocab_size, self.prompt_tokens).astype(np.int32)
            params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
            yield Request(f"prompt {number}", prompt, params, arrival_s=number * self.every_s)

    def ways(self) -> dict[str, list[str]]:
        """Return the recipe's keys for both ways."""
        num_slots, longest = self.num_answers + 2, max(self.prompt_tokens + 2, self.answer_tokens + 16)
        budget = max(num_slots, self.chunk_tokens + self.num_answers)
        both = [f"scheduler.num_slots={num_slots}", f"scheduler.max_request_tokens={longest}"]
        whole = ["scheduler.policy=orca", f"scheduler.max_batch_tokens={longest + num_slots}"]
        chunked = ["scheduler.policy=stall_free", f"scheduler.max_batch_tokens={budget}"]
        return {"whole": [*both, *whole], "chunked": [*both, *chunked]}


def _serve(
    recipe_path: str, overrides: Sequence[str], profile: str | None, load: StallLoad
) -> dict[str, Any]:
    recipe = read(recipe_path, overrides, profile).recipe
    built = build(recipe)
    gc.collect()
    jobs = load.jobs(built.config.vocab_size)
    timeline, records = offline.serve(built.engine, None, jobs)
    refused = [record["error"] for record in records if "error" in record]
    if refused:
        raise ValueError(f"{recipe_path}: {len(refused)} of {len(jobs)} requests failed: {refused[0]}")
    requests = [job.request for job in jobs]
    gaps_s = [
        gap_s
        for request in requests[: load.num_answers]
        for gap_s in np.diff(timeline.token_times_s[request.id]).tolist()
    ]
    first_s, last_s = timeline.steps[0].start_s, timeline.steps[-1].end_s
    tokens = sum(sum(step.num_tokens) for step in timeline.steps)
    prompts = requests[load.num_answers :]
    waits_s = [each.first_token_s - each.arrival_s for each in prompts if each.first_token_s is not None]
    return {
        "worst_itl_ms": round(1e3 * max(gaps_s), 3),
        "itl_ms": percentiles(gaps_s),
        "ttft_of_long_prompts_ms": percentiles(waits_s),
        "total_tokens_per_s": round(tokens / (last_s - first_s), 2),
        "computed_tokens": tokens,
        "steps": len(timeline.steps),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of both ways, and the ratios of chunks to whole prompts."""
    given = (options.prompt_tokens, options.every, options.prompts, options.answers, options.answer_tokens)
    load = StallLoad(*given, options.chunk)
    path, overrides, profile = options.recipe, options.overrides, options.profile
    figures = {name: _serve(path, [*overrides, *keys], profile, load) for name, keys in load.ways().items()}
    whole, chunked = figures["whole"], figures["chunked"]
    return {
        "recipe": path,
        "overrides": list(overrides),
        "profile": profile,
        "load": asdict(load),
        "machine": versions.describe(start(read(path, overrides, profile).recipe.device).name),
        **figures,
        "worst_itl_times_lower": round(whole["worst_itl_ms"] / chunked["worst_itl_ms"], 2),
        "throughput_times": round(chunked["total_tokens_per_s"] / whole["total_tokens_per_s"], 4),
    }
