"""Run engine after engine over ranks, in the same processes, and collect what they answer.

`serve_all` is what each rank runs, see recipes/cluster/in_ranks.py: the first leads, the others follow its
recording, as in a server. So two processes serve any number of checkpoints, and start once.
"""

from __future__ import annotations

import gc
import socket
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from continuous_batching.engine import Engine
from continuous_batching.recording.follower import Beats, Follower
from continuous_batching.recording.listeners import Listeners
from continuous_batching.recording.recorder import Recorder
from continuous_batching.request import Request, SamplingParams
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index
from models.parallel.group import Group
from models.sampling.sampler import Best, Chosen
from recipes.assembly.engine import BuiltEngine, assemble
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT, Recipe
from tests.patience import PATIENCE_S

NUM_TOP = 3  # log-probabilities that are asked for beside that of each token


@dataclass(frozen=True, slots=True)
class Asked:
    """One engine: the overrides of its recipe, and the prompts that it answers greedily."""

    name: str
    settings: tuple[str, ...]
    prompts: list[list[int]]
    num_new: int


@dataclass(frozen=True, slots=True)
class Served:
    """What one rank has to say of an engine.

    `answers` and `logprobs`, lines of (token, log-probability) [num_new, 1 + NUM_TOP, 2], are the leader's
    alone. `logits` has a checksum of the logits of each step that had any; `happened` counts.
    """

    answers: list[list[int]]
    logprobs: list[list[list[tuple[int, float]]]]
    logits: list[int]
    happened: dict[str, int]


class Witness:
    """A rank's sampler, which keeps a checksum of the logits of each step."""

    def __init__(self, sampler: Any) -> None:
        self._sampler, self.seen = sampler, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def start(
        self, logits: Tensor, rows: Index, targets: Index, slots: SlotPool, best: Best | None = None
    ) -> Chosen:
        self.seen.append(zlib.crc32(logits.float().cpu().numpy().tobytes()))
        chosen: Chosen = self._sampler.start(logits, rows, targets, slots, best)
        return chosen


def serve_all(_: Recipe, group: Group, asked: list[Asked], folder: Path) -> dict[str, Served]:
    """In each rank: all engines, one after the other."""
    found = {}
    for each in asked:
        found[each.name] = _served(each, group, folder)
        gc.collect()
    return found


def _served(asked: Asked, group: Group, folder: Path) -> Served:
    place = folder / asked.name
    if group.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            place.write_text(str(server.getsockname()[1]))
            built, witness = _assembled(asked, group)
            server.settimeout(PATIENCE_S)
            connections = {f"rank {rank}": server.accept()[0] for rank in range(1, group.size)}
        return _led(asked, built, witness, connections)
    built, witness = _assembled(asked, group)  # which ends on no rank before the leader listens
    with socket.create_connection(("127.0.0.1", int(place.read_text())), PATIENCE_S) as connection:
        connection.settimeout(None)
        replays = _counted(built)
        apply = built.runner.cache.apply
        Follower(Beats(connection), built.engine.scheduler, built.runner, built.facts, apply=apply).follow()
    return Served([], [], witness.seen, _happened(built.engine) | {"replays": replays()})


def _assembled(asked: Asked, group: Group) -> tuple[BuiltEngine, Witness]:
    in_stages = any(each.startswith("parallel.pipeline=") for each in asked.settings)
    spread = [] if in_stages else [f"parallel.tensor={group.size}"]
    recipe = load(ROOT / "recipes/any/cpu.yaml", [*asked.settings, *spread])
    built = assemble(recipe, group)
    witness = Witness(built.runner.sampler)
    built.runner.sampler = witness
    return built, witness


def _led(asked: Asked, built: BuiltEngine, witness: Witness, connections: dict[str, socket.socket]) -> Served:
    engine, replays = built.engine, _counted(built)
    recorder = Recorder(built.facts, Listeners(connections, PATIENCE_S))
    engine.observer = recorder
    params = SamplingParams(max_tokens=asked.num_new, temperature=0.0, logprobs=NUM_TOP, ignore_eos=True)
    requests = [Request(str(number), np.array(each), params) for number, each in enumerate(asked.prompts)]
    try:
        chunks = _serve(engine, requests)
    finally:
        recorder.close()
    return Served(
        [request.answer.tolist() for request in requests],
        [[[(line.token, line.logprob), *line.top] for line in each.logprobs] for each in requests],
        witness.seen,
        _happened(engine) | {"replays": replays(), "chunks": chunks},
    )


def _serve(engine: Engine, requests: list[Request]) -> int:
    """A few join at each step; how many spans of prompts were not the last of theirs."""
    waiting, chunks, end_s = list(requests), 0, time.monotonic() + PATIENCE_S
    while waiting or engine.has_work:
        assert time.monotonic() < end_s, "the engine does not end"
        for request in waiting[:3]:
            engine.add(request)
        waiting = waiting[3:]
        step = engine.step()
        assert step is not None, "there is work"
        chunks += step.batch.num_spans - len(step.batch.sampled)
    return chunks


def _happened(engine: Engine) -> dict[str, int]:
    counters = engine.scheduler.counters
    names = "preemptions", "hit_tokens", "accepted_tokens"
    return {name: getattr(counters, name) for name in names}


def _counted(built: BuiltEngine) -> Callable[[], int]:
    """How often captured steps will have been replayed."""
    graphs: Any = built.runner.graphs
    count = 0
    if graphs is None:
        return lambda: 0
    inner = graphs.run

    def run(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return inner(*arguments)

    graphs.run = run
    return lambda: count
