"""How would the requests of a recording have fared under another policy?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import yaml

from benchmark.recordings import what_if
from benchmark.recordings.recording_file import Recording
from continuous_batching.recording.replay import Event
from continuous_batching.scheduling.scheduler import Scheduler
from recipes.build.scheduler import scheduler_from
from simulation.fitted import fit

BOUNDS = ("max_waiting_requests", "max_waiting_tokens", "max_queue_wait_s")


def change(text: str) -> tuple[str, Any]:
    """The key and the value of scheduler.KEY=VALUE."""
    name, equals, value = text.partition("=")
    section, _, leaf = name.partition(".")
    if section != "scheduler" or not leaf or not equals:
        raise ValueError(f"{text}: give scheduler.KEY=VALUE, such as scheduler.batch_size=8")
    return leaf, yaml.safe_load(value)


def compare(
    changes: dict[str, Any], recording: Recording, scheduler: Scheduler, events: Iterator[Event]
) -> None:
    """Print how the requests fared, and how they would have."""
    recorded, steps = what_if.served(events, scheduler)
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
    columns = {"as recorded": what_if.summary(recorded)}
    section = recording.facts["scheduler"] | dict.fromkeys(BOUNDS)  # all that came is served
    for name, scheduling in (("modelled", section), ("what if", section | changes)):
        other = scheduler_from(recording.facts | {"scheduler": scheduling})
        fates = what_if.simulate(other, recorded, answered, costs)
        columns[f"{name}: {scheduling['policy']}"] = what_if.summary(fates)
    print(f"{'':18}" + "".join(f"{name:>24}" for name in columns))
    for row in columns["as recorded"]:
        print(f"{row:18}" + "".join(f"{column.get(row, float('nan')):24.2f}" for column in columns.values()))
    left_out = len(recording.added) - len(answered)
    if left_out:
        print(f"{left_out} requests (unanswered, searches, of one id) are left out of the modelled columns")
