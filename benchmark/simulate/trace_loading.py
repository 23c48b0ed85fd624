"""Read the requests of a trace for a recipe's model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from borders.file_bounds import lines_of
from continuous_batching.request import Request
from recipes.schema.recipe import Recipe
from serving.text.request_fields import parse_request
from serving.text.tokenizer import Text
from simulation import trace


def requests_of(
    path: str, recipe: Recipe, vocab_size: int, *, skip_bad: bool
) -> Callable[[], Iterator[Request]]:
    """Return a function that reads the trace from its start at every call."""
    model = recipe.model.path
    text = Text.load(model) if model is not None else None

    def skip(reason: str) -> None:
        print(f"skipped {path}: {reason}", file=sys.stderr)

    def parse(fields: dict[str, object]) -> Request:
        return parse_request(fields, text)

    def opened() -> Iterator[Request]:
        request = None
        lines = lines_of(path)
        try:
            for request in trace.read(lines, vocab_size, parse, skip if skip_bad else None):
                yield request
        except trace.BadLine as error:
            raise ValueError(f"{path}: {error}; --skip-bad leaves such lines out") from error
        if request is None:
            raise ValueError(f"{path} holds no request that can be simulated; make one with scripts.trace")

    return opened
