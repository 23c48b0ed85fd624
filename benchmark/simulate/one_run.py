"""Simulate one trace on one deployment, on several that are compared, or on settings to find the cheapest.

Those that are compared serve the same requests on the same number of engines: the routes of a router, or who
computes prompts. Found tokens are counted where a request is answered, so they include pages that came from
an engine for prompts; they are reported for routes only.

A search tries settings by the number of devices that they take, fewest first; of those with the same number,
all are tried and the one with the most output tokens a second wins. Settings with more devices than the
cheapest are not tried.

One request alone is simulated by the length of its prompt, without a trace.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmark.gate.gate import with_verdict
from benchmark.options import Column, named_rows, recipe_of, table, verdict_line
from benchmark.recordings import SimulatedTrace
from benchmark.simulate.deployment import SIMULATED, Deployment, Placement, Result, device_name, place
from borders.files import MOST_JSON_BYTES, check_rereadable, lines_of, read_bounded, whole_file
from continuous_batching.batch import Batch
from continuous_batching.request import Request
from continuous_batching.routing.routing import ROUTES, Route
from continuous_batching.routing.splitting import Split, SplitWeights
from continuous_batching.slots import SlotPool
from models.config import DecoderConfig
from recipes.assembly.families import model_config
from recipes.schema.command_line import keep_apart
from recipes.schema.reader import read
from recipes.schema.scheduler_defaults import completed
from serving.text.request_fields import parse_request
from serving.text.tokenizer import Text
from simulation import trace
from simulation.fitted import Fitted, in_words
from simulation.roofline import Roofline

MOST_RECORDS = 20_000  # most records that a result keeps, for the gate to recount
FACTORS = (0.5, 2.0)  # factors by which a weight of a split is varied
WAY = Column("name", "way")
ROUTED = (
    Column("prefix_hit_rate", "tokens found", "{:.3f}"),
    Column("routed_hits_of_best", "of the best known", "{:.3f}"),
    Column("routed_most_of_mean", "most loaded / mean", "{:.2f}"),
)
SPLIT = (Column("prompts_apart", "prompts apart", "{:,}"),)
SERVED = (
    Column("ttft_ms.p50", "TTFT p50", "{:,.0f} ms"),
    Column("ttft_ms.p99", "p99", "{:,.0f} ms"),
    Column("tpot_ms.p50", "TPOT p50", "{:.1f} ms"),
    Column("tpot_ms.p99", "p99", "{:.1f} ms"),
    Column("requests_per_s", "requests/s", "{:.2f}"),
    Column("busy_share", "busy", "{:.2f}"),
)
TRIED = (
    Column("devices", "devices"),
    Column("setting", "setting"),
    Column("meets", "meets the objectives"),
    Column("ttft_within", "TTFT within", "{:.1%}"),
    Column("itl_within", "ITL within", "{:.1%}"),
    Column("output_tokens_per_s", "output tokens/s", "{:,.0f}"),
    Column("refused", "refused by the gate"),
    Column("cannot_be", "cannot run"),
)
LENGTHS = (
    Column("prompt_tokens", "prompt, tokens", "{:,}"),
    Column("read", "tokens read"),
    Column("ttft_ms", "TTFT, ms", "{:,.0f}"),
    Column("tpot_ms", "TPOT, ms", "{:.2f}"),
)
WANTED = ("requests_per_s", "output_tokens_per_s", "busy_share", "prompts_apart", "ttft_ms", "tpot_ms")


def requests_of(options: argparse.Namespace, placement: Placement) -> Callable[[], Iterator[Request]]:
    """Return a function that reads the trace that the options name from its start at every call."""
    path, model = options.trace, placement.recipe.model.path
    text, vocab_size = Text.load(model) if model is not None else None, placement.config.vocab_size

    def skip(reason: str) -> None:
        print(f"skipped {path}: {reason}", file=sys.stderr)

    def parse(fields: dict[str, object]) -> Request:
        return parse_request(fields, text)

    def opened() -> Iterator[Request]:
        request = None
        lines = lines_of(path)
        try:
            for request in trace.read(lines, vocab_size, parse, skip if options.skip_bad else None):
                yield request
        except trace.BadLine as error:
            raise ValueError(f"{path}: {error}; --skip-bad leaves such lines out") from error
        if request is None:
            raise ValueError(f"{path} holds no request that can be simulated; make one with scripts.trace")

    return opened


def deployment_of(options: argparse.Namespace) -> Deployment:
    """Return the deployment that the options name."""
    recipe = recipe_of(options)
    tensor, pipeline = options.tp or recipe.parallel.tensor, options.pp or recipe.parallel.pipeline
    if options.costs is not None and (tensor != recipe.parallel.tensor or pipeline > 1):
        raise ValueError(
            "--costs are of the devices that were recorded, without stages of layers; leave out --tp and"
            " --pp, and let parallel.pipeline be 1"
        )
    if options.split is not None and options.dp > 1:
        raise ValueError("--split says how many engines there are; leave out --dp")
    if options.split_by is not None and options.split is None:
        raise ValueError("--split-by says which prompts are computed apart; give --split, or leave it out")
    if options.route is not None and options.dp == 1 and max(options.split or (1,)) == 1:
        raise ValueError("--route chooses among engines; give several, by --dp or --split, or leave it out")
    fitted = None
    if options.costs is not None:
        fitted = Fitted.from_json(read_bounded(options.costs, MOST_JSON_BYTES), options.costs)
    planned = place(recipe, options.device, tensor, pipeline, fitted)
    route: Route = options.route or "least_loaded"
    split_by: Split = options.split_by or "cost"
    return Deployment(planned, options.dp, route, options.split, split_by)


def figures_of(
    deployment: Deployment, requests: Iterator[Request], timeline: SimulatedTrace | None = None
) -> Result:
    """Return the figures of one simulated run, without a verdict."""
    began_s = time.perf_counter()
    totals, own = deployment.serve(requests, timeline, records=True)
    took_s = time.perf_counter() - began_s
    figures = deployment.figures(totals, own)
    fitted = deployment.placement.fitted
    if fitted is not None and (said := fitted.describe())["doubts"]:
        print(f"warning: the fit {in_words(said)}", file=sys.stderr)
    kept = totals.records is not None and len(totals.records) <= MOST_RECORDS and not figures["failed"]
    return {
        **figures,
        "num_pages": deployment.placement.memory.num_pages,
        **({} if fitted is None else {"fit": fitted.describe()}),
        "wall_s": round(took_s, 3),
        "simulated_output_tokens_per_wall_s": round(totals.output_tokens / took_s),
        **({"records": totals.records} if kept else {}),
    }


def run(options: argparse.Namespace) -> Result:
    """Return the figures with the gate's verdict; raises ValueError for what cannot be simulated."""
    deployment = deployment_of(options)
    if options.timeline is not None and (options.split is not None):
        raise ValueError("--timeline shows one engine or the stages of one; leave out --split")
    if options.timeline is not None:
        keep_apart(options.timeline, options.recipe, options.trace, *filter(None, [options.costs]))
    requests = requests_of(options, deployment.placement)
    if options.timeline is None:
        figures = figures_of(deployment, requests())
    else:
        with whole_file(options.timeline) as file:
            timeline = SimulatedTrace(file)
            figures = figures_of(deployment, requests(), timeline)
            timeline.close()
    said = {"recipe": options.recipe, "overrides": list(options.overrides), "trace": Path(options.trace).name}
    return with_verdict({"SIMULATED": SIMULATED, **said, **figures})


