"""`benchmark offline --masks` measures what it says that it measures."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from benchmark.offline import cases as masks
from continuous_batching.request import Request, SamplingParams
from scripts.benchmark import main
from serving.grammars.structured_output import grammar_of


def test_a_made_vocabulary_spells_all_that_a_form_may_need() -> None:
    vocabulary = masks.MadeVocabulary(3000)
    pieces = [vocabulary.token_bytes(token) for token in range(3, 3000)]
    assert len(set(pieces)) == len(pieces)
    assert {bytes([each]) for each in range(256)} <= set(pieces)
    assert [vocabulary.token_bytes(token) for token in range(3)] == [b""] * 3
    assert b"".join(map(vocabulary.token_bytes, vocabulary.encode_within('{"a": é}'))) == '{"a": é}'.encode()


def test_answers_along_its_masks_have_the_form() -> None:
    made, random = masks.grammars(3000), np.random.default_rng(0)
    request = Request("a", np.array([1]), SamplingParams(grammar=grammar_of({"guided_json": masks.ITEM})))
    made.constrain(request)
    assert request.constraint is not None
    vocabulary, answer = masks.MadeVocabulary(3000), [0]
    answer.clear()
    while len(answer) < 400:
        (mask,) = request.constraint.masks(np.array(answer, dtype=np.int64), np.empty(0, dtype=np.int64))
        assert mask is not None
        may = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if masks.END in may:
            break
        answer.append(int(random.choice(may)))
    jsonschema.validate(json.loads(b"".join(map(vocabulary.token_bytes, answer))), masks.ITEM)


def test_it_prints_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "offline",
        "--masks",
        "recipes/tiny/cpu.yaml",
        "--vocabulary=3000",
        "--tokens=30",
        "--requests=3",
    ]
    main([*arguments, "device.threads=1", "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    one, answers = found["masks"], found["throughput"]["cases"]
    assert one["ratio"]["p50_us"] == pytest.approx(one["ours"]["p50_us"] / one["llguidance"]["p50_us"])
    assert answers["free"]["ratio"] == 1
    held = answers["held to a form"]
    assert len(held["ratios"]) == masks.ROUNDS
    assert min(held["ratios"]) <= held["ratio"] <= max(held["ratios"])
    masks.print_masks(found)
    printed = capsys.readouterr().out
    assert f"{one['ratio']['p50_us']:.2f}" in printed
    assert f"| {held['ratio']:.2f} (" in printed
