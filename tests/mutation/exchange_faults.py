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
    SENDS: _EXCHANGE,
    FETCHES: _EXCHANGE,
    WORKER: ("tests/serving/test_worker.py",),
    **dict.fromkeys((MESSAGES, CONNECTION), ("tests/serving/test_hostile_peers.py",)),
    SERVER: _EXCHANGE,
    SOURCE: _EXCHANGE,
    IDENTITY: ("tests/kv_cache/test_exchange.py",),
    TRANSPORTS: ("tests/kv_cache/test_exchange.py", *_EXCHANGE),
}

EXCHANGE_FAULTS = (
    Fault(
        "fetching_requests_untold",
        WORKER,
        "len(compiling) + num_fetched,\n",
        "len(compiling),\n",
        "a router forgets what waits for pages, and sends more there",
    ),
    Fault(
        "compiling_tokens_untold",
        WORKER,
        "tokens_not_found(scheduler, compiling) + fetched_tokens",
        "fetched_tokens",
        "prompts whose grammars are compiled seem to cost nothing",
    ),
    Fault(
        "published_before_whole",
        HELD,
        "        if not is_whole:\n            self._counters",
        "        if not len(pages):\n            self._counters",
        "of a cut transfer, pages that never came are found",
    ),
    Fault(
        "found_pages_not_held",
        HELD,
        "        self._prefix.share(found)\n        if missing",
        "        if missing",
        "what the arriving pages continue is evicted before they come",
    ),
    Fault(
        "arrival_over_promised",
        HELD,
        "        if not missing or missing + num_idle > num_spare:\n",
        "        if not missing or missing > self._tables.num_available - num_idle:\n",
        "pages are taken that running requests were promised",
    ),
    Fault(
        "doubles_stay",
        HELD,
        "            self._prefix.share(standing[doubles])  # so that a chain is used as a whole\n"
        "            self._prefix.release(arrival.filled[doubles])\n"
        "            pages = np.concatenate([pages[: arrival.num_found], standing])\n",
        "",
        "a page is evicted before the one that continues it",
    ),
    Fault(
        "arrived_pages_leak",
        HELD,
        "        self._prefix.release(pages)\n        self._pin()\n",
        "        self._pin()\n",
        "each transfer takes its pages for ever",
    ),
    Fault(
        "lease_not_pinned",
        HELD,
        "        self._leased[name] = pages\n        self._pin()\n",
        "        self._leased[name] = pages[:0]\n        self._pin()\n",
        "pages are evicted or moved while they are being read",
    ),
    Fault(
        "holds_never_give_way",
        HELD,
        "        else:\n            return False\n        return True\n",
        "        return False\n",
        "a request that fits waits for pages that nobody uses",
    ),
    Fault(
        "sent_before_it_is_full",
        SENDS,
        "stop // slots.page_size)\n",
        "-(-stop // slots.page_size))\n",
        "a page is sent without its last tokens",
    ),
    Fault(
        "lease_outlives_the_transfer",
        SENDS,
        "        if sending.is_computed:\n            self._engine.release_pages(sending.request.id)\n"
        "        else:\n",
        "        if not sending.is_computed:\n",
        "each prompt for another engine holds its pages for ever",
    ),
    Fault(
        "lease_without_end",
        SENDS,
        "            if now_s >= sending.until_s:\n",
        "            if now_s >= sending.until_s + 3600:\n",
        "who reads slowly holds another engine's pages",
    ),
    Fault(
        "gone_link_forgotten",
        SENDS,
        "            for sending in self._of(asked.link, number):\n                self._end(sending)\n",
        "            if number is not None:\n                for sending in self._of(asked.link, number):\n"
        "                    self._end(sending)\n",
        "prompts are computed for who is gone",
    ),
    Fault(
        "end_without_a_count",
        FETCHES,
        "                if min(fetch.next_page) == fetch.num_pages and num_bytes == fetch.num_bytes:\n",
        "                if num_bytes:\n",
        "pages are found of which the last part was lost",
    ),
    Fault(
        "late_is_waited_for",
        FETCHES,
        "if now_s >= each.until_s]:\n",
        "if now_s >= each.until_s + 3600]:\n",
        "an engine that stands still holds requests up",
    ),
    Fault(
        "lost_engine_waited_for",
        FETCHES,
        '                self._miss(lost, "the engine is lost")\n',
        "                pass\n",
        "requests wait for an engine that was killed until they are late",
    ),
    Fault(
        "bytes_believed",
        SOURCE,
        "        if zlib.crc32(self.connection.part(part).data) != part.check:\n",
        "        if part.num_bytes != len(self.connection.part(part)):\n",
        "a write that did not arrive whole is read as pages",
    ),
    Fault(
        "model_not_compared",
        IDENTITY,
        '            "the model": (self.model, hello.model),\n',
        "",
        "pages of another model are found under the keys of the same tokens",
    ),
    Fault(
        "window_overrun",
        TRANSPORTS,
        "            if newest < oldest:\n                stop = oldest\n            elif",
        "            if",
        "bytes are put over others that were not taken out yet",
    ),
    Fault(
        "own_send_counts_against_here",
        SPLITTING,
        "        before = int(routing.queued_tokens[sent.replica]) - sent.queued_tokens\n",
        "        before = int(routing.queued_tokens[sent.replica]) * 3\n",
        "a prompt waits for itself, and goes elsewhere to an idle replica",
    ),
    Fault(
        "slots_of_others_unasked",
        SPLITTING,
        "any(self._has_slot(each) for each in others)",
        "others",
        "requests wait for a slot while engines of prompts have some",
    ),
    Fault(
        "split_counted_twice",
        SPLITTING,
        "        self._routing.begun(sent)  # nothing of it waits to be computed here\n",
        "",
        "replicas of answers seem to compute what others do",
    ),
    Fault(
        "priority_of_a_peer_unbounded",
        MESSAGES,
        "    priority: Annotated[int, Meta(ge=-LAST_ID, le=LAST_ID)] = 0\n",
        "    priority: int = 0\n",
        "one message of another engine ends this one",
    ),
    Fault(
        "begun_message_waited_for",
        CONNECTION,
        "incoming.until_s = time.monotonic() + MESSAGE_S\n",
        "incoming.until_s = time.monotonic() + 3600\n",
        "a part that is never ended holds up the request that it is for",
    ),
    Fault(
        "stalled_asked_again",
        SOURCE,
        "            self._pause_s = STALLED_S\n",
        "            pass\n",
        "each request waits for an engine of prompts that stands still",
    ),
    Fault(
        "silent_take_all_places",
        SERVER,
        "if len(self._ungreeted) > MOST_UNGREETED else None\n",
        "if len(self._ungreeted) > 2**20 else None\n",
        "connections that say nothing take memory and threads",
    ),
)
