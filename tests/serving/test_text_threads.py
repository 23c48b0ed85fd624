"""A long text is tokenised beside everything else: the thread that does it keeps no other from running."""

from __future__ import annotations

import threading
import time

import pytest

from serving.text.tokenizer import Text
from tests.serving.conftest import KINDS

LONG = "What is 348 plus 275? It is 623, of course. " * 12_000


def num_turns(text: Text) -> int:
    """How often another thread got its turn while the text was tokenised, each a millisecond at least."""
    worker = threading.Thread(target=lambda: text.encode(LONG))
    turns = 0
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        turns += 1
    return turns


@pytest.mark.parametrize("kind", KINDS)
def test_others_run_while_a_long_text_is_tokenised(kind: str, texts: dict[str, Text]) -> None:
    # A library that keeps the interpreter to itself leaves two to five turns, before and after; one that does
    # not, a hundred and more. Three tries, because the machine may have other work
    assert any(num_turns(texts[kind]) > 30 for _ in range(3))
