"""The n-gram proposer finds what followed an earlier place with a row's last tokens.

It forgets a row's earlier requests, and its memory is bounded.
"""

from __future__ import annotations

import numpy as np
import pytest

from continuous_batching.request import Request, SamplingParams
from continuous_batching.slots import SlotPool
from continuous_batching.speculation.proposer import LENGTH, NGram, Proposer
from kv_cache.pages import Index


def take(slots: SlotPool, number: int, tokens: list[int], salt: str | None = None) -> int:
    request = Request(str(number), np.array(tokens), SamplingParams(max_tokens=40), cache_salt=salt)
    request.number = number
    return slots.take(request)


def leave(slots: SlotPool, row: int) -> None:
    slots.hand_back(row)
    slots.release(row)


def say(slots: SlotPool, row: int, tokens: list[int]) -> None:
    known = int(slots.num_tokens[row])
    slots.token_ids[row, known : known + len(tokens)] = tokens
    slots.num_tokens[row] += len(tokens)


def guessed(proposer: Proposer, *rows: int, most: int = 4) -> list[list[int]]:
    guesses = proposer.guess(np.array(rows), most)
    assert ((guesses.counts >= 0) & (guesses.counts <= most)).all()
    return [tokens[:count] for tokens, count in zip(guesses.tokens.tolist(), guesses.counts.tolist())]


def scanned(slots: SlotPool, row: int, most: int) -> list[int]:
    """The definition: what followed the most recent earlier place of the last tokens."""
    tokens: list[int] = slots.token_ids[row, : slots.num_tokens[row]].tolist()
    for at in range(len(tokens) - 1, LENGTH - 1, -1):
        if tokens[at - LENGTH : at] == tokens[-LENGTH:]:
            return tokens[at : at + most]
    return []


def test_it_guesses_what_followed_the_most_recent_earlier_place() -> None:
    slots = SlotPool(2, 64, 4)
    row = take(slots, 0, [1, 2, 3, 7, 7, 9, 1, 2, 3, 8, 4, 5, 1, 2, 3])
    proposer = NGram(slots)
    assert guessed(proposer, row) == [[8, 4, 5, 1]]
    say(slots, row, [8, 4])
    assert guessed(proposer, row) == [[5, 1, 2, 3]], "a right guess goes on"
    say(slots, row, [6])
    assert guessed(proposer, row) == [[]], "a wrong one does not"
    say(slots, row, [1, 2, 3])
    assert guessed(proposer, row, most=2) == [[8, 4]]


@pytest.mark.parametrize("tokens", [[1], [1, 2], [5, 5, 5], [0, 0, 0, 0]])
def test_short_rows_have_what_the_definition_has(tokens: list[int]) -> None:
    slots = SlotPool(1, 64, 4)
    row = take(slots, 0, tokens)
    assert guessed(NGram(slots), row) == [scanned(slots, row, 4)]


def test_a_row_knows_nothing_of_the_request_before() -> None:
    slots = SlotPool(1, 64, 4)
    proposer = NGram(slots)
    row = take(slots, 0, [1, 2, 3, 4, 5, 1, 2, 3])
    assert guessed(proposer, row) == [[4, 5, 1, 2]]
    leave(slots, row)
    assert take(slots, 1, [1, 2, 3, 9, 9, 9, 9, 9, 9, 1, 2]) == row
    assert guessed(proposer, row) == [[]]
    say(slots, row, [3])
    assert guessed(proposer, row) == [[9, 9, 9, 9]]
    leave(slots, row)
    assert take(slots, 2, [6, 2, 9, 9, 9]) == row
    assert guessed(proposer, row) == [[]], "its row still holds tokens of the one before, further on"


@pytest.mark.parametrize("seed", range(6))
def test_a_row_alone_has_what_the_definition_has(seed: int) -> None:
    random = np.random.default_rng(seed)
    slots = SlotPool(3, 4096, 16)
    proposer = NGram(slots)
    row = take(slots, 0, random.integers(0, 6, int(random.integers(1, 400))).tolist())
    slots.limit[row] = 4096
    num_found = 0
    for _ in range(300):
        found = guessed(proposer, row)[0]
        place = proposer._source[row]
        tokens = slots.token_ids[row, : slots.num_tokens[row]]
        if found:  # it may go on from an older place, but what stands there is what stands at the end
            assert tokens[place - LENGTH : place].tolist() == tokens[-LENGTH:].tolist()
            assert found == tokens[place : place + 4].tolist()
            num_found += 1
        else:
            assert not scanned(slots, row, 4)
        say(slots, row, random.integers(0, 6, int(random.integers(1, 6))).tolist())
    assert num_found > 50


def test_many_rows_are_found_like_one() -> None:
    """Rows whose guesses are right are followed each time; the others are looked up now and then."""
    rows = 70
    random = np.random.default_rng(3)
    slots = SlotPool(rows, 2048, 16)
    proposer = NGram(slots)
    stories = [np.tile(random.integers(0, 1000, 40), 20).tolist() for _ in range(rows)]
    for number, story in enumerate(stories):
        take(slots, number, story[: 20 + number])
        slots.limit[:] = 2048
    every: Index = np.arange(rows)
    right = 0
    for _ in range(60):
        guesses = proposer.guess(every, 4)
        for row in range(rows):
            known, count = int(slots.num_tokens[row]), int(guesses.counts[row])
            right += guesses.tokens[row, :count].tolist() == stories[row][known : known + count] and count > 0
            say(slots, row, stories[row][known : known + 1])
    assert right > 0.8 * (60 * rows - rows * 10)


def test_a_long_prompt_is_found_in() -> None:
    slots = SlotPool(1, 40_000, 16)
    prompt = np.random.default_rng(0).integers(0, 30_000, 32_768).tolist()
    row = take(slots, 0, [*prompt, *prompt[32_000:32_010]])
    assert guessed(NGram(slots), row) == [prompt[32_010:32_014]]


def test_its_memory_is_bounded() -> None:
    assert NGram(SlotPool(4096, 4096, 16))._tables.nbytes <= 2**24
    assert NGram(SlotPool(1, 2**20, 16))._tables.nbytes <= 2**17
