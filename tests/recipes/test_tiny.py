"""The model that this repository trained solves sums it was not trained on, and its files fit together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece

from recipes.tiny import corpus
from tests.lazy import transformers

WEIGHTS = Path(corpus.__file__).parent / "weights"
TEXTS = (
    "The fox is red and quick.",
    "348加275等于多少？狐狸住在森林里。",
    "emoji 🦊🎉👩‍🚀 and é ñ",
    "  two  spaces,\ta tab\nand a line ",
    "罕见字：龘靐齉",
    "",
)


@pytest.mark.parametrize("chat", [False, True])
def test_held_out_sums_come_out_right(chat: bool) -> None:
    from recipes.tiny.evaluate import accuracy  # imported here because it imports transformers

    assert accuracy(WEIGHTS, 100, chat=chat, seed=1) >= 0.95


def test_text_survives_the_tokenizer_which_transformers_reads_alike() -> None:
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(WEIGHTS / "tokenizer.model"))
    theirs = transformers.AutoTokenizer.from_pretrained(WEIGHTS)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_id() not in ids
        assert theirs.encode(text) == [tokenizer.bos_id(), *ids]
        assert theirs.decode(theirs.encode(text), skip_special_tokens=True) == text


def test_chat_template_writes_what_training_read() -> None:
    turns = [
        *corpus.messages("What is 1+2?"),
        {"role": "assistant", "content": "1+2=3."},
        {"role": "user", "content": "从1数到3。"},
    ]
    text = transformers.AutoTokenizer.from_pretrained(WEIGHTS).apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    assert text == (
        f"<s><|system|>{corpus.SYSTEM_PROMPT}<|user|>What is 1+2?<|assistant|>1+2=3.</s>"
        "<|user|>从1数到3。<|assistant|>"
    )


def _operands(documents: Iterator[corpus.Document]) -> Iterator[tuple[int, int]]:
    for document in documents:
        for text, _ in document:
            yield from ((int(a), int(b)) for a, b in re.findall(r"(\d+)\+(\d+)", text))


@pytest.mark.parametrize("long", [False, True])
def test_no_held_out_sum_is_trained_on(long: bool) -> None:
    seen = set(_operands(itertools.islice(corpus.documents(1, long=long), 5_000)))
    assert len(seen) > 3_000
    assert not any(corpus.held_out(a, b) for a, b in seen)
    held_out = corpus.held_out_sums(1000)
    assert seen.isdisjoint(held_out)
    assert seen.isdisjoint((b, a) for a, b in held_out)


def test_a_tenth_is_held_out_in_either_order() -> None:
    pairs = [(a, b) for a in range(0, 1000, 7) for b in range(0, 1000, 11)]
    assert 0.09 < sum(corpus.held_out(a, b) for a, b in pairs) / len(pairs) < 0.11
    assert all(corpus.held_out(a, b) == corpus.held_out(b, a) for a, b in pairs)


def test_a_seed_gives_one_corpus() -> None:
    def take(seed: int) -> list[corpus.Document]:
        return list(itertools.islice(corpus.documents(seed, long=True), 200))

    assert take(5) == take(5) != take(6)
    assert corpus.held_out_sums(50, 5) == corpus.held_out_sums(50, 5) != corpus.held_out_sums(50, 6)
    assert corpus.demo_requests(64, 5) == corpus.demo_requests(64, 5) != corpus.demo_requests(64, 6)
