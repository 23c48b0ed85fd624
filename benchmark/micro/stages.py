"""Measure how long the stages of a recipe wait for each other, and compare it with the simulation.

Each stage makes the same schedule by itself, and learns from the last stage that a batch is done, with its
tokens. The times of each stage's steps in one round give the simulation the costs for the next round. A wait
is the time between two batches of a stage: PB1 where both have prompts, PB2 where one has, PB3 where none has
(Sarathi, 2023).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmark.options import markdown
from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine, Runner
from continuous_batching.request import Request, SamplingParams
from continuous_batching.slots import SlotPool
from kv_cache.pages import PageCopy
from models.parallel.group import Group, StageLinks
from recipes.assembly.engine import assemble
from recipes.cluster.in_ranks import in_ranks
from recipes.schema.reader import load
from recipes.schema.recipe import Recipe
from recipes.schema.recipe_error import RecipeError
from simulation.fitted import Fitted, Timed, features, fit
from simulation.pipeline import Stages

Costs = list[Fitted]  # costs of each stage
ROUNDS = 5  # the median of the rounds counts
KINDS = ("PB3", "PB2", "PB1")  # waits, by the number of neighbouring batches with prompts
PROMPT_TOKENS, ANSWER_TOKENS = (16, 200), (8, 48)  # range of a request's lengths


class TimedLinks(StageLinks):
    """The same links; `waited_s` adds up the time until the stage before has sent."""

    def __init__(self, links: StageLinks) -> None:
        super().__init__()
        self._links, self.waited_s = links, 0.0

    def receive(self, x: Tensor) -> Tensor:
        start_s = time.perf_counter()
        x = self._links.receive(x)
        self.waited_s += time.perf_counter() - start_s
        return x

    def send(self, x: Tensor) -> None:
        self._links.send(x)


class TimedStage:
    """A stage's runner with timed computation and waits, simulated beside by the `costs` of all stages."""

    def __init__(
        self, runner: Runner, links: TimedLinks, world: Group, slots: SlotPool, costs: Costs
    ) -> None:
        self._runner, self._links, self._world, self._slots = runner, links, world, slots
        self.waited_s = dict.fromkeys(KINDS, 0.0)
        self.steps: list[Timed] = []
        self.simulated = Stages(costs, lambda _: 0.0) if costs else None
        self.done_s = [0.0]  # the first batch's start, then when each simulated batch has passed all stages
        self._num_landed, self._had_prompt = 0, False

    def run(self, batch: Batch) -> Sampled:
        raise AssertionError("as many batches are in flight as there are stages")

    def resize(self, num_pages: int, copies: tuple[PageCopy, ...]) -> None:
        raise AssertionError("nothing is resized here")

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        has_prompt = bool((batch.starts < self._slots.num_prompt[batch.slots]).any())
        if self.simulated is not None:
            now_s = self.done_s[self._num_landed]
            self.done_s.append(self.simulated.pass_through(batch, self._slots, now_s, 0))
        leads = self._world.rank == 0
        start_s, since_s = time.perf_counter(), self._links.waited_s
        wait = self._runner.start(batch)
        if not leads:  # the leader computes only when its result is asked for
            self._computed(batch, start_s, since_s, has_prompt=has_prompt)

        def waited() -> Sampled:
            start_s, since_s = time.perf_counter(), self._links.waited_s
            tokens = torch.zeros(1 + len(batch.owners), dtype=torch.int64)
            sampled = wait()
            if leads:
                self._computed(batch, start_s, since_s, has_prompt=has_prompt)
                tokens[1:] = torch.from_numpy(sampled.tokens)
            start_s = time.perf_counter()
            self._world.broadcast(tokens)
            if not leads:
                self._links.waited_s += time.perf_counter() - start_s
            self._num_landed += 1
            return Sampled(tokens[1:].numpy())

        return waited

    def _computed(self, batch: Batch, start_s: float, since_s: float, *, has_prompt: bool) -> None:
        took_s = time.perf_counter() - start_s - (self._links.waited_s - since_s)
        self.steps.append(Timed(features(batch), took_s))
        self.waited_s[KINDS[has_prompt + self._had_prompt]] += self._links.waited_s
        self._links.waited_s, self._had_prompt = 0.0, has_prompt


