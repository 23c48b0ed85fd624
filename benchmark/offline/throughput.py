"""Measure tokens a second when all requests come at once, in the terms of `vllm bench throughput`.

The engine is in this process. Requests are those of a trace without their times, or --num-prompts of
--input-len random tokens, each answered with --output-len.
"""

from __future__ import annotations

import argparse

from benchmark.gate.gate import with_verdict
from benchmark.offline import offline
from benchmark.options import add_json, print_figures, show
from benchmark.workloads.lengths import lengths
from benchmark.workloads.synthetic import SyntheticLoad, draw_requests
from recipes.assembly.engine import BuiltEngine
from recipes.schema.command_line import add_recipe
from recipes.schema.numbers import MOST_COUNT, MOST_SEED, MOST_TOKENS, whole
from recipes.schema.reader import read
from serving.answers.jobs import Job
from serving.offline import Record
from serving.text.request_fields import parse_request
from serving.text.tokenizer import Text

INPUT_LEN, OUTPUT_LEN, NUM_PROMPTS = 512, 128, 64


def jobs(
    built: BuiltEngine, num_prompts: int, input_len: int, output_len: int, seed: int
) -> list[Job | Record]:
    """Return random requests of one size that come at once, the same for the same seed."""
    vocab_size = built.config.vocab_size
    load = SyntheticLoad(lengths(str(input_len)), lengths(str(output_len)), vocab_size, seed)
    return [Job(parse_request(line, None)) for line in draw_requests(load, num_prompts)]


def at_once(found: list[Job | Record]) -> list[Job | Record]:
    """Set the arrival of all requests to 0."""
    for job in found:
        if isinstance(job, Job):
            for request in (job.request, *job.request.followers):
                request.arrival_s = 0.0
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `throughput`."""
    add_recipe(parser)
    add = parser.add_argument
    add("--trace", metavar="FILE.jsonl", help="requests, as `generate` reads them; if not, random ones:")
    add("--num-prompts", type=whole(1, MOST_COUNT), metavar="N", help=str(NUM_PROMPTS))
    add("--input-len", type=whole(1, MOST_TOKENS), metavar="TOKENS", help=str(INPUT_LEN))
    add("--output-len", type=whole(1, MOST_TOKENS), metavar="TOKENS", help=str(OUTPUT_LEN))
    add("--seed", type=whole(0, MOST_SEED), default=0)
    add(
        "--runs",
        type=whole(1, MOST_COUNT),
        default=1,
        metavar="N",
        help="counted runs; the median is reported",
    )
    add_json(parser)


def main(options: argparse.Namespace) -> None:
    sizes = (options.num_prompts, options.input_len, options.output_len)
    if options.trace is not None and any(sizes):
        raise ValueError("--trace says what is asked for; leave out --num-prompts, --input-len, --output-len")
    recipe = read(options.recipe, options.overrides, options.profile).recipe
    text = Text.load(recipe.model.path) if recipe.model.path else None
    if options.trace is not None:
        # Read before the model is built, so that a bad file fails at once.
        offline.load_trace(options.trace, text)
    num_prompts, input_len, output_len = (
        given or usual for given, usual in zip(sizes, (NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN))
    )

    def load(built: BuiltEngine) -> list[Job | Record]:
        if options.trace is not None:
            return at_once(offline.load_trace(options.trace, text))
        return jobs(built, num_prompts, input_len, output_len, options.seed)

    described: dict[str, object] = {"recipe": options.recipe, "overrides": options.overrides}
    described["trace"] = (
        options.trace or f"{num_prompts} prompts of {input_len} tokens, answers of {output_len}"
    )
    result = offline.measure(described, recipe, text, load, options.runs)
    show(with_verdict(in_their_names(result)), options, print_figures)


def in_their_names(result: dict[str, object]) -> dict[str, object]:
    """Return the result with the figures that vLLM's users look for first, under the names that they know."""
    tokens = int(str(result["prompt_tokens"])) + int(str(result["output_tokens"]))
    return {
        "elapsed_time": result["duration_s"],
        "num_requests": result["requests"],
        "total_num_tokens": tokens,
        "requests_per_second": result["requests_per_s"],
        "tokens_per_second": result["total_tokens_per_s"],
        **result,
    }
