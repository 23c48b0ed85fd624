"""Record the clocks, steps and tokens of one run, and derive what a result states of it.

These are the figures that are commonly reported, and beside them what the gate needs to audit them: counters,
a record of each request, and what computed. Figures are read from a monotonic clock. The clocks of the wall
and of the processor are read beside it, so that a gate can compare durations with something that they were
not computed from.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from continuous_batching.counters import Counters
from continuous_batching.engine import Engine, Step
from continuous_batching.request import Request
from devices.rates import named
from recipes.schema.recipe import Recipe
from simulation.run_totals import DONE, rounded

if TYPE_CHECKING:  # it imports torch
    from recipes.assembly.engine import BuiltEngine

Figures = dict[str, float]
Result = dict[str, Any]
NEAR_S = 5e-5  # seconds between two readings of one moment, unless something else ran in between
TRIES = 20
STAT = Path("/proc/stat")


def with_wall(clock: Callable[[], float]) -> tuple[float, float]:
    """Return the wall clock's and another clock's readings of one moment.

    On a busy machine this process may have to wait between both; they are then read again.
    """
    nearest, found = float("inf"), (0.0, 0.0)
    for _ in range(TRIES):
        before_s, wall_s, after_s = clock(), time.time(), clock()
        if after_s - before_s < nearest:
            nearest, found = after_s - before_s, (wall_s, (before_s + after_s) / 2)
        if nearest <= NEAR_S:
            break
    return found


class RunClock:
    """A clock that starts when it is made."""

    __slots__ = ("_cpu_s", "_monotonic_s", "_wall_s")

    def __init__(self) -> None:
        self._cpu_s = time.process_time()
        self._wall_s, self._monotonic_s = with_wall(time.monotonic)

    def read(self) -> dict[str, object]:
        """Return what has passed since, in the form of a result: `monotonic_s` and `cpu_s` in seconds.

        The processor time is of all threads of this process.
        """
        wall_s, monotonic_s = with_wall(time.monotonic)
        return {
            "started_at": _iso(self._wall_s),
            "ended_at": _iso(wall_s),
            "monotonic_s": round(monotonic_s - self._monotonic_s, 6),
            "cpu_s": round(time.process_time() - self._cpu_s, 6),
        }


def _iso(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, timezone.utc).isoformat(timespec="microseconds")


class OtherLoad:
    """The processor time of this machine that neither this process nor its ended children took.

    It counts from when it is made, by Linux's `/proc/stat`, with what a hypervisor took from the machine.
    """

    __slots__ = ("_own_s", "_since_s", "_taken_s")

    def __init__(self) -> None:
        self._since_s, self._taken_s, self._own_s = time.monotonic(), taken_s(STAT.read_text()), own_s()

    def share(self) -> float:
        """Return the others' share of the processor time of all cores."""
        others_s = taken_s(STAT.read_text()) - self._taken_s - (own_s() - self._own_s)
        all_s = (time.monotonic() - self._since_s) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, others_s) / all_s)


