"""Which faults are seeded where it is decided which replica takes a request?"""

from __future__ import annotations

from tests.mutation.fault import Fault

ROUTING = "continuous_batching/routing.py"
PROTOCOL = "serving/api/protocol.py"
HOLDERS = "continuous_batching/key_holders.py"
EVENTS = "kv_cache/events.py"
REPLICAS = "serving/router/replicas.py"
UPSTREAM = "serving/router/upstream.py"
MODEL, ANSWERS = "serving/router/fleet_model.py", "serving/router/replica_answers.py"
PROXY = "serving/router/proxy.py"
READER = "serving/router/page_reader.py"
ROUTING_TESTS_OF = {
    ROUTING: ("tests/continuous_batching/test_routing.py",),
    PROTOCOL: ("tests/serving/router/test_gone_clients.py",),
    HOLDERS: ("tests/continuous_batching/test_routing.py",),
    EVENTS: ("tests/kv_cache/test_events.py",),
    **dict.fromkeys((REPLICAS, UPSTREAM), ("tests/serving/router/test_lost_replicas.py",)),
    **dict.fromkeys((MODEL, ANSWERS), ("tests/serving/router/test_hostile_replicas.py",)),
    PROXY: tuple(f"tests/serving/router/test_{name}.py" for name in ("lost_replicas", "proxy", "abort")),
    READER: ("tests/serving/router/test_page_reader.py",),
}

ROUTING_FAULTS = (
    Fault(
        "own_sends_forgotten",
        ROUTING,
        "        known.own_queued += sent.queued_tokens\n",
        "",
        "a burst goes to the replica that was last said to be idle",
    ),
    Fault(
        "told_and_own_counted",
        ROUTING,
        "            known.own_told += first.queued_tokens\n            known.own_requests -= 1\n",
        "            known.own_told += first.queued_tokens\n",
        "a request counts twice once its replica has told of it",
    ),
    Fault(
        "begun_takes_what_others_need",
        ROUTING,
        "                known.told_queued = max(told - sent.queued_tokens, min(told, known.own_told))\n",
        "                known.told_queued = max(told - sent.queued_tokens, 0)\n",
        "a replica whose queue is half computed seems idle, and gets what others have room for",
    ),
    Fault(
        "hits_over_gaps",
        HOLDERS,
        "            _put(found, there ^ still, number)\n",
        "            _put(found, there ^ still, number + 1)\n",
        "a replica seems to hold a page more than it does",
    ),
    Fault(
        "ties_to_the_first",
        ROUTING,
        "            return later if costs[later] == costs[least] else least\n",
        "            return least\n",
        "the first of equal replicas gets everything",
    ),
    Fault(
        "snapshot_upon_what_was",
        EVENTS,
        "            snapshot = KVEventBatch(time.time(), [AllBlocksCleared(), *self._pages.values()])\n",
        "            snapshot = KVEventBatch(time.time(), [*self._pages.values()])\n",
        "who missed that a page went believes in it for ever",
    ),
    Fault(
        "shared_as_dear_as_ones_own",
        ROUTING,
        "            costs -= np.maximum(hits, hits * weights.shared + second * (1 - weights.shared))\n",
        "            costs -= hits\n",
        "a system prompt stays where it is, however many more requests that replica gets",
    ),
    Fault(
        "shared_by_one",
        HOLDERS,
        "            second = number if there & (there - 1) else second\n",
        "            second = number\n",
        "a conversation is parted from its pages for half of what they cost",
    ),
    Fault(
        "no_prompt_counts_as_one",
        ROUTING,
        "        if prompt.num_tokens:\n",
        "        if True:\n",
        "asking for the names of models makes even loads worth nothing",
    ),
    Fault(
        "door_shut_streams_cut",
        REPLICAS,
        "            except Lost as lost:\n                self._shut(str(lost))\n",
        "            except Lost as lost:\n                self.lose(str(lost))\n",
        "a server that drains behind a closed door has its answers cut",
    ),
    Fault(
        "lost_asked_again",
        UPSTREAM,
        "                if not answer.is_used or answer.is_given_up:\n",
        "                if not answer.is_used:\n",
        "a request waits for ever at a server that stands still and is known to be lost",
    ),
    Fault(
        "posted_twice",
        PROXY,
        "                if is_once and lost.may_be_done:\n",
        "                if False:\n",
        "a batch is run at two replicas",
    ),
    Fault(
        "cancelled_once",
        PROXY,
        "        self._again = self._task.get_loop().call_later(AGAIN_S, self._gone)\n",
        "",
        "a replica computes for a client that is gone",
    ),
    Fault(
        "deaf_after_a_long_body",
        PROTOCOL,
        "            self.flow.resume_reading()  # after",
        "            pass  # after",
        "a replica computes for a client that is gone, if it sent a long prompt",
    ),
    Fault(
        "last_bytes_said_twice",
        PROXY,
        '                unsent = b""\n',
        "                pass\n",
        "a stream that is cut off repeats its last event",
    ),
    Fault(
        "unknown_instead_of_refused",
        PROXY,
        "                    if said is None or said[0] == _UNKNOWN or answer[0] == _DONE:\n",
        "                    if said is None or answer[0] == _DONE:\n",
        "who may not end a request is told that nobody has it",
    ),
    Fault(
        "old_engine_believed",
        READER,
        "            if self._gone in ready:\n                return\n",
        "            if self._gone in ready:\n                await self._gone.recv_multipart()\n",
        "pages of an engine that is gone draw prompts, and those of the new one none",
    ),
    Fault(
        "one_asked_to_abort",
        PROXY,
        "        asking = [asyncio.ensure_future(ask(each)) for each in there]\n",
        "        asking = [asyncio.ensure_future(ask(each)) for each in there[:1]]\n",
        "requests of other replicas go on for nobody",
    ),
    Fault(
        "lost_while_aborting",
        PROXY,
        "                with suppress(Lost):  # with its requests",
        "                with suppress(ValueError):  # with its requests",
        "a request cannot be aborted while any replica is lost",
    ),
    Fault(
        "any_model_behind_one_router",
        MODEL,
        '        if model in ("", self.name):\n',
        "        if model is not None:\n",
        "half of the requests are told that their model is not served",
    ),
    Fault(
        "answer_of_any_length",
        ANSWERS,
        "            if num_bytes > most_bytes:\n",
        "            if num_bytes < 0:\n",
        "a replica whose metrics never end fills the router's memory",
    ),
)
