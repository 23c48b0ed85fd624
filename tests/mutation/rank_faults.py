"""Faults of ranks: what they hear, which layers and slices they hold, and what they sum."""

from __future__ import annotations

from tests.mutation.fault import Fault

_DIVIDED = "tests/models/test_tensor_parallel.py::test_ranks_compute_what_one_computes"

FAULTS = {
    "two_ranks_on_an_npu": Fault(
        "recipes/cluster/rank_table.py::_server",
        "times > 1",
        "times > 2",
        "two ranks of a machine take the same NPU",
        "tests/recipes/test_cluster.py::test_a_rank_table_that_says_nothing_is_refused",
    ),
    "moved_pages_believed": Fault(
        "kv_cache/device/rank_pages.py::RankPages.move",
        "self._check(layer, pages)",
        "",
        "a leader's entry reads beyond a rank's pages",
        "tests/kv_cache/test_rank_pages.py::test_pages_that_a_rank_does_not_have_are_refused",
    ),
    "parts_weighed_alike": Fault(
        "attention/divided.py::DividedAttention._joined",
        "(output * (sums - total).exp()).sum(0)",
        "output.mean(0)",
        "a rank with few keys of a request counts as much as one with many",
        _DIVIDED,
    ),
    "parts_gathered_in_turn": Fault(
        "attention/divided.py::DividedAttention.all_of",
        "self.neighbours.all_gather(own).movedim(0, 2)",
        "self.neighbours.all_gather(own).movedim(0, 1).reshape(made[first : first + most].shape)",
        "a gathered page has one rank's tokens after the other's, and not in their order",
        _DIVIDED,
    ),
    "turn_of_a_rank_forgotten": Fault(
        "kv_cache/device/rank_pages.py::piece_of_page",
        "slice(piece.turn, None, piece.turns)",
        "slice(0, None, piece.turns)",
        "all neighbours write the first one's tokens of a page that came",
        "tests/kv_cache/test_rank_pages.py::test_ranks_that_divide_pages_exchange_what_one_rank_would_hold",
    ),
    "resize_told_too_late": Fault(
        "continuous_batching/engine.py::Engine.resize",
        (
            "self.observer.resized(counts, give_up)\n"
            "self.runner.resize(counts, self.scheduler.tables.take_copies())"
        ),
        (
            "self.runner.resize(counts, self.scheduler.tables.take_copies())\n"
            "self.observer.resized(counts, give_up)"
        ),
        "the leader waits in a resize for ranks that have not heard of it",
        "tests/continuous_batching/test_follower.py::test_a_resize_is_told_before_ranks_wait_for_each_other_in_it",
    ),
    "forgotten_by_the_leader_alone": Fault(
        "continuous_batching/recording/replay.py::_replay_quiet",
        "lifecycle.matching.forget_all()",
        "pass",
        "ranks find pages of a run before, which the leader computes again",
        "tests/continuous_batching/test_recorder.py::test_a_replay_searches_the_same",
    ),
    "masks_untold": Fault(
        "continuous_batching/recording/recorder.py::_recorded",
        "allowed[:4]",
        "None",
        "ranks that follow take a masked row for a greedy one, and wait for logits that nobody brings",
        "tests/continuous_batching/test_follower.py::test_a_rank_hears_that_tokens_are_masked_and_not_how",
    ),
    "copies_of_other_engines_dropped": Fault(
        "continuous_batching/recording/follower.py::Follower.copy",
        "self._apply(copies)",
        "pass",
        "a rank finds in the host's pool what only the leader wrote there",
        "tests/continuous_batching/test_agreement.py::test_a_rank_makes_the_copies_for_pages_that_are_expected",
    ),
    "missing_answer_waited_for": Fault(
        "continuous_batching/recording/agreement.py::Agreement.take",
        "now_s >= each.until_s",
        "False",
        "a rank that does not answer holds a request for ever",
        "tests/continuous_batching/test_agreement.py"
        "::test_answers_that_are_late_lost_or_out_of_order_settle_within_the_bound",
    ),
    "most_of_the_ranks_counts": Fault(
        "continuous_batching/recording/agreement.py::Settled.least",
        "min(each.count for each in self.answers.values())",
        "max(each.count for each in self.answers.values())",
        "a page is found of which one rank has no bytes",
        "tests/continuous_batching/test_agreement.py"
        "::test_answers_that_are_late_lost_or_out_of_order_settle_within_the_bound",
    ),
    "weights_of_some_ranks": Fault(
        "serving/engine/fence.py::Fence._have_read",
        "self._decide(WEIGHTS, settled.name, is_agreed=False)",
        "self._decide(WEIGHTS, settled.name, is_agreed=True)",
        "weights are put although a rank has refused its share of them",
        "tests/serving/test_orders.py::test_all_ranks_change_or_none_does",
    ),
    "draft_of_an_own_shard": Fault(
        "models/drafting/eagle.py::Eagle3.__init__",
        "share.tensors > 1",
        "False",
        "each rank drafts the best token of its own part of the vocabulary",
        "tests/models/test_eagle3.py::test_ranks_share_a_head_and_say_what_one_says",
    ),
    "another_engine_followed": Fault(
        "continuous_batching/recording/follower.py::Follower._compare",
        "header.facts",
        "own",
        "a rank with other settings goes on until something differs",
        "tests/continuous_batching/test_follower.py::test_an_engine_made_of_something_else_is_refused",
    ),
    "silent_rank_unseen": Fault(
        "continuous_batching/recording/listeners.py::Listeners._receive_once",
        "any(now_s - rank.heard_s > self.limit_s for rank in self._ranks)",
        "False",
        "a rank that is stopped is never named",
        "tests/continuous_batching/test_follower.py::test_a_rank_that_is_stopped_is_named_while_the_leader_is_idle",
    ),
    "pages_of_this_rank": Fault(
        "recipes/assembly/engine.py::_least",
        "world.least(memory.num_pages, machine.device)",
        "memory.num_pages",
        "a rank with less memory has fewer pages than the leader gives out",
        "tests/recipes/test_tensor_ranks.py::test_all_ranks_take_the_pages_that_the_least_of_them_has_room_for",
    ),
    "row_in_two_batches": Fault(
        "continuous_batching/scheduling/in_flight.py::InFlight.withheld",
        "if self._depth > 1:\n    return self.rows",
        "",
        "a row is computed twice, by batches in two stages",
        "tests/continuous_batching/test_depth.py::test_batches_in_flight_share_no_row_and_each_has_its_part",
    ),
    "pages_moved_under_a_stage": Fault(
        "continuous_batching/scheduling/scheduler.py::Scheduler.schedule",
        "self._compaction is not None and (self.depth == 1 or not ahead)",
        "self._compaction is not None",
        "the last stage reads pages where they are not yet",
        "tests/continuous_batching/test_depth.py::test_samples_searches_and_those_that_are_outranked_share_no_row_in_flight",
    ),
    "layer_of_two_stages": Fault(
        "models/parallel/share.py::Share.layers",
        "range(first, stop)",
        "range(first, stop + 1)",
        "a layer is computed twice",
        "tests/models/test_share.py::test_stages_hold_each_layer_once_and_the_first_ranks_hold_the_last",
    ),
    "inputs_of_a_later_table": Fault(
        "models/step/stage_runner.py::StageRunner.start",
        "self._prepared(batch)",
        "lambda: self._prepared(batch)()",
        "the leader reads pages that were moved for a batch after this one",
        "tests/models/test_stage_runner.py::test_the_leader_computes_a_step_when_it_is_asked_for_as_it_was_when_it_was_made",
    ),
    "inputs_for_two_batches": Fault(
        "models/step/graphs.py::DecodeGraphs.__init__",
        "max(2, stages)",
        "2",
        "with three stages, the third batch takes the place of the first, which nobody has computed",
        "tests/models/test_captured_draws.py::test_as_many_captured_steps_as_there_are_stages_wait_with_inputs_of_their_own",
    ),
    "bias_of_every_rank": Fault(
        "models/parallel/share.py::Share.slices",
        "(slice(0, 0),)",
        "()",
        "each rank brings the bias to a sum that is to have it once",
        "tests/models/test_share.py::test_a_tensor_is_cut_by_its_role",
    ),
    "kv_heads_in_turn": Fault(
        "models/parallel/share.py::Share._kv_heads",
        "self.tensor * config.num_kv_heads // self.tensors",
        "self.tensor * max(1, config.num_kv_heads // self.tensors) % config.num_kv_heads",
        "with fewer heads than ranks, query heads read the keys of another group",
        "tests/models/test_share.py::test_a_rank_holds_the_key_value_heads_that_its_query_heads_read",
    ),
    "tokens_rounded_down": Fault(
        "models/parallel/share.py::Share.tokens",
        "-(-config.vocab_size // self.tensors)",
        "config.vocab_size // self.tensors",
        "the last tokens of an odd vocabulary are nowhere",
        "tests/models/test_share.py::test_the_ranks_hold_each_token_once",
    ),
    "rows_padded_in_front": Fault(
        "models/ops/divided_rows.py::DividedRows._padded",
        "(0, 0) * (x.ndim - 1) + (0, missing)",
        "(0, 0) * (x.ndim - 1) + (missing, 0)",
        "where ranks do not divide a step's rows, each row is taken for the one before it",
        "tests/models/test_tensor_parallel.py::test_ranks_compute_what_one_computes",
    ),
    "shared_part_of_one_rank": Fault(
        "models/layers/mixture.py::Mixture._sent",
        "made if shared is None else made + division.summed(shared())",
        "made",
        "a model's tokens that are sent to their experts lack the shared expert",
        "tests/models/test_tensor_parallel_npu.py::test_ranks_on_npus_compute_what_one_processor_computes",
    ),
    "last_of_equal_tokens": Fault(
        "models/layers/logit_parts.py::LogitParts.greedy",
        "torch.where(logits == best, tokens, MOST_TOKENS).amin(0)",
        "torch.where(logits == best, tokens, -1).amax(0)",
        "of equal logits, which bfloat16 has many of, ranks take another token than one rank does",
        "tests/models/test_logit_parts.py::test_the_best_of_all_parts_is_the_first_of_the_best",
    ),
    "nan_of_another_rank": Fault(
        "models/layers/logit_parts.py::LogitParts.own_best",
        "torch.where(is_finite | (logit == -torch.inf), logit, torch.inf)",
        "torch.where(is_finite, logit, -torch.inf)",
        "a row with a NaN on one rank gets a token of another",
        "tests/models/test_logit_parts.py::test_a_row_fails_by_its_largest_logit_alone",
    ),
    "limit_of_the_whole_start": Fault(
        "continuous_batching/recording/listeners.py::Listeners._check_start",
        "now_s - self._progressed_s",
        "now_s - self._began_s",
        "ranks that read their weights for longer than parallel.start_timeout_s are ended while they read",
        "tests/continuous_batching/test_starting_ranks.py::test_a_start_takes_as_long_as_it_progresses",
    ),
    "percent_of_any_length": Fault(
        "continuous_batching/recording/listeners.py::_percent",
        "None if said is None else _PERCENT.parse(said[1])",
        "None if said is None else int(said[1])",
        "a rank that says a percent of 5,000 digits ends the thread that watches all ranks",
        "tests/continuous_batching/test_fuzzed_ranks.py::test_a_percent_of_any_length_is_read",
    ),
    "stranger_ends_the_start": Fault(
        "recipes/cluster/joining.py::Joining._hear",
        "prove_as_listener(self._secret, sock.sendall, receive)",
        "",
        "whoever connects before the ranks do is taken for one",
        "tests/recipes/test_joining.py::test_a_rank_joins_beside_strangers",
    ),
}
