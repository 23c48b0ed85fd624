"""What does speculation bring, at which load, on which text?

Plain decoding and each kind of speculation serve the same requests, in turn, and medians of the runs are
compared. A kind keeps between its runs what it has learnt of lengths and times, as a server does between
requests, but no text and no pages. A draft model takes part where the recipe names one, and is then loaded
beside all kinds. Some requests quote: their prompt holds the answer that they get. Others get an
ordinary answer, or begin with random tokens. A load is the number of requests that run at once.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmark import outputs
from benchmark.gate.gate import with_verdict
from benchmark.options import add_json, show, verdict_line
from benchmark.run_clock import RunClock
from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Fixed, Lengths
from continuous_batching.speculation.source import Source
from continuous_batching.speculation.speculation import Speculation
from continuous_batching.speculation.throughput import Throughput
from recipes.build import versions
from recipes.build.engine import build
from recipes.build.machine import start
from recipes.build.speculation import ON_DEVICE, PROPOSERS
from recipes.schema.command_line import add_recipe
from recipes.schema.numbers import MOST_COUNT, MOST_TOKENS, whole, wholes
from recipes.schema.reader import read

TEXTS = ("quoting", "ordinary", "random")
WAYS = ("throughput", "source", "fixed")
_NO_DRAFT_MODEL = (
    "the recipe names no draft model; add speculation.kind=draft speculation.draft_path=DIRECTORY"
)
KINDS = ("plain", *(f"{name}, {way}" for name in PROPOSERS for way in WAYS))


@dataclass(frozen=True, slots=True)
class SpeculationLoad:
    """What is served."""

    prompt_tokens: int
    answer_tokens: int
    most_drafts: int
    num_runs: int


def proposer_of(kind: str) -> str:
    """Who guesses, by a kind's name."""
    return kind.split(", ")[0]


def lengths_of(kind: str, slots: SlotPool, most: int) -> Lengths | None:
    """What a kind's name says; None for plain decoding."""
    if kind == "plain":
        return None
    made: dict[str, Callable[[], Lengths]] = {
        "throughput": lambda: Throughput(slots),
        "source": lambda: Source(most, 1, most, 100),
        "fixed": Fixed,
    }
    return made[kind.split(", ")[1]]()


def run(
    recipe_path: str,
    overrides: Sequence[str],
    profile: str | None,
    loads: Sequence[int],
    asked: Sequence[str] | None,
    load: SpeculationLoad,
) -> dict[str, Any]:
    """A row for each text, load and kind; what a kind brings is over plain decoding of the same row.

    Of all kinds, or those `asked` for; raises ValueError for a draft model that the recipe does not name.
    """
    clock = RunClock()
    most_tokens = 3 * (load.prompt_tokens + load.answer_tokens)
    keys = [f"scheduler.num_slots={max(loads)}", f"scheduler.max_request_tokens={most_tokens}"]
    recipe = read(recipe_path, [*overrides, *keys], profile).recipe
    absent = ON_DEVICE - {recipe.speculation.kind}
    for kind in asked or ():
        if proposer_of(kind) in absent:
            raise ValueError(f"--kinds {kind!r}: {_NO_DRAFT_MODEL}")
    kinds = [kind for kind in asked or KINDS if proposer_of(kind) not in absent]
    built = build(recipe)
    rows: list[dict[str, Any]] = []
    for text in TEXTS:
        prompts = _prompts(built.engine, text, max(loads), load, built.config.vocab_size)
        for num in loads:
            rows += _rows(built.engine, text, prompts[:num], kinds, load)
    result = {
        "benchmark": "speculation",
        "recipe": recipe_path,
        "overrides": list(overrides),
        "profile": profile,
        "prompt_tokens": load.prompt_tokens,
        "answer_tokens": load.answer_tokens,
        "most_drafts": load.most_drafts,
        "left_out": sorted(absent) if asked is None else [],
        "clock": clock.read(),
        "machine": versions.describe(start(recipe.device).name),
        "rows": rows,
    }
    return with_verdict(result)


def _prompts(engine: Engine, text: str, num: int, load: SpeculationLoad, vocab_size: int) -> list[list[int]]:
    """Random tokens; for ordinary answers what the model says after these, and for quotes that twice over."""
    random = np.random.default_rng(TEXTS.index(text))
    prompts: list[list[int]] = random.integers(3, vocab_size, (num, load.prompt_tokens)).tolist()
    if text == "random":
        return prompts
    said = _answers(engine, prompts, load.answer_tokens)
    if text == "ordinary":
        return said
    return [prompt + answer + prompt for prompt, answer in zip(prompts, said)]


def _requests(prompts: list[list[int]], answer_tokens: int, kind: str) -> list[Request]:
    """Of one kind: they share no pages with others, which may have been computed without a draft model."""
    params = SamplingParams(max_tokens=answer_tokens, temperature=0.0, ignore_eos=True)
    return [
        Request(str(number), np.array(each), params, cache_salt=kind) for number, each in enumerate(prompts)
    ]


