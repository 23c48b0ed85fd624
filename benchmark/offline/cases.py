"""Measure what adapters and structured output cost: cases that take turns in the same run as a plain one.

In each round every case answers the same requests, which all come at once, and is compared with the plain one
of its round; the medians of the rounds count. Adapters: one of two engines of a recipe has room for them,
and requests use none, the same one, or all by turns; their weights are random, which no figure depends on.
Structured output: answers are free, or held to a JSON schema. Beside that, the time of a single mask is
compared with that of llguidance itself, over a vocabulary that is made, not a model's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmark.options import markdown
from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from models.layers.low_rank import LowRank
from recipes.assembly.engine import BuiltEngine, build
from recipes.schema.adapters_section import AdaptersSection
from recipes.schema.reader import load
from serving.grammars.matching import Grammars
from serving.grammars.structured_output import grammar_of

ROUNDS = 5  # rounds in turns, whose median counts; one more before them warms up
SCALE = 1e-3  # largest random weight of an adapter
TOKENS = 64  # tokens of each answer that is held to a form
END = 2
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["person", "place", "thing"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 100_000},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}, "maxItems": 5},
    },
    "required": ["name", "kind", "size", "tags"],
    "additionalProperties": False,
}
# The array is so long that no answer of TOKENS tokens is complete.
SCHEMA = {"type": "array", "items": ITEM, "minItems": 200}
_SIGNS = b"etaoinshrdlucmfwypvbgkjqxz"


def tokens_per_s(engine: Engine, requests: Sequence[Request]) -> float:
    """Return the output tokens a second of requests that all come at once."""
    for request in requests:
        engine.add(request)
    start_s = time.perf_counter()
    while engine.has_work:
        engine.step()
    return sum(len(request.answer) for request in requests) / (time.perf_counter() - start_s)


def beside(cases: Mapping[str, Callable[[int], float]]) -> dict[str, dict[str, Any]]:
    """Return the tokens a second of each case, which is asked for by round, and its ratio to the first."""
    rounds = [{name: case(number) for name, case in cases.items()} for number in range(1 + ROUNDS)][1:]
    plain = next(iter(cases))
    found = {}
    for name in cases:
        ratios = [each[name] / each[plain] for each in rounds]
        found[name] = {
            "tokens_per_s": round(statistics.median(each[name] for each in rounds), 1),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(each, 3) for each in ratios],
        }
    return found


def print_cases(heads: Sequence[str], rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a Markdown row for each case."""
    ratios = {name: f"{row['ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})"
              for name, row in rows.items()}  # fmt: skip
    print(
        markdown(heads, [(name, f"{row['tokens_per_s']:,.0f}", ratios[name]) for name, row in rows.items()])
    )


def run_adapters(options: argparse.Namespace) -> dict[str, Any]:
    """Return the speed of an engine without room for adapters, and of one with room, by how they are used."""
    recipe, most = load(options.recipe, options.overrides, options.profile), options.places
    plain = build(replace(recipe, adapters=AdaptersSection()))
    roomy = build(replace(recipe, adapters=AdaptersSection(most=most, rank=options.rank)))
    fill_adapters(roomy)
    params = SamplingParams(max_tokens=options.output_tokens, temperature=0.0, ignore_eos=True)

    def case(built: BuiltEngine, numbers: Sequence[int]) -> Callable[[int], float]:
        def served(seed: int) -> float:
            random, vocab_size = np.random.default_rng(seed), built.config.vocab_size
            prompts = random.integers(0, vocab_size, (options.requests, options.prompt_tokens))
            used = [numbers[index % len(numbers)] for index in range(options.requests)]
            requests = [
                Request(
                    f"{seed}/{index}", tokens.astype(np.int32), params, adapter=number, cache_salt=str(number)
                )
                for index, (tokens, number) in enumerate(zip(prompts, used))
            ]
            return tokens_per_s(built.engine, requests)

        return served

    rows = beside(
        {
            "without room": case(plain, [0]),
            "none": case(roomy, [0]),
            "one": case(roomy, [1]),
            f"{most} by turns": case(roomy, range(1, most + 1)),
        }
    )
    sizes = {"most": most, "rank": options.rank, "requests": options.requests}
    return {"adapters": {**sizes, "room_bytes": roomy.memory.adapter_bytes, "cases": rows}}


def fill_adapters(built: BuiltEngine) -> None:
    """Fill all adapters with random weights."""
    generator = torch.Generator().manual_seed(0)
    for each in built.runner.decoder.modules():
        if not isinstance(each, LowRank):
            continue
        for number, (index, width) in product(range(1, each.rooms.most + 1), enumerate(each.widths)):
            a, b = torch.empty(each.rooms.rank, each.num_inputs), torch.empty(width, each.rooms.rank)
            for numbers in (a, b):
                numbers.uniform_(-SCALE, SCALE, generator=generator)
            each.put(number, index, a, b)


def print_adapters(result: Mapping[str, Any]) -> None:
    """Print a row for each use of adapters."""
    found = result["adapters"]
    print(
        f"{found['requests']} requests, room for {found['most']} adapters of rank {found['rank']}"
        f" ({found['room_bytes'] / 2**20:.1f} MiB)\n"
    )
    print_cases(("adapters of requests", "tokens/s", "beside an engine without room"), found["cases"])


