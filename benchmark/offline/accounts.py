"""Collect what a result must state about its run so that it can be audited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from benchmark.offline.timeline import StepRecord, Timeline, end_s
from continuous_batching.engine import Engine
from continuous_batching.request import Request
from devices.profile import named
from recipes.assembly.engine import BuiltEngine
from recipes.schema.recipe import Recipe
from simulation.run_totals import rounded

DONE = ("stop", "length")
Result = dict[str, object]


def accounts(engine: Engine, requests: Sequence[Request], timeline: Timeline, duration_s: float) -> Result:
    """Return what the gate's laws need beside the figures.

    The figures know one answer of each request. Where some requests failed or were searched for, there are no
    records. Where the engine did not end just these requests, each in a step, there are no means over time
    either: there may be more samples, or stop strings, which end a request between steps.
    """
    steps = timeline.steps
    done = [r for r in requests if r.finish_reason in DONE]
    lens = [len(r.answer) for r in done]
    arrivals_s = [r.arrival_s for r in requests]
    spread_s = max(arrivals_s, default=0.0) - min(arrivals_s, default=0.0)
    plain = len(done) == len(requests) and not any(r.hypotheses for r in requests)
    in_steps = sum(step.num_ended for step in steps) == len(requests)
    return {
        "offered_per_s": rounded((len(requests) - 1) / spread_s, 4) if spread_s > 0 else None,
        "slots": engine.slots.num_slots,
        "num_pages": engine.scheduler.pool.num_pages - 1,
        "counters": {"before": asdict(timeline.before), "after": asdict(engine.scheduler.counters)},
        "max_tokens_per_step": 1,
        "least_output_tokens": min(lens, default=None),
        "most_output_tokens": max(lens, default=None),
        **(_asked(requests) if plain else {}),
        **(means_over_time(steps, arrivals_s, duration_s) if plain and in_steps else {}),
        **({"records": records(requests, timeline.token_times_s)} if plain else {}),
    }


def _asked(requests: Sequence[Request]) -> Result:
    """Return how answers ended, and the most tokens that they could have, for requests with records."""
    ended_by = Counter(sorted(str(each.finish_reason) for each in requests))
    asked = sum(each.params.max_tokens for each in requests)
    return {"ended_by": dict(ended_by), "asked_output_tokens": asked}


def hardware(built: BuiltEngine, recipe: Recipe, machine: Mapping[str, object]) -> Result:
    """Return what computed, what a step reads, and from which memory.

    The profile is None for a device that has none.
    """
    attention, on_host = type(built.runner.attention), recipe.device.kind == "cpu"
    return {
        "computed_on": {
            "kind": recipe.device.kind,
            "count": 1,
            "virtual": recipe.device.virtual,
            "attention": f"{attention.__module__}.{attention.__qualname__}",
            "memory_gib": round(built.memory.memory_bytes / 2**30, 3),
        },
        "device_profile": named(str(machine["cpu" if on_host else "device"])),
        "num_devices": 1,
        "weight_bytes_per_step": built.config.step_weight_bytes,
        "kv_bytes_per_token": built.config.growing_kv_bytes_per_token,
        "page_size": recipe.cache.page_size,
        "page_bytes": built.memory.page_bytes,
        "settings": recipe.described(),
    }


def means_over_time(steps: Sequence[StepRecord], arrivals_s: Sequence[float], duration_s: float) -> Result:
    """Return the mean number of requests that ran, and that were in the system at all.

    They are counted at the end of each step for the whole time since the step before, unless no request was
    left then; a request that came during a step, which cannot join it, is counted from its arrival.
    """
    running, present = 0.0, -sum(arrivals_s)
    before_s, left = 0.0, 0
    for step in steps:
        since_s = before_s if left else step.start_s
        taken_s = step.end_s - since_s
        running += step.num_running * taken_s
        present += (step.num_running + step.num_waiting) * taken_s
        # Newcomers, counted from their arrivals.
        present += (step.num_running + step.num_waiting - left) * since_s
        before_s, left = step.end_s, step.num_running + step.num_waiting - step.num_ended
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return {"mean_running": round(running * per_s, 4), "mean_in_system": round(present * per_s, 4)}


def records(requests: Sequence[Request], token_times_s: Mapping[str, Sequence[float]]) -> list[Result]:
    """Return a record of each request; times count from the first arrival.

    The times of tokens are included where each token of every answer came in a step.
    """
    origin_s = min((r.arrival_s for r in requests), default=0.0)
    in_steps = all(len(token_times_s.get(r.id, ())) == len(r.answer) for r in requests)

    def since(time_s: float | None) -> float | None:
        return None if time_s is None else round(time_s - origin_s, 6)

    def of_tokens(request: Request) -> Result:
        times_s = token_times_s.get(request.id, ())
        return {"token_times_s": [since(each) for each in times_s]} if in_steps else {}

    return [
        {
            "id": r.id,
            "arrival_s": since(r.arrival_s),
            "first_token_s": since(r.first_token_s),
            "finish_s": since(end_s(r, token_times_s.get(r.id, ()))),
            "prompt_tokens": r.num_prompt_tokens,
            "max_tokens": r.params.max_tokens,
            "output_tokens": len(r.answer),
            "finish_reason": r.finish_reason,
            **of_tokens(r),
        }
        for r in requests
    ]
