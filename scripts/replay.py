"""Replay a recording, check that every decision is the same, and explain what happened in it.

    python -m scripts.replay FILE                       decide every step again; the first difference, if any
    python -m scripts.replay FILE --explain REQUEST_ID  one request's story
    python -m scripts.replay FILE --trace OUT.json      a time line for Perfetto or chrome://tracing

A recording is made with `scheduler.record=FILE` in the recipe. Exit status 1: a decision differs; 2: the
recording is damaged; 3: its end is missing. What comes before the damage is replayed all the same, and a time
line has a mark there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from benchmark.recordings import RecordedTrace, Recording, Story
from borders.files import opened, whole_file
from continuous_batching.recording.replay import Divergence, Event, Replayed, replay
from continuous_batching.scheduling.scheduler import Scheduler
from recipes.assembly.scheduler import scheduler_from
from recipes.schema import verb
from recipes.schema.command_line import keep_apart


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m scripts.replay", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    top.add_argument("file", help="a recording")
    purpose = top.add_mutually_exclusive_group()
    purpose.add_argument("--explain", metavar="REQUEST_ID", help="print one request's story")
    purpose.add_argument("--trace", metavar="OUT.json", help="write a time line")
    return top


def main(argv: list[str]) -> int:
    """Replay; raises ValueError or OSError for an unusable file."""
    options = parser().parse_args(argv)
    if options.trace is not None:
        keep_apart(options.trace, options.file)
    with opened(options.file) as file:
        recording = Recording(file, options.file)
        scheduler = scheduler_from(recording.facts)
        try:
            act(options, recording, scheduler, replay(recording, scheduler))
        except Divergence as divergence:
            print(f"{options.file}: {divergence}")
            return 1
    return recording.status


def act(
    options: argparse.Namespace, recording: Recording, scheduler: Scheduler, events: Iterator[Event]
) -> None:
    """Do what the options ask for."""
    if options.explain is not None:
        story = Story(options.explain, scheduler)
        story.follow(events)
        print("\n".join(story.lines))
    elif options.trace is not None:
        with whole_file(options.trace) as output:
            count = RecordedTrace(output, scheduler).write(recording, events)
        print(f"{count} events in {options.trace}; open it in ui.perfetto.dev")
    else:
        steps = [event.number for event in events if isinstance(event, Replayed)]
        print(f"{len(recording.added)} requests, {len(steps)} steps: every decision is the same")


if __name__ == "__main__":
    verb.run(main)
