"""Answer the requests of a file; RECIPE may be the folder of a checkpoint, too.

    python -m scripts.generate RECIPE [key=value ...] --prompt TEXT | --chat TEXT
    python -m scripts.generate RECIPE [key=value ...] --input FILE.jsonl --output FILE.jsonl [--resume]

Each input line is a request: id, prompt | prompt_token_ids | messages, arrival_s, and the sampling fields of
the OpenAI API; each output line is its answer, or {"id", "error"} where it was refused. `-` is standard input
or output; without --output the answer is printed. --resume serves only what --output lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os

from tqdm import tqdm

from benchmark import options as kinds
from recipes.assembly.engine import build_in_sight
from recipes.fitting import with_recipe
from recipes.schema import verb
from recipes.schema.command_line import add_field, add_recipe, keep_apart
from recipes.schema.reader import read
from serving.offline import asked_lines, check_answers, opened, read_jobs, run_jobs, unanswered, write_record
from serving.text.tokenizer import Text


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    raw = argparse.RawTextHelpFormatter
    top = argparse.ArgumentParser(prog="python -m scripts.generate", description=__doc__, formatter_class=raw)
    add_recipe(top)
    source = top.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", metavar="FILE.jsonl", help="requests, one a line; - for standard input")
    source.add_argument("--prompt", metavar="TEXT", help="the one request's prompt")
    source.add_argument("--chat", metavar="TEXT", help="what the user says, as a chat of one turn")
    top.add_argument("--output", metavar="FILE.jsonl", help="answers, one a line; - for standard output")
    top.add_argument("--resume", action="store_true", help="serve only what --output does not answer yet")
    add_field(top, "max_tokens")
    top.add_argument("--log", action="store_true", help="say on stderr what is built")
    return top


def main(argv: list[str]) -> None:
    """Serve all requests; raises ValueError or OSError for an unusable recipe or file."""
    options = parser().parse_intermixed_args(with_recipe("scripts.generate", argv))
    if options.input is not None and options.output is None:
        raise ValueError("--output is missing: name a file for the answers, or - for standard output")
    lines = asked_lines(options.input, options.prompt, options.chat, options.max_tokens)
    if options.output not in (None, "-"):
        kinds.file(options.output)
        keep_apart(options.output, options.recipe, *filter(None, [options.input]))
        check_answers(options.output, goes_on=options.resume)
    elif options.resume:
        raise ValueError("--resume needs --output, the file of answers to go on with")
    logging.basicConfig(level=logging.INFO if options.log else logging.WARNING, format="%(message)s")
    recipe = read(options.recipe, options.overrides, options.profile).recipe
    text = Text.of(recipe)
    jobs = list(read_jobs(lines, text, recipe))  # a bad file fails before the build
    engine = build_in_sight(recipe).engine
    jobs = unanswered(options.output, jobs) if options.resume else jobs
    with contextlib.ExitStack() as stack:  # opened after the build, whose failure keeps the file's content
        output = stack.enter_context(opened(options.output, goes_on=options.resume))
        is_hidden = None if options.input is not None else True  # None: unless on a terminal
        progress = stack.enter_context(tqdm(total=len(jobs), unit="request", disable=is_hidden))
        for record in run_jobs(engine, text, jobs, recipe=recipe):
            progress.update()
            if output is not None:
                write_record(output, record | ({"device": "VIRTUAL"} if recipe.device.virtual else {}))
            elif "error" in record:
                raise ValueError(record["error"])
            else:  # the model may have no tokenizer; the answer is then token ids
                print(record["token_ids"] if record["text"] is None else record["text"])


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    verb.run(main)
