"""Does a recording come out the same again, and what happened in it?

    python -m scripts.replay FILE                       decide every step again; the first difference, if any
    python -m scripts.replay FILE --explain REQUEST_ID  one request's story
    python -m scripts.replay FILE --trace OUT.json      a time line for Perfetto or chrome://tracing
    python -m scripts.replay FILE --policy NAME         what if another policy had served these requests

A recording is made with `scheduler.record=FILE` in the recipe. Exit 1: a decision came out otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import IO

from continuous_batching.recording import Added, DamagedRecording, Entry, Header, read_entries
from continuous_batching.replay import Divergence, Event, Replayed, replay
from continuous_batching.scheduler import Scheduler
from recipes.scheduling import scheduler_from
from scripts import verb
from scripts.replay import perfetto, what_if
from scripts.replay.explain import Story


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m scripts.replay", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    top.add_argument("file", help="a recording")
    purpose = top.add_mutually_exclusive_group()
    purpose.add_argument("--explain", metavar="REQUEST_ID", help="tell one request's story")
    purpose.add_argument("--trace", metavar="OUT.json", help="write a time line")
    purpose.add_argument("--policy", metavar="NAME", help="what if this policy had served the same requests")
    return top


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
    options = parser().parse_args(argv)
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
        compare(options.policy, recording, scheduler, events)
    else:
        steps = [event.number for event in events if isinstance(event, Replayed)]
        print(f"{len(recording.added)} requests, {len(steps)} steps: every decision is the same")


def compare(policy: str, recording: Recording, scheduler: Scheduler, events: Iterator[Event]) -> None:
    """Print how the requests fared, and how they would have."""
    recorded, steps = what_if.served(events, scheduler)
    costs = what_if.fit(steps)
    answered = [each for each in recording.added if all(recorded[one.id].token_s for one in each.samples)]
    columns = {"as recorded": what_if.summary(recorded)}
    section = recording.facts["scheduler"]
    for name, chosen in (("modelled", section["policy"]), ("what if", policy)):
        other = scheduler_from({**recording.facts, "scheduler": {**section, "policy": chosen}})
        fates = what_if.simulate(other, recorded, answered, costs)
        columns[f"{name}: {chosen}"] = what_if.summary(fates)
    print(f"{'':18}" + "".join(f"{name:>24}" for name in columns))
    for row in columns["as recorded"]:
        print(f"{row:18}" + "".join(f"{column.get(row, float('nan')):24.2f}" for column in columns.values()))
    left_out = len(recording.added) - len(answered)
    if left_out:
        print(f"{left_out} requests without a token are left out of the modelled columns")


if __name__ == "__main__":
    verb.run(main)
