"""Run engines on one product of the virtual NPU: eager, captured, and disturbed between steps.

    python -m tests.models.product_runs < ASKED.json

A process has one NPU for as long as it lives, so the runs of each product have a process of their own. They
are read as JSON, and what came of each is the last line that is printed.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any, Literal, TypedDict

import numpy as np

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from models.ops.cpu.ops import keep_memory
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT

Way = Literal["eager", "captured", "disturbed", "own_type"]

NUM_NEW, LONGEST = 16, 130
NUM_SLOTS = 7  # a 950 holds four graphs, and captures only some of these sizes
PAGE_SIZE = {"310P": 64, "950": 128}  # the smallest that their attention takes; else as in other tests
OWN_TYPE = {"310P": "float16", "910": "float16"}  # elsewhere bfloat16
# What happens, a letter each: r a replay, p a preemption, s a swap-in, c a compaction, z a resize, a a step
# that is made ahead
HAPPENED = {
    "eager": "",
    "captured": "r",
    "own_type": "rpscz",
    "disturbed": "rpscza",
}


class AskedRequest(TypedDict):
    """A prompt, whose answer is greedy without a seed and drawn with one."""

    prompt: list[int]
    seed: int | None


class Run(TypedDict):
    """One engine on a checkpoint; `more` replaces keys of its recipe."""

    path: str
    way: Way
    more: dict[str, str]
    requests: list[AskedRequest]


class Outcome(TypedDict):
    """The answers, the log-probabilities of their tokens, and what happened in which order, a letter each; or
    how the run was refused.
    """

    answers: list[list[int]]
    logprobs: list[list[float]]
    happened: str
    refused: str | None


def settings(product: str, run: Run) -> list[str]:
    """The recipe of a run, as overrides."""
    size, disturbed = PAGE_SIZE.get(product, 16), run["way"] in ("disturbed", "own_type")
    pages_of_one = -(-(LONGEST + NUM_NEW) // size)
    own_type = run["way"] == "own_type"
    keys: dict[str, object] = {
        "model.path": run["path"],
        "model.dtype": OWN_TYPE.get(product, "bfloat16") if own_type else "float32",
        "device.kind": "npu",
        "device.virtual": "true",
        "device.virtual_fp32": "false" if own_type else "true",
        "device.product": json.dumps(product),
        "device.compile": "auto",
        "device.graphs": 0 if run["way"] == "eager" else NUM_SLOTS,
        "cache.page_size": size,
        "cache.num_pages": 1 + (2 * pages_of_one if disturbed else NUM_SLOTS * pages_of_one),
        "cache.memory_gib": "null",
        "scheduler.num_slots": NUM_SLOTS,
        "scheduler.max_batch_tokens": 96,
        "scheduler.max_request_tokens": LONGEST + NUM_NEW,
    }
    if disturbed:
        keys |= {
            "cache.host_gib": 0.01,
            "cache.compact_every_steps": 1,
            "scheduler.overlap": "true",
        }
    return [f"{key}={value}" for key, value in (keys | run["more"]).items()]


def request_of(number: int, asked: AskedRequest, way: Way = "eager") -> Request:
    """A request of a run; no step is made ahead of one that gives log-probabilities."""
    params = SamplingParams(
        max_tokens=NUM_NEW,
        temperature=0.0 if asked["seed"] is None else 0.8,
        seed=asked["seed"],
        logprobs=0 if way == "own_type" else None,
        ignore_eos=True,
    )
    return Request(str(number), np.array(asked["prompt"]), params)


def serve(engine: Engine, requests: list[Request], *, resizes: bool = False) -> str:
    """Serve them, a few joining at each step; what happened in which order, a letter of HAPPENED each."""
    happened: list[str] = []
    _note(engine, happened)
    counters, most_pages = engine.scheduler.counters, engine.scheduler.pool.num_pages
    random, waiting = np.random.default_rng(3), list(requests)
    before = (0, 0, 0)
    while waiting or engine.has_work:
        for request in waiting[:3]:
            engine.add(request)
        waiting = waiting[3:]
        engine.step()
        after = (counters.preemptions, counters.swapped_in_pages, counters.compacted_pages)
        happened += [letter for letter, was, is_ in zip("psc", before, after) if is_ > was]
        before = after
        if resizes and random.random() < 0.07:  # each captures all sizes anew
            engine.resize(int(random.integers(most_pages // 2 + 1, most_pages + 1)), "running")
            happened.append("z")
    return "".join(happened)


def _note(engine: Engine, happened: list[str]) -> None:
    """Let replays of captured steps, and steps that are made ahead, leave their letters."""
    advance, graphs = engine.scheduler.in_flight.advance, getattr(engine.runner, "graphs", None)

    def advanced() -> None:
        happened.append("a")
        advance()

    engine.scheduler.in_flight.advance = advanced  # type: ignore[method-assign]  # watched
    if graphs is not None:
        inner = graphs.run

        def run(*args: Any) -> Any:
            happened.append("r")
            return inner(*args)

        graphs.run = run


def outcome_of(product: str, run: Run) -> Outcome:
    """One run; a refusal of its recipe is an outcome too."""
    try:
        engine = build(load(ROOT / "recipes/any/cpu.yaml", settings(product, run))).engine
    except ValueError as error:
        return Outcome(answers=[], logprobs=[], happened="", refused=str(error))
    requests = [request_of(number, asked, run["way"]) for number, asked in enumerate(run["requests"])]
    happened = serve(engine, requests, resizes=run["way"] in ("disturbed", "own_type"))
    return Outcome(
        answers=[request.answer.tolist() for request in requests],
        logprobs=[[line.logprob for line in request.logprobs] for request in requests],
        happened=happened,
        refused=None,
    )


if __name__ == "__main__":
    keep_memory()  # the CPU's operators, which compute for the stand-in, do so as well
    asked_of, outcomes = json.load(sys.stdin), []
    gc.freeze()  # what is imported stays, and need not be looked at after each run
    for each in asked_of["runs"]:
        outcomes.append(outcome_of(asked_of["product"], each))
        gc.collect()  # a 950 has no room for the graphs of an engine beside those of the last
    print(json.dumps(outcomes))
