"""Which faults are seeded where pages go from one engine to another?"""

from __future__ import annotations

from tests.mutation.fault import Fault

HELD = "continuous_batching/paging/held_pages.py"
SPLITTING = "continuous_batching/splitting.py"
SENDS, FETCHES = "serving/engine/page_sends.py", "serving/engine/page_fetches.py"
WORKER = "serving/engine/worker.py"
SERVER, SOURCE = "kv_cache/exchange/page_server.py", "kv_cache/exchange/prompt_source.py"
IDENTITY = "kv_cache/exchange/identity.py"
MESSAGES, CONNECTION = "kv_cache/exchange/messages.py", "kv_cache/exchange/connection.py"
TRANSPORTS = "kv_cache/exchange/transports.py"
_EXCHANGE = ("tests/serving/test_page_exchange.py", "tests/serving/test_hostile_peers.py")
EXCHANGE_TESTS_OF = {
    HELD: ("tests/continuous_batching/test_held_pages.py",),
    SPLITTING: ("tests/continuous_batching/test_splitting.py",),
    SENDS: (*_EXCHANGE, "tests/serving/test_hostile_sources.py"),
    FETCHES: (*_EXCHANGE, "tests/serving/test_hostile_sources.py"),
    WORKER: ("tests/serving/test_worker.py",),
    **dict.fromkeys((MESSAGES, CONNECTION), ("tests/serving/test_hostile_peers.py",)),
    SERVER: _EXCHANGE,
    SOURCE: _EXCHANGE,
    IDENTITY: ("tests/kv_cache/test_exchange.py",),
    TRANSPORTS: ("tests/kv_cache/test_exchange.py", *_EXCHANGE),
}

