"""Measure how the ranks of a recipe wait for each other: in collectives by size, in steps, between stages.

Collectives: a decode of R rows adds up [R, hidden] twice in each layer (all_reduce), gathers [R, vocabulary /
ranks] (all_gather), and sends [R] tokens from the first rank to the others (broadcast). Times are of the
first rank, from the call to its end on the device; bandwidth counts the bytes that each rank contributes.

Tensor ranks: rank 0 serves the same requests alone, and then with the others, in turns. The roofline of
`simulate --tp` is fitted (simulation/roofline.py) to the steps of rank 0 alone, and to sums of some
sizes over all ranks that each follow a product; it is fitted to no step of several ranks. Its prediction for
these steps is compared with the time that they took.

Stages: each makes the same schedule by itself, and learns from the last stage that a batch is done, with its
tokens. The times of each stage's steps in one round give the simulation the costs for the next round. A wait
is the time between two batches of a stage: PB1 where both have prompts, PB2 where one has, PB3 where none has
(Sarathi, 2023).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from benchmark.micro.cpu import check_cpu
from benchmark.options import markdown
from benchmark.simulate.deployment import device_name
from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine, Runner
from continuous_batching.request import Request, SamplingParams
from continuous_batching.slots import SlotPool
from devices.rates import DeviceRates
from kv_cache.pages import PageCopy
from models.config import DecoderConfig
from models.layers.dtypes import TORCH_DTYPES
from models.parallel.group import ALONE, Group, StageLinks
from recipes.assembly.engine import BuiltEngine, assemble
from recipes.assembly.families import model_config
from recipes.cluster.in_ranks import in_ranks
from recipes.machine import start
from recipes.schema.parallel_section import ParallelSection
from recipes.schema.reader import load
from recipes.schema.recipe import Recipe
from recipes.schema.recipe_error import RecipeError
from simulation.fitted import Fitted, Timed, features, fit
from simulation.pipeline import Stages
from simulation.roofline import Roofline, StepSize, fitted_device, predicted_s, with_links

ROUNDS = 5  # the median of the rounds counts
WARM_UP = 3  # calls of each size before the timed ones
SUMMED_TOKENS = (1, 8, 64, 256)  # numbers of tokens whose hidden states are summed
REPEATS = 10  # repetitions in a round
READ_SIDE, READ_WEIGHTS = 4096, 4  # sizes of products with one row: more than caches hold
LEAST_SUM_S = 1e-7  # no sum between processes takes less: a smaller result was lost in the products' noise
Steps = list[tuple[StepSize, float]]  # sizes of steps and the seconds that each took
Costs = list[Fitted]  # costs of each stage
KINDS = ("PB3", "PB2", "PB1")  # waits, by the number of neighbouring batches with prompts
PROMPT_TOKENS, ANSWER_TOKENS = (16, 200), (8, 48)  # range of a request's lengths


def methods(group: Group) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the collectives that a step calls, by name."""
    return {"all_reduce": group.all_reduce, "all_gather": group.all_gather, "broadcast": group.broadcast}


