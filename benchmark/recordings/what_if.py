"""Simulate how recorded requests would have fared under another policy, or with drafts.

Arrivals and answers are those of the recording; costs come from a fit to the recorded steps. Drafts are
guessed from the same tokens as on a device, and are accepted where the recorded answer agrees.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import yaml

from benchmark.recordings.recording_file import Recording
from continuous_batching.engine import Engine, Step
from continuous_batching.recording.format import Added
from continuous_batching.recording.replay import Event, Replayed, request_of
from continuous_batching.request import Request
from continuous_batching.scheduling.scheduler import Scheduler
from recipes.assembly.scheduler import changed, scheduler_from
from recipes.schema.speculation_section import DRAFTERS, SpeculationSection, speculation_contradictions
from simulation.fit_trust import in_words
from simulation.fitted import Timed, fit, timed
from simulation.replica import Replica
from simulation.run_totals import RunTotals
from simulation.runner import CostModel, Speaker
from simulation.serve import in_order

BOUNDS = ("max_waiting_requests", "max_waiting_tokens", "max_queue_wait_s")


@dataclass(frozen=True, slots=True)
class Fate:
    """One request, and when each of its tokens came, on the clock it was served by."""

    request: Request
    token_s: list[float]


def served(events: Iterable[Event], scheduler: Scheduler) -> tuple[dict[str, Fate], list[Timed]]:
    """Return what happened to each request of a replay on `scheduler`, and the cost of each step."""
    found: dict[str, Fate] = {}

    def followed() -> Iterator[Event]:
        for event in events:
            if isinstance(event, Request):
                found.update((each.id, Fate(each, [])) for each in (event, *event.followers))
            elif isinstance(event, Replayed):
                for owner in event.owner_ids:
                    found[owner].token_s.append(event.end_s)
            yield event

    return found, timed(followed(), scheduler)


def simulate(
    scheduler: Scheduler, recorded: dict[str, Fate], added: Sequence[Added], costs: CostModel
) -> dict[str, Fate]:
    """Serve the same requests, each with the answer that it got in the recording."""
    found: dict[str, Fate] = {}

    def observe(engine: Engine, step: Step) -> None:
        for row in step.owners.tolist():
            found[engine.slots.requests[row].id].token_s.append(step.end_s)

    speaker = Speaker(scheduler.slots, {name: fate.request.answer for name, fate in recorded.items()})
    replica = Replica(scheduler, costs, RunTotals(), speaker=speaker, observe=observe)
    requests = sorted(map(request_of, added), key=lambda request: request.arrival_s)
    for request in in_order(requests):
        found.update((each.id, Fate(each, [])) for each in (request, *request.followers))
        replica.advance(request.arrival_s)
        replica.add(request)
    replica.advance(math.inf)
    return found


def summary(fates: dict[str, Fate]) -> dict[str, float]:
    """Return latencies in ms, and the throughput, of the requests that were served."""
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


def change(text: str) -> tuple[str, str, Any]:
    """Parse section, key and value of scheduler.KEY=VALUE or speculation.KEY=VALUE."""
    name, equals, value = text.partition("=")
    section, _, leaf = name.partition(".")
    if section not in ("scheduler", "speculation") or not leaf or not equals:
        raise ValueError(
            f"{text}: give scheduler.KEY=VALUE, such as scheduler.batch_size=8, or speculation.*"
        )
    return section, leaf, yaml.safe_load(value)


def compare(
    changes: Sequence[tuple[str, str, Any]],
    recording: Recording,
    scheduler: Scheduler,
    events: Iterator[Event],
) -> None:
    """Print how the requests fared, and how they would have fared with these changes."""
    facts = recording.facts
    speculation = _drafted(facts["speculation"], changes)
    recorded, steps = served(events, scheduler)
    if not steps:
        raise ValueError("nothing was computed in this recording, so that nothing can be learnt from it")
    costs = fit(steps)
    ids: Counter[str] = Counter(one.id for each in recording.added for one in each.samples)
    answered = [
        each
        for each in recording.added
        if not each.samples[0].params.beam_width
        and all(len(recorded[one.id].request.answer) and ids[one.id] == 1 for one in each.samples)
    ]
    if not answered:
        raise ValueError(
            "no request of this recording can be served again: none was answered, or all are searches"
        )
    columns = {"as recorded": summary(recorded)}
    section = facts["scheduler"] | dict.fromkeys(BOUNDS)  # every request is served without bounds
    scheduling = changed(section, {key: value for where, key, value in changes if where == "scheduler"})
    for name, asked, drafting in (
        ("modelled", section, facts["speculation"]),
        ("what if", scheduling, speculation),
    ):
        other = scheduler_from(facts | {"scheduler": asked, "speculation": drafting})
        costs = replace(costs)  # starts from the same step, so that the columns differ by nothing else
        fates = simulate(other, recorded, answered, costs)
        drafts = "" if drafting["kind"] == "none" else f", {drafting['kind']}"
        columns[f"{name}: {asked['policy']}{drafts}"] = summary(fates)
    width = 2 + max(map(len, columns))
    print(f"{'':18}" + "".join(f"{name:>{width}}" for name in columns))
    for row in columns["as recorded"]:
        values = [column.get(row, float("nan")) for column in columns.values()]
        print(f"{row:18}" + "".join(f"{value:{width}.2f}" for value in values))
    print(f"the fit of the modelled columns {in_words(costs.describe())}")
    left_out = len(recording.added) - len(answered)
    if left_out:
        print(f"{left_out} requests (unanswered, searches, of one id) are left out of the modelled columns")


def _drafted(section: dict[str, Any], changes: Sequence[tuple[str, str, Any]]) -> dict[str, Any]:
    """Return a recording's section for speculation with changes of its keys."""
    drafted = dict(section)
    for where, key, value in changes:
        if where == "speculation":
            if key not in section:
                raise ValueError(f"speculation.{key}: there is no such key, but for {', '.join(section)}")
            drafted[key] = value
    for kind in (section["kind"], drafted["kind"]):
        if kind in DRAFTERS:
            raise ValueError(f"speculation.kind: what a {DRAFTERS[kind]} says is not modelled")
    for problem in speculation_contradictions(SpeculationSection(**drafted), "cpu"):
        raise problem
    return drafted
