"""What load does a benchmark serve? Requests of drawn lengths, arriving at drawn times.

    python -m scripts.trace --requests 64 --rate inf --prompt-tokens uniform:70:210 \\
        --output-tokens uniform:32:96 --vocab-size 32000 --seed 0 --output FILE.jsonl

The lines are what `python -m scripts.generate` reads: prompts of token ids, so that any model serves them,
and answers of exactly the drawn length. Requests arrive by a Poisson process, or all at once at rate `inf`.
LENGTHS are `N`, `uniform:LEAST:MOST` or `lognormal:MEAN:SIGMA` (sigma of the logarithm). The same seed draws
the same lengths and prompts at every rate.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts import verb

Draw = Callable[[np.random.Generator, int], NDArray[np.int64]]


def lengths(text: str) -> Draw:
    """How to draw lengths, from `N`, `uniform:LEAST:MOST` or `lognormal:MEAN:SIGMA`."""
    kind, *values = text.split(":") if ":" in text else ("uniform", text, text)
    try:
        if kind == "uniform":
            least, most = (int(value) for value in values)
            if 1 <= least <= most:
                return lambda random, count: random.integers(least, most, count, endpoint=True)
        elif kind == "lognormal":
            mean, sigma = (float(value) for value in values)
            if 1 <= mean < math.inf and 0 <= sigma < math.inf:
                return lambda random, count: _lognormal(random, count, mean, sigma)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"{text!r} is no length; write N, uniform:LEAST:MOST or lognormal:MEAN:SIGMA, of at least 1 token"
    )


def _lognormal(random: np.random.Generator, count: int, mean: float, sigma: float) -> NDArray[np.int64]:
    drawn = random.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)  # whose mean is `mean`
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def requests(
    count: int, rate_per_s: float, prompt_tokens: Draw, output_tokens: Draw, vocab_size: int, seed: int
) -> list[dict[str, Any]]:
    """The trace, one input line of `generate` for each request, in order of arrival."""
    # Each draws from a stream of its own, so that changing one leaves the others
    arrival, prompt, output, token = (np.random.default_rng([seed, stream]) for stream in range(4))
    gaps_s = arrival.exponential(1 / rate_per_s, count) if rate_per_s < math.inf else np.zeros(count)
    drawn = zip(np.cumsum(gaps_s), prompt_tokens(prompt, count), output_tokens(output, count))
    return [
        {
            "id": str(number),
            "arrival_s": round(float(arrival_s), 6),
            "prompt_token_ids": token.integers(0, vocab_size, num_prompt).tolist(),
            "max_tokens": int(num_output),
            "temperature": 0,
            "ignore_eos": True,
        }
        for number, (arrival_s, num_prompt, num_output) in enumerate(drawn)
    ]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m scripts.trace", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    top.add_argument("--requests", type=int, required=True, metavar="N")
    top.add_argument("--rate", type=float, default=math.inf, metavar="PER_S", help="mean arrivals a second")
    top.add_argument("--prompt-tokens", type=lengths, required=True, metavar="LENGTHS")
    top.add_argument("--output-tokens", type=lengths, required=True, metavar="LENGTHS")
    top.add_argument("--vocab-size", type=int, required=True, metavar="N", help="ids go from 0 to N - 1")
    top.add_argument("--seed", type=int, default=0)
    top.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl")
    return top


def main(argv: list[str]) -> None:
    """Write a trace; raises ValueError or OSError for what cannot be drawn or written."""
    options = parser().parse_args(argv)
    for name in ("requests", "vocab_size", "rate"):
        if not (value := getattr(options, name)) > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    if options.seed < 0:
        raise ValueError(f"--seed is {options.seed}; it must be 0 or more")
    trace = requests(
        options.requests,
        options.rate,
        options.prompt_tokens,
        options.output_tokens,
        options.vocab_size,
        options.seed,
    )
    options.output.write_text("".join(json.dumps(each) + "\n" for each in trace), encoding="utf-8")
    print(summary(trace))


def summary(trace: list[dict[str, Any]]) -> str:
    """How much work a trace is, in one line."""
    num_prompt = sum(len(each["prompt_token_ids"]) for each in trace)
    num_output = sum(each["max_tokens"] for each in trace)
    tokens = f"{num_prompt:,} prompt and {num_output:,} output tokens"
    return f"{len(trace):,} requests in {trace[-1]['arrival_s']:.1f} s, {tokens}"


if __name__ == "__main__":
    verb.run(main)
