"""Faults of heads that draft from the target's features."""

from __future__ import annotations

from tests.mutation.fault import Fault

FAULTS = {
    "feature_of_the_token_itself": Fault(
        "models/inputs.py::step_inputs",
        "np.maximum(packed.positions - 1, 0)",
        "packed.positions",
        "an entry reads the feature at its own position, which is not there yet",
        "tests/models/test_eagle3.py::test_a_head_changes_no_token_and_says_what_the_published_one_does",
    ),
    "head_reads_no_prompt": Fault(
        "models/head_drafter.py::HeadDrafter.run",
        "self._lacking(batch, np.flatnonzero(~drafting))",
        "None",
        "drafts follow from a prompt that the head has not read",
        "tests/models/test_eagle3.py::test_a_head_changes_no_token_and_says_what_the_published_one_does",
    ),
    "own_output_is_no_feature": Fault(
        "models/head.py::Head.forward",
        "self.features.write_ends(hidden, step.metadata.write_index, step.before_index)",
        "pass",
        "a second draft reads what an earlier step left",
        "tests/models/test_eagle3.py::test_a_head_changes_no_token_and_says_what_the_published_one_does",
    ),
    "features_of_accepted_drafts_written_over": Fault(
        "models/features.py::FeaturePages.write_ends",
        "self._places(index).masked_fill(is_followed, 0)",
        "self._places(index)",
        "what the head said takes the place of the target's feature at the end of a page",
        "tests/models/test_features.py::test_what_a_head_says_stands_at_ends_of_spans_alone",
    ),
    "features_stay_behind": Fault(
        "recipes/build/decoders.py::cache_of",
        "beside=beside",
        "beside=None if isinstance(config, HeadConfig) else beside",
        "a page that is copied, swapped or moved leaves its features",
        "tests/recipes/test_heads.py::test_requests_may_be_longer_than_the_heads_positions",
    ),
    "feature_before_the_embedding": Fault(
        "models/mtp.py::Mtp._inputs",
        "(embedded, feature)",
        "(feature, embedded)",
        "the paper has the parts in this order, and published weights in the other",
        "tests/models/test_mtp.py::test_a_layer_changes_no_token_and_says_what_the_published_one_does",
    ),
}