EXCHANGE_FAULTS = {
    "fetching_requests_untold": Fault(
        WORKER + "::Worker._usage",
        "found.waiting_requests + len(compiling) + num_fetched",
        "found.waiting_requests + len(compiling)",
        "a router forgets what waits for pages, and sends more there",
    ),
    "compiling_tokens_untold": Fault(
        WORKER + "::Worker._usage",
        "found.queued_tokens + tokens_not_found(scheduler, compiling)",
        "found.queued_tokens",
        "prompts whose grammars are compiled seem to cost nothing",
    ),
    "published_before_whole": Fault(
        HELD + "::HeldPages.arrived",
        "not is_whole",
        "not len(pages)",
        "of a cut transfer, pages that never came are found",
    ),
    "found_pages_not_held": Fault(
        HELD + "::HeldPages.expect",
        "self._prefix.share(found)",
        "",
        "what the arriving pages continue is evicted before they come",
    ),
    "arrival_over_promised": Fault(
        HELD + "::HeldPages.expect",
        "missing + num_idle > num_spare",
        "missing > self._tables.num_available - num_idle",
        "pages are taken that running requests were promised",
    ),
    "doubles_stay": Fault(
        HELD + "::HeldPages.arrived",
        (
            "self._prefix.share(standing[doubles])\n"
            "self._prefix.release(arrival.filled[doubles])\n"
            "pages = np.concatenate([pages[: arrival.num_found], standing])"
        ),
        "",
        "a page is evicted before the one that continues it",
    ),
    "arrived_pages_leak": Fault(
        HELD + "::HeldPages.arrived",
        "self._prefix.release(pages)",
        "",
        "each transfer takes its pages for ever",
    ),
    "lease_not_pinned": Fault(
        HELD + "::HeldPages.lease",
        "self._leased[name] = pages",
        "self._leased[name] = pages[:0]",
        "pages are evicted or moved while they are being read",
    ),
    "holds_never_give_way": Fault(
        HELD + "::HeldPages.give_way",
        "if self._arriving: ...\nelif self._leased: ...\nelse:\n    return False\nreturn True",
        "if self._arriving: ...\nelif self._leased: ...\nreturn False",
        "a request that fits waits for pages that nobody uses",
    ),
    "sent_before_it_is_full": Fault(
        SENDS + "::PageSends._tapped",
        "stop // slots.page_size",
        "-(-stop // slots.page_size)",
        "a page is sent without its last tokens",
    ),
    "lease_outlives_the_transfer": Fault(
        SENDS + "::PageSends._end",
        "if sending.is_computed:\n    self._engine.release_pages(sending.request.id)\nelse: ...",
        "if not sending.is_computed: ...",
        "each prompt for another engine holds its pages for ever",
    ),
    "lease_without_end": Fault(
        SENDS + "::PageSends.take",
        "sending.until_s",
        "sending.until_s + 3600",
        "who reads slowly holds another engine's pages",
    ),
    "gone_link_forgotten": Fault(
        SENDS + "::PageSends.take",
        "for sending in self._of(asked.link, number): ...",
        "if number is not None:\n    for sending in self._of(asked.link, number): ...",
        "prompts are computed for who is gone",
    ),
    "end_without_a_count": Fault(
        FETCHES + "::PageFetches._hear",
        "min(fetch.next_page) == fetch.num_pages and num_bytes == fetch.num_bytes",
        "num_bytes",
        "pages are found of which the last part was lost",
    ),
    "late_is_waited_for": Fault(
        FETCHES + "::PageFetches.take",
        "each.until_s",
        "each.until_s + 3600",
        "an engine that stands still holds requests up",
    ),
    "lost_engine_waited_for": Fault(
        FETCHES + "::PageFetches._hear",
        'self._miss(lost, "the engine is lost")',
        "pass",
        "requests wait for an engine that was killed until they are late",
    ),
    "bytes_believed": Fault(
        SOURCE + "::_Life._check",
        "zlib.crc32(self.connection.part(part).data) != part.check",
        "part.num_bytes != len(self.connection.part(part))",
        "a write that did not arrive whole is read as pages",
    ),
    "model_not_compared": Fault(
        IDENTITY + "::PageIdentity.difference",
        '"the model": (self.model, hello.model)',
        "",
        "pages of another model are found under the keys of the same tokens",
    ),
    "window_overrun": Fault(
        TRANSPORTS + "::Ring.take",
        "stop = self.num_bytes\nif newest < oldest:\n    stop = oldest\nelif start + count > stop: ...",
        "stop = self.num_bytes\nif start + count > stop: ...",
        "bytes are put over others that were not taken out yet",
    ),
    "own_send_counts_against_here": Fault(
        SPLITTING + "::Splitting._cost_here",
        "int(routing.queued_tokens[sent.replica]) - sent.queued_tokens",
        "int(routing.queued_tokens[sent.replica]) * 3",
        "a prompt waits for itself, and goes elsewhere to an idle replica",
    ),
    "slots_of_others_unasked": Fault(
        SPLITTING + "::Splitting.not_for_answers",
        "any(self._has_slot(each) for each in others)",
        "others",
        "requests wait for a slot while engines of prompts have some",
    ),
    "split_counted_twice": Fault(
        SPLITTING + "::Splitting.choose",
        "self._routing.begun(sent)",
        "",
        "replicas of answers seem to compute what others do",
    ),
    "priority_of_a_peer_unbounded": Fault(
        MESSAGES + "::PagesWanted",
        "Annotated[int, Meta(ge=-LAST_ID, le=LAST_ID)]",
        "int",
        "one message of another engine ends this one",
    ),
    "begun_message_waited_for": Fault(
        CONNECTION + "::Connection._receive",
        "incoming.left_s = MESSAGE_S",
        "incoming.left_s = 3600.0",
        "a part that is never ended holds up the request that it is for",
    ),
    "stalled_asked_again": Fault(
        SOURCE + "::_Life._ended",
        "self._pause_s = STALLED_S",
        "pass",
        "each request waits for an engine of prompts that stands still",
    ),
    "silent_take_all_places": Fault(
        SERVER + "::PageServer._accept",
        "len(self._ungreeted) > MOST_UNGREETED",
        "len(self._ungreeted) > 2**20",
        "connections that say nothing take memory and threads",
    ),
}
