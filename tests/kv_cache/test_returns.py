"""The expected wait of a conversation follows from how often such conversations were continued before."""

from __future__ import annotations

import numpy as np

from benchmark.simulate.states import scheduler
from kv_cache.returns import MOST_TIMES, NOBODY, UNKNOWN, Returns
from simulation.shared_prompts import documents
from simulation.state_rules import SplitMemory, served_share


def test_conversations_continued_as_often_as_those_that_ended_wait_longest() -> None:
    returns = Returns(most=100)
    for number in range(20):
        key = b"%d" % number
        for times in range(3):
            end, found = returns.arrive([b"beginning", key])
            assert (end, found) == ((key, times) if times else (None, 0))
            returns.note(key, found)
    waits = returns.waits()
    assert waits[2] > 10 * waits[0]
    assert waits[2] > 10 * waits[1]
    assert waits[0] < waits[UNKNOWN] < waits[NOBODY] == np.inf


def test_an_end_takes_the_place_of_the_one_before_it_and_the_oldest_is_forgotten() -> None:
    returns = Returns(most=2)
    returns.note(b"a", 0)
    returns.note(b"b", 3, before=b"a")
    assert returns.arrive([b"a"]) == (None, 0)
    assert returns.arrive([b"a", b"b", b"c"]) == (b"b", 4)
    returns.note(b"c", MOST_TIMES + 5)
    returns.note(b"d", 0)
    assert returns.arrive([b"b"]) == (None, 0)
    assert returns.arrive([b"c"]) == (b"c", MOST_TIMES)


def test_documents_about_which_all_was_asked_are_evicted_first() -> None:
    # 0.261 of the prompt tokens are computed; 0.368 were where what is least recently used went first
    turns = documents(np.random.default_rng(62), 40)
    assert served_share(turns, scheduler(turns, SplitMemory.split(8 * 2**30, 0.3), 8)) < 0.31
