"""An engine of prompts that lies to an engine of answers does not keep the pages of another one from it."""

from __future__ import annotations

import pytest

from kv_cache.exchange.connection import Connection, Wake
from kv_cache.exchange.identity import PageIdentity
from kv_cache.exchange.messages import NotSent
from kv_cache.exchange.prompt_source import Came, PromptSource
from serving.engine import page_fetches
from serving.engine.page_fetches import PageFetches
from tests.kv_cache import device
from tests.serving.page_pair import HERE, Pair, cache_of, prompts

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
    monkeypatch.setattr(page_fetches, "MOST_WRITTEN_BYTES", 0)
    pair = Pair(most_wait_s=0.0)
    pair.is_stopped = True
    late: list[float] = []
    monkeypatch.setattr(pair.source, "was_late", late.append)
    request, *_ = prompts(1)
    assert pair.fetching.begin(0, request)
    flood(pair.source, num_unread)
    pair.fetches.take()
    assert [each.leader for each in pair.fetches.take_ready()] == [request]
    assert len(late) == 1 - num_unread
    pair.close()
