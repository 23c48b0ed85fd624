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
    UPSTREAM: ("tests/serving/router/test_lost_replicas.py",),
    REPLICAS: tuple(f"tests/serving/router/test_{name}.py" for name in ("lost_replicas", "fleet_model")),
    **dict.fromkeys(
        (MODEL, ANSWERS),
        tuple(f"tests/serving/router/test_{name}.py" for name in ("fleet_model", "hostile_replicas")),
    ),
    PROXY: tuple(f"tests/serving/router/test_{name}.py" for name in ("lost_replicas", "proxy", "abort")),
    READER: ("tests/serving/router/test_page_reader.py",),
}

ROUTING_FAULTS = {
    "own_sends_forgotten": Fault(
        ROUTING + "::Routing.send",
        "known.own_queued += sent.queued_tokens",
        "",
        "a burst goes to the replica that was last said to be idle",
    ),
    "told_and_own_counted": Fault(
        ROUTING + "::Routing.told",
        "known.own_requests -= 1",
        "",
        "a request counts twice once its replica has told of it",
    ),
    "begun_takes_what_others_need": Fault(
        ROUTING + "::Routing.begun",
        "min(told, known.own_told)",
        "0",
        "a replica whose queue is half computed seems idle, and gets what others have room for",
    ),
    "hits_over_gaps": Fault(
        HOLDERS + "::num_first",
        "_put(found, there ^ still, number)",
        "_put(found, there ^ still, number + 1)",
        "a replica seems to hold a page more than it does",
    ),
    "ties_to_the_first": Fault(
        ROUTING + "::Routing._least",
        "later if costs[later] == costs[least] else least",
        "least",
        "the first of equal replicas gets everything",
    ),
    "snapshot_upon_what_was": Fault(
        EVENTS + "::PageEvents._answer",
        "[AllBlocksCleared(), *self._pages.values()]",
        "[*self._pages.values()]",
        "who missed that a page went believes in it for ever",
    ),
    "shared_as_dear_as_ones_own": Fault(
        ROUTING + "::Routing._costs",
        "np.maximum(hits, hits * weights.shared + second * (1 - weights.shared))",
        "hits",
        "a system prompt stays where it is, however many more requests that replica gets",
    ),
    "shared_by_one": Fault(
        HOLDERS + "::num_first",
        "number if there & (there - 1) else second",
        "number",
        "a conversation is parted from its pages for half of what they cost",
    ),
    "no_prompt_counts_as_one": Fault(
        ROUTING + "::Routing._learn",
        "if prompt.num_tokens: ...",
        "if True: ...",
        "asking for the names of models makes even loads worth nothing",
    ),
    "door_shut_streams_cut": Fault(
        REPLICAS + "::FleetReplica.watch",
        "self._shut(str(lost))",
        "self.lose(str(lost))",
        "a server that drains behind a closed door has its answers cut",
    ),
    "lost_asked_again": Fault(
        UPSTREAM + "::Upstream.ask",
        "not answer.is_used or answer.is_given_up",
        "not answer.is_used",
        "a request waits for ever at a server that stands still and is known to be lost",
    ),
    "posted_twice": Fault(
        PROXY + "::Proxy._send_on", "is_once and lost.may_be_done", "False", "a batch is run at two replicas"
    ),
    "cancelled_once": Fault(
        PROXY + "::ClientWatch._gone",
        "self._again = self._task.get_loop().call_later(AGAIN_S, self._gone)",
        "",
        "a replica computes for a client that is gone",
    ),
    "deaf_after_a_long_body": Fault(
        PROTOCOL + "::Protocol.on_message_complete",
        "self.flow.resume_reading()",
        "pass",
        "a replica computes for a client that is gone, if it sent a long prompt",
    ),
    "last_bytes_said_twice": Fault(
        PROXY + "::Proxy._forward", 'unsent = b""', "pass", "a stream that is cut off repeats its last event"
    ),
    "unknown_instead_of_refused": Fault(
        PROXY + "::Proxy._abort",
        "said is None or said[0] == _UNKNOWN or answer[0] == _DONE",
        "said is None or answer[0] == _DONE",
        "who may not end a request is told that nobody has it",
    ),
    "old_engine_believed": Fault(
        READER + "::PageReader._read_one",
        "return",
        "await self._gone.recv_multipart()",
        "pages of an engine that is gone draw prompts, and those of the new one none",
    ),
    "one_asked_to_abort": Fault(
        PROXY + "::Proxy._abort", "there", "there[:1]", "requests of other replicas go on for nobody"
    ),
    "lost_while_aborting": Fault(
        PROXY + "::Proxy._abort",
        "suppress(Lost)",
        "suppress(ValueError)",
        "a request cannot be aborted while any replica is lost",
    ),
    "any_model_behind_one_router": Fault(
        MODEL + "::FleetModel.refusal",
        "not names or self.name in names",
        "True",
        "half of the requests are told that their model is not served",
    ),
    "gone_and_still_decides": Fault(
        MODEL + "::FleetModel._holder",
        "each.ready_s >= since_s",
        "True",
        "a replica that is gone for good keeps out all that serve another model",
    ),
    "back_and_not_asked": Fault(
        REPLICAS + "::FleetReplica._shut",
        "self._stop_reading()",
        "",
        "a replica that went down twice comes back with another model, and is sent requests",
    ),
    "pages_without_end": Fault(
        READER + "::PageReader._take",
        "max(len(keys), self._num_pages) > _MOST_PAGES",
        "False",
        "a replica that tells of ever more pages fills the router's memory",
    ),
    "answer_of_any_length": Fault(
        ANSWERS + "::ask",
        "num_bytes > most_bytes",
        "num_bytes < 0",
        "a replica whose metrics never end fills the router's memory",
    ),
}
