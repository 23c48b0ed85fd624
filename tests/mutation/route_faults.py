"""Faults of the router: which replica takes a request, and how many replicas there are."""

from __future__ import annotations

from tests.mutation.fault import Fault

FAULTS = {
    "own_sends_forgotten": Fault(
        "continuous_batching/routing/routing.py::Routing.send",
        "known.own_queued += sent.queued_tokens",
        "",
        "a burst goes to the replica that was last said to be idle",
        "tests/continuous_batching/test_routing.py::test_own_sends_count_until_they_are_told",
    ),
    "snapshot_upon_what_was": Fault(
        "kv_cache/events.py::PageEvents._answer",
        "[AllBlocksCleared(), *self._pages.values()]",
        "[*self._pages.values()]",
        "who missed that a page went believes in it for ever",
        "tests/kv_cache/test_events.py::test_a_late_reader_knows_all",
    ),
    "strangers_events_believed": Fault(
        "serving/router/replicas.py::ReplicaTrust.believes_events",
        "not is_of_others(endpoint, host)",
        "True",
        "events of another machine are believed though nothing proves whose they are",
        "tests/serving/router/test_page_reader.py"
        "::test_events_of_another_machine_are_read_with_a_secret_or_where_the_recipe_is_open",
    ),
    "ray_open_to_others": Fault(
        "recipes/cluster/ray_cluster.py::check_reach",
        "all(map(is_loopback, addresses))",
        "any(map(is_loopback, addresses))",
        "one node on loopback lets the others be where anybody runs code on them",
        "tests/scripts/test_on_ray.py::test_a_cluster_that_others_may_reach_must_be_meant",
    ),
    "door_shut_streams_cut": Fault(
        "serving/router/replicas.py::FleetReplica.watch",
        "self._shut(str(lost))",
        "self.lose(str(lost))",
        "a server that drains behind a closed door has its answers cut",
        "tests/serving/router/test_lost_replicas.py::test_who_drains_behind_a_closed_door_ends_its_answers",
    ),
    "posted_twice": Fault(
        "serving/router/proxy.py::Proxy._send_on",
        "known.lose(is_orderly=lost.is_orderly) or is_once",
        "known.lose(is_orderly=lost.is_orderly)",
        "a batch is run at two replicas",
        "tests/serving/router/test_lost_replicas.py::test_a_file_is_not_posted_twice",
    ),
    "goes_on_with_other_weights": Fault(
        "serving/router/proxy.py::Proxy._next",
        "each.continuations != like",
        "False",
        "another model continues the answer",
        "tests/serving/router/test_resuming.py::test_it_goes_on_only_at_replicas_like_the_first",
    ),
    "begins_without_end": Fault(
        "serving/router/resuming.py::KnownAnswer.lose",
        "self._num_losses > self.most_losses",
        "False",
        "a request that ends engines is sent to all replicas",
        "tests/serving/router/test_resuming.py::test_what_ends_engines_before_its_first_token_is_not_sent_to_all",
    ),
    "goes_on_without_end": Fault(
        "serving/router/resuming.py::KnownAnswer.check_resumable",
        "num_lost >= begun.most_resumed",
        "False",
        "a request that ends engines ends all of them, for ever",
        "tests/serving/router/test_resuming.py::test_it_goes_on_as_often_as_it_may",
    ),
    "answers_fill_the_router": Fault(
        "serving/router/resuming.py::KnownAnswers.take",
        "self.num_bytes + num_bytes > self._most_bytes",
        "False",
        "the router keeps ever more of answers",
        "tests/serving/router/test_resuming.py::test_the_memory_for_answers_is_bounded_and_given_back",
    ),
    "bytes_without_tokens_are_believed": Fault(
        "serving/router/framed_answer.py::FramedAnswer.grow",
        "begun_with(each.payload)[1]",
        "False",
        "what a client was sent is sent to it again when the replica is lost",
        "tests/serving/router/test_resuming.py::test_a_replica_that_tells_what_cannot_be_is_lost_with_its_request",
    ),
    "any_key_is_a_routers": Fault(
        "serving/api/continuations.py::Continuations._is_router",
        "client is not None and client.may_operate and (client is not ANYBODY or self._is_local)",
        "client is not None",
        "any client has an answer begin as it likes",
        "tests/serving/test_continuations.py::test_with_keys_a_router_shows_an_operators",
    ),
    "goes_on_with_another_seed": Fault(
        "serving/async_llm.py::AsyncLLM._parse",
        "seed=known.begun.seed",
        "",
        "the rest of a drawn answer is another one's",
        "tests/serving/test_continuations.py::test_what_is_drawn_without_a_seed_goes_on_too",
    ),
    "parsers_begin_anew": Fault(
        "serving/api/frame_writer.py::FrameWriter._replayed",
        "range(0, len(replayed), _REWRITTEN)",
        "range(0)",
        "roles, thoughts and numbers of events begin again in the middle of a stream",
        "tests/serving/test_continuations.py::test_an_answer_goes_on_byte_for_byte_from_any_token",
    ),
    "asks_again_while_one_starts": Fault(
        "continuous_batching/routing/scaling.py::decide",
        "demand.num_ready >= wanted and demand.queued_tokens > bounds.queued_tokens * wanted",
        "demand.queued_tokens > bounds.queued_tokens * wanted",
        "what one that loads for minutes is for brings all that there may be",
        "tests/continuous_batching/test_scaling.py::test_while_one_starts_no_other_is_asked_for",
    ),
    "stopped_while_it_answers": Fault(
        "recipes/cluster/replica_set.py::ReplicaSet._stop_drained",
        "each.replica.url is None or each.replica.url not in report.replicas",
        "True",
        "one that is scaled down ends with its requests unanswered",
        "tests/recipes/test_replica_set.py::test_who_goes_is_stopped_when_its_last_request_has_ended",
    ),
    "started_again_without_a_pause": Fault(
        "recipes/cluster/replica_set.py::ReplicaSet.bury",
        "now_s + self._pause_s",
        "now_s",
        "a model that cannot be loaded is loaded again at once, for ever",
        "tests/recipes/test_replica_set.py::test_what_never_gets_ready_is_tried_less_and_less_often",
    ),
    "no_name_server_no_replicas": Fault(
        "serving/router/membership.py::FleetMembers.follow",
        "trouble = str(error)",
        "trouble = str(error)\nself._become(url, set())",
        "a name server that is away for a second empties the fleet",
        "tests/serving/router/test_membership.py::test_the_addresses_of_a_name_are_replicas",
    ),
}
