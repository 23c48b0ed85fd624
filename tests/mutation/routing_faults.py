"""Which faults are seeded where it is decided which replica takes a request?"""

from __future__ import annotations

from tests.mutation.fault import Fault

ROUTING = "continuous_batching/routing.py"
EVENTS = "kv_cache/events.py"
ROUTING_TESTS_OF = {
    ROUTING: ("tests/continuous_batching/test_routing.py",),
    EVENTS: ("tests/kv_cache/test_events.py",),
}

ROUTING_FAULTS = (
    Fault(
        "own_sends_forgotten",
        ROUTING,
        "        self._own_queued[chosen] += sent.queued_tokens\n",
        "",
        "a burst goes to the replica that was last said to be idle",
    ),
    Fault(
        "told_and_own_counted",
        ROUTING,
        "            self._own_requests[replica] -= 1\n",
        "",
        "a request counts twice once its replica has told of it",
    ),
    Fault(
        "hits_over_gaps",
        ROUTING,
        "                found[_numbers(there ^ still, self.count)] = number\n",
        "                found[_numbers(there ^ still, self.count)] = number + 1\n",
        "a replica seems to hold a page more than it does",
    ),
    Fault(
        "ties_to_the_first",
        ROUTING,
        "        return int(equal[np.searchsorted(equal, self._last + 1) % len(equal)])",
        "        return int(equal[0])",
        "the first of equal replicas gets everything",
    ),
    Fault(
        "snapshot_upon_what_was",
        EVENTS,
        "            snapshot = KVEventBatch(time.time(), [AllBlocksCleared(), *self._pages.values()])\n",
        "            snapshot = KVEventBatch(time.time(), [*self._pages.values()])\n",
        "who missed that a page went believes in it for ever",
    ),
)
