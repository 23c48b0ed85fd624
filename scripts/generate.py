"""How do requests in a file become answers in a file?

    python -m scripts.generate RECIPE [key=value ...] --input FILE.jsonl --output FILE.jsonl
    python -m scripts.generate RECIPE [key=value ...] --prompt TEXT | --chat TEXT

Each input line is a request: id, prompt | prompt_token_ids | messages, arrival_s, and the sampling fields of
the OpenAI API. Each output line is its answer, or {"id", "error"} for one that was refused; the others still
run. `-` means standard input or output. --prompt is one request, a text to be continued; --chat is one that
the model's chat template wraps. Without --output the answer is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterable

from tqdm import tqdm

from benchmark import outputs
from recipes.build.engine import build
from recipes.schema import verb
from recipes.schema.command_line import add_recipe, keep_apart
from recipes.schema.numbers import whole
from recipes.schema.reader import read
from serving.offline import lines_in, opened, read_jobs, run_jobs, write_record
from serving.text.tokenizer import Text


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m scripts.generate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_recipe(top)
    source = top.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", metavar="FILE.jsonl", help="requests, one a line; - for standard input")
    source.add_argument("--prompt", metavar="TEXT", help="the one request's prompt")
    source.add_argument("--chat", metavar="TEXT", help="what the user says, as a chat of one turn")
    top.add_argument("--output", metavar="FILE.jsonl", help="answers, one a line; - for standard output")
    top.add_argument("--max-tokens", type=whole(1, 2**31 - 1), default=64, metavar="N", help="of its answer")
    top.add_argument("--log", action="store_true", help="say on stderr what is built")
    return top


def lines_of(options: argparse.Namespace) -> Iterable[str]:
    """The request lines, from --prompt, --chat or --input."""
    one = {"id": "one", "max_tokens": options.max_tokens, "temperature": 0}
    if options.prompt is not None:
        return [json.dumps(one | {"prompt": options.prompt})]
    if options.chat is not None:
        return [json.dumps(one | {"messages": [{"role": "user", "content": options.chat}]})]
    return lines_in(options.input)


def main(argv: list[str]) -> None:
    """Serve all requests; raises ValueError or OSError for an unusable recipe or file."""
    options = parser().parse_intermixed_args(argv)
    if options.input is not None and options.output is None:
        raise ValueError("--output is missing: name a file for the answers, or - for standard output")
    if options.output not in (None, "-"):
        outputs.file(options.output)
        keep_apart(options.output, options.recipe, *filter(None, [options.input]))
    logging.basicConfig(level=logging.INFO if options.log else logging.WARNING, format="%(message)s")
    recipe = read(options.recipe, options.overrides, options.profile).recipe
    text = Text.load(recipe.model.path) if recipe.model.path else None
    jobs = list(read_jobs(lines_of(options), text))  # before the model is built: a bad file fails at once
    engine = build(recipe).engine
    with contextlib.ExitStack() as stack:  # what stood in the file is kept where no engine could be built
        output = stack.enter_context(opened(options.output)) if options.output is not None else None
        on_terminal = sys.stderr.isatty() and options.input is not None
        progress = stack.enter_context(tqdm(total=len(jobs), unit="request", disable=not on_terminal))
        for record in run_jobs(engine, text, jobs):
            progress.update()
            if output is not None:
                write_record(output, record | ({"device": "VIRTUAL"} if recipe.device.virtual else {}))
            elif "error" in record:
                raise ValueError(record["error"])
            else:  # without a tokenizer the answer is token ids
                print(record["token_ids"] if record["text"] is None else record["text"])


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    verb.run(main)