def _answers(engine: Engine, prompts: list[list[int]], answer_tokens: int) -> list[list[int]]:
    requests = _requests(prompts, answer_tokens, "plain")
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return [each.answer.tolist() for each in requests]


def _rows(
    engine: Engine, text: str, prompts: list[list[int]], kinds: Sequence[str], load: SpeculationLoad
) -> list[dict[str, Any]]:
    """Kinds take turns, so that what else the machine does meets all of them; what they say is the same."""
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    facts: dict[str, dict[str, int]] = {}
    slots, most = engine.slots, load.most_drafts
    learnt = {kind: lengths_of(kind, slots, most) for kind in kinds}
    answers: list[list[int]] | None = None
    for _ in range(load.num_runs):
        for kind in kinds:
            engine.scheduler.speculation = None
            if lengths := learnt[kind]:
                name = proposer_of(kind)
                engine.scheduler.speculation = Speculation(
                    slots, PROPOSERS[name](slots), lengths, most, on_device=name in ON_DEVICE
                )
            gc.collect()
            seconds, said, facts[kind] = _serve(engine, prompts, load.answer_tokens, kind)
            taken[kind].append(seconds)
            if answers is not None and said != answers:
                raise ValueError(f"{kind} changed an answer of {len(prompts)} requests on {text} text")
            answers = said
    engine.scheduler.speculation = None
    medians = {kind: float(np.median(each)) for kind, each in taken.items()}
    return [
        {
            "text": text,
            "slots": len(prompts),
            "kind": kind,
            "decode_s": [round(each, 4) for each in taken[kind]],
            "tokens_per_s": round(facts[kind]["tokens"] / medians[kind], 2),
            "times_plain": round(medians[kinds[0]] / medians[kind], 4),
            **facts[kind],
        }
        for kind in kinds
    ]


def _serve(
    engine: Engine, prompts: list[list[int]], answer_tokens: int, kind: str
) -> tuple[float, list[list[int]], dict[str, int]]:
    """Seconds from the first token of the last request to the end, and what came in them."""
    counters = engine.scheduler.counters
    requests = _requests(prompts, answer_tokens, kind)
    for request in requests:
        engine.add(request)
    while any(each.first_token_s is None for each in requests):
        engine.step()
    names = {
        "tokens": "sampled_tokens",
        "steps": "steps",
        "drafted": "draft_tokens",
        "accepted": "accepted_tokens",
    }
    before = {name: getattr(counters, counter) for name, counter in names.items()}
    start_s = engine.clock()
    while engine.has_work:
        engine.step()
    seconds = engine.clock() - start_s
    facts = {name: getattr(counters, counter) - before[name] for name, counter in names.items()}
    return seconds, [each.answer.tolist() for each in requests], facts


def print_table(result: dict[str, Any]) -> None:
    """A row for each text, load and kind."""
    print(f"{'text':10}{'slots':>6}  {'kind':22}{'tokens/s':>10}{'x plain':>9}{'accepted':>10}{'a step':>8}")
    for row in result["rows"]:
        share = f"{row['accepted'] / row['drafted']:.0%}" if row["drafted"] else "-"
        per_step = row["tokens"] / row["steps"] / row["slots"]
        print(
            f"{row['text']:10}{row['slots']:>6}  {row['kind']:22}{row['tokens_per_s']:>10.1f}"
            f"{row['times_plain']:>9.2f}{share:>10}{per_step:>8.2f}"
        )
    for name in result["left_out"]:
        print(f"{name}: left out, since {_NO_DRAFT_MODEL}")
    print(verdict_line(result["verdict"]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `speculation`."""
    add_recipe(parser)
    add = parser.add_argument
    add("--loads", type=wholes(1, 2**16), default=[1, 4, 16, 32], metavar="N,N,...", help="requests at once")
    add("--kinds", nargs="+", choices=KINDS, metavar="KIND", help=f"of {'; '.join(KINDS)} (all)")
    add("--prompt", type=whole(8, MOST_TOKENS), default=32, metavar="TOKENS")
    add("--answer", type=whole(2, MOST_TOKENS), default=128, metavar="TOKENS")
    add("--most", type=whole(1, 64), default=4, metavar="DRAFTS", help="of a row in a step")
    add("--runs", type=whole(1, MOST_COUNT), default=3, metavar="N")
    add("--plot", type=outputs.picture, metavar="FILE", help="draw what each kind brings over the load")
    add_json(parser)


def main(options: argparse.Namespace) -> None:
    load = SpeculationLoad(options.prompt, options.answer, options.most, options.runs)
    kinds = None if options.kinds is None else list(dict.fromkeys(("plain", *options.kinds)))
    result = run(options.recipe, options.overrides, options.profile, options.loads, kinds, load)
    show(result, options, print_table)
    if options.plot:
        from benchmark.offline.speculation_chart import save  # matplotlib takes seconds to load

        save(options.plot, result["rows"])