class MadeVocabulary:
    """Three control tokens, all bytes, and pieces of words and JSON, in the form that `Grammars` reads."""

    def __init__(self, size: int, seed: int = 0) -> None:
        random, weights = np.random.default_rng(seed), 1 / np.arange(1, len(_SIGNS) + 1)
        pieces = {bytes([each]): None for each in range(256)}
        pieces |= dict.fromkeys([b'":', b'",', b'"},', b'": "', b'", "', b'{"', b"[]", b"  ", b"\n"])
        while len(pieces) < size - 3:
            lens, spaces = random.integers(2, 10, size), random.integers(0, 2, size)
            signs = random.choice(len(_SIGNS), int(lens.sum()), p=weights / weights.sum())
            text = bytes(_SIGNS[each] for each in signs.tolist())
            ends = np.cumsum(lens).tolist()
            for start, end, space in zip([0, *ends], ends, spaces.tolist()):
                pieces[b" " * space + text[start:end]] = None
        self.vocab_size = size
        self._pieces = [b"", b"", b"", *list(pieces)[: size - 3]]

    def token_bytes(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        """Return the bytes of a token; control tokens have a name where they are not skipped."""
        return self._pieces[token] or (b"" if skip_special_tokens else b"<%d>" % token)

    def encode_within(self, text: str) -> list[int]:
        """Encode a text as its bytes, which is one valid tokenization."""
        return [3 + each for each in text.encode()]


def grammars(vocab_size: int) -> Grammars:
    """Return the compiler of grammars for a made vocabulary."""
    vocabulary = MadeVocabulary(vocab_size)
    return Grammars(lambda: vocabulary, vocab_size, [END])


def run_masks(options: argparse.Namespace) -> dict[str, Any]:
    """Return the time of a mask beside llguidance's own, and the speed of answers held to a form."""
    built = build(load(options.recipe, options.overrides, options.profile))
    made, vocab_size = grammars(built.config.vocab_size), built.config.vocab_size

    def case(grammar: str | None) -> Callable[[int], float]:
        params = SamplingParams(
            max_tokens=TOKENS, temperature=1.0, seed=1, grammar=grammar, ignore_eos=grammar is None
        )

        def served(seed: int) -> float:
            prompts = np.random.default_rng(seed).integers(3, vocab_size, (options.requests, TOKENS))
            requests = [Request(str(number), prompt, params) for number, prompt in enumerate(prompts)]
            for request in requests:
                made.constrain(request)
            found = tokens_per_s(built.engine, requests)
            assert all(len(request.answer) == TOKENS for request in requests), "an answer ended"
            return found

        return served

    rows = beside({"free": case(None), "held to a form": case(grammar_of({"guided_json": SCHEMA}))})
    late = built.engine.scheduler.counters.late_masks
    return {
        "masks": mask_times(options.vocabulary, options.tokens),
        "throughput": {"requests": options.requests, "late_masks": late, "cases": rows},
    }


def mask_times(vocab_size: int, num_tokens: int) -> dict[str, Any]:
    """Time a mask with the token before it, ours and the library's own, along the same answer.

    The answer is drawn from the tokens that the mask allows.
    """
    made, random = grammars(vocab_size), np.random.default_rng(0)
    grammar = grammar_of({"guided_json": SCHEMA})
    assert grammar is not None, "no form is asked for"
    request = Request("a", np.array([1]), SamplingParams(grammar=grammar))
    made.constrain(request)
    constraint, beginning = request.constraint, made.beginning(grammar)
    assert constraint is not None, "it was not compiled"
    answer = np.zeros(num_tokens, dtype=np.int64)
    ours, bare = list[float](), list[float]()
    for number in range(1 + ROUNDS):  # the first round finds the states of the lexer
        constraint.leave()
        matcher = beginning.deep_copy()
        for at in range(num_tokens):
            began_s = time.perf_counter()
            (mask,) = constraint.masks(answer[:at], answer[:0])
            between_s = time.perf_counter()
            if at:
                matcher.try_consume_tokens([int(answer[at - 1])])
            bits = matcher.compute_bitmask()
            end_s = time.perf_counter()
            assert mask is not None, "all may come"
            assert mask.tobytes() == bits, "the masks differ"
            if number:
                ours.append(between_s - began_s)
                bare.append(end_s - between_s)
            else:
                answer[at] = random.choice(
                    np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                )
    found = {name: _of_times(each) for name, each in (("ours", ours), ("llguidance", bare))}
    ratios = {part: found["ours"][part] / found["llguidance"][part] for part in ("p50_us", "mean_us")}
    return {"vocab_size": vocab_size, "tokens": num_tokens, **found, "ratio": ratios}


def _of_times(times_s: Iterable[float]) -> dict[str, float]:
    times_us = [1e6 * each for each in times_s]
    return {"p50_us": statistics.median(times_us), "mean_us": statistics.fmean(times_us)}


def print_masks(result: Mapping[str, Any]) -> None:
    """Print both tables in Markdown."""
    one, answers = result["masks"], result["throughput"]
    print(f"A mask and the token before it, of {one['vocab_size']:,} tokens, in microseconds\n")
    rows = [
        (name, f"{one[name]['p50_us']:.1f}", f"{one[name]['mean_us']:.1f}") for name in ("ours", "llguidance")
    ]
    ratio = ("ratio", *(f"{one['ratio'][part]:.2f}" for part in ("p50_us", "mean_us")))
    print(markdown(("", "median", "mean"), [*rows, ratio]))
    print(f"\n{answers['requests']} answers at once; {answers['late_masks']} masks were late\n")
    print_cases(("answers", "tokens/s", "beside free ones"), answers["cases"])
