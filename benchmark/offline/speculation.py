"""Measure what speculation gains, by load and by text.

Plain decoding and each kind of speculation serve the same requests, in turn, and medians of the runs are
compared. A kind keeps between its runs what it has learnt of lengths and times, as a server does between
requests, but no text and no pages. A draft model or a head takes part where the recipe names one, and is then
loaded beside all kinds. Some requests quote: their prompt holds the answer that they get. Others get an
ordinary answer, or begin with random tokens. A load is the number of requests that run at once: where one
ends the next begins, so that all slots are busy from the first measured step to the last. Answers are between
half and one and a half times as long as --answer says, so that requests end one by one, as those of a server
do.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from benchmark.options import Column, table, verdict_line
from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.lengths import Fixed, Lengths, Source, Throughput
from continuous_batching.speculation.speculation import Speculation
from continuous_batching.step_time import StepTime
from recipes.assembly import versions
from recipes.assembly.speculation import ON_DEVICE, PROPOSERS
from recipes.schema.reader import read
from recipes.schema.speculation_section import DRAFTERS

TEXTS = ("quoting", "ordinary", "random")
# Rounds of as many requests as run at once: the first warms up, two are measured, the last fills up.
ROUNDS = 4
WAYS = ("throughput", "source", "fixed")
COLUMNS = (
    Column("text", "text"),
    Column("slots", "slots"),
    Column("kind", "kind"),
    Column("tokens_per_s", "tokens/s", "{:.1f}"),
    Column("times_plain", "x plain", "{:.2f}"),
    Column("share", "accepted", "{:.0%}"),
    Column("a_step", "tokens a step", "{:.2f}"),
)
KINDS = ("plain", *(f"{name}, {way}" for name in PROPOSERS for way in WAYS))


def proposer_of(kind: str) -> str:
    """Return the proposer in a kind's name."""
    return kind.split(", ")[0]


def _not_named(kind: str) -> str:
    if kind not in DRAFTERS:
        return f"the recipe does not say speculation.kind={kind}"
    return (
        f"the recipe names no {DRAFTERS[kind]}; add speculation.kind={kind} speculation.draft_path=DIRECTORY"
    )


def lengths_of(kind: str, slots: SlotPool, most: int, step_time: StepTime) -> Lengths | None:
    """Return the choice of lengths in a kind's name; None for plain decoding."""
    if kind == "plain":
        return None
    made: dict[str, Callable[[], Lengths]] = {
        "throughput": lambda: Throughput(slots, step_time),
        "source": lambda: Source(most, 1, most, 100),
        "fixed": Fixed,
    }
    return made[kind.split(", ")[1]]()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each text, load and kind; a gain is relative to plain decoding of the same row.

    All kinds take part, or those asked for; raises ValueError for a draft model or a head that the recipe
    does not name.
    """
    asked = None if options.kinds is None else list(dict.fromkeys(("plain", *options.kinds)))
    loads, most_tokens = options.loads, 2 * (options.prompt + _longest(options.answer))
    keys = [f"scheduler.num_slots={max(loads)}", f"scheduler.max_request_tokens={most_tokens}"]
    # These are bounded by the number of drafts, which is set only where somebody guesses
    unbounded = ["speculation.base_tokens=null", "speculation.min_tokens=null"]
    found = read(options.recipe, [*options.overrides, *keys, *unbounded], options.profile).recipe
    if found.speculation.kind != "none":  # a head stores features for this many drafts
        keys.append(f"speculation.max_tokens={options.most}")
    recipe = read(options.recipe, [*options.overrides, *keys], options.profile).recipe
    absent = set(ON_DEVICE) - {recipe.speculation.kind}
    for kind in asked or ():
        if kind not in KINDS:
            raise ValueError(f"--kinds {kind!r} is not known; choose of {'; '.join(KINDS)}")
        if proposer_of(kind) in absent:
            raise ValueError(f"--kinds {kind!r}: {_not_named(proposer_of(kind))}")
    kinds = [kind for kind in asked or KINDS if proposer_of(kind) not in absent]
    from recipes.assembly.engine import build  # imported here because it imports torch

    built = build(recipe)
    rows: list[dict[str, Any]] = []
    for text in TEXTS:
        prompts = _prompts(built.engine, text, ROUNDS * max(loads), options, built.config.vocab_size)
        for num in loads:
            rows += _rows(built.engine, text, prompts[: ROUNDS * num], kinds, options)
    return {
        "prompt_tokens": options.prompt,
        "answer_tokens": options.answer,
        "most_drafts": options.most,
        "left_out": sorted(absent) if asked is None else [],
        "machine": versions.describe(built.device_name),
        "rows": rows,
    }


def _longest(answer_tokens: int) -> int:
    return answer_tokens + answer_tokens // 2


def _prompts(
    engine: Engine, text: str, num: int, options: argparse.Namespace, vocab_size: int
) -> list[list[int]]:
    """Return random tokens, the model's answers to them, or these answers between the tokens twice."""
    random = np.random.default_rng(TEXTS.index(text))
    prompts: list[list[int]] = random.integers(3, vocab_size, (num, options.prompt)).tolist()
    if text == "random":
        return prompts
    requests = _requests(prompts, [_longest(options.answer)] * num, "answers")
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    said = [each.answer.tolist() for each in requests]
    if text == "ordinary":
        return [answer[: options.answer] for answer in said]
    return [prompt + answer + prompt for prompt, answer in zip(prompts, said)]


