"""Thoughts are told from answers, however a text is cut."""

from __future__ import annotations

import random

import pytest

from serving.tools.parsing import ReasoningParser
from tests.serving.test_tool_parsing import cut


def parsed(pieces: list[str], *, is_open: bool) -> tuple[str, str]:
    parser = ReasoningParser(is_open=is_open)
    parts = [*map(parser.push, pieces), parser.finish()]
    return "".join(each[0] for each in parts), "".join(each[1] for each in parts)


@pytest.mark.parametrize(
    ("answer", "is_open", "thoughts", "text"),
    [
        ("<think>\nSo.\n\nYes.\n</think>\n\nIt is 42.", False, "So.\n\nYes.", "It is 42."),
        ("So.\n</think>\n\nIt is 42.", True, "So.", "It is 42."),
        ("<think>\n\n</think>\n\nIt is.", False, "", "It is."),
        ("<think>So", False, "So", ""),
        ("So </thin", True, "So </thin", ""),
        ("It is <think>.</think> so", False, "", "It is <think>.</think> so"),
        (" \n<think>a</think> b </think> c\n", False, "a", "b </think> c\n"),
        (" It", False, "", " It"),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
    ],
)
def test_a_block_is_found_however_it_is_cut(answer: str, is_open: bool, thoughts: str, text: str) -> None:
    rng = random.Random(3)
    for pieces in ([answer], list(answer), *(cut(answer, rng) for _ in range(20))):
        assert parsed(pieces, is_open=is_open) == (thoughts, text)


def test_every_way_to_cut_made_answers_gives_the_same() -> None:
    rng = random.Random(4)
    words = ["<think>", "</think>", " ", "\n\n", "<", "</", "think>", "So", "42.", "天气"]
    for _ in range(1000):
        answer = "".join(rng.choice(words) for _ in range(rng.randrange(9)))
        is_open = rng.random() < 0.5
        whole = parsed([answer], is_open=is_open)
        assert parsed(list(answer), is_open=is_open) == whole, answer
        assert parsed(cut(answer, rng), is_open=is_open) == whole, answer
