"""Faults of a head: which features it reads, what it computes, and where both lie."""

from __future__ import annotations

from tests.mutation.fault import Fault

SPANS = "continuous_batching/speculation/draft_model.py"
FEATURES, HEAD, DRAFTER = "models/features.py", "models/head.py", "models/head_drafter.py"
EAGLE3, WEIGHTS, CONFIG = "models/eagle3.py", "models/head_weights.py", "recipes/llama/eagle3.py"

HEAD_FAULTS = {
    "feature_of_the_token_itself": Fault(
        "models/inputs.py::step_inputs",
        "np.maximum(packed.positions - 1, 0)",
        "packed.positions",
        "an entry reads the feature at its own position, which is not there yet",
    ),
    "a_features_place_in_a_graph_is_its_own": Fault(
        "models/graphs.py::_before_index",
        "(positions.long() - 1).clamp(min=0)",
        "positions.long()",
        "the same in a captured step",
    ),
    "head_behind_without_end": Fault(
        SPANS + "::head_spans",
        "np.where(may_lack & (lag[may_lack] >= most).any(), starts, first)",
        "first",
        "a row without drafts lacks entries whose features are gone",
    ),
    "head_behind_by_one_too_many": Fault(
        SPANS + "::head_spans",
        "lag[may_lack] >= most",
        "lag[may_lack] > most",
        "the feature of the first entry that a row lacks has been written over",
    ),
    "entries_for_drafts_last": Fault(
        SPANS + "::head_spans",
        "np.minimum(stops, known)",
        "np.minimum(stops, known + 1)",
        "what a head said of its own draft stays in place of what the target found",
    ),
    "head_reads_no_prompt": Fault(
        DRAFTER + "::HeadDrafter.run",
        "self._lacking(batch, np.flatnonzero(~drafting))",
        "None",
        "drafts follow from a prompt that the head has not read",
    ),
    "features_of_a_prompt_shifted": Fault(
        DRAFTER + "::HeadDrafter._lacking",
        "positions - 1",
        "positions",
        "entries of a prompt read the feature of their own token",
    ),
    "features_of_another_span": Fault(
        DRAFTER + "::HeadDrafter._lacking",
        "len(known) + np.repeat(packed[spans], lens)",
        "len(known)",
        "prompts of one step read the features of the first of them",
    ),
    "draft_spans_of_a_head_cut": Fault(
        DRAFTER + "::HeadDrafter._pieces",
        "lens.cumsum()",
        "lens",
        "more tokens are computed at once than a step may have",
    ),
    "own_output_is_no_feature": Fault(
        HEAD + "::Head.forward",
        "self.features.write_ends(hidden, step.metadata.write_index, step.before_index)",
        "pass",
        "a second draft reads what an earlier step left",
    ),
    "target_leaves_no_features": Fault(
        HEAD + "::Head._take",
        "self.features.write(self.fresh, step.metadata.write_index)",
        "pass",
        "features are never those of the target",
    ),
    "features_of_accepted_drafts_written_over": Fault(
        FEATURES + "::FeaturePages.write_ends",
        "self._places(index).masked_fill(is_followed, 0)",
        "self._places(index)",
        "what the head said takes the place of the target's feature at the end of a page",
    ),
    "features_of_a_page_are_its_first": Fault(
        FEATURES + "::FeaturePages.write",
        "places.masked_fill(is_over, 0)",
        "places.masked_fill(~is_over & is_over.any(), 0)",
        "a page keeps the features of its first positions",
    ),
    "features_in_one_place_for_all_pages": Fault(
        FEATURES + "::FeaturePages._places",
        "page * self._kept + offset % self._kept",
        "offset % self._kept",
        "rows write over each other's features",
    ),
    "too_few_features_kept": Fault(
        "recipes/build/families.py::_num_kept",
        "recipe.speculation.max_tokens + 1",
        "recipe.speculation.max_tokens",
        "after drafts that were all right the first feature is gone",
    ),
    "features_stay_behind": Fault(
        "recipes/build/decoders.py::cache_of",
        "beside=beside",
        "beside=None if isinstance(config, HeadConfig) else beside",
        "a page that is copied, swapped or moved leaves its features",
    ),
    "first_position_is_seen": Fault(
        "recipes/build/decoders.py::shape_of",
        "FIRST_KEY if isinstance(config, HeadConfig) else 0",
        "0",
        "drafts depend on an entry that the published head does not have",
    ),
    "draft_tokens_taken_for_the_targets": Fault(
        "models/drafter.py::Greedy.best",
        "tokens = tokens + self._offsets[tokens]",
        "pass",
        "a draft of a smaller vocabulary is another token",
    ),
    "feature_normed_away": Fault(
        EAGLE3 + "::Eagle3._inputs",
        "normed if self.adds_normed else features",
        "features if self.adds_normed else normed",
        "the layer adds to the wrong one of two",
    ),
    "embedding_and_feature_exchanged": Fault(
        EAGLE3 + "::Eagle3._inputs",
        "(self.ops.rms_norm(embedded, self.input_norm, self.eps), normed)",
        "(normed, self.ops.rms_norm(embedded, self.input_norm, self.eps))",
        "attention reads them in the wrong order",
    ),
    "next_feature_is_normed": Fault(
        EAGLE3 + "::Eagle3.computed", "self.mlp(x) + residual", "self.mlp(x)", "the residual is lost"
    ),
    "layers_read_one_late": Fault(
        "models/decoder.py::Decoder.forward",
        "number in self._taps",
        "number - 1 in self._taps",
        "features are of the layers after those that the head was trained on",
    ),
    "own_embedding_not_read": Fault(
        CONFIG + "::config", "EMBEDDING in names", "False", "a head with an embedding of its own is refused"
    ),
    "tokens_beyond_the_vocabulary": Fault(
        WEIGHTS + "::load",
        "head.config.vocab_size",
        "2 * head.config.vocab_size",
        "a head of another model makes drafts that no embedding has",
    ),
    "features_not_planned": Fault(
        "recipes/build/sizing.py::plan_memory",
        "sum(each.feature_bytes for each in both if isinstance(each, HeadConfig))",
        "0",
        "features take memory that was promised to pages",
    ),
    "a_key_left_out_on_no_npu": Fault(
        "attention/npu/fused_attention.py::FusedAttention._seen",
        "not self.leaves_first_out",
        "True",
        "a place of zeros takes its share of the weights",
    ),
    "a_key_left_out_on_no_cpu": Fault(
        "attention/cpu/tiles.py::DecodeTiles.of",
        "np.minimum(first_key, lens - 1)",
        "np.zeros_like(lens)",
        "decodes see what lies before the first key",
    ),
}

HEAD_TESTS = (
    "tests/models/test_features.py",
    "tests/models/test_eagle3.py",
    "tests/recipes/test_heads.py",
)
HEAD_TESTS_OF = {
    **dict.fromkeys((FEATURES, HEAD, DRAFTER, EAGLE3, WEIGHTS, CONFIG), HEAD_TESTS),
    **dict.fromkeys(("recipes/build/families.py", "recipes/build/decoders.py"), HEAD_TESTS),
    **dict.fromkeys(("models/inputs.py", "recipes/build/sizing.py"), HEAD_TESTS),
    "attention/cpu/tiles.py": ("tests/attention/test_attention.py",),
}
