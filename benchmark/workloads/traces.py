"""Make the trace that options describe: a drawn one, or a published one that is converted to requests.

Mooncake (github.com/kvcache-ai/Mooncake): JSON lines of `timestamp` (ms), `input_length`, `output_length` and
`hash_ids`, one for each 512 tokens of the prompt; the same id stands for the same tokens after the same
prefix. BurstGPT (github.com/HPMLL/BurstGPT): CSV with the columns `Timestamp` (s), `Request tokens` and
`Response tokens`; a request that failed has 0 of the latter. ShareGPT: a JSON list of `conversations`, turns
of `from` and `value`; there is a request for each human turn that was answered.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.options import why
from benchmark.workloads.synthetic import (
    OUTPUT,
    THINK,
    Arrivals,
    Line,
    SyntheticLoad,
    bounded,
    draw_requests,
    lengths,
    line_of,
    mark,
    session_starts_s,
)
from borders.files import lines_of, read_bounded
from borders.refusal import abbreviate
from recipes.schema.numbers import MOST_TOKENS

# These defaults are a load that the tiny model of this repository serves too.
DRAWN_DEFAULTS = {"requests": "64", "prompt_tokens": "uniform:16:200", "output_tokens": "uniform:8:48"}
VOCABULARY = {"vocab_size": "1024"}
DEFAULTS = {None: DRAWN_DEFAULTS | VOCABULARY, "mooncake": VOCABULARY, "burstgpt": VOCABULARY, "sharegpt": {}}
# Options that each way of making a trace does not use.
DRAWN = ("prompt_tokens", "system_prompts", "turns")
TIMED = (*DRAWN, "output_tokens", "tokenizer", "rate", "arrivals", "think_s")
NO_USE = {
    None: ("tokenizer", "skip_bad"),
    "mooncake": TIMED,
    "burstgpt": TIMED,
    "sharegpt": (*DRAWN, "vocab_size"),
}
MOST_CONVERSATION_BYTES = 2**31  # the published list has 640 MiB, and is one JSON value
MOONCAKE_TOKENS = 512  # tokens of a prompt for each of its hash_ids
MOONCAKE, BURSTGPT = 20, 21  # numbers of random streams
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
CountTokens = Callable[[str], int]
Item = tuple[str, Callable[[], Any]]  # its position, and how to read it


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
        return timed(path, form, load, options.requests, options.skip_bad)
    count_tokens = None
    if options.tokenizer is not None:
        from serving.text.tokenizer import Text  # imported here: only this layout has text

        text = Text.load(options.tokenizer)
        if text is None:
            raise ValueError(f"{options.tokenizer} holds no tokenizer.json and no tokenizer.model")

        def count_tokens(answer: str) -> int:
            return len(text.encode(answer, add_special_tokens=False))

    return sharegpt(path, load, options.requests, options.skip_bad, count_tokens)


def summary(trace: list[Line]) -> str:
    """Return how much work a trace is, in one line."""
    num_output = sum(each["max_tokens"] for each in trace)
    ids = [each["prompt_token_ids"] for each in trace if "prompt_token_ids" in each]
    prompts = f"{sum(map(len, ids)):,} prompt" if ids else "prompts of text"
    tokens = f"{prompts} and {num_output:,} output tokens"
    return f"{len(trace):,} requests in {trace[-1]['arrival_s']:.1f} s, {tokens}"


def _length(fields: Any, name: str) -> int:
    value = fields.get(name)
    number = math.nan if isinstance(value, bool) or value is None else _float(value)
    if not number.is_integer() or not 1 <= number <= MOST_TOKENS:
        raise ValueError(f"{name} is {abbreviate(value)}; it must be a whole number from 1 to {MOST_TOKENS}")
    return int(number)


def _time(fields: Any, name: str) -> float:
    time = _float(fields[name])
    if not 0 <= time < math.inf:
        raise ValueError(f"{name} is {abbreviate(fields[name])}; it must be a finite number of 0 or more")
    return time


def _float(value: Any) -> float:
    """Return nan for what is no number, inf for one of too many digits."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (ValueError, TypeError):
        return math.nan


