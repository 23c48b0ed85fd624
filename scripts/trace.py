"""What load does a benchmark serve? Requests of drawn lengths at drawn times, or those of a public trace.

    python -m scripts.trace --requests 64 --rate inf --prompt-tokens uniform:70:210 \\
        --output-tokens uniform:32:96 --vocab-size 32000 --seed 0 --output FILE.jsonl
    python -m scripts.trace --from mooncake:TRACE.jsonl --vocab-size 32000 --output FILE.jsonl

The lines are what `python -m scripts.generate` reads: prompts of token ids, so that any model serves them,
and answers of exactly the drawn length. Requests arrive by a Poisson process, or all at once at rate `inf`;
in bursts, the gaps drawn from a gamma distribution; or at a rate that goes evenly from --rate to a last one.
LENGTHS are `N`, `uniform:LEAST:MOST`, `lognormal:MEAN:SIGMA` (sigma of the logarithm) or `file:PATH` (one a
line). The same seed draws the same lengths and prompts at every rate.

A session's turns have ids `SESSION/TURN`, each prompt going on from the one before and a stand-in for its
answer. A closed loop has ids `CLIENT/NUMBER` and no times: a client sends a request when the one before has
ended. `generate` knows no clients, and takes such a file as requests that all come at once.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from benchmark import outputs
from benchmark.workloads import public_traces
from benchmark.workloads.arrivals import Arrivals, arrivals
from benchmark.workloads.lengths import lengths
from benchmark.workloads.synthetic import Line, SyntheticLoad, draw_requests, levels, shared_prompts, shares
from scripts import verb

FORMS = ("mooncake", "burstgpt", "sharegpt")
# What each way of making a trace must be told, and what it has no use for
MUST = {
    None: ("requests", "prompt_tokens", "output_tokens", "vocab_size"),
    "mooncake": ("vocab_size",),
    "burstgpt": ("vocab_size",),
    "sharegpt": (),
}
DRAWN = ("prompt_tokens", "system_prompts", "turns")
TIMED = (*DRAWN, "output_tokens", "tokenizer", "rate", "arrivals", "think_s")
NO_USE = {
    None: ("tokenizer", "skip_bad"),
    "mooncake": TIMED,
    "burstgpt": TIMED,
    "sharegpt": (*DRAWN, "vocab_size"),
}


def source(text: str) -> tuple[str, Path]:
    """The layout and the file, from `LAYOUT:FILE`."""
    form, _, path = text.partition(":")
    if form not in FORMS or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is no source; write {', '.join(FORMS)}, and :FILE")
    return form, Path(path)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m scripts.trace", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    top.add_argument("--from", type=source, dest="source", metavar="LAYOUT:FILE", help=", ".join(FORMS))
    top.add_argument("--skip-bad", action="store_true", help="tell of lines that cannot be read, and go on")
    top.add_argument("--tokenizer", metavar="FOLDER", help="counts the tokens of sharegpt's answers")
    top.add_argument("--requests", type=int, metavar="N", help="at most so many, where a file is read")
    top.add_argument("--rate", type=float, metavar="PER_S", help="mean arrivals a second; inf if not given")
    top.add_argument(
        "--arrivals",
        type=arrivals,
        metavar="PROCESS",
        help="poisson, gamma:CV, ramp:LAST_PER_S, closed:CLIENTS",
    )
    top.add_argument("--prompt-tokens", type=lengths, metavar="LENGTHS")
    top.add_argument("--output-tokens", type=lengths, metavar="LENGTHS")
    top.add_argument(
        "--system-prompts", type=shared_prompts, metavar="COUNT:LENGTHS", help="one begins each prompt"
    )
    top.add_argument("--turns", type=lengths, metavar="LENGTHS", help="of a session")
    top.add_argument("--think-s", type=float, metavar="SECONDS", help="mean time between the turns' arrivals")
    top.add_argument("--tenants", type=shares, metavar="NAME=SHARE,...")
    top.add_argument("--priorities", type=levels, metavar="LEVEL=SHARE,...")
    top.add_argument("--vocab-size", type=int, metavar="N", help="ids go from 0 to N - 1")
    top.add_argument("--seed", type=int, default=0)
    top.add_argument("--output", type=outputs.file, required=True, metavar="FILE.jsonl")
    return top


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for options that are missing, not to the purpose, or out of range."""
    form = None if options.source is None else options.source[0]
    what = "a drawn trace" if form is None else form
    given = {name for name, value in vars(options).items() if value is not None and value is not False}
    for name in (each for each in MUST[form] if each not in given):
        raise ValueError(f"--{name.replace('_', '-')} is missing; {what} needs it")
    for name in (each for each in NO_USE[form] if each in given):
        raise ValueError(f"--{name.replace('_', '-')} has no meaning for {what}; leave it out")
    for name in ("requests", "vocab_size", "rate"):
        if name in given and not (value := getattr(options, name)) > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    if options.seed < 0:
        raise ValueError(f"--seed is {options.seed}; it must be 0 or more")
    if options.think_s is not None and not 0 <= options.think_s < math.inf:
        raise ValueError(f"--think-s is {options.think_s}; it must be 0 or more")
    if form == "sharegpt" and (options.tokenizer is None) == (options.output_tokens is None):
        raise ValueError(
            "sharegpt needs --tokenizer, to count answers, or else --output-tokens, to draw them"
        )
    closed = options.arrivals is not None and options.arrivals.kind == "closed"
    if closed and ("turns" in given or "rate" in given or form == "sharegpt"):
        raise ValueError("--arrivals closed has no times: leave out --rate, --turns and --from sharegpt")
    if "think_s" in given and form is None and "turns" not in given:
        raise ValueError("--think-s is between the turns of a session; give --turns too")


