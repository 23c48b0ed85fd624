"""A router's choice: by what a request costs in each replica, and by nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from continuous_batching.routing.routing import RoutedPrompt, Routing, Sent, Weights
from tests.thorough import cases

PAGE = 16
ALONE = Weights(0.0, 0.0, 0.0)  # tokens to be computed, and nothing else


def prompt(*keys: int, num_tokens: int | None = None) -> RoutedPrompt:
    return RoutedPrompt(PAGE * len(keys) + 1 if num_tokens is None else num_tokens, keys, PAGE)


def sent(routing: Routing, what: RoutedPrompt, at_s: float = 0.0, **options: object) -> Sent:
    found = routing.send(what, at_s, **options)
    assert found is not None
    return found


def test_equal_replicas_take_turns() -> None:
    routing = Routing(3, "round_robin")
    assert [sent(routing, prompt()).replica for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_the_one_with_the_fewest_requests_goes_next() -> None:
    routing = Routing(3, "least_loaded")
    one, two, three = (sent(routing, prompt(), n) for n in range(3))
    routing.ended(two)
    assert sent(routing, prompt(), 4).replica == two.replica
    routing.ended(three)
    routing.ended(one)
    assert sent(routing, prompt(), 5).replica == three.replica, "ties go on from the last one chosen"


def test_pages_that_were_told_draw_a_prompt() -> None:
    routing = Routing(4)
    routing.stored(2, [1, 2, 3])
    routing.stored(3, [1, 2])
    found = sent(routing, prompt(1, 2, 3, 4))
    assert (found.replica, found.hit_tokens, found.queued_tokens) == (2, 3 * PAGE, PAGE + 1)
    assert found.best_hit_tokens == 3 * PAGE


def test_a_replica_without_pages_is_cleared_without_a_look_at_those_of_others() -> None:
    """Its events may be lost again and again, and the others may have millions of pages."""
    num_looks = 0

    class Looked(dict[int, int]):
        def items(self) -> Any:
            nonlocal num_looks
            num_looks += 1
            return super().items()

    routing = Routing(2)
    routing.held.masks = Looked()
    routing.stored(0, range(9))
    routing.stored(1, [3, 20])
    routing.removed(1, [3, 20])
    routing.cleared(1)
    assert (num_looks, len(routing.held)) == (0, 9)
    routing.stored(1, [3, 20])
    routing.cleared(1)
    assert {*routing.held.masks.values()} == {1}
    assert (num_looks, len(routing.held)) == (1, 9)


def test_a_hit_ends_where_a_replica_has_what_its_windows_see() -> None:
    """Two keys stand for 8 tokens; a window of 9 tokens sees the two before it, one of 5 the last alone."""
    routing, keys = Routing(3, weights=ALONE), [1, 2, 3, 4, 5]
    for replica in range(3):
        routing.stored(replica, keys)
    routing.stored_beside(1, keys, 1, 9)
    routing.stored_beside(1, keys[:3] + keys[4:], 2, 5)
    routing.stored_beside(2, keys[:3] + keys[4:], 1, 9)
    assert routing.num_found(keys, 4).tolist() == [5, 5, 3]
    assert routing.removed_beside(1, [3, 5, 77], 2) == 2
    assert routing.num_found(keys, 4).tolist() == [5, 2, 3]
    assert routing.num_found(keys[:1], 4).tolist() == [1, 1, 1]
    routing.removed_beside(2, keys, 1)
    assert routing.num_found(keys, 4).tolist() == [5, 2, 0]
    routing.cleared(1)
    assert routing.num_found(keys, 4).tolist() == [5, 0, 0]
    assert sent(routing, prompt(*keys)).replica == 0


def test_a_hit_ends_at_the_last_state_of_a_replica() -> None:
    routing, keys = Routing(2, weights=ALONE), [1, 2, 3, 4, 5]
    for replica in range(2):
        routing.stored(replica, keys)
    routing.stored_beside(1, [2, 4], 1, 0)
    assert routing.num_found(keys, 4).tolist() == [5, 4]
    assert routing.num_found(keys[:3], 4).tolist() == [3, 2]
    routing.removed_beside(1, [2, 4], 1)
    assert routing.num_found(keys, 4).tolist() == [5, 0]


def test_a_hit_is_not_worth_any_wait() -> None:
    routing = Routing(2)
    routing.stored(0, [1, 2])
    routing.report_load(0, 10 * PAGE, 0, 0.0)
    assert sent(routing, prompt(1, 2)).replica == 1, "half of what waits is more than the hit"
    routing.report_load(0, 0, 0, 0.0)
    assert sent(routing, prompt(1, 2)).replica == 0


def test_own_sends_count_until_they_are_told() -> None:
    """One burst does not go to the replica that was last said to be idle."""
    routing = Routing(2)
    chosen = [sent(routing, RoutedPrompt(100), 1.0).replica for _ in range(10)]
    assert chosen.count(0) == chosen.count(1) == 5
    routing.report_load(0, 500, 5, 0.5)  # what was known before they were sent
    assert routing.queued_tokens.tolist() == [1000, 500]
    routing.report_load(0, 500, 5, 1.0)
    assert routing.queued_tokens.tolist() == [500, 500]
    assert routing.requests.tolist() == [5, 5]


@pytest.mark.parametrize("is_reported", [False, True])
def test_a_request_leaves_nothing_behind(is_reported: bool) -> None:
    routing = Routing(2)
    one = sent(routing, prompt(1, 2), 1.0)
    if is_reported:
        routing.report_load(one.replica, one.queued_tokens, 1, 2.0)
    assert routing.queued_tokens.tolist() == [2 * PAGE + 1, 0]
    routing.begun(one)
    assert routing.queued_tokens.tolist() == [0, 0]
    assert routing.requests.tolist() == [1, 0]
    routing.ended(one)
    routing.ended(one)
    assert routing.requests.tolist() == [0, 0]
    assert not len(routing.supposed), "the replica tells its pages: none were published"


def test_what_is_computed_of_a_prompt_is_not_taken_off_twice() -> None:
    """Three prompts of 100 tokens in a line, and a replica that tells what is left of them all."""
    routing = Routing(1)
    line = [sent(routing, RoutedPrompt(100), 1.0) for _ in range(3)]
    routing.report_load(0, 230, 3, 2.0)  # 70 of the first are computed
    routing.begun(line[0])
    assert routing.queued_tokens.tolist() == [200], "the other two wait as a whole"
    routing.report_load(0, 110, 3, 3.0)  # 90 of the second are
    routing.begun(line[1])
    assert routing.queued_tokens.tolist() == [100]
    routing.ended(line[2])
    assert routing.queued_tokens.tolist() == [0]
    for each in line:
        routing.ended(each)
    routing.report_load(0, 500, 5, 4.0)  # others' requests, which came another way
    mine = sent(routing, RoutedPrompt(100), 5.0)
    routing.report_load(0, 600, 6, 6.0)
    routing.begun(mine)
    assert routing.queued_tokens.tolist() == [500]


def test_a_page_on_its_way_counts_as_found() -> None:
    """Two that begin alike go together before the first is computed, where pages are told and where not."""
    for route in ("prefix", "text_prefix"):
        routing = Routing(4, route, ALONE)
        first = sent(routing, prompt(1, 2, 3))
        assert sent(routing, prompt(1, 2, 9)).hit_tokens == 2 * PAGE
        routing.ended(first)
    assert routing.num_found([1, 2, 3])[first.replica] == 3, "text only: what was sent stays supposed"


def test_a_session_stays_until_its_replica_closes() -> None:
    routing = Routing(3)
    home = sent(routing, prompt(1), session="a").replica
    routing.report_load(home, 10**6, 100, 1.0)
    assert sent(routing, prompt(7), 2.0, session="a").replica == home
    assert sent(routing, prompt(7), 2.0).replica != home
    routing.is_open[home] = False
    assert sent(routing, prompt(7), 3.0, session="a").replica != home


def test_nobody_is_sent_where_it_may_not() -> None:
    routing = Routing(3)
    assert {sent(routing, prompt(1), but=[0, 2]).replica for _ in range(5)} == {1}
    routing.is_open[1] = False
    assert routing.send(prompt(1), 0.0, but=[0, 2]) is None
    assert routing.requests.tolist() == [0, 5, 0], "who was not sent is not counted"


def test_a_lost_replica_is_forgotten() -> None:
    routing = Routing(2)
    routing.stored(0, [1, 2])
    one = sent(routing, prompt(1, 2, 3), session="a")
    routing.report_load(0, 100, 9, -1.0)
    routing.lost(0)
    assert (routing.queued_tokens[0], routing.requests[0]) == (0, 0)
    assert routing.num_found([1, 2, 3]).tolist() == [0, 0]
    routing.ended(one)
    assert routing.requests.tolist() == [0, 0]
    routing.is_open[0] = False
    assert sent(routing, prompt(1), session="a").replica == 1


def test_an_idle_replica_gets_its_share() -> None:
    """One beginning that all prompts have does not keep them at one replica for ever."""
    routing, given = Routing(4), np.zeros(4)
    for number in range(400):
        one = sent(routing, prompt(1, 2, 3, 1000 + number), number / 10)
        given[one.replica] += 1
        routing.stored(one.replica, [1, 2, 3, 1000 + number])
        routing.ended(one)
    assert given.max() / given.mean() < 1.25


@pytest.mark.parametrize("seed", cases(range(10), range(300)))
def test_found_keys_are_those_of_plain_sets(seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 40))
    routing, plain = Routing(count), [set[int]() for _ in range(count)]
    for _ in range(100):
        replica, keys = int(random.integers(count)), random.integers(0, 30, 4).tolist()
        if random.random() < 0.7:
            routing.stored(replica, keys)
            plain[replica] |= {*keys}
        else:
            routing.removed(replica, keys)
            plain[replica] -= {*keys}
        asked = random.permutation(30)[:6].tolist()
        wanted = [sum(1 for _ in itertools.takewhile(each.__contains__, asked)) for each in plain]
        assert routing.num_found(asked).tolist() == wanted
    assert len(routing.held) == len(set().union(*plain))


def test_requests_without_a_prompt_say_nothing_of_prompts() -> None:
    """Asking for the names of models leaves what a balanced load is worth as it was."""
    with_others, without = Routing(2), Routing(2)
    for routing in (with_others, without):
        for number in range(50):
            sent(routing, prompt(1, 2, 3, 4, 10 + number), float(number))
            for _ in range(20 if routing is with_others else 0):
                routing.ended(sent(routing, RoutedPrompt(0), float(number)))
    assert with_others._mean_prompt == without._mean_prompt


def test_what_several_have_is_given_to_another_sooner_than_what_one_has() -> None:
    """A system prompt of many sessions, and a conversation of one, of equal length; equal loads."""

    def chosen(holders: list[int]) -> int:
        routing = Routing(4, weights=Weights(queued=1.0, request=0.0, recent=0.0))
        for holder in holders:
            routing.stored(holder, [1, 2, 3, 4])
            routing.report_load(
                holder, 3 * PAGE, 1, 0.0
            )  # waits there: more than half of what is found, not all
        return sent(routing, prompt(1, 2, 3, 4), 1.0).replica

    assert chosen([2]) == 2
    assert chosen([1, 2]) not in (1, 2)


def test_of_two_replicas_neither_is_short_of_what_both_have() -> None:
    routing = Routing(2, weights=ALONE)
    for holder in (0, 1):
        routing.stored(holder, [1, 2, 3])
    routing.stored(1, [4])
    assert sent(routing, prompt(1, 2, 3, 4)).replica == 1


def test_a_replica_that_joins_is_as_one_that_was_there() -> None:
    routing, whole = Routing(1), Routing(2)
    assert sent(routing, prompt(1, 2)).replica == sent(whole, prompt(1, 2)).replica == 0
    number = routing.join()
    assert (number, routing.count) == (1, 2)
    assert not routing.is_open[1], "it says itself when it takes requests"
    routing.is_open[1] = routing.tells[1] = True
    for each in (routing, whole):
        each.stored(1, [5, 6])
        each.report_load(1, 100, 2, 0.0)
        found = [sent(each, prompt(5, 6, 7), 1.0), sent(each, prompt(8), 2.0), sent(each, prompt(9), 3.0)]
        assert [one.replica for one in found] == [1, 0, 0]
        assert each.requests.tolist() == [3, 3]


def test_who_is_believed_again_has_only_what_it_reports() -> None:
    routing = Routing(1, tells=False)
    routing.ended(sent(routing, prompt(1, 2)))
    assert routing.num_found([1, 2]).tolist() == [2]
    routing.believe(0)
    assert routing.num_found([1, 2]).tolist() == [0]
    one = sent(routing, prompt(3))
    routing.believe(0)
    assert routing.num_found([3]).tolist() == [1], "what is computed for who was believed all the time counts"
    routing.ended(one)


def test_what_has_left_leaves_nothing_to_who_has_its_number() -> None:
    routing = Routing(2)
    one = sent(routing, prompt(1, 2), session="a")
    routing.stored(one.replica, [1, 2])
    routing.report_load(one.replica, 500, 9, 0.5)
    routing.ended(one)
    routing.leave(one.replica)
    assert routing.num_found([1, 2]).tolist() == [0, 0]
    assert sent(routing, prompt(1, 2), 1.0, session="a").replica != one.replica
    assert routing.join() == one.replica, "the number is free"
    routing.is_open[one.replica] = True
    assert (routing.queued_tokens[one.replica], routing.requests[one.replica]) == (0, 0)
    assert not routing.tells[one.replica]
    assert routing.join() == 2


def test_who_has_left_does_not_dilute_what_is_usual() -> None:
    """The price of having been given more than others is by the mean of those that are there."""
    few, many = Routing(2), Routing(5)
    for number in (2, 3, 4):
        many.leave(number)
    for routing in (few, many):
        for at in range(8):
            routing.ended(sent(routing, prompt(at, at + 100), float(at)))
    assert np.allclose(few._costs(None, 0), many._costs(None, 0)[:2])