def body(recipe: Recipe, world: Group, num_requests: int) -> list[dict[str, Any]]:
    """Return a rank's figures of each round, after one that gives the simulation its costs."""
    built = assemble(recipe, world, lambda: 0.0, recipe.parallel.start_timeout_s)
    engine, decoder = built.engine, built.runner.decoder
    decoder.stages = links = TimedLinks(decoder.stages)
    costs: list[Fitted] = []
    found = []
    for number in range(1 + ROUNDS):
        links.waited_s = 0.0
        engine.runner = runner = TimedStage(built.runner, links, world, engine.slots, costs)
        start_s = time.perf_counter()
        serve(engine, np.random.default_rng(number), num_requests, decoder.config.vocab_size)
        found.append(
            {
                "stage": decoder.share.stage,
                "seconds": time.perf_counter() - start_s,
                "busy_s": sum(each.taken_s for each in runner.steps),
                "waited_s": runner.waited_s,
                "simulated_seconds": runner.done_s[-1],
                "simulated_busy_s": runner.simulated.busy_s if runner.simulated else 0.0,
                "simulated_waited_s": runner.simulated.bubbles_s if runner.simulated else {},
            }
        )
        texts: list[str] = [""] * world.size
        dist.all_gather_object(texts, fit(runner.steps).in_json())
        first_of_each = reversed(texts[:: recipe.parallel.tensor])  # the last stage has the first ranks
        # The costs are replayed as recorded, from the first step on: stages of one machine are slow together.
        costs = [Fitted.from_json(each.encode(), "a stage").rewound() for each in first_of_each]
    return found[1:]


def serve(engine: Engine, random: np.random.Generator, num_requests: int, vocab_size: int) -> None:
    """Serve requests of all lengths, which all come at once."""
    for number in range(num_requests):
        prompt = random.integers(0, vocab_size, int(random.integers(*PROMPT_TOKENS))).astype(np.int32)
        params = SamplingParams(
            max_tokens=int(random.integers(*ANSWER_TOKENS)), temperature=0.0, ignore_eos=True
        )
        engine.add(Request(str(number), prompt, params))
    while engine.has_work:
        engine.step()


def check_cpu(recipe: Recipe) -> None:
    """Raise RecipeError for a device that computes while the host goes on."""
    if recipe.device.kind != "cpu":
        reason = "only a CPU computes while the host waits for it"
        raise RecipeError("device.kind", reason, "set it to cpu", value=recipe.device.kind)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return shares of the time of all stages, each the median of the rounds."""
    recipe, num_requests = load(options.recipe, options.overrides, options.profile), options.requests
    stages = recipe.parallel.pipeline
    if stages < 2:
        raise RecipeError(
            "parallel.pipeline", "one stage waits for nobody", "set it to 2 or more", value=stages
        )
    check_cpu(recipe)
    ranks = in_ranks(recipe, body, num_requests)
    rounds = [list(each) for each in zip(*ranks[:: recipe.parallel.tensor])]
    rows = [shares([each[at]]) for each in rounds for at in range(stages)]
    named = {
        f"stage {ranks[at * recipe.parallel.tensor][0]['stage'] + 1}": rows[at::stages]
        for at in range(stages)
    }
    named["all"] = [shares(each) for each in rounds]
    named["simulated"] = [simulated_shares(each[0], stages) for each in rounds]
    order = sorted(named.items(), key=lambda each: (each[0] in ("all", "simulated"), each[0]))
    times = [each[0]["simulated_seconds"] / each[0]["seconds"] for each in rounds]
    found = {
        "stages": stages,
        "requests": num_requests,
        "shares": {
            name: {key: round(statistics.median(each[key] for each in many), 4) for key in many[0]}
            for name, many in order
        },
        "seconds": round(statistics.median(each[0]["seconds"] for each in rounds), 3),
        "simulated_of_measured": round(statistics.median(times), 3),
    }
    return {"stages": found}


def shares(of_stages: list[dict[str, Any]]) -> dict[str, float]:
    """Return the share of these stages' time that each kind of wait took, and the share that was computed."""
    total_s = sum(each["seconds"] for each in of_stages)
    waited = {kind: sum(each["waited_s"][kind] for each in of_stages) / total_s for kind in reversed(KINDS)}
    return waited | {"busy": sum(each["busy_s"] for each in of_stages) / total_s}


def simulated_shares(found: dict[str, Any], stages: int) -> dict[str, float]:
    """Return the same shares of all simulated stages."""
    total_s = stages * found["simulated_seconds"]
    waited = {kind: found["simulated_waited_s"][kind] / total_s for kind in reversed(KINDS)}
    return waited | {"busy": found["simulated_busy_s"] / total_s}


def print_table(result: Mapping[str, Any]) -> None:
    """Print a Markdown row for each stage; the rest of the time is the host's."""
    found = result["stages"]
    names = [*reversed(KINDS), "busy"]
    print(f"{found['requests']} requests over {found['stages']} stages in {found['seconds']} s, of which")
    print(f"the simulation says {found['simulated_of_measured']} times; shares of the time\n")
    rows = [(name, *(f"{row[each]:.1%}" for each in names)) for name, row in found["shares"].items()]
    print(markdown(("", *names), rows))
