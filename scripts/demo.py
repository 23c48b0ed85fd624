"""Compare continuous batching with static batching: the tiny model serves one trace in both ways.

    python -m scripts.demo [--requests 64] [--rate 200] [--output demo.png]

Requests arrive by a Poisson process and share a system prompt. Static batching waits for a full batch and
runs it to its longest answer; continuous batching lets requests join and leave at every step. Engine, recipe,
trace and number of slots are the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmark import options as kinds
from benchmark.demo import NUM_SLOTS, ROWS, RUNS, SEED, run, save_slots
from recipes.schema import verb
from recipes.schema.numbers import real, whole
from recipes.tiny.corpus import demo_requests


def main(argv: list[str]) -> None:
    """Serve the trace in both ways, print a few answers and a table of both, and draw them."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=whole(1, 10_000), default=64, metavar="N")
    parser.add_argument(
        "--rate", type=real(0.1, 1e6), default=200.0, metavar="PER_S", help="mean arrivals a second"
    )
    parser.add_argument("--output", type=kinds.picture, default=Path("demo.png"), metavar="FILE.png")
    options = parser.parse_args(argv)
    results = {name: run(overrides, options.requests, options.rate) for name, overrides in RUNS.items()}

    print(f"{options.requests} requests, {options.rate:g} a second, {NUM_SLOTS} slots; some answers:\n")
    answers = {record["id"]: record["text"].strip() for record in results["continuous batching"][2]}
    for number, messages in enumerate(demo_requests(options.requests, seed=SEED)[:6]):
        print(f"  {messages[-1]['content']}\n    -> {answers[str(number)]}")
    print("\n" + " " * 36 + "".join(f"{name:>22}" for name in results))
    for each in ROWS:
        print(f"{each.heading:36}" + "".join(f"{each.cell(result[0]):>22}" for result in results.values()))
    save_slots(options.output, [(name, result[1], result[3]) for name, result in results.items()])
    print(f"\nslots over time: {options.output}")


if __name__ == "__main__":
    verb.run(main)
