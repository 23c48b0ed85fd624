"""Measure what grammars cost: a mask beside llguidance's own, and constrained answers beside free ones.

The vocabulary is made, not a model's: all bytes, then pieces of words as BPE has them, by a fixed seed.
Answers are drawn from the tokens that the mask allows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmark.options import add_json, show
from benchmark.run_clock import RunClock
from continuous_batching.request import Request, SamplingParams
from kv_cache.pages import Index
from recipes.assembly import versions
from recipes.assembly.engine import BuiltEngine, build
from recipes.schema.command_line import add_recipe
from recipes.schema.numbers import MOST_COUNT, whole
from recipes.schema.reader import load
from serving.grammars.matching import Grammars
from serving.grammars.structured_output import grammar_of

ROUNDS = 5  # rounds in turns, whose median counts; one more before them warms up
TOKENS = 64  # tokens of each answer
VOCABULARY = 152_000
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


class MadeVocabulary:
    """Three control tokens, all bytes, and pieces of words and JSON, in the form that `Grammars` reads."""

    def __init__(self, size: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        pieces = {bytes([each]): None for each in range(256)}
        pieces |= dict.fromkeys([b'":', b'",', b'"},', b'": "', b'", "', b'{"', b"[]", b"  ", b"\n"])
        while len(pieces) < size - 3:
            lens, spaces = random.integers(2, 10, size), random.integers(0, 2, size)
            signs = random.choice(len(_SIGNS), int(lens.sum()), p=_falling(len(_SIGNS)))
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


def _falling(count: int) -> Any:
    weights = 1 / np.arange(1, count + 1)
    return weights / weights.sum()


def grammars(vocab_size: int) -> Grammars:
    """Return the compiler of grammars for a made vocabulary."""
    vocabulary = MadeVocabulary(vocab_size)
    return Grammars(lambda: vocabulary, vocab_size, [END])


def masks(vocab_size: int, num_tokens: int) -> dict[str, Any]:
    """Time a mask with the token before it, ours and the library's own, along the same answer."""
    made, random = grammars(vocab_size), np.random.default_rng(0)
    grammar = grammar_of({"guided_json": SCHEMA})
    assert grammar is not None, "no form is asked for"
    request = Request("a", np.array([1]), SamplingParams(grammar=grammar))
    made.constrain(request)
    constraint, beginning = request.constraint, made.beginning(grammar)
    assert constraint is not None, "it was not compiled"
    answer = np.zeros(num_tokens, dtype=np.int64)
    ours, bare = [], []
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
                may = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                answer[at] = random.choice(may)
    rows = {"ours": ours, "llguidance": bare}
    found = {
        name: {"p50_us": 1e6 * statistics.median(each), "mean_us": 1e6 * statistics.fmean(each)}
        for name, each in rows.items()
    }
    ratios = {each: found["ours"][each] / found["llguidance"][each] for each in ("p50_us", "mean_us")}
    return {"vocab_size": vocab_size, "tokens": num_tokens, **found, "ratio": ratios}


def throughput(built: BuiltEngine, num_requests: int) -> dict[str, Any]:
    """Return the output tokens a second of requests that all come at once, free and constrained."""
    made = grammars(built.config.vocab_size)
    grammar = grammar_of({"guided_json": SCHEMA})
    rounds = []
    for number in range(1 + ROUNDS):
        random = np.random.default_rng(number)
        prompts = random.integers(3, built.config.vocab_size, (num_requests, TOKENS))
        rounds.append([serve(built, prompts, made, each) for each in (None, grammar)])
    free, held = np.array(rounds[1:]).T
    ratios = held / free
    return {
        "requests": num_requests,
        "free_tokens_per_s": float(np.median(free)),
        "held_tokens_per_s": float(np.median(held)),
        "ratio": float(np.median(ratios)),
        "ratios": ratios.tolist(),
        "late_masks": built.engine.scheduler.counters.late_masks,
    }


def serve(built: BuiltEngine, prompts: Index, made: Grammars, grammar: str | None) -> float:
    """Return the tokens a second. All answers are sampled, and have TOKENS tokens."""
    params = SamplingParams(
        max_tokens=TOKENS, temperature=1.0, seed=1, grammar=grammar, ignore_eos=grammar is None
    )
    requests = [Request(str(number), prompt, params) for number, prompt in enumerate(prompts)]
    for request in requests:
        made.constrain(request)
        built.engine.add(request)
    start_s = time.perf_counter()
    while built.engine.has_work:
        built.engine.step()
    took_s = time.perf_counter() - start_s
    assert all(len(request.answer) == TOKENS for request in requests), "an answer ended"
    return len(prompts) * TOKENS / took_s


def print_table(result: Mapping[str, Any]) -> None:
    """Print the tables in Markdown."""
    one, all_of = result["masks"], result["throughput"]
    print(f"A mask and the token before it, of {one['vocab_size']:,} tokens, in microseconds\n")
    print("| | median | mean |\n|---|---|---|")
    for name in ("ours", "llguidance"):
        print(f"| {name} | {one[name]['p50_us']:.1f} | {one[name]['mean_us']:.1f} |")
    print(f"| ratio | {one['ratio']['p50_us']:.2f} | {one['ratio']['mean_us']:.2f} |\n")
    least, most = min(all_of["ratios"]), max(all_of["ratios"])
    print(
        f"{all_of['requests']} answers at once: free {all_of['free_tokens_per_s']:,.0f} tokens/s, held to a"
        f" form {all_of['held_tokens_per_s']:,.0f}: {all_of['ratio']:.3f} ({least:.3f} to {most:.3f});"
        f" {all_of['late_masks']} masks were late"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `masks`."""
    add_recipe(parser)
    for name, default, meaning in (
        ("vocabulary", VOCABULARY, "tokens of the made vocabulary of single masks"),
        ("tokens", 400, "of the answer along which these are made"),
        ("requests", 32, "of a round"),
    ):
        parser.add_argument(
            f"--{name}",
            type=whole(300 if name == "vocabulary" else 1, MOST_COUNT),
            default=default,
            metavar="N",
            help=f"{meaning} (default: {default})",
        )
    add_json(parser)


def main(options: argparse.Namespace) -> None:
    recipe, clock = load(options.recipe, options.overrides, options.profile), RunClock()
    found = {"masks": masks(options.vocabulary, options.tokens)}
    found["throughput"] = throughput(build(recipe), options.requests)
    described = {"benchmark": "masks", "machine": versions.describe(), "clock": clock.read()}
    show(described | found, options, print_table)