def splits(whole: Deployment, split: tuple[int, int]) -> Iterator[tuple[str, Deployment]]:
    """Yield whole engines, all prompts apart, those for which it costs less, and these with other weights."""
    yield "never", whole
    yield "always", replace(whole, split=split, split_by="always")
    yield "cost", replace(whole, split=split)
    usual = SplitWeights()
    for name in SplitWeights.__dataclass_fields__:
        for factor in FACTORS:
            weights = replace(usual, **{name: factor * getattr(usual, name)})
            yield f"cost, {name} x {factor:g}", replace(whole, split=split, weights=weights)


def run_ways(options: argparse.Namespace) -> Result:
    """Return the figures of each route, or of each split; raises ValueError for one that the gate refuses."""
    recipe, split = recipe_of(options), getattr(options, "split", None)
    tensor, pipeline = options.tp or recipe.parallel.tensor, recipe.parallel.pipeline
    placement = place(recipe, options.device, tensor, pipeline)
    whole = Deployment(placement, options.dp if split is None else sum(split), "prefix")
    requests = requests_of(options, placement)
    routes = ((route, replace(whole, route=route)) for route in ROUTES)
    rows: dict[str, Result] = {}
    for name, deployment in routes if split is None else splits(whole, split):
        found = with_verdict({"SIMULATED": SIMULATED, **figures_of(deployment, requests())})
        verdict = found["verdict"]
        if verdict["outcome"] != "pass":
            raise ValueError(f"{name} does not pass the gate: {verdict_line(verdict)}")
        wanted = (*WANTED, *(each.name for each in ROUTED if split is None))
        rows[name] = {figure: found[figure] for figure in wanted if figure in found}
    return {"SIMULATED": SIMULATED, **replace(whole, split=split).facts(), "ways": rows}


