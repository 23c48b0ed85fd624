"""Prompts are split off to prefill replicas by their length and by the load of each replica.

Each prompt counts as load where it is computed.
"""

from __future__ import annotations

import pytest

from continuous_batching.routing.routing import RoutedPrompt, Routing
from continuous_batching.routing.splitting import Splitting

HERE, PROMPTS, OTHER = 0, 1, 2


def made(split="cost", count: int = 3, slots: int = 0) -> tuple[Routing, Splitting]:
    """Replica 0 answers, 1 computes prompts for it, and 2 for others."""
    routing = Routing(count)
    splitting = Splitting(routing, split)
    splitting.is_known(HERE, "", ["tcp://one:1"], slots)
    splitting.is_known(PROMPTS, "tcp://one:1", [], slots)
    splitting.is_known(OTHER, "tcp://two:1", [], slots)
    return routing, splitting


def sent_here(routing: Routing, splitting: Splitting, prompt: RoutedPrompt):
    sent = routing.send(prompt, 0.0, but=splitting.not_for_answers)
    assert sent is not None
    assert sent.replica == HERE
    return sent, splitting.choose(prompt, sent, 0.0).place


def busy(routing: Routing, requests: int) -> None:
    routing.report_load(HERE, 0, requests, as_of_s=-1.0)


def test_long_prompts_go_where_no_answers_run_and_short_ones_stay() -> None:
    routing, splitting = made()
    busy(routing, 20)
    _, place = sent_here(routing, splitting, RoutedPrompt(1000, range(62), 16))
    assert place is not None
    assert (place.sent.replica, place.endpoint) == (PROMPTS, "tcp://one:1")
    assert sent_here(routing, splitting, RoutedPrompt(20, range(100, 101), 16))[1] is None


def test_what_is_found_where_it_is_answered_stays() -> None:
    routing, splitting = made()
    busy(routing, 20)
    routing.stored(HERE, range(60))
    assert sent_here(routing, splitting, RoutedPrompt(1000, range(62), 16))[1] is None


def test_a_queue_there_weighs_as_one_here_does() -> None:
    routing, splitting = made()
    busy(routing, 20)
    routing.report_load(PROMPTS, 10_000, 9, as_of_s=-1.0)
    assert sent_here(routing, splitting, RoutedPrompt(1000, range(62), 16))[1] is None
    routing.report_load(HERE, 10_000, 20, as_of_s=-1.0)
    assert sent_here(routing, splitting, RoutedPrompt(1000, range(100, 162), 16))[1] is not None


def test_a_prompt_counts_where_it_is_computed_until_it_is() -> None:
    routing, splitting = made("always")
    sent, place = sent_here(routing, splitting, RoutedPrompt(1000, range(62), 16))
    assert place is not None
    assert routing.queued_tokens.tolist() == [0, 1000, 0]
    assert routing.requests.tolist() == [1, 1, 0]
    routing.ended(place.sent)
    routing.ended(sent)
    assert routing.queued_tokens.tolist() == routing.requests.tolist() == [0, 0, 0]


def test_the_replica_of_prompts_that_has_most_of_it_gets_it() -> None:
    routing = Routing(4)
    splitting = Splitting(routing, "always")
    splitting.is_known(0, "", ["a", "b", "c"], 0)
    for replica, name in enumerate("abc", 1):
        splitting.is_known(replica, name, [], 0)
    routing.stored(3, range(50))
    sent = routing.send(RoutedPrompt(1000, range(62), 16), 0.0, but=splitting.not_for_answers)
    place = splitting.choose(RoutedPrompt(1000, range(62), 16), sent, 0.0).place
    assert place.endpoint == "c"


@pytest.mark.parametrize("why", ["closed", "unreachable", "never", "without the adapter"])
def test_nobody_else_computes_it(why: str) -> None:
    routing, splitting = made("never" if why == "never" else "always")
    if why == "closed":
        routing.is_open[PROMPTS] = False
    if why == "unreachable":
        splitting.is_known(HERE, "", ["tcp://three:1"], 0)
    sent = routing.send(RoutedPrompt(1000, range(62), 16), 0.0, but=[PROMPTS, OTHER])
    but = [PROMPTS] if why == "without the adapter" else []
    assert splitting.choose(RoutedPrompt(1000, range(62), 16), sent, 0.0, but).place is None
    assert routing.queued_tokens.tolist() == [1000, 0, 0]


def test_replicas_of_prompts_answer_only_where_no_other_does() -> None:
    routing, splitting = made()
    assert splitting.not_for_answers == [PROMPTS, OTHER]
    routing.is_open[HERE] = False
    assert splitting.not_for_answers == []
    routing.is_open[HERE] = True
    splitting.is_known(OTHER, "", [], 0)  # it came back with another recipe
    assert splitting.not_for_answers == [PROMPTS]
    assert made("never")[1].not_for_answers == []


def test_replicas_of_prompts_answer_where_all_slots_of_others_are_taken() -> None:
    routing, splitting = made(slots=4)
    long = RoutedPrompt(1000, range(62), 16)
    busy(routing, 3)
    assert splitting.not_for_answers == [PROMPTS, OTHER], "one slot is left"
    busy(routing, 4)
    routing.report_load(OTHER, 0, 4, as_of_s=-1.0)
    assert splitting.not_for_answers == [OTHER], "it has none either"
    sent = routing.send(long, 0.0, but=splitting.not_for_answers)
    assert sent is not None
    assert sent.replica == PROMPTS
    assert splitting.choose(long, sent, 0.0).place is None, "nobody computes prompts for it"
    routing.report_load(PROMPTS, 0, 4, as_of_s=1.0)
    assert splitting.not_for_answers == [PROMPTS, OTHER], "where it waits, it waits with those that answer"
    assert routing.send(long, 0.0, but=splitting.not_for_answers).replica == HERE
    routing.is_open[HERE] = False
    assert splitting.not_for_answers == []
    apart, always = made("always", slots=4)
    busy(apart, 4)
    assert always.not_for_answers == [PROMPTS, OTHER]


def test_a_choice_says_what_was_compared() -> None:
    """By hand: 1,000 tokens beside 20 others lose 5 % for each; there, 32 and a tenth of what moves."""
    routing, splitting = made()
    busy(routing, 20)
    prompt = RoutedPrompt(1000, range(62), 16)
    sent = routing.send(prompt, 0.0, but=splitting.not_for_answers)
    assert sent is not None
    choice = splitting.choose(prompt, sent, 0.0)
    assert choice.cost_here == pytest.approx(1000 * (1 + 0.05 * 20))
    assert choice.cost_there == pytest.approx(1000 + 32 + 100)
    short = routing.send(RoutedPrompt(10, (), 16), 0.0, but=splitting.not_for_answers)
    assert short is not None
    assert splitting.choose(RoutedPrompt(10, (), 16), short, 0.0).cost_here is None, "it was not asked"