def mooncake(path: Path, load: SyntheticLoad) -> Iterator[Item]:
    """Yield requests whose prompts share the same parts as in the trace."""

    def read(number: int, line: bytes) -> Line:
        fields = json.loads(line.decode())
        if not isinstance(fields, dict):
            raise ValueError("it is no object")
        length, ids = _length(fields, "input_length"), fields.get("hash_ids")
        if ids is None:
            # Ids that no other prompt shares.
            ids = [-number * 10**6 - part for part in range(-(-length // MOONCAKE_TOKENS))]
        if not isinstance(ids, list) or len(ids) != -(-length // MOONCAKE_TOKENS):
            raise ValueError(
                f"{length} tokens and hash_ids {abbreviate(ids)}; there must be one for each 512 tokens"
            )
        if not all(type(each) is int for each in ids):
            raise ValueError(f"hash_ids is {abbreviate(ids)}; each must be a whole number")
        parts = [
            np.random.default_rng([load.seed, MOONCAKE, int(each < 0), abs(each)])
            .integers(0, load.vocab_size, MOONCAKE_TOKENS)
            .tolist()
            for each in ids
        ]
        prompt = [token for part in parts for token in part][:length]
        output = _length(fields, "output_length")
        return line_of(str(number), _time(fields, "timestamp") / 1e3, {"prompt_token_ids": prompt}, output)

    for number, line in enumerate(lines_of(path), 1):
        if line.strip():
            yield f"line {number}", partial(read, number, line)


def burstgpt(path: Path, load: SyntheticLoad) -> Iterator[Item]:
    """Yield requests with prompts of random tokens."""

    def read(number: int, names: list[str], line: bytes) -> Line:
        row = dict(zip(names, _cells(line)))
        random = np.random.default_rng([load.seed, BURSTGPT, number])
        prompt = random.integers(0, load.vocab_size, _length(row, "Request tokens")).tolist()
        output = _length(row, "Response tokens")
        return line_of(str(number), _time(row, "Timestamp"), {"prompt_token_ids": prompt}, output)

    lines = lines_of(path)
    try:
        names = _cells(next(lines, b""))
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}: line 1: {why(error)}") from error
    if missing := {"Timestamp", "Request tokens", "Response tokens"} - {*names}:
        raise ValueError(f"{path} has no column {', '.join(sorted(missing))}; is it BurstGPT's?")
    for number, line in enumerate(lines, 2):
        if line.strip():
            yield f"line {number}", partial(read, number, names, line)


def _cells(line: bytes) -> list[str]:
    """Return the fields of one line of CSV, read alone, so that a broken line affects no other."""
    return next(csv.reader([line.decode("utf-8-sig")]))


def conversations(path: Path) -> Iterator[Item]:
    """Yield the messages of each conversation that has an answered turn."""

    def read(entry: Any) -> list[Line]:
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            raise ValueError("it has no list of conversations")
        messages = []
        for turn in turns:
            value = turn.get("value") if isinstance(turn, dict) else None
            if not isinstance(value, str) or not value or str(turn.get("from")) not in ROLES:
                raise ValueError(
                    f"a turn is {abbreviate(turn)}; it must have from ({', '.join(ROLES)}) and a value of"
                    " text"
                )
            value.encode()  # JSON can write halves of surrogate pairs, which no tokenizer reads
            messages.append({"role": ROLES[turn["from"]], "content": value})
        if not any(_pairs(messages)):
            raise ValueError("no human turn is answered")
        return messages

    try:
        entries = json.loads(read_bounded(path, MOST_CONVERSATION_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {why(error)}") from error
    if not isinstance(entries, list):
        raise ValueError(f"{path} is no list of conversations")
    for number, entry in enumerate(entries, 1):
        yield f"conversation {number}", partial(read, entry)


def _pairs(messages: list[Line]) -> Iterator[tuple[list[Line], str]]:
    """Yield the messages up to each answered human turn, and its answer."""
    for index, (one, two) in enumerate(pairwise(messages)):
        if (one["role"], two["role"]) == ("user", "assistant"):
            yield messages[: index + 1], two["content"]


def good(path: Path, items: Iterable[Item], skip_bad: bool, skipped: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the items that can be read, with their positions; others go to `skipped`, or raise ValueError."""
    for where, read in items:
        try:
            found = read()
        except (ValueError, KeyError, TypeError, RecursionError, csv.Error) as error:
            reason = why(error)
            if not skip_bad:
                raise ValueError(f"{path}: {where}: {reason}; --skip-bad leaves such out") from error
            skipped.append(f"{path}: {where}: {reason}")
        else:
            yield where, found


def timed(
    path: Path, form: str, load: SyntheticLoad, most: int | None, skip_bad: bool
) -> tuple[list[Line], list[str]]:
    """Return the requests of a trace with times, which then count from the first; and what was skipped."""
    skipped: list[str] = []
    items = mooncake(path, load) if form == "mooncake" else burstgpt(path, load)
    lines = bounded(line for _, line in islice(good(path, items, skip_bad, skipped), most))
    lines.sort(key=lambda line: line["arrival_s"])
    first_s = lines[0]["arrival_s"] if lines else 0.0
    for line in lines:
        line["arrival_s"] = round(line["arrival_s"] - first_s, 6)
    return mark(load, lines), skipped


def sharegpt(
    path: Path, load: SyntheticLoad, most: int | None, skip_bad: bool, count_tokens: CountTokens | None
) -> tuple[list[Line], list[str]]:
    """Return requests of conversations that begin as `load` says.

    Answers are as long as they were, or as drawn.
    """
    skipped: list[str] = []
    found, num_turns = [], 0
    for where, messages in good(path, conversations(path), skip_bad, skipped):
        pairs = list(_pairs(messages))[: None if most is None else most - num_turns]
        num_turns += len(pairs)
        if pairs:
            found.append((where.removeprefix("conversation "), pairs))
    starts_s = session_starts_s(load, len(found), num_turns)
    drawn = iter(load.output_tokens(load.stream(OUTPUT), num_turns).tolist())
    think, lines = load.stream(THINK), []
    for start_s, (name, pairs) in zip(starts_s, found):
        at_s = float(start_s)
        for turn, (messages, answer) in enumerate(pairs):
            num_output = next(drawn) if count_tokens is None else max(1, count_tokens(answer))
            lines.append(line_of(f"{name}/{turn}", at_s, {"messages": messages}, num_output))
            at_s += float(think.exponential(load.think_s))
    return mark(load, sorted(lines, key=lambda line: line["arrival_s"])), skipped