def times_us(
    group: Group, device: torch.device, sizes: list[int], repeats: int
) -> Iterator[tuple[str, int, float]]:
    """Yield each method's name, the bytes that a rank contributes, and the microseconds of a call."""
    wait = (lambda: None) if device.type == "cpu" else torch.get_device_module(device).synchronize
    for name, call in methods(group).items():
        for size in sizes:
            x = torch.zeros(size // 4, dtype=torch.float32, device=device)
            for _ in range(WARM_UP):
                call(x)
            rounds = []
            for _ in range(ROUNDS):
                wait()
                start_s = time.perf_counter()
                for _ in range(repeats):
                    call(x)
                wait()
                rounds.append(1e6 * (time.perf_counter() - start_s) / repeats)
            yield name, size, statistics.median(rounds)


def collectives_of(
    recipe: Recipe, group: Group, sizes: list[int], repeats: int
) -> tuple[str, list[tuple[str, int, float]]]:
    """Return a rank's device and times."""
    machine = start(recipe.device)
    return machine.name, list(times_us(group, machine.device, sizes, repeats))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the first rank."""
    recipe = load(options.recipe, options.overrides, options.profile)
    ranks = recipe.parallel.ranks
    if ranks < 2:
        raise RecipeError("parallel.tensor", "one rank waits for nobody", "set it to 2 or more", value=ranks)
    (name, rows), *_ = in_ranks(recipe, collectives_of, options.sizes, options.repeats)
    figures = [
        {"method": method, "bytes": size, "us": round(us, 1), "gb_per_s": round(size / us / 1e3, 3)}
        for method, size, us in rows
    ]
    return {"collective": {"device": name, "ranks": ranks, "calls": figures}}


def print_table(result: Mapping[str, Any]) -> None:
    """Print a Markdown row for each size."""
    found = result["collective"]
    by_size: dict[int, dict[str, str]] = {}
    for row in found["calls"]:
        cell = f"{row['us']:,.1f} ({row['gb_per_s']:.3f})"
        by_size.setdefault(row["bytes"], {})[row["method"]] = cell
    print(f"{found['ranks']} ranks of {found['device']}: µs of a call (GB/s)\n")
    heads = ("bytes of a rank", *next(iter(by_size.values())))
    print(markdown(heads, [(f"{size:,}", *cells.values()) for size, cells in by_size.items()]))


class TimedSteps:
    """A runner whose steps are timed. Ranks that do not sample receive the tokens from the first."""

    def __init__(self, runner: Runner, group: Group, slots: SlotPool, config: DecoderConfig) -> None:
        self._runner, self._group, self._slots = runner, group, slots
        # No rate of the device changes what a step reads.
        self._seen = Roofline(config, DeviceRates.load("epyc")).seen
        self.steps: Steps = []

    def run(self, batch: Batch) -> Sampled:
        start_s = time.perf_counter()
        sampled = self._runner.run(batch)
        taken_s = time.perf_counter() - start_s
        captured = batch.num_spans + batch.num_drafts
        size = StepSize(batch.num_tokens, captured, len(batch.owners), *self._seen(batch, batch.num_tokens))
        self.steps.append((size, taken_s))
        tokens = torch.zeros(len(batch.owners), dtype=torch.int64)
        if self._group.rank == 0:
            tokens.copy_(torch.from_numpy(sampled.tokens))
        return Sampled(self._group.broadcast(tokens).numpy())

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        raise AssertionError("steps follow each other here")

    def resize(self, num_pages: Sequence[int], copies: tuple[PageCopy, ...]) -> None:
        raise AssertionError("nothing is resized here")


def steps_of(
    recipe: Recipe, world: Group, num_requests: int, num_rounds: int
) -> tuple[list[tuple[Steps, Steps]], Any, float]:
    """Return, for each round, the steps of one rank and of all; the times of sums; and GB/s of a product.

    The product has one row, so its time is that of reading its weight.
    """
    shared = assemble(recipe, world, lambda: 0.0)
    alone = None
    if world.rank == 0:
        alone = assemble(replace(recipe, parallel=ParallelSection()), clock=lambda: 0.0)
    rounds = []
    for number in range(1 + num_rounds):
        one = [] if alone is None else timed(alone, ALONE, number, num_requests)
        world.least(0, torch.device("cpu"))  # the other ranks wait for the first
        rounds.append((one, timed(shared, world, number, num_requests)))
    hidden, dtype = shared.config.hidden_size, TORCH_DTYPES[shared.config.dtype]
    sums, read_gb_per_s = beside_products(world, dtype, hidden, num_rounds)
    return rounds[1:], sums, read_gb_per_s


def beside_products(
    group: Group, dtype: torch.dtype, hidden: int, num_rounds: int
) -> tuple[list[tuple[int, float]], float]:
    """Time sums that each follow a product, as in a step, and the products alone.

    Ranks that finish a product at different times wait for each other in the sum. Returns (bytes, seconds)
    for each size, and GB/s of the products alone, of one row, which all ranks compute at once.
    """
    weights = [torch.ones(READ_SIDE, READ_SIDE, dtype=dtype) for _ in range(READ_WEIGHTS)]
    row, num_bytes = torch.ones(1, READ_SIDE, dtype=dtype), sum(weight.nbytes for weight in weights)

    def seconds(x: torch.Tensor | None) -> float:
        group.least(0, torch.device("cpu"))  # all ranks begin at once
        start_s = time.perf_counter()
        for weight in weights * REPEATS:
            F.linear(row, weight)
            if x is not None:
                group.all_reduce(x)
        return (time.perf_counter() - start_s) / REPEATS

    summed = [torch.zeros(tokens, hidden, dtype=dtype) for tokens in SUMMED_TOKENS]
    taken_s = [[seconds(x) for x in (None, *summed)] for _ in range(1 + num_rounds)][1:]
    alone_s, *with_sums_s = (statistics.median(column) for column in zip(*taken_s))
    sums = [
        (x.nbytes, max(each_s - alone_s, LEAST_SUM_S) / READ_WEIGHTS)
        for x, each_s in zip(summed, with_sums_s)
    ]
    return sums, 1e-9 * num_bytes / alone_s


def timed(built: BuiltEngine, group: Group, seed: int, num_requests: int) -> Steps:
    """Return this rank's steps for requests that all come at once."""
    engine: Engine = built.engine
    engine.overlap = False  # a step is timed from its start to its tokens
    engine.runner = runner = TimedSteps(built.runner, group, engine.slots, built.config)
    serve(engine, np.random.default_rng(seed), num_requests, built.config.vocab_size)
    return runner.steps


def compared(roofline: Roofline, rounds: list[Steps]) -> dict[str, float]:
    """Return medians: seconds of a round's steps, measured and predicted, and the error of a step."""
    measured_s = [sum(taken_s for _, taken_s in steps) for steps in rounds]
    said_s = [sum(predicted_s(roofline, size) for size, _ in steps) for steps in rounds]
    errors = [predicted_s(roofline, size) / taken_s - 1 for steps in rounds for size, taken_s in steps]
    return {
        "seconds": round(statistics.median(measured_s), 3),
        "simulated_seconds": round(statistics.median(said_s), 3),
        "error": round(statistics.median(said / took for said, took in zip(said_s, measured_s)) - 1, 4),
        "error_of_a_step": round(statistics.median(map(abs, errors)), 4),
    }


def run_tensor(options: argparse.Namespace) -> dict[str, Any]:
    """Return the measured and the simulated times, and the device that was fitted."""
    recipe = load(options.recipe, options.overrides, options.profile)
    ranks, fix = recipe.parallel.tensor, "set it to 2 or more, and parallel.pipeline to 1"
    if ranks < 2 or recipe.parallel.pipeline > 1:
        raise RecipeError("parallel.tensor", "ranks are held against one", fix, value=ranks)
    check_cpu(recipe)
    (rounds, sums, read_gb_per_s), *_ = in_ranks(recipe, steps_of, options.requests, options.rounds)
    config = model_config(recipe)
    base = DeviceRates.load(device_name(recipe, None))
    device = fitted_device(base, config, [each for one, _ in rounds for each in one], read_gb_per_s)
    device = with_links(device, ranks, sums)
    rows = {
        name: compared(Roofline(config, device, tensor), [pair[at] for pair in rounds])
        for at, (name, tensor) in enumerate((("1", 1), (str(ranks), ranks)))
    }
    fields = ("tflop_per_s", "memory_gb_per_s", "host_us", "row_us", "link_us", "link_gb_per_s")
    said = asdict(device)
    found = {
        "requests": options.requests,
        "ranks": rows,
        "device": {name: said[name] for name in fields} | {"tflop_per_s": said["tflop_per_s"][config.dtype]},
        "sums": [{"bytes": num_bytes, "us": round(1e6 * seconds, 1)} for num_bytes, seconds in sums],
    }
    return {"ranks": found}


def print_tensor(result: Mapping[str, Any]) -> None:
    """Print a Markdown row for each number of ranks."""
    found = result["ranks"]
    device = found["device"]
    print(
        f"{found['requests']} requests; one rank is as {device['tflop_per_s']:.3f} TFLOP/s,"
        f" {device['memory_gb_per_s']:.1f} GB/s and {device['host_us']:.0f} us of the host a step and"
        f" {device['row_us']:.0f} a row, and a sum as hops of {device['link_us']:.0f} us and"
        f" {device['link_gb_per_s']:.2f} GB/s\n"
    )
    rows = [
        (name, f"{row['seconds']:.2f}", f"{row['simulated_seconds']:.2f}", f"{row['error']:+.1%}",
         f"{row['error_of_a_step']:.1%}")
        for name, row in found["ranks"].items()
    ]  # fmt: skip
    print(markdown(("ranks", "measured, s", "simulated, s", "error", "of a step, median"), rows))


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

    def resize(self, num_pages: Sequence[int], copies: tuple[PageCopy, ...]) -> None:
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


def stages_of(recipe: Recipe, world: Group, num_requests: int) -> list[dict[str, Any]]:
    """Return a rank's figures of each round, after one that gives the simulation its costs."""
    built = assemble(recipe, world, lambda: 0.0)
    engine, decoder = built.engine, built.runner.decoder
    decoder.stages = links = TimedLinks(decoder.stages)
    costs: list[Fitted] = []
    found = []
    for number in range(1 + ROUNDS):
        links.waited_s = 0.0
        engine.runner = runner = TimedStage(built.runner, links, world, engine.slots, costs)
        start_s = time.perf_counter()
        serve(engine, np.random.default_rng(number), num_requests, decoder.config.vocab_size)
        row: dict[str, Any] = {"stage": decoder.share.stage, "seconds": time.perf_counter() - start_s}
        row |= {**runner.waited_s, "busy": sum(each.taken_s for each in runner.steps)}
        if runner.simulated is not None:
            waited = runner.simulated.bubbles_s
            row["simulated"] = {"seconds": runner.done_s[-1], "busy": runner.simulated.busy_s, **waited}
        found.append(row)
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


def run_stages(options: argparse.Namespace) -> dict[str, Any]:
    """Return shares of the time of all stages, each the median of the rounds."""
    recipe, num_requests = load(options.recipe, options.overrides, options.profile), options.requests
    stages = recipe.parallel.pipeline
    if stages < 2:
        raise RecipeError(
            "parallel.pipeline", "one stage waits for nobody", "set it to 2 or more", value=stages
        )
    check_cpu(recipe)
    ranks = in_ranks(recipe, stages_of, num_requests)
    rounds = [list(each) for each in zip(*ranks[:: recipe.parallel.tensor])]
    rows = [shares([each[at]], 1) for each in rounds for at in range(stages)]
    named = {
        f"stage {ranks[at * recipe.parallel.tensor][0]['stage'] + 1}": rows[at::stages]
        for at in range(stages)
    }
    named["all"] = [shares(each, stages) for each in rounds]
    named["simulated"] = [shares([each[0]["simulated"]], stages) for each in rounds]
    order = sorted(named.items(), key=lambda each: (each[0] in ("all", "simulated"), each[0]))
    times = [each[0]["simulated"]["seconds"] / each[0]["seconds"] for each in rounds]
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


def shares(rows: Sequence[Mapping[str, Any]], num_stages: int) -> dict[str, float]:
    """Return the shares of the time of `num_stages` that each kind of wait took, and that was computed."""
    total_s = num_stages / len(rows) * sum(each["seconds"] for each in rows)
    return {name: sum(each[name] for each in rows) / total_s for name in (*reversed(KINDS), "busy")}


def print_stages(result: Mapping[str, Any]) -> None:
    """Print a Markdown row for each stage; the rest of the time is the host's."""
    found = result["stages"]
    names = [*reversed(KINDS), "busy"]
    print(f"{found['requests']} requests over {found['stages']} stages in {found['seconds']} s, of which")
    print(f"the simulation says {found['simulated_of_measured']} times; shares of the time\n")
    rows = [(name, *(f"{row[each]:.1%}" for each in names)) for name, row in found["shares"].items()]
    print(markdown(("", *names), rows))