def _requests(prompts: list[list[int]], answer_tokens: Sequence[int], salt: str) -> list[Request]:
    """Build requests that share no pages with requests of another salt.

    A draft model may have computed none of the pages that another kind has filled.
    """
    return [
        Request(
            str(number),
            np.array(prompt),
            SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True),
            cache_salt=salt,
        )
        for number, (prompt, most) in enumerate(zip(prompts, answer_tokens))
    ]


def _rows(
    engine: Engine, text: str, prompts: list[list[int]], kinds: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure the kinds in turns, so that other load on the machine affects all; their answers must agree."""
    windows: dict[str, list[Window]] = {kind: [] for kind in kinds}
    slots, most = engine.slots, options.most
    own_time, times = engine.scheduler.step_time, {kind: StepTime() for kind in kinds}
    learnt = {kind: lengths_of(kind, slots, most, times[kind]) for kind in kinds}
    between = options.answer // 2, _longest(options.answer) + 1
    answer_tokens = np.random.default_rng(0).integers(*between, len(prompts)).tolist()
    answers: dict[str, list[int]] = {}
    for number in range(options.runs):
        for kind in kinds:
            engine.scheduler.speculation, engine.scheduler.step_time = None, own_time
            if lengths := learnt[kind]:
                name, engine.scheduler.step_time = proposer_of(kind), times[kind]
                engine.scheduler.speculation = Speculation(
                    slots, PROPOSERS[name](slots), lengths, most, spans=ON_DEVICE.get(name)
                )
            gc.collect()
            window, said = _serve(engine, _requests(prompts, answer_tokens, f"{kind} {number}"))
            windows[kind].append(window)
            for name, answer in said.items():
                if answers.setdefault(name, answer) != answer:
                    raise ValueError(f"{kind} changed the answer of request {name} on {text} text")
    engine.scheduler.speculation, engine.scheduler.step_time = None, own_time
    rows: list[dict[str, Any]] = []
    plain_per_s = 0.0
    for kind, of_kind in windows.items():
        per_s = float(np.median([each.tokens / each.seconds for each in of_kind]))
        plain_per_s = plain_per_s or per_s
        row = {"text": text, "slots": len(prompts) // ROUNDS, "kind": kind}
        row["window_s"] = [round(each.seconds, 4) for each in of_kind]
        row["window_tokens"] = [each.tokens for each in of_kind]
        row |= {"tokens_per_s": round(per_s, 2), "times_plain": round(per_s / plain_per_s, 4)}
        rows.append(row | {n: sum(getattr(each, n) for each in of_kind) for n in Window._fields[2:]})
    return rows


class Window(NamedTuple):
    """What was computed while all slots were busy."""

    seconds: float
    tokens: int
    steps: int
    drafted: int
    accepted: int


def _serve(engine: Engine, requests: list[Request]) -> tuple[Window, dict[str, list[int]]]:
    """Serve a quarter of the requests at once, and measure until three quarters have ended.

    The first quarter to end warms up. Each token of the window has its share of a prompt beside it. Requests
    that still run at the end are aborted.
    """
    counters, at_once = engine.scheduler.counters, len(requests) // ROUNDS
    to_come = iter(requests)
    for request in itertools.islice(to_come, at_once):
        engine.add(request)
    said: dict[str, list[int]] = {}
    before, start_s = replace(counters), engine.clock()
    while len(said) < (ROUNDS - 1) * at_once:
        step = engine.step()
        finished = [] if step is None else step.finished
        is_warming_up = len(said) < at_once
        said |= {request.id: request.answer.tolist() for request in finished}
        for request in itertools.islice(to_come, len(finished)):
            engine.add(request)
        if is_warming_up and len(said) >= at_once:
            before, start_s = replace(counters), engine.clock()
    window = Window(
        engine.clock() - start_s,
        counters.sampled_tokens - before.sampled_tokens,
        counters.steps - before.steps,
        counters.draft_tokens - before.draft_tokens,
        counters.accepted_tokens - before.accepted_tokens,
    )
    for request in requests:
        engine.abort(request.id)
    while engine.has_work:
        engine.step()
    return window, said


def print_table(result: dict[str, Any]) -> None:
    """Print a row for each text, load and kind."""
    rows = [
        {
            **row,
            "share": row["accepted"] / row["drafted"] if row["drafted"] else None,
            "a_step": sum(row["window_tokens"]) / row["steps"] / row["slots"],
        }
        for row in result["rows"]
    ]
    print(table(COLUMNS, rows, "-"))
    for name in result["left_out"]:
        print(f"{name}: left out, since {_not_named(name)}")
    print(verdict_line(result["verdict"]))
