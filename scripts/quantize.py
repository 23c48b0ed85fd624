"""Quantise a checkpoint to int8 weights, and measure what that changes.

    python -m scripts.quantize MODEL_DIR OUT_DIR [--evaluate TEXT_FILE]

OUT_DIR gets the same model in compressed-tensors' format int-quantized (W8A8): int8 weights with a scale for
each output channel, activations quantised token by token while serving. Embedding, norms and the head stay as
they are. --evaluate prints how both models score each line of a text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from borders.files import read_bounded
from recipes.assembly.int8_checkpoint import quantize
from recipes.assembly.scoring import check, comparison, score
from recipes.schema import verb
from serving.text.tokenizer import Text

MOST_TEXT_BYTES = 2**26  # most bytes of a text to score; a book has 1 MiB


def main(argv: list[str]) -> None:
    """Quantise, and score both models where asked to; raises ValueError or OSError."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.quantize", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "source", type=Path, metavar="MODEL_DIR", help="a checkpoint in the Hugging Face layout"
    )
    parser.add_argument(
        "target", type=Path, metavar="OUT_DIR", help="a directory that is not there yet, or empty"
    )
    parser.add_argument(
        "--evaluate", type=Path, metavar="TEXT_FILE", help="a text of which each line is scored"
    )
    options = parser.parse_args(argv)
    tokens = _tokens(options.evaluate, options.source) if options.evaluate else []
    before, after = quantize(options.source, options.target)
    print(f"{options.target}: {after / 2**20:,.1f} MiB of weights, from {before / 2**20:,.1f}")
    if options.evaluate:
        print(comparison(score(options.source, tokens), score(options.target, tokens)))


def _tokens(path: Path, source: Path) -> list[list[int]]:
    """Return the tokens of a text's lines.

    Raises ValueError for what could not be scored after quantising.
    """
    try:
        lines = read_bounded(path, MOST_TEXT_BYTES).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.start} is wrong") from error
    if not any(lines):
        raise ValueError(f"{path} has no line that can be scored; name another")
    text = Text.load(source)
    if text is None:
        raise ValueError(f"{source} has no tokenizer, so that no text can be scored; leave out --evaluate")
    tokens = [text.encode(line) for line in lines]
    check(source, tokens)
    return tokens


if __name__ == "__main__":
    verb.run(main)