def taken_s(stat: str) -> float:
    """Return the seconds that all cores were not idle: user, nice, system, both interrupts, and stolen."""
    user, nice, system, _idle, _waiting, hard, soft, stolen = map(int, stat.split()[1:9])
    return (user + nice + system + hard + soft + stolen) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: when it ran, and for each span its row, its request and what it computed."""

    start_s: float
    end_s: float
    rows: list[int]
    request_ids: list[str]
    decodes: list[bool]  # whether the span computed a sampled token, not a part of the prompt
    held_pages: int  # pages that rows hold, without idle cached pages
    num_running: int  # requests in slots, including those that this step ended
    num_waiting: int
    num_ended: int


@dataclass(slots=True)
class Timeline:
    """Records an engine's steps as they are made. Times are on the engine's clock."""

    before: Counters  # the engine's counters when the run began
    steps: list[StepRecord] = field(default_factory=list)
    # Times of each answer token, by request.
    token_times_s: dict[str, list[float]] = field(default_factory=dict)

    def record(self, engine: Engine, step: Step) -> None:
        """Record one step; call it before the next step is made."""
        slots, batch = engine.slots, step.batch
        ids = [slots.requests[row].id for row in batch.slots.tolist()]
        pool, prefix = engine.scheduler.pool, engine.scheduler.prefix
        # An engine that overlaps has begun the next step: a row may still hold a request that this step
        # ended, or may already hold one that waited until then. No more than the number of slots can have
        # run.
        held = {slots.requests[row].id for row in slots.busy}
        seen = len(slots.busy) + sum(each.id not in held for each in step.finished)
        num_running = min(seen, slots.num_slots)
        self.steps.append(
            StepRecord(
                start_s=step.start_s,
                end_s=step.end_s,
                rows=batch.slots.tolist(),
                request_ids=ids,
                decodes=(batch.starts >= slots.num_prompt[batch.slots]).tolist(),
                held_pages=pool.num_pages - 1 - pool.num_free - prefix.num_idle,
                num_running=num_running,
                num_waiting=len(engine.scheduler.waiting) + seen - num_running,
                num_ended=len(step.finished),
            )
        )
        # A beam search samples for each of its beams, but its answer grows by one token. Other requests may
        # get several tokens at once where drafts were accepted.
        searches = set()
        for row in step.owners.tolist():
            request = slots.requests[row]
            if request.params.beam_width:
                if request.id in searches:
                    continue
                searches.add(request.id)
            self.token_times_s.setdefault(request.id, []).append(step.end_s)


def percentiles(values_s: Sequence[float]) -> Figures:
    """Return mean, deviation and percentiles in milliseconds of durations in seconds; empty for no values."""
    if not len(values_s):
        return {}
    found_s = [np.mean(values_s), np.std(values_s), *np.percentile(values_s, [50, 90, 99])]
    names = ("mean", "std", "p50", "p90", "p99")
    return {name: round(1e3 * float(value), 3) for name, value in zip(names, found_s)}


def figures_of(records: Sequence[Result], due_s: Sequence[float]) -> Result:
    """Return counts, rates and latencies of requests by their records.

    Times of records count from the first arrival, and the duration runs to the last token or failure. Failed
    requests are counted, and their tokens are not.
    """
    done = [each for each in records if each["finish_reason"] in DONE]
    ends_s = [end for each in records if (end := each.get("finish_s", each.get("end_s"))) is not None]
    duration_s = max(ends_s, default=0.0)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    spread_s = max(due_s, default=0.0) - min(due_s, default=0.0)
    prompt_tokens = sum(each["prompt_tokens"] or 0 for each in done)
    lens, asked = [each["output_tokens"] for each in done], [each["max_tokens"] for each in records]
    spans_s = [(each["finish_s"] - each["first_token_s"], each["output_tokens"] - 1) for each in done]
    times_s = [each.get("token_times_s") or each.get("piece_times_s") or [] for each in done]
    gaps_s = [gap for each in times_s for gap in np.diff(each).tolist()]
    return {
        "requests": len(records),
        "completed": len(done),
        "failed": len(records) - len(done),
        "ended_by": dict(Counter(sorted(str(each["finish_reason"]) for each in done))),
        "duration_s": round(duration_s, 6),
        "prompt_tokens": prompt_tokens,
        "output_tokens": sum(lens),
        "requests_per_s": rounded(len(done) * per_s, 4),
        "output_tokens_per_s": rounded(sum(lens) * per_s, 3),
        "total_tokens_per_s": rounded((prompt_tokens + sum(lens)) * per_s, 3),
        "ttft_ms": percentiles([each["first_token_s"] - each["arrival_s"] for each in done]),
        "tpot_ms": percentiles([spent_s / count for spent_s, count in spans_s if count > 0]),
        "itl_ms": percentiles(gaps_s),
        "itl_gaps": len(gaps_s),
        "e2e_ms": percentiles([each["finish_s"] - each["arrival_s"] for each in done]),
        "offered_per_s": rounded((len(records) - 1) / spread_s, 4) if spread_s > 0 else None,
        "least_output_tokens": min(lens, default=None),
        "most_output_tokens": max(lens, default=None),
        "asked_output_tokens": None if None in asked else sum(asked),
    }


def end_s(request: Request, times_s: Sequence[float]) -> float | None:
    """Return when a client has had its last token. A stop string is found in the text after that."""
    return times_s[-1] if len(times_s) else request.finish_s


def summarise(engine: Engine, requests: Sequence[Request], timeline: Timeline) -> Result:
    """Return the figures of a run, and what the gate's laws need beside them.

    The figures know one answer of each request. Where some requests failed or were searched for, there are no
    records. Where the engine did not end just these requests, each in a step, there are no means over time
    either: there may be more samples, or stop strings, which end a request between steps.
    """
    steps, counters, before = timeline.steps, engine.scheduler.counters, timeline.before
    arrivals_s, kept = [r.arrival_s for r in requests], records(requests, timeline.token_times_s)
    figures = figures_of(kept, arrivals_s)
    num_pages, num_steps = engine.scheduler.pool.num_pages - 1, len(steps) or 1
    speculation = engine.scheduler.speculation
    looked_up = max(1, counters.prompt_tokens - before.prompt_tokens)
    plain = not figures["failed"] and not any(r.hypotheses for r in requests)
    in_steps = sum(step.num_ended for step in steps) == len(requests)
    if any(len(each["token_times_s"]) != each["output_tokens"] for each in kept):
        for each in kept:  # a token that came in no step has no time
            del each["token_times_s"]
    return {
        **figures,
        "mean_batch": round(sum(len(s.rows) for s in steps) / num_steps, 2),
        "mean_page_use": round(sum(s.held_pages for s in steps) / num_steps / num_pages, 4),
        "steps": len(steps),
        "prefix_hit_rate": round((counters.hit_tokens - before.hit_tokens) / looked_up, 4),
        "preemptions": counters.preemptions - before.preemptions,
        "slots": engine.slots.num_slots,
        "num_pages": num_pages,
        "counters": {"before": asdict(before), "after": asdict(counters)},
        "max_tokens_per_step": 1 if speculation is None else 1 + speculation.most,
        **(means_over_time(steps, arrivals_s, figures["duration_s"]) if plain and in_steps else {}),
        **({"records": kept} if plain else {}),
    }


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
    running, present, before_s, left = 0.0, -sum(arrivals_s), 0.0, 0
    for step in steps:
        since_s, num_present = before_s if left else step.start_s, step.num_running + step.num_waiting
        running += step.num_running * (step.end_s - since_s)
        # Newcomers are present from their arrivals, which were subtracted.
        present += num_present * (step.end_s - since_s) + (num_present - left) * since_s
        before_s, left = step.end_s, num_present - step.num_ended
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return {"mean_running": rounded(running * per_s, 4), "mean_in_system": rounded(present * per_s, 4)}


def records(requests: Sequence[Request], token_times_s: Mapping[str, Sequence[float]]) -> list[Result]:
    """Return a record of each request; times count from the first arrival."""
    origin_s = min((r.arrival_s for r in requests), default=0.0)

    def since(time_s: float | None) -> float | None:
        return None if time_s is None else round(time_s - origin_s, 6)

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
            "token_times_s": [since(each) for each in token_times_s.get(r.id, ())],
        }
        for r in requests
    ]