def print_ways(result: Result) -> None:
    """Print a row for each way."""
    rows = named_rows(result["ways"])
    is_routed = all("routed_most_of_mean" in each for each in rows)
    print(f"SIMULATED: {SIMULATED}\n")
    print(table((WAY, *(ROUTED if is_routed else SPLIT), *SERVED), rows, "" if is_routed else "0"))


@dataclass(frozen=True, slots=True)
class TriedSetting:
    """The parts of a setting that a search may choose."""

    tensor: int
    pipeline: int  # the recipe's own, which no setting changes
    replicas: int
    overrides: tuple[str, ...]  # the recipe's keys that it sets

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline * self.replicas

    def __str__(self) -> str:
        return " ".join([f"--tp {self.tensor} --dp {self.replicas}", *self.overrides])


def settings(options: argparse.Namespace, pipeline: int) -> list[TriedSetting]:
    """Return all settings that may be tried with so many stages of layers, fewest devices first."""
    keys: list[list[tuple[str, ...]]] = [
        [(f"scheduler.{name}={value}",) for value in given] or [()]
        for name, given in (("max_batch_tokens", options.chunk or ()), ("num_slots", options.slots or ()))
    ]
    made = itertools.product(options.tp, options.dp, *keys)
    found = [TriedSetting(tensor, pipeline, count, (*chunk, *slots)) for tensor, count, chunk, slots in made]
    return sorted(found, key=lambda each: each.num_devices)


def tried(options: argparse.Namespace, setting: TriedSetting) -> Result:
    """Return a setting's shares within the objectives and its figures, or why it cannot run."""
    named: Result = {"setting": str(setting), "devices": setting.num_devices}
    try:
        recipe = read(options.recipe, [*options.overrides, *setting.overrides], options.profile).recipe
        placement = place(recipe, options.device, setting.tensor, setting.pipeline)
        deployment = Deployment(placement, setting.replicas, "least_loaded")
        placement.scheduler()
    except ValueError as error:
        return {**named, "meets": False, "cannot_be": str(error)}
    totals, own = deployment.serve(requests_of(options, placement)(), None, records=False)
    figures = deployment.figures(totals, own)
    shares = (
        totals.ttft.share_within(options.ttft_ms / 1e3),
        totals.itl.share_within(options.itl_ms / 1e3),
    )
    verdict = with_verdict(figures)["verdict"]
    within = all(100 * each >= options.percent for each in shares) and not figures["failed"]
    return {
        **named,
        "meets": within and verdict["outcome"] == "pass",
        "within": within,
        "ttft_within": round(shares[0], 4),
        "itl_within": round(shares[1], 4),
        "output_tokens_per_s": figures["output_tokens_per_s"],
        "failed": figures["failed"],
        "ttft_ms": figures["ttft_ms"],
        "itl_ms": figures["itl_ms"],
        "verdict": verdict["outcome"],
        **({"refused": verdict_line(verdict)} if verdict["refused"] else {}),
    }


def search(options: argparse.Namespace) -> list[Result]:
    """Return each setting that was tried; those that meet the objectives come last, the best at the end."""
    # The parts that no setting changes are checked before any setting is tried.
    recipe = recipe_of(options)
    check_rereadable(Path(options.trace))
    device_name(recipe, options.device)
    model_config(recipe)
    found: list[Result] = []
    made = settings(options, recipe.parallel.pipeline)
    for num_devices, same in itertools.groupby(made, key=lambda each: each.num_devices):
        fared = sorted(
            (tried(options, each) for each in same),
            key=lambda each: (each["meets"], each.get("output_tokens_per_s", 0.0)),
        )
        found += fared
        if fared[-1]["meets"]:
            break
        assert num_devices, "a setting takes a device"
    return found


