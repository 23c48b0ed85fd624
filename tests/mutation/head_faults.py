"""Faults of heads that draft from the target's features."""

from __future__ import annotations

from tests.mutation.fault import Fault

FAULTS = {
    "drafts_unknown_to_the_first_stage": Fault(
        "models/step/stage_runner.py::StageRunner._drafted",
        "self.slots.token_ids[batch.owners[guessed], batch.targets[guessed]] = drafts",
        "",
        "the first stage computes zeros in the places of the drafts that the last one checks",
        "tests/models/test_eagle3.py::test_ranks_share_a_head_and_say_what_one_says",
    ),
    "taps_counted_from_the_stage": Fault(
        "models/decoder.py::Decoder.forward",
        "self._first + number in self._taps",
        "number in self._taps",
        "a head reads layers that have the right numbers in their own stage",
        "tests/models/test_eagle3.py::test_ranks_share_a_head_and_say_what_one_says",
    ),
    "entries_left_of_the_next_batch": Fault(
        "models/drafting/drafter.py::HeadDrafter.finish",
        "self._left.popleft()",
        "self._left.pop()",
        "with two batches in flight, entries of the second are computed from what the first has found",
        "tests/models/test_eagle3.py::test_ranks_share_a_head_and_say_what_one_says",
    ),
    "a_features_place_in_a_graph_is_its_own": Fault(
        "models/step/graphs.py::_before_index",
        "(positions.long() - 1).clamp(min=0)",
        "positions.long()",
        "a captured step reads the feature of a token in place of that of the one before it",
        "tests/models/test_eagle3.py::test_captured_steps_make_the_published_drafts",
    ),
    "features_of_accepted_drafts_written_over": Fault(
        "models/head.py::FeaturePages.write_ends",
        "self._places(index).masked_fill(is_followed, 0)",
        "self._places(index)",
        "what the head said takes the place of the target's feature at the end of a page",
        "tests/models/test_features.py::test_what_a_head_says_stands_at_ends_of_spans_alone",
    ),
    "draft_tokens_taken_for_the_targets": Fault(
        "models/drafting/drafter.py::Greedy.best",
        "tokens = tokens + self._offsets[tokens]",
        "pass",
        "a draft of a smaller vocabulary is another token",
        "tests/models/test_eagle3.py::test_a_head_changes_no_token_and_says_what_the_published_one_does",
    ),
    "a_key_left_out_on_no_npu": Fault(
        "attention/npu/fused_attention.py::FusedAttention._seen",
        "not self.leaves_first_out",
        "True",
        "a place of zeros takes its share of the weights",
        "tests/attention/test_attention.py::test_no_query_sees_what_lies_before_the_first_key",
    ),
    "feature_before_the_embedding": Fault(
        "models/drafting/mtp.py::Mtp._inputs",
        "(embedded, feature)",
        "(feature, embedded)",
        "the paper has the parts in this order, and published weights in the other",
        "tests/models/test_mtp.py::test_a_layer_changes_no_token_and_says_what_the_published_one_does",
    ),
}
