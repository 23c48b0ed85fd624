"""Measure what a follower costs the host of the leader.

Two engines whose device answers at once decode in all slots and are recorded into files. The second is also
followed by a process that makes the same decisions; another thread sends to it. Their steps are timed in
turns of many. The result is meaningful only on a machine with two free cores.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine
from continuous_batching.recording.follower import Beats, Follower
from continuous_batching.recording.listeners import Listeners
from continuous_batching.recording.recorder import Recorder, RecordingFile
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from kv_cache.pages import PageCopy
from recipes.assembly.scheduler import SchedulerLimits, scheduler_of
from recipes.schema.recipe import CacheSection
from recipes.schema.scheduler_section import SchedulerSection

VOCAB_SIZE, PAGE_SIZE, PROMPT_TOKENS = 32_000, 16, 1000
ROUNDS = 9  # rounds in turns, whose median counts
PATIENCE_S = 60.0


class AtOnce:
    """A runner whose device answers at once."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._slots = scheduler.slots
        self._random = np.random.default_rng(1)

    def run(self, batch: Batch) -> Sampled:
        self._slots.inputs(batch)
        return Sampled(self._random.integers(0, VOCAB_SIZE, len(batch.owners)))

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        sampled = self.run(batch)
        return lambda: sampled

    def resize(self, num_pages: int, copies: tuple[PageCopy, ...]) -> None:
        raise AssertionError("nothing is resized here")


def scheduler(num_slots: int, num_steps: int) -> Scheduler:
    """Return an empty scheduler with room for all contexts."""
    longest = PROMPT_TOKENS + num_steps + 8
    pages = 1 + num_slots * -(-longest // PAGE_SIZE)
    asked = SchedulerSection(num_slots=num_slots, max_batch_tokens=num_slots * PROMPT_TOKENS)
    limits = SchedulerLimits(pages, 0, longest, VOCAB_SIZE, (), None)
    return scheduler_of(asked, CacheSection(page_size=PAGE_SIZE, num_pages=pages), limits)


def follow(address: tuple[str, int], num_slots: int, num_steps: int) -> None:
    """Run a follower in its own process."""
    made = scheduler(num_slots, num_steps)
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        Follower(Beats(connection), made, AtOnce(made), {}).follow()


def decoding(num_slots: int, num_steps: int, observer: Recorder) -> Engine:
    """Return an engine that has computed the prompts of all its slots."""
    made = scheduler(num_slots, num_steps)
    engine = Engine(made, AtOnce(made))
    engine.observer = observer
    random = np.random.default_rng(0)
    params = SamplingParams(max_tokens=num_steps + 4, temperature=0.0, ignore_eos=True)
    for number in range(num_slots):
        engine.add(
            Request(str(number), random.integers(0, VOCAB_SIZE, PROMPT_TOKENS).astype(np.int32), params)
        )
    engine.step()
    return engine


def turn(engine: Engine, num_steps: int) -> float:
    """Return the median time of a step in microseconds."""
    times_us = []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        engine.step()
        times_us.append(1e6 * (time.perf_counter() - start_s))
    return statistics.median(times_us)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Time steps alone and followed; returns both, and the median of their ratios."""
    num_slots, total = options.slots, ROUNDS * options.steps
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        rank = context.Process(target=follow, args=(server.getsockname(), num_slots, total), daemon=True)
        rank.start()
        server.settimeout(PATIENCE_S)
        connection, _ = server.accept()
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listeners = Listeners({"the follower": connection}, PATIENCE_S)
        files = (RecordingFile(Path(folder) / name) for name in ("alone", "followed"))
        alone = decoding(num_slots, total, Recorder({}, next(files)))
        followed = decoding(num_slots, total, Recorder({}, next(files), listeners))
        gc.collect()
        rounds = [(turn(alone, options.steps), turn(followed, options.steps)) for _ in range(ROUNDS)]
        for engine in (alone, followed):
            engine.observer.close()
        rank.join(PATIENCE_S)
        assert rank.exitcode == 0, "the follower did not end in order"
    ratios = [round(with_one / without, 3) for without, with_one in rounds]
    row = {"slots": num_slots, "ratio": statistics.median(ratios), "ratios": ratios}
    for name, times_us in zip(("alone_us", "followed_us"), zip(*rounds)):
        row[name] = round(statistics.median(times_us), 1)
    return {"followed": row}


def print_table(result: Mapping[str, Any]) -> None:
    """Print the result in one line."""
    row = result["followed"]
    least, most = min(row["ratios"]), max(row["ratios"])
    print(
        f"{row['slots']} slots, a step of decodes: {row['alone_us']} µs alone, {row['followed_us']} µs"
        f" followed, {row['ratio']} times (median of {len(row['ratios'])}, {least} to {most})"
    )