def run_search(options: argparse.Namespace) -> None:
    """Print what was tried and found; raises ValueError if nothing meets the objectives."""
    found = search(options)
    best = found[-1]
    if options.json:
        said = {"SIMULATED": SIMULATED, "tried": found, "best": best if best["meets"] else None}
        print(json.dumps(said, indent=2))
    else:
        print(f"SIMULATED: {SIMULATED}\n\n{table(TRIED, found)}\n")
    if all("cannot_be" in each for each in found):
        raise ValueError(f"none of {len(found)} settings can run; the last: {best['cannot_be']}")
    if not best["meets"]:
        for each in found:
            if each.get("within"):
                raise ValueError(f"{each['setting']} does not pass the gate: {each['refused']}")
        raise ValueError(
            f"none of {len(found)} settings meets the objectives; allow more devices (--tp, --dp) or time"
        )
    if not options.json:
        print(f"cheapest: {best['devices']} devices, {best['setting']}")


def run_lengths(options: argparse.Namespace) -> Result:
    """Return the times of one request alone, by the length of its prompt.

    The time to its first token is that of its prompt's chunks, one after the other; the time of each further
    one is that of a decode behind them. A model with sparse attention is also simulated without its indexers,
    all tokens read, so that what these bring can be seen. The roofline alone is asked, also for lengths that
    the recipe's cache does not hold. Raises ValueError where the recipe has stages of layers, or does not fit
    the device.
    """
    recipe = recipe_of(options)
    if recipe.parallel.pipeline > 1:
        raise ValueError("lengths are simulated without stages of layers; add parallel.pipeline=1")
    placed = place(recipe, options.device, options.tp or recipe.parallel.tensor)
    chunk = completed(recipe.scheduler, placed.memory.longest_tokens).section.max_batch_tokens
    assert chunk is not None, "a completed section has a budget"
    ways = {"all" if top is None else f"at most {top:,}": config for top, config in _ways(placed.config)}
    rows = [
        {"prompt_tokens": length, "read": name} | _times(replace(placed, config=config), length, chunk)
        for length in options.tokens
        for name, config in ways.items()
    ]
    return {"simulated": SIMULATED, **placed.facts(), "chunk": chunk, "lengths": rows}


def print_lengths(result: Result) -> None:
    """Print a row for each length and way."""
    print(f"SIMULATED ({result['simulated']}); {result['costs']}")
    print(f"{result['num_devices']} x {result['device_profile']}, chunks of {result['chunk']:,} tokens\n")
    print(table(LENGTHS, result["lengths"]))


def _ways(config: DecoderConfig) -> list[tuple[int | None, DecoderConfig]]:
    """Return the decoder by what its queries read: as it is, and without indexers if it has any."""
    latent = config.latent
    if latent is None or latent.index is None:
        return [(None, config)]
    layers = tuple(replace(each, index=None) for each in config.layers)
    without = replace(config, layers=layers, latent=replace(latent, index=None))
    return [(latent.index.top_k, config), (None, without)]


def _times(placed: Placement, length: int, chunk: int) -> Result:
    """Return the milliseconds to the first token, and of a decode behind the prompt."""
    costs = placed.costs()
    assert isinstance(costs, Roofline), "nothing was fitted"
    slots = SlotPool(1, length + 1, placed.recipe.cache.page_size)
    starts = range(0, length, chunk)
    first_s = sum(costs.step_s(_span(start, min(start + chunk, length), length), slots) for start in starts)
    further_s = costs.step_s(_span(length, length + 1, length), slots)
    return {"ttft_ms": 1e3 * first_s, "tpot_ms": 1e3 * further_s}


def _span(start: int, stop: int, length: int) -> Batch:
    """Return a step of one span, which samples if it ends the prompt or lies behind it."""
    row, samples = np.zeros(1, np.int64), np.arange(int(stop >= length))
    return Batch(row, np.array([start]), np.array([stop]), samples, row[: len(samples)], samples + stop)
