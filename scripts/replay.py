"""Does a recording come out the same again, and what happened in it?

    python -m scripts.replay FILE                       decide every step again; the first difference, if any
    python -m scripts.replay FILE --explain REQUEST_ID  one request's story
    python -m scripts.replay FILE --trace OUT.json      a time line for Perfetto or chrome://tracing
    python -m scripts.replay FILE --policy NAME [scheduler.KEY=VALUE ...]
                                                        what if another policy had served these requests

A recording is made with `scheduler.record=FILE` in the recipe. Exit 1: a decision came out otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

import yaml

from benchmark.recordings import perfetto, what_if
from benchmark.recordings.explain import Story
from continuous_batching.recording.format import Added, DamagedRecording, Entry, Header, read_entries
from continuous_batching.recording.replay import Divergence, Event, Replayed, replay
from continuous_batching.scheduling.scheduler import Scheduler
from recipes.build.scheduler import changed, scheduler_from
from scripts import verb
from simulation.fitted import fit


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m scripts.replay", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    top.add_argument("file", help="a recording")
    top.add_argument(
        "changes", nargs="*", metavar="scheduler.KEY=VALUE", help="with --policy: what else is other"
    )
    purpose = top.add_mutually_exclusive_group()
    purpose.add_argument("--explain", metavar="REQUEST_ID", help="tell one request's story")
    purpose.add_argument("--trace", metavar="OUT.json", help="write a time line")
    purpose.add_argument("--policy", metavar="NAME", help="what if this policy had served the same requests")
    return top


BOUNDS = ("max_waiting_requests", "max_waiting_tokens", "max_queue_wait_s")


class Recording:
    """The entries of a file up to its end, or to where it is damaged, which is said on stderr."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._entries = read_entries(file)
        self._name = name
        try:
            header = next(self._entries)
        except (StopIteration, DamagedRecording) as error:
            raise ValueError(f"{name} is no recording: {str(error) or 'it is empty'}") from error
        assert isinstance(header, Header), "a recording starts with its header"
        self.facts = header.facts
        self.added: list[Added] = []

    def __iter__(self) -> Iterator[Entry]:
        try:
            for entry in self._entries:
                if isinstance(entry, Added):
                    self.added.append(entry)
                yield entry
        except DamagedRecording as damage:
            print(f"{self._name}: {damage}; what comes before it is replayed", file=sys.stderr)


def main(argv: list[str]) -> int:
    """Replay; raises ValueError or OSError for an unusable file."""
    options = parser().parse_intermixed_args(argv)
    if options.changes and options.policy is None:
        raise ValueError(
            f"{options.changes[0]}: a recording is replayed as it was; with --policy NAME it may change"
        )
    with open(options.file, "rb") as file:
        recording = Recording(file, options.file)
        scheduler = scheduler_from(recording.facts)
        try:
            act(options, recording, scheduler, replay(recording, scheduler))
        except Divergence as divergence:
            print(f"{options.file}: {divergence}")
            return 1
    return 0


def act(
    options: argparse.Namespace, recording: Recording, scheduler: Scheduler, events: Iterator[Event]
) -> None:
    """What the options ask for."""
    if options.explain is not None:
        story = Story(options.explain, scheduler)
        story.follow(events)
        print("\n".join(story.lines))
    elif options.trace is not None:
        with open(options.trace, "w", encoding="utf-8") as output:
            count = perfetto.write(output, perfetto.Tracer(scheduler).events(events))
        print(f"{count} events in {options.trace}; open it in ui.perfetto.dev")
    elif options.policy is not None:
        changes = {"policy": options.policy} | dict(map(change, options.changes))
        compare(changes, recording, scheduler, events)
    else:
        steps = [event.number for event in events if isinstance(event, Replayed)]
        print(f"{len(recording.added)} requests, {len(steps)} steps: every decision is the same")


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
    for name, scheduling in (("modelled", section), ("what if", changed(section, changes))):
        other = scheduler_from(recording.facts | {"scheduler": scheduling})
        fates = what_if.simulate(other, recorded, answered, costs)
        columns[f"{name}: {scheduling['policy']}"] = what_if.summary(fates)
    print(f"{'':18}" + "".join(f"{name:>24}" for name in columns))
    for row in columns["as recorded"]:
        print(f"{row:18}" + "".join(f"{column.get(row, float('nan')):24.2f}" for column in columns.values()))
    left_out = len(recording.added) - len(answered)
    if left_out:
        print(f"{left_out} requests (unanswered, searches, of one id) are left out of the modelled columns")


if __name__ == "__main__":
    verb.run(main)
