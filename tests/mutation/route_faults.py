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
    "hits_over_gaps": Fault(
        "continuous_batching/routing/routing.py::num_first",
        "_put(found, there ^ still, number)",
        "_put(found, there ^ still, number + 1)",
        "a replica seems to hold a page more than it does",
        "tests/continuous_batching/test_routing.py::test_pages_that_were_told_draw_a_prompt",
    ),
    "snapshot_upon_what_was": Fault(
        "kv_cache/events.py::PageEvents._answer",
        "[AllBlocksCleared(), *self._pages.values()]",
        "[*self._pages.values()]",
        "who missed that a page went believes in it for ever",
        "tests/kv_cache/test_events.py::test_a_late_reader_knows_all",
    ),
    "door_shut_streams_cut": Fault(
        "serving/router/replicas.py::FleetReplica.watch",
        "self._shut(str(lost))",
        "self.lose(str(lost))",
        "a server that drains behind a closed door has its answers cut",
        "tests/serving/router/test_lost_replicas.py::test_who_drains_behind_a_closed_door_ends_its_answers",
    ),
    "lost_asked_again": Fault(
        "serving/router/upstream.py::Upstream.ask",
        "not answer.is_used or answer.is_given_up",
        "not answer.is_used",
        "a request waits for ever at a server that stands still and is known to be lost",
        "tests/serving/router/test_lost_replicas.py::test_who_stands_still_is_not_asked_again",
    ),
    "posted_twice": Fault(
        "serving/router/proxy.py::Proxy._send_on",
        "is_once and lost.may_be_done",
        "False",
        "a batch is run at two replicas",
        "tests/serving/router/test_lost_replicas.py::test_a_file_is_not_posted_twice",
    ),
    "pages_without_end": Fault(
        "serving/router/page_reader.py::PageReader._take",
        "max(len(keys), self._num_pages) > _MOST_PAGES",
        "False",
        "a replica that tells of ever more pages fills the router's memory",
        "tests/serving/router/test_page_reader.py::test_what_a_replica_tells_of_its_pages_is_bounded",
    ),
    "answers_not_slowed": Fault(
        "continuous_batching/routing/splitting.py::Splitting._cost_here",
        "self._weights.answer * others",
        "self._weights.answer",
        "long prompts are computed beside however many answers",
        "tests/continuous_batching/test_splitting.py::test_long_prompts_go_where_no_answers_run_and_short_ones_stay",
    ),
    "closed_prompts_chosen": Fault(
        "continuous_batching/routing/splitting.py::Splitting._places",
        "each in sources and is_open[at]",
        "each in sources",
        "a prompt is to be computed by a replica that is lost",
        "tests/continuous_batching/test_splitting.py::test_nobody_else_computes_it",
    ),
    "nobody_left_to_answer": Fault(
        "continuous_batching/routing/splitting.py::Splitting.not_for_answers",
        "if not others:\n    return []",
        "if not others:\n    return ours",
        "requests are refused while a replica of prompts could answer them",
        "tests/continuous_batching/test_splitting.py::test_replicas_of_prompts_answer_only_where_no_other_does",
    ),
    "prompt_waits_at_both": Fault(
        "continuous_batching/routing/splitting.py::Splitting.choose",
        "self._routing.begun(sent)",
        "",
        "a replica of answers seems busy with prompts that others compute",
        "tests/continuous_batching/test_splitting.py::test_a_prompt_counts_where_it_is_computed_until_it_is",
    ),
    "link_sends_all_at_once": Fault(
        "simulation/disaggregated.py::DisaggregatedFleet._computed",
        "max(begun_s + layer_s, self._free_s[moving.prompts])",
        "begun_s + layer_s",
        "a link carries more than it can",
        "tests/simulation/test_disaggregated.py::test_a_link_sends_one_prompt_after_the_other",
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
        "now_s + min(2.0**self._num_failed, MOST_PAUSE_S)",
        "now_s",
        "a model that cannot be loaded is loaded again at once, for ever",
        "tests/recipes/test_replica_set.py::test_what_never_gets_ready_is_tried_less_and_less_often",
    ),
    "forgotten_with_requests_open": Fault(
        "serving/router/membership.py::FleetMembers.watch",
        'each.leaves and each.state != "gone" and not each.num_open',
        'each.leaves and each.state != "gone"',
        "what a leaving replica is at is cut off",
        "tests/serving/router/test_membership.py::test_who_comes_is_asked_and_who_leaves_is_not",
    ),
    "no_name_server_no_replicas": Fault(
        "serving/router/membership.py::FleetMembers.follow",
        "trouble = str(error)",
        "trouble = str(error)\nself._become(url, set())",
        "a name server that is away for a second empties the fleet",
        "tests/serving/router/test_membership.py::test_the_addresses_of_a_name_are_replicas",
    ),
}
