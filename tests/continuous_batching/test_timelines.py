"""The timelines that the sources draw, drawn again by this scheduler."""

from __future__ import annotations

import numpy as np
import pytest

from continuous_batching.engine import Engine
from continuous_batching.policies.batching import Orca, PrefillFirst, StallFree, Static
from continuous_batching.policies.policy import Policy
from continuous_batching.policies.prefill_budget import FixedChunks
from continuous_batching.request import Request, SamplingParams
from tests.continuous_batching.checksum import VOCAB_SIZE
from tests.continuous_batching.test_slot_lifecycle import make

# The note on Orca, with static batches and with iteration-level scheduling: a cell is a token in its step
STATIC = """
    | S1 | S1 | A1 | A1 | A1  | A1 | EOS |     |
    | S2 | S2 | S2 | A2 | EOS |    |     |     |
    | S3 | S3 | S3 | S3 | A3  | A3 | A3  | EOS |
    | S4 | S4 | S4 | S4 | S4  | A4 | EOS |     |
"""
CONTINUOUS = """
    | S1 | S1 | A1 | A1 | A1  | A1 | EOS | S6  |
    | S2 | S2 | S2 | A2 | EOS | S5 | S5  | S5  |
    | S3 | S3 | S3 | S3 | A3  | A3 | A3  | EOS |
    | S4 | S4 | S4 | S4 | S4  | A4 | EOS | S7  |
"""


def cells(drawing: str) -> list[list[str]]:
    """The columns of a drawing: what is computed in each step."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in drawing.split("\n") if "|" in line]
    return [sorted(filter(None, column)) for column in zip(*rows)]


def ask(name: str, num_prompt: int, num_answer: int) -> Request:
    prompt = np.random.default_rng(ord(name[-1])).integers(0, VOCAB_SIZE, num_prompt)
    return Request(name, prompt, SamplingParams(max_tokens=num_answer, temperature=0.0))


def names(engine: Engine) -> list[str]:
    """Who is computed in one step."""
    step = engine.step()
    assert step is not None
    return [engine.slots.requests[row].id for row in step.batch.slots.tolist()]


def spans(engine: Engine) -> dict[str, int]:
    """How many tokens of whom are computed in one step."""
    step = engine.step()
    assert step is not None
    lens = (step.batch.stops - step.batch.starts).tolist()
    return {engine.slots.requests[row].id: num for row, num in zip(step.batch.slots.tolist(), lens)}


def draw(engine: Engine, lines: dict[str, list[str]], num_steps: int) -> list[list[str]]:
    """Columns of a drawing, where each request's steps are drawn by its own cells."""
    left = {name: iter(line) for name, line in lines.items()}
    return [sorted(next(left[name]) for name in names(engine)) for _ in range(num_steps)]


# The cells of each request. Its last prompt token yields its first answer token in the same step; the note
# draws that one cell later. Hence one token more than the answer has cells, so that it stays as many steps.
LINES = {
    "S1": ["S1", "S1", "A1", "A1", "A1", "A1", "EOS"],
    "S2": ["S2", "S2", "S2", "A2", "EOS"],
    "S3": ["S3", "S3", "S3", "S3", "A3", "A3", "A3", "EOS"],
    "S4": ["S4", "S4", "S4", "S4", "S4", "A4", "EOS"],
    "S5": ["S5"] * 9,
    "S6": ["S6"] * 9,
    "S7": ["S7"] * 9,
}


def test_the_note_on_orca_with_prompts_drawn_token_by_token() -> None:
    engine = make(policy=StallFree(FixedChunks(1)), budget=4)
    for name, line in LINES.items():
        num_prompt = line.count(name)
        engine.add(ask(name, num_prompt, len(line) - num_prompt + 1))
    assert draw(engine, LINES, 8) == cells(CONTINUOUS)


@pytest.mark.parametrize(
    ("policy", "drawing"), [(Orca(), CONTINUOUS), (Static(4, 0.0), STATIC)], ids=["orca", "static"]
)
def test_the_note_on_orca_with_a_step_for_each_cell(policy: Policy, drawing: str) -> None:
    engine = make(policy=policy, budget=128)
    for name, line in LINES.items():
        engine.add(ask(name, 1, len(line)))
    assert draw(engine, LINES, 8) == cells(drawing)
    assert "S7" in names(engine), "who waited for the static batch comes when it is empty"


# The article on Sarathi: A and B decode, A for one more step and B for three; then C and D arrive
FOUR_WAYS = {
    "vllm": (PrefillFirst(), [{"C": 6, "D": 4}, {"A": 1, "B": 1, "C": 1, "D": 1}, {"B": 1, "C": 1, "D": 1}]),
    "orca": (Orca(), [{"A": 1, "B": 1, "C": 6, "D": 4}, {"B": 1, "C": 1, "D": 1}]),
    "faster_transformer": (Static(2, 0.0), [{"A": 1, "B": 1}, {"B": 1}, {"B": 1}, {"C": 6, "D": 4}]),
    "sarathi": (
        StallFree(),
        [
            {"A": 1, "B": 1, "C": 3},
            {"B": 1, "C": 3, "D": 1},
            {"B": 1, "C": 1, "D": 3},
            {"C": 1, "D": 1},
        ],
    ),
}


@pytest.mark.parametrize(("policy", "expected"), FOUR_WAYS.values(), ids=FOUR_WAYS)
def test_the_four_ways_of_the_article_on_sarathi(policy: Policy, expected: list[dict[str, int]]) -> None:
    engine = make(policy=policy, budget=128)
    engine.add(ask("A", 2, 3))
    engine.add(ask("B", 2, 5))
    assert [spans(engine), spans(engine)] == [{"A": 2, "B": 2}, {"A": 1, "B": 1}]
    engine.scheduler.max_batch_tokens = 5 if type(policy) is StallFree else 128
    engine.add(ask("C", 6, 9))
    engine.add(ask("D", 4, 9))
    assert [spans(engine) for _ in expected] == expected
