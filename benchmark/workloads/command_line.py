"""Check the options of a trace, and make the trace that they describe."""

from __future__ import annotations

import argparse
import math

from benchmark.workloads import public_traces
from benchmark.workloads.synthetic import (
    Arrivals,
    Line,
    SyntheticLoad,
    draw_requests,
    lengths,
)

# These defaults are a load that the tiny model of this repository serves too.
DRAWN_DEFAULTS = {"requests": "64", "prompt_tokens": "uniform:16:200", "output_tokens": "uniform:8:48"}
VOCABULARY_DEFAULT = {"vocab_size": "1024"}
DEFAULTS: dict[str | None, dict[str, str]] = {
    None: DRAWN_DEFAULTS | VOCABULARY_DEFAULT,
    "mooncake": VOCABULARY_DEFAULT,
    "burstgpt": VOCABULARY_DEFAULT,
    "sharegpt": {},
}
# Options that each way of making a trace does not use.
DRAWN = ("prompt_tokens", "system_prompts", "turns")
TIMED = (*DRAWN, "output_tokens", "tokenizer", "rate", "arrivals", "think_s")
NO_USE = {
    None: ("tokenizer", "skip_bad"),
    "mooncake": TIMED,
    "burstgpt": TIMED,
    "sharegpt": (*DRAWN, "vocab_size"),
}


def check(options: argparse.Namespace) -> None:
    """Raise ValueError for options that are missing, unused, or out of range."""
    form = None if options.source is None else options.source[0]
    what = "a drawn trace" if form is None else form
    given = {name for name, value in vars(options).items() if value is not None and value is not False}
    for name in (each for each in NO_USE[form] if each in given):
        raise ValueError(f"--{name.replace('_', '-')} has no meaning for {what}; leave it out")
    if form == "sharegpt" and (options.tokenizer is None) == (options.output_tokens is None):
        raise ValueError(
            "sharegpt needs --tokenizer, to count answers, or else --output-tokens, to draw them"
        )
    closed = options.arrivals is not None and options.arrivals.kind == "closed"
    if closed and ("turns" in given or "rate" in given or form == "sharegpt"):
        raise ValueError("--arrivals closed has no times: leave out --rate, --turns and --from sharegpt")
    if "think_s" in given and form is None and "turns" not in given:
        raise ValueError("--think-s is between the turns of a session; give --turns too")


def fill_in(options: argparse.Namespace) -> list[str]:
    """Give the options that were left out their defaults; returns these as a command line would give them."""
    form = None if options.source is None else options.source[0]
    taken = []
    for name, text in DEFAULTS[form].items():
        if getattr(options, name) is None:
            setattr(options, name, int(text) if text.isdecimal() else lengths(text))
            taken.append(f"--{name.replace('_', '-')} {text}")
    return taken


def made(options: argparse.Namespace) -> tuple[list[Line], list[str]]:
    """Return the trace that is asked for, and the entries of its source that were skipped."""
    one = lengths("1")  # placeholder where nothing is drawn
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
        from serving.text.tokenizer import Text  # imported here: only this layout has text

        text = Text.load(options.tokenizer)
        if text is None:
            raise ValueError(f"{options.tokenizer} holds no tokenizer.json and no tokenizer.model")

        def count_tokens(answer: str) -> int:
            return len(text.encode(answer))

    return public_traces.sharegpt(path, load, options.requests, options.skip_bad, count_tokens)


def summary(trace: list[Line]) -> str:
    """Return how much work a trace is, in one line."""
    num_output = sum(each["max_tokens"] for each in trace)
    ids = [each["prompt_token_ids"] for each in trace if "prompt_token_ids" in each]
    prompts = f"{sum(map(len, ids)):,} prompt" if ids else "prompts of text"
    tokens = f"{prompts} and {num_output:,} output tokens"
    return f"{len(trace):,} requests in {trace[-1]['arrival_s']:.1f} s, {tokens}"
