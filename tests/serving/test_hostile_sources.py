"""An engine that lies or takes nothing does not use up what others need of a step or of memory."""

from __future__ import annotations

import numpy as np
import pytest

from kv_cache.exchange.connection import Connection, Wake
from kv_cache.exchange.messages import NotSent, PageIdentity, PagesWanted
from kv_cache.exchange.prompt_source import Came, PromptSource
from serving.engine import page_exchange as exchange
from serving.engine.page_exchange import PageFetches
from tests.kv_cache import device
from tests.serving.hostile_peer import AnswersPeer
from tests.serving.page_pair import HERE, Pair, alone, cache_of, prompts

LIAR = "tcp://127.0.0.1:1"
FLOOD = 4096


def source_of(pair: Pair) -> PromptSource:
    """A source of which messages are put into its queue by hand."""
    identity = PageIdentity("the model", device.PAGE_SIZE, cache_of(pair.answers).layout)
    return PromptSource(LIAR, identity, Wake())


def flood(source: PromptSource, num_messages: int = FLOOD) -> None:
    silent = Connection(lambda _: None, lambda _: None)
    for _ in range(num_messages):
        source.came.put(Came(silent, NotSent(1, "nobody asked for it")))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_flood_of_one_source_does_not_delay_another(is_first: bool) -> None:
    pair = Pair()
    liar, honest = source_of(pair), pair.source
    names = {LIAR: liar, HERE: honest} if is_first else {HERE: honest, LIAR: liar}
    fetches = PageFetches(pair.answers, cache_of(pair.answers), names, 60.0, Wake())
    for source in (liar, honest):
        flood(source)
    while not honest.came.empty():
        fetches.take()
        assert abs(liar.came.qsize() - honest.came.qsize()) <= 1, "each has its turn"
    pair.close()


@pytest.mark.parametrize("num_unread", [0, 1])
def test_who_answered_is_not_blamed_for_what_lies_unread_here(
    num_unread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is late; only a source that left nothing in this engine's queue is left alone for it."""
    monkeypatch.setattr(exchange, "MOST_WRITTEN_BYTES", 0)
    pair = Pair(most_wait_s=1e-9)  # over by the time it is looked at
    pair.is_stopped = True
    late: list[float] = []
    monkeypatch.setattr(pair.source, "was_late", late.append)
    # A connection that brings nothing: the real one may bring a refusal at any moment
    asked = Connection(lambda _: None, lambda _: None), 1
    monkeypatch.setattr(pair.source, "want", lambda *_: asked)
    request, *_ = prompts(1)
    assert pair.fetching.begin(0, request)
    flood(pair.source, num_unread)
    pair.fetches.take()
    assert [each.leader for each in pair.fetches.take_ready()] == [request]
    assert len(late) == 1 - num_unread
    pair.close()


def test_who_takes_nothing_uses_up_no_memory_for_unsent_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """When all that may be unsent is, one part at a time is read for each, and so for an honest one, too."""
    monkeypatch.setattr(exchange, "MOST_UNSENT_BYTES_OF_ALL", 1)
    pair = Pair()
    most = pair.server.most_part_bytes
    peers = [AnswersPeer(pair, window_bytes=most) for _ in range(2)]
    tokens = (np.arange(8 * device.PAGE_SIZE, dtype="<i4") % device.VOCABULARY).tobytes()
    for each in peers:
        each.say(PagesWanted(1, tokens, "", 0, 600.0))

    def are_computed() -> bool:
        assert all(link.unsent_bytes <= most for link in pair.server.links)
        sendings = [*pair.sends._sendings.values()]
        return len(sendings) == len(peers) and all(each.is_computed for each in sendings)

    pair.until(are_computed)
    assert pair.serve(prompts(1)) == alone(prompts(1))
    assert pair.answers.scheduler.counters.arrived_pages
    for each in peers:
        each.close()
    pair.settle()
    pair.close()
