"""Compare the routes of a router, or who computes prompts, on one trace.

Each way serves the same requests on the same number of engines. Found tokens are counted where a request is
answered, so they include pages that came from an engine for prompts; they are reported for routes only.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace

from benchmark.gate.gate import with_verdict
from benchmark.options import show, verdict_line
from benchmark.simulate.deployment import SIMULATED, Deployment, Result
from benchmark.simulate.one_run import run
from benchmark.simulate.placement import place
from benchmark.simulate.trace_loading import requests_of
from continuous_batching.routing.routing import ROUTES
from continuous_batching.routing.splitting import SplitWeights
from recipes.schema.reader import read

FACTORS = (0.5, 2.0)  # factors by which a weight of a split is varied
ROUTED = ("prefix_hit_rate", "routed_hits_of_best", "routed_most_of_mean")


def routes(whole: Deployment) -> Iterator[tuple[str, Deployment]]:
    """Yield each route, in front of whole engines."""
    for route in ROUTES:
        yield route, replace(whole, route=route)


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


def compare(options: argparse.Namespace, split: tuple[int, int] | None) -> Result:
    """Return the figures of each way; raises ValueError for one that cannot run or fails the gate."""
    recipe = read(options.recipe, options.overrides, options.profile).recipe
    placement = place(recipe, options.device, options.tp)
    whole = Deployment(placement, options.dp if split is None else sum(split), "prefix")
    requests = requests_of(options.trace, recipe, placement.config.vocab_size, skip_bad=options.skip_bad)
    rows: dict[str, Result] = {}
    for name, deployment in routes(whole) if split is None else splits(whole, split):
        found = with_verdict({"SIMULATED": SIMULATED, **run(deployment, requests())})
        verdict = found["verdict"]
        assert isinstance(verdict, dict), "a verdict is described by an object"
        if verdict["outcome"] != "pass":
            raise ValueError(f"{name} does not pass the gate: {verdict_line(verdict)}")
        rows[name] = row(found, is_routed=split is None)
    return {"SIMULATED": SIMULATED, **placement.facts(), "devices": whole.num_devices, "ways": rows}


def row(found: Mapping[str, object], *, is_routed: bool) -> Result:
    """Return the figures that are reported for one way."""
    wanted = ("requests_per_s", "output_tokens_per_s", "busy_share", "prompts_apart", "ttft_ms", "tpot_ms")
    return {name: found[name] for name in (*wanted, *(ROUTED if is_routed else ())) if name in found}


def print_table(result: Result) -> None:
    """Print a Markdown row for each way."""
    ways = result["ways"]
    is_routed = all("routed_most_of_mean" in each for each in ways.values())
    own = "tokens found | of the best known | most loaded / mean" if is_routed else "prompts apart"
    print(f"SIMULATED: {SIMULATED}\n")
    print(f"| way | {own} | TTFT p50 | p99 | TPOT p50 | p99 | requests/s | busy |")
    print("|---" * (len(own.split(" | ")) + 7) + "|")
    for name, each in ways.items():
        if is_routed:
            best = each["routed_hits_of_best"]
            routed = f"{each['prefix_hit_rate']:.3f} | {best or '':.5} | {each['routed_most_of_mean']:.2f}"
        else:
            routed = f"{each.get('prompts_apart', 0):,}"
        ttft, tpot = each["ttft_ms"], each["tpot_ms"]
        print(
            f"| {name} | {routed} | {ttft['p50']:,.0f} ms | {ttft['p99']:,.0f} ms | {tpot['p50']:.1f} ms"
            f" | {tpot['p99']:.1f} ms | {each['requests_per_s']:.2f} | {each['busy_share']:.2f} |"
        )


def routes_main(options: argparse.Namespace) -> None:
    """Compare the routes."""
    result = compare(options, None)
    if options.plot is not None:
        from benchmark.simulate.ways_chart import save  # the import takes a second

        save(options.plot, result["ways"])
    show(result, options, print_table)


def splits_main(options: argparse.Namespace) -> None:
    """Compare who computes prompts."""
    show(compare(options, options.split), options, print_table)
