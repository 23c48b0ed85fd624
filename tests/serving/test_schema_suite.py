"""The matcher takes the valid instances of the JSON Schema Test Suite, and none of the invalid ones.

The suite is not a part of this project: the source distribution of `jsonschema` has it. Name its folder of a
draft in JSON_SCHEMA_SUITE:

    pip download --no-deps --no-binary :all: jsonschema==4.26.0 && tar xzf jsonschema-4.26.0.tar.gz
    export JSON_SCHEMA_SUITE=$PWD/jsonschema-4.26.0/json/tests/draft2020-12
    python -m pytest -s tests/serving/test_schema_suite.py
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from borders.refusal import BadRequest
from continuous_batching.constraints import Constraint
from continuous_batching.request import Request, SamplingParams
from recipes.schema.recipe import ROOT
from serving.grammars.matching import Grammars
from serving.grammars.structured_output import form_notes, grammar_of
from serving.text.tokenizer import Text

SUITE = os.environ.get("JSON_SCHEMA_SUITE")


def takes(constraint: Constraint, instance: Any, text: Text) -> bool:
    """Whether an answer may be this instance, token by token of a byte each."""
    spelt = {text.token_bytes(token): token for token in range(text.vocab_size)}
    written = json.dumps(instance, ensure_ascii=False).encode()
    tokens = [*(spelt[bytes([byte])] for byte in written), text.eos_token_ids[0]]
    constraint.leave()
    return constraint.num_possible(np.empty(0, dtype=np.int64), tokens) == len(tokens)


def schemas(
    folder: Path, grammars: Grammars
) -> Iterator[tuple[str, Constraint | None, list[dict[str, Any]]]]:
    """The file, the constraint or None where the schema is refused or not held whole, and the instances."""
    for path in sorted(folder.glob("*.json")):
        for case in json.loads(path.read_text(encoding="utf-8")):
            try:
                form = {"name": "a", "schema": case["schema"], "strict": True}
                fields = {"response_format": {"type": "json_schema", "json_schema": form}}
                grammar = None if form_notes(fields) else grammar_of(fields)
                request = Request("a", np.array([1]), SamplingParams(grammar=grammar))
                grammars.constrain(request)
                yield path.stem, request.constraint, case["tests"]
            except BadRequest:
                yield path.stem, None, case["tests"]


@pytest.mark.skipif(SUITE is None, reason="JSON_SCHEMA_SUITE names no folder")
def test_no_invalid_instance_is_an_answer() -> None:
    assert SUITE is not None
    text = Text.load(ROOT / "recipes/tiny/weights")
    assert text is not None
    counts: Counter[str] = Counter()
    for stem, constraint, instances in schemas(
        Path(SUITE), Grammars(lambda: text, text.vocab_size, text.eos_token_ids)
    ):
        counts["schemas held" if constraint else "schemas refused or noted"] += 1
        for each in instances if constraint else ():
            assert constraint is not None
            is_taken = takes(constraint, each["data"], text)
            assert each["valid"] or not is_taken, (stem, each)
            counts[f"{'valid' if each['valid'] else 'invalid'}, {'taken' if is_taken else 'refused'}"] += 1
    print(dict(counts))
    assert counts["valid, taken"] > 10 * counts["valid, refused"]
