"""How would the same requests have fared under another policy?

The same arrivals and the same answers on a virtual clock, whose steps take what a model says that was fitted
to the recorded steps: a constant, so much a token, so much a token of context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import Batch, Sampled
from continuous_batching.recording import Added
from continuous_batching.replay import Event, Replayed, request_of
from continuous_batching.request import Request
from continuous_batching.scheduler import Scheduler

IDLE_S = 1e-3

Timed = tuple[NDArray[np.float64], float]  # features of a step, and its seconds


def features(batch: Batch) -> NDArray[np.float64]:
    """What a step's time depends on: a constant, its tokens, the context that they read."""
    context = batch.stops.sum()
    return np.array([1.0, batch.num_tokens, context], dtype=np.float64)


def fit(steps: Sequence[Timed]) -> NDArray[np.float64]:
    """Seconds a unit of each feature, none negative, by least squares over (features, seconds)."""
    left, right = np.array([each for each, _ in steps]), np.array([time_s for _, time_s in steps])
    kept = np.arange(left.shape[1])
    while True:  # leave out what would come out negative
        costs = np.zeros(left.shape[1])
        costs[kept] = np.linalg.lstsq(left[:, kept], right, rcond=None)[0]
        if (costs >= 0).all():
            return costs
        kept = kept[costs[kept] >= 0]


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one request, and when each token came, on the clock it was served by."""

    request: Request
    token_s: list[float]


def served(events: Iterable[Event], scheduler: Scheduler) -> tuple[dict[str, Fate], list[Timed]]:
    """What became of each request of a replay on `scheduler`, and what each step cost."""
    found: dict[str, Fate] = {}
    steps: list[Timed] = []
    idle_s = -np.inf  # since when the device has nothing to do: a step may be made before
    for event in events:
        if isinstance(event, Request):
            for each in (event, *event.followers):
                found[each.id] = Fate(each, [])
        elif isinstance(event, Replayed):
            steps.append((features(event.batch), event.end_s - max(event.start_s, idle_s)))
            idle_s = event.end_s
            for owner in event.owner_ids:
                found[owner].token_s.append(event.end_s)
    return found, steps


def simulate(
    scheduler: Scheduler, recorded: dict[str, Fate], added: Sequence[Added], costs: NDArray[np.float64]
) -> dict[str, Fate]:
    """Serve the same requests on a virtual clock, each to the answer that it got in the recording."""
    arrivals = deque(sorted(map(request_of, added), key=lambda request: request.arrival_s))
    found: dict[str, Fate] = {}
    now_s = arrivals[0].arrival_s if arrivals else 0.0
    while arrivals or scheduler.has_work:
        while arrivals and arrivals[0].arrival_s <= now_s:
            request = arrivals.popleft()
            for each in (request, *request.followers):
                found[each.id] = Fate(each, [])
            scheduler.add(request)
        batch = scheduler.schedule(now_s)
        if batch.num_spans:
            now_s += float(features(batch) @ costs)
            _answer(scheduler, batch, recorded, found, now_s)
        elif scheduler.has_work:
            now_s += IDLE_S  # a policy that waits for a fuller batch is asked again
        else:
            now_s = arrivals[0].arrival_s
    return found


def _answer(
    scheduler: Scheduler, batch: Batch, recorded: dict[str, Fate], found: dict[str, Fate], now_s: float
) -> None:
    slots = scheduler.slots
    owners: list[Request] = [slots.requests[row] for row in batch.owners.tolist()]
    answers = [recorded[each.id].request.answer for each in owners]
    at = (slots.num_tokens - slots.num_prompt)[batch.owners].tolist()
    tokens = np.array([answer[index] for answer, index in zip(answers, at)], dtype=np.int64)
    scheduler.commit(batch, Sampled(tokens), now_s)
    for request, answer, index in zip(owners, answers, at):
        found[request.id].token_s.append(now_s)
        if index + 1 == len(answer) and request.finish_reason is None:
            scheduler.end(request.id, "stop")


def summary(fates: dict[str, Fate]) -> dict[str, float]:
    """Latencies in ms and throughput of what was served."""
    begun = [fate for fate in fates.values() if fate.token_s]
    first = np.array([fate.token_s[0] - fate.request.arrival_s for fate in begun])
    gaps = np.concatenate([np.diff(fate.token_s) for fate in begun])
    since = min(fate.request.arrival_s for fate in begun)
    until = max(fate.token_s[-1] for fate in begun)
    result = {"requests": float(len(begun))}
    result["output tokens/s"] = sum(len(fate.token_s) for fate in begun) / (until - since)
    for name, values in (("TTFT", first), ("ITL", gaps)):
        if len(values):
            for percent in (50, 99, 100):
                result[f"{name} ms, p{percent}"] = 1e3 * float(np.percentile(values, percent))
    return result
