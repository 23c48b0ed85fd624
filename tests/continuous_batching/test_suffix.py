"""The suffix proposer finds what other requests under the same salt said, and nothing of other salts.

Its memory is bounded.
"""

from __future__ import annotations

import numpy as np
import pytest

from continuous_batching.slots import SlotPool
from continuous_batching.speculation.suffix import LENGTHS, Suffix
from tests.continuous_batching.test_ngram import guessed, leave, say, take


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 30_000, length).tolist()


def test_what_another_request_said_is_found() -> None:
    slots = SlotPool(2, 256, 16)
    proposer, story = Suffix(slots), text(0, 100)
    row = take(slots, 0, story[:50])
    assert guessed(proposer, row) == [[]]
    say(slots, row, story[50:])
    assert guessed(proposer, row) == [[]]
    leave(slots, row)
    row = take(slots, 1, text(1, 20) + story[60:75])
    assert guessed(proposer, row) == [story[75:79]], "of an answer"
    say(slots, row, story[75:77])
    assert guessed(proposer, row) == [story[77:81]], "a right guess goes on"
    say(slots, row, [0])
    assert guessed(proposer, row) == [[]], "a wrong one does not"
    other = take(slots, 2, text(2, 20) + story[20:35])
    assert guessed(proposer, row, other) == [[], story[35:39]], "of a prompt"


def test_the_longest_end_goes_before_the_latest() -> None:
    slots = SlotPool(3, 256, 16)
    proposer, end = Suffix(slots), text(0, 12)
    for number, start in enumerate((end, end[-4:])):  # the later one shares four tokens alone
        guessed(proposer, take(slots, number, [*text(5 + number, 20), *start, 100 + number, 7, 8, 9]))
    row = take(slots, 2, [*text(7, 20), *end])
    assert guessed(proposer, row) == [[100, 7, 8, 9]]
    say(slots, row, [*text(8, 12), *end[-4:]])
    assert guessed(proposer, row) == [text(8, 12)[:4]], "the latest of equals"


@pytest.mark.parametrize(("first", "second"), [(None, "a"), ("a", None), ("a", "b")])
def test_nothing_is_found_across_salts(first: str | None, second: str | None) -> None:
    slots = SlotPool(3, 256, 16)
    proposer, story = Suffix(slots), text(0, 100)
    guessed(proposer, take(slots, 0, story, first))
    assert guessed(proposer, take(slots, 1, story[:50], second)) == [[]]
    assert guessed(proposer, take(slots, 2, story[:50], first)) == [story[50:54]]


def test_entries_that_meet_in_a_table_tell_nothing_across_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = SlotPool(2, 256, 16)
    proposer, story = Suffix(slots), text(0, 100)
    hashed = proposer._hashed
    monkeypatch.setattr(proposer, "_hashed", lambda tokens, salts: hashed(tokens, 0 * salts))
    guessed(proposer, take(slots, 0, story, "a"))
    assert guessed(proposer, take(slots, 1, story[:50], "b")) == [[]]


def test_many_salts_take_no_memory_for_ever_and_stay_apart() -> None:
    slots = SlotPool(1, 64, 16)
    proposer, story = Suffix(slots, 1024), text(0, 20)
    for number in range(60):
        row = take(slots, number, story, f"salt {number}")
        assert guessed(proposer, row) == [[]]
        leave(slots, row)
    assert len(proposer._salts) < 12


def test_the_oldest_make_room() -> None:
    slots = SlotPool(1, 512, 16)
    proposer = Suffix(slots, 4096)
    stories = [text(number, 250) for number in range(40)]

    def found(number: int, start: int) -> list[int]:
        row = take(slots, 1000 + number, stories[number][start : start + 14])
        tokens = guessed(proposer, row)[0]
        leave(slots, row)
        return tokens

    for number, story in enumerate(stories):
        row = take(slots, number, story)
        guessed(proposer, row)
        leave(slots, row)
    assert found(39, 100) == stories[39][114:118]
    assert found(33, 100) == stories[33][114:118]
    assert found(0, 100) == []
    assert proposer._chunks.size <= 4096 + 256


def test_what_stands_where_one_chunk_ends_and_the_next_begins_is_found() -> None:
    slots = SlotPool(2, 1200, 16)
    proposer, story = Suffix(slots), text(0, 1000)
    guessed(proposer, take(slots, 0, story))
    for end in range(240, 280):
        row = take(slots, end, story[end - 12 : end])
        assert guessed(proposer, row)[0][:1] == story[end : end + 1], end
        leave(slots, row)


@pytest.mark.parametrize("seed", range(2))
def test_every_guess_follows_an_end_that_stood_before(seed: int) -> None:
    """Few words, many rows, requests that come and go: guesses are what some request of the salt said."""
    random = np.random.default_rng(seed)
    slots = SlotPool(6, 900, 16)
    proposer = Suffix(slots, 20_000)
    said: dict[str | None, list[list[int]]] = {None: [], "a": []}
    of_row: dict[int, list[int]] = {}
    salt_of: dict[int, str | None] = {}
    right = number = 0
    for _ in range(250):
        for row in [row for row in of_row if random.random() < 0.01 or len(of_row[row]) > 800]:
            leave(slots, row)
            del of_row[row]
        while slots.num_free:
            salt = (None, "a")[int(random.integers(2))]
            tokens = random.integers(0, 5, int(random.integers(1, 300))).tolist()
            row = take(slots, number, tokens, salt)
            slots.limit[row] = 900
            of_row[row], salt_of[row] = tokens, salt
            said[salt].append(tokens)
            number += 1
        rows = sorted(of_row)
        for row, tokens in zip(rows, guessed(proposer, *rows)):
            end = of_row[row][-LENGTHS[-1] :]
            if tokens:
                right += 1
                wanted = ",".join(map(str, [*end, *tokens]))
                texts = (",".join(map(str, each)) for each in said[salt_of[row]])
                assert any(wanted in each for each in texts)
        for row in rows:
            new = random.integers(0, 5, int(random.integers(1, 6))).tolist()
            say(slots, row, new)
            of_row[row] += new
    assert right > 200


@pytest.mark.parametrize("capacity", [1024, 2048])
def test_a_source_whose_chunk_is_reused_in_the_same_step_is_lost(capacity: int) -> None:
    """Rows follow old chunks while new prompts take them; two salts have no words in common."""
    random = np.random.default_rng(0)
    slots, first = SlotPool(3, 900, 16), {"a": 0, "b": 10}
    proposer = Suffix(slots, capacity)
    salt_of: dict[int, str] = {}
    right = number = 0
    for _ in range(200):
        for row in [row for row in salt_of if random.random() < 0.1 or slots.num_tokens[row] > 700]:
            leave(slots, row)
            del salt_of[row]
        while slots.num_free:
            salt = "ab"[int(random.integers(2))]
            prompt = first[salt] + random.integers(0, 3, int(random.integers(1, 600)))
            row = take(slots, number, prompt.tolist(), salt)
            salt_of[row] = salt
            number += 1
        rows = sorted(salt_of)
        for row, tokens in zip(rows, guessed(proposer, *rows)):
            right += bool(tokens)
            assert all((token >= 10) == (salt_of[row] == "b") for token in tokens)
            other = (first[salt_of[row]] + random.integers(0, 3, 2)).tolist()
            say(slots, row, tokens if tokens and random.random() < 0.8 else other)
    assert right > 400
