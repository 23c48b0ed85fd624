"""An engine of any number of ranks that exchanges pages: `python -m tests.serving.rank_engine KEY=VALUE...`.

It says where it listens for engines that answer, and then, for each line of its input, answers a prompt: the
line is JSON, with the prompt's tokens and the engine that is to compute it, if any. What it prints is the
answer's tokens, how many of the prompt's were found, and what is held afterwards.
"""

from __future__ import annotations

import json
import os
import select
import sys
from typing import Any

import numpy as np

from continuous_batching.inspection import recount
from continuous_batching.request import Request, SamplingParams
from kv_cache.exchange import prompt_source
from recipes.assembly.engine import BuiltEngine, build
from recipes.schema.reader import load
from serving.engine.page_exchange import PageExchange, exchange_of
from tests.kv_cache.device import OVERRIDES

TOKENS = 6  # tokens of an answer
RECIPE = "recipes/tiny/cpu.yaml"


def turn(built: BuiltEngine, pages: PageExchange) -> list[Request]:
    """One round of an engine's loop; returns the requests that have ended."""
    engine = built.engine
    for fetch in pages.take():
        engine.add(fetch.leader)
    if not engine.has_work or (step := engine.step()) is None:
        return []
    pages.stepped(step)
    return step.finished


def answered(built: BuiltEngine, pages: PageExchange, asked: dict[str, Any]) -> dict[str, Any]:
    request = Request(
        asked["id"],
        np.array(asked["prompt"], dtype=np.int32),
        SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
        prompt_replica=asked["source"],
    )
    engine = built.engine
    beside = Request(
        f"beside {request.id}",
        np.arange(1, 8, dtype=np.int32),
        SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    )
    engine.add(beside)  # so that pages come while batches are in flight
    if not pages.begin(0, request):
        engine.add(request)
    while request.finish_reason is None or beside.finish_reason is None:
        turn(built, pages)
        if not engine.has_work:
            select.select([pages.wake.fd], [], [], 0.05)
    counters, scheduler = engine.scheduler.counters, engine.scheduler
    recount(scheduler)
    held = scheduler.lifecycle.held
    return {
        "answer": request.answer.tolist(),
        "cached": request.num_cached_tokens,
        "missed": counters.missed_pages,
        "held": len(held.pages) + len(held.states) + scheduler.pool.num_held - scheduler.prefix.num_idle,
    }


def main(overrides: list[str]) -> None:
    """Serve until the input ends."""
    prompt_source.LOST_S = 0.0  # the next prompt is asked for again at once
    recipe = load(RECIPE, [*(f"{key}={value}" for key, value in OVERRIDES.items()), *overrides])
    built = build(recipe)
    pages = exchange_of(recipe, built)
    assert pages is not None, "the recipe names a role"
    if built.ranks is not None:
        built.ranks.ends_process = True  # a lost rank ends it, also while it waits
    print(json.dumps({"ready": os.getpid()}), flush=True)
    poller = select.poll()
    poller.register(0, select.POLLIN)
    poller.register(pages.wake.fd, select.POLLIN)
    lines = os.fdopen(0, "rb", buffering=0)  # a buffer would hide lines from the poller
    while True:
        turn(built, pages)
        ready = dict(poller.poll(0 if built.engine.has_work else 100))
        if 0 in ready:
            line = lines.readline()
            if not line:
                break
            print(json.dumps(answered(built, pages, json.loads(line))), flush=True)
    built.engine.close()
    if built.pages is not None:
        built.pages.close()


if __name__ == "__main__":
    main(sys.argv[1:])
