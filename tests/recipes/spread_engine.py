"""One engine over several ranks, for a test: `python -m tests.recipes.spread_engine JOB ANSWERS`.

JOB is JSON: a recipe, its changes, prompts with the number of tokens to answer, and a seed. It aborts
requests and resizes the cache meanwhile; ANSWERS gets the other answers, and what happened on the way.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from continuous_batching.request import Request, SamplingParams, packed_ids
from recipes.assembly.engine import build
from recipes.schema.reader import load
from tests.recipes.test_tensor_ranks import served


def requests(
    asked: list[tuple[list[int], int]], random: np.random.Generator, vocab_size: int
) -> list[Request]:
    """The greedy ones that were asked for, and beside each another whose tokens are drawn, or masked."""
    found = []
    for number, (prompt, max_tokens) in enumerate(asked):
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        found.append(Request(f"{number}", np.array(prompt), params, priority=int(random.integers(3))))
        some = packed_ids(random.integers(0, vocab_size, 9).tolist())
        beside = SamplingParams(
            max_tokens=int(random.integers(1, 24)),
            temperature=float(random.choice([0.0, 0.9])),
            seed=number,
            ignore_eos=True,
            allowed_token_ids=some if random.random() < 0.5 else None,
        )
        start = np.array(prompt[: int(random.integers(1, 40))])
        found.append(Request(f"beside {number}", start, beside, priority=int(random.integers(3))))
    return found


def main(job: Path, answers: Path) -> None:
    """Serve what is asked for."""
    asked = json.loads(job.read_text())
    built = build(load(asked["recipe"], asked["changes"]))
    engine, random = built.engine, np.random.default_rng(asked["seed"])
    try:
        of = requests(asked["prompts"], random, built.runner.config.vocab_size)
        found = served(engine, of, random)
    finally:
        engine.observer.close()
    happened = asdict(engine.scheduler.counters)
    happened["graphs"] = 0 if built.runner.graphs is None else len(built.runner.graphs.steps)
    answers.write_text(json.dumps({"answers": found, "happened": happened}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