def made(options: argparse.Namespace) -> tuple[list[Line], list[str]]:
    """The trace that is asked for, and what of its source was skipped."""
    one = lengths("1")  # stands where nothing is drawn
    load = SyntheticLoad(
        prompt_tokens=options.prompt_tokens or one,
        output_tokens=options.output_tokens or one,
        vocab_size=options.vocab_size or 1,
        seed=options.seed,
        rate_per_s=math.inf if options.rate is None else options.rate,
        arrivals=options.arrivals or Arrivals(),
        system_prompts=options.system_prompts,
        turns=options.turns,
        think_s=options.think_s or 0.0,
        tenants=options.tenants,
        priorities=options.priorities,
    )
    if options.source is None:
        return draw_requests(load, options.requests), []
    form, path = options.source
    if form != "sharegpt":
        return public_traces.timed(path, form, load, options.requests, options.skip_bad)
    count_tokens = None
    if options.tokenizer is not None:
        from serving.text.tokenizer import Text  # only here is there text

        text = Text.load(options.tokenizer)
        if text is None:
            raise ValueError(f"{options.tokenizer} holds no tokenizer.json and no tokenizer.model")

        def count_tokens(answer: str) -> int:
            return len(text.encode(answer))

    return public_traces.sharegpt(path, load, options.requests, options.skip_bad, count_tokens)


def main(argv: list[str]) -> None:
    """Write a trace; raises ValueError or OSError for what cannot be drawn, read or written."""
    options = parser().parse_args(argv)
    check(options)
    trace, skipped = made(options)
    for reason in skipped:
        print(f"skipped {reason}", file=sys.stderr)
    if not trace:
        raise ValueError(f"{options.source[1]} holds no request that can be read")
    options.output.write_text("".join(json.dumps(each) + "\n" for each in trace), encoding="utf-8")
    print(summary(trace))


def summary(trace: list[Line]) -> str:
    """How much work a trace is, in one line."""
    num_output = sum(each["max_tokens"] for each in trace)
    ids = [each["prompt_token_ids"] for each in trace if "prompt_token_ids" in each]
    prompts = f"{sum(map(len, ids)):,} prompt" if ids else "prompts of text"
    tokens = f"{prompts} and {num_output:,} output tokens"
    return f"{len(trace):,} requests in {trace[-1]['arrival_s']:.1f} s, {tokens}"


if __name__ == "__main__":
    verb.run(main)
