"""What happened when? Steps and tokens of one run, and the figures that people quote of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from continuous_batching.counters import Counters
from continuous_batching.engine import Engine, Step
from continuous_batching.request import Request
from simulation.run_totals import rounded

Figures = dict[str, float]
MOST_READINGS = 500


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: when it ran, and for each span its row, its request and how many tokens it computed."""

    start_s: float
    end_s: float
    rows: list[int]
    request_ids: list[str]
    num_tokens: list[int]
    decodes: list[bool]  # whether the span computed a sampled token, not a part of the prompt
    held_pages: int  # pages that rows hold, idle cached pages not among them
    num_running: int  # requests in slots, those that this step ended among them
    num_waiting: int
    num_ended: int


@dataclass(slots=True)
class Timeline:
    """Records an engine's steps as they are made. Times are on the engine's clock."""

    before: Counters  # the engine's when the run began
    steps: list[StepRecord] = field(default_factory=list)
    token_times_s: dict[str, list[float]] = field(default_factory=dict)  # of each answer token, by request

    def record(self, engine: Engine, step: Step) -> None:
        """Record one step; call it before the next step is made."""
        slots, batch = engine.slots, step.batch
        ids = [slots.requests[row].id for row in batch.slots.tolist()]
        pool, prefix = engine.scheduler.pool, engine.scheduler.prefix
        self.steps.append(
            StepRecord(
                start_s=step.start_s,
                end_s=step.end_s,
                rows=batch.slots.tolist(),
                request_ids=ids,
                num_tokens=(batch.stops - batch.starts).tolist(),
                decodes=(batch.starts >= slots.num_prompt[batch.slots]).tolist(),
                held_pages=pool.num_pages - 1 - pool.num_free - prefix.num_idle,
                num_running=len(slots.busy) + len(step.finished),
                num_waiting=len(engine.scheduler.waiting),
                num_ended=len(step.finished),
            )
        )
        for row in step.owners.tolist():
            self.token_times_s.setdefault(slots.requests[row].id, []).append(step.end_s)


def readings(timeline: Timeline, origin_s: float, num_pages: int) -> dict[str, object]:
    """Usage at the ends of at most MOST_READINGS steps, evenly chosen, as a server's metrics are kept."""
    steps = timeline.steps[:: -(-len(timeline.steps) // MOST_READINGS) or 1]
    return {
        "columns": ["at_s", "running", "waiting", "kv_usage"],
        "readings": [
            [
                round(step.end_s - origin_s, 4),
                step.num_running,
                step.num_waiting,
                round(step.held_pages / num_pages, 4),
            ]
            for step in steps
        ],
    }


def percentiles(values_s: Sequence[float]) -> Figures:
    """Mean and percentiles in milliseconds of durations in seconds; empty for no values."""
    if not len(values_s):
        return {}
    p50, p90, p99 = np.percentile(values_s, [50, 90, 99]) * 1e3
    mean = float(np.mean(values_s)) * 1e3
    return {
        key: round(float(value), 3)
        for key, value in zip(("mean", "p50", "p90", "p99"), (mean, p50, p90, p99))
    }


def summarise(engine: Engine, requests: Sequence[Request], timeline: Timeline) -> dict[str, object]:
    """Throughput and latencies of finished requests; the duration runs from the first arrival to the last
    token. A request that failed is counted, and its tokens are not."""
    done = [r for r in requests if r.finish_reason in ("stop", "length")]
    start_s = min((r.arrival_s for r in requests), default=0.0)
    duration_s = max((r.finish_s or start_s for r in requests), default=0.0) - start_s
    answer_tokens = sum(len(r.answer) for r in done)
    times = {r.id: timeline.token_times_s.get(r.id, []) for r in done}
    gaps = [gap for of_one in times.values() for gap in np.diff(of_one).tolist()]
    counters, before = engine.scheduler.counters, timeline.before
    num_pages = engine.scheduler.pool.num_pages - 1
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return {
        "requests": len(requests),
        "completed": len(done),
        "failed": len(requests) - len(done),
        "duration_s": round(duration_s, 4),
        "prompt_tokens": sum(r.num_prompt_tokens for r in done),
        "output_tokens": answer_tokens,
        "requests_per_s": rounded(len(done) * per_s, 3),
        "output_tokens_per_s": rounded(answer_tokens * per_s, 2),
        "total_tokens_per_s": rounded((answer_tokens + sum(r.num_prompt_tokens for r in done)) * per_s, 2),
        "ttft_ms": percentiles([r.first_token_s - r.arrival_s for r in done if r.first_token_s is not None]),
        "tpot_ms": percentiles([(t[-1] - t[0]) / (len(t) - 1) for t in times.values() if len(t) > 1]),
        "itl_ms": percentiles(gaps),
        "e2e_ms": percentiles([r.finish_s - r.arrival_s for r in done if r.finish_s is not None]),
        "mean_batch": round(float(np.mean([len(s.rows) for s in timeline.steps])), 2)
        if timeline.steps
        else 0.0,
        "mean_page_use": (
            round(float(np.mean([s.held_pages for s in timeline.steps])) / num_pages, 4)
            if timeline.steps
            else 0.0
        ),
        "steps": len(timeline.steps),
        "prefix_hit_rate": round(
            (counters.hit_tokens - before.hit_tokens) / max(1, counters.prompt_tokens - before.prompt_tokens),
            4,
        ),
        "preemptions": counters.preemptions - before.preemptions,
    }
