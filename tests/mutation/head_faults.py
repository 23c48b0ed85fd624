"""Faults of a head: which features it reads, what it computes, and where both lie."""

from __future__ import annotations

from tests.mutation.fault import Fault

SPANS = "continuous_batching/speculation/draft_model.py"
FEATURES, HEAD, DRAFTER = "models/features.py", "models/head.py", "models/head_drafter.py"
EAGLE3, WEIGHTS, CONFIG = "models/eagle3.py", "models/head_weights.py", "recipes/llama/eagle3.py"

HEAD_FAULTS = (
    Fault(
        "feature_of_the_token_itself",
        "models/inputs.py",
        "np.maximum(packed.positions - 1, 0)",
        "packed.positions",
        "an entry reads the feature at its own position, which is not there yet",
    ),
    Fault(
        "a_features_place_in_a_graph_is_its_own",
        "models/graphs.py",
        "(positions.long() - 1).clamp(min=0)",
        "positions.long()",
        "the same in a captured step",
    ),
    Fault(
        "head_behind_without_end",
        SPANS,
        "np.where(may_lack & (lag[may_lack] >= most).any(), starts, first)",
        "first",
        "a row without drafts lacks entries whose features are gone",
    ),
    Fault(
        "head_behind_by_one_too_many",
        SPANS,
        "(lag[may_lack] >= most)",
        "(lag[may_lack] > most)",
        "the feature of the first entry that a row lacks has been written over",
    ),
    Fault(
        "entries_for_drafts_last",
        SPANS,
        "np.where(waits, behind, np.minimum(stops, known))",
        "np.where(waits, behind, np.minimum(stops, known + 1))",
        "what a head said of its own draft stays in place of what the target found",
    ),
    Fault(
        "head_reads_no_prompt",
        DRAFTER,
        "self._left = self._lacking(batch, np.flatnonzero(~drafting))",
        "self._left = None",
        "drafts follow from a prompt that the head has not read",
    ),
    Fault(
        "features_of_a_prompt_shifted",
        DRAFTER,
        "ahead = positions - 1 - np.repeat(first, lens)",
        "ahead = positions - np.repeat(first, lens)",
        "entries of a prompt read the feature of their own token",
    ),
    Fault(
        "features_of_another_span",
        DRAFTER,
        "len(known) + np.repeat(packed[spans], lens) + ahead",
        "len(known) + ahead",
        "prompts of one step read the features of the first of them",
    ),
    Fault(
        "draft_spans_of_a_head_cut",
        DRAFTER,
        "count = max(1, int((lens.cumsum() <= self._most_tokens).sum()))",
        "count = max(1, int((lens <= self._most_tokens).sum()))",
        "more tokens are computed at once than a step may have",
    ),
    Fault(
        "own_output_is_no_feature",
        HEAD,
        "self.features.write_ends(hidden, step.metadata.write_index, step.before_index)",
        "pass",
        "a second draft reads what an earlier step left",
    ),
    Fault(
        "target_leaves_no_features",
        HEAD,
        "self.features.write(self.fresh, step.metadata.write_index)",
        "pass",
        "features are never those of the target",
    ),
    Fault(
        "features_of_accepted_drafts_written_over",
        FEATURES,
        "self._places(index).masked_fill(is_followed, 0), features",
        "self._places(index), features",
        "what the head said takes the place of the target's feature at the end of a page",
    ),
    Fault(
        "features_of_a_page_are_its_first",
        FEATURES,
        "places.masked_fill(is_over, 0)",
        "places.masked_fill(~is_over & is_over.any(), 0)",
        "a page keeps the features of its first positions",
    ),
    Fault(
        "features_in_one_place_for_all_pages",
        FEATURES,
        "return page * self._kept + offset % self._kept",
        "return offset % self._kept",
        "rows write over each other's features",
    ),
    Fault(
        "too_few_features_kept",
        "recipes/build/families.py",
        "recipe.speculation.max_tokens + 1)",
        "recipe.speculation.max_tokens)",
        "after drafts that were all right the first feature is gone",
    ),
    Fault(
        "features_stay_behind",
        "recipes/build/decoders.py",
        "        beside=beside,\n",
        "        beside=None if isinstance(config, HeadConfig) else beside,\n",
        "a page that is copied, swapped or moved leaves its features",
    ),
    Fault(
        "first_position_is_seen",
        "recipes/build/decoders.py",
        "first_key=FIRST_KEY if isinstance(config, HeadConfig) else 0",
        "first_key=0",
        "drafts depend on an entry that the published head does not have",
    ),
    Fault(
        "draft_tokens_taken_for_the_targets",
        "models/drafter.py",
        "tokens = tokens + self._offsets[tokens]",
        "pass",
        "a draft of a smaller vocabulary is another token",
    ),
    Fault(
        "feature_normed_away",
        EAGLE3,
        "return x, normed if self.adds_normed else features, cos, sin",
        "return x, features if self.adds_normed else normed, cos, sin",
        "the layer adds to the wrong one of two",
    ),
    Fault(
        "embedding_and_feature_exchanged",
        EAGLE3,
        "self.ops.rms_norm(embedded, self.input_norm, self.eps), normed), -1)",
        "normed, self.ops.rms_norm(embedded, self.input_norm, self.eps)), -1)",
        "attention reads them in the wrong order",
    ),
    Fault(
        "next_feature_is_normed",
        EAGLE3,
        "return (self.mlp(x) + residual)[: len(features)]",
        "return self.mlp(x)[: len(features)]",
        "the residual is lost",
    ),
    Fault(
        "layers_read_one_late",
        "models/decoder.py",
        "if number in self._taps:",
        "if number - 1 in self._taps:",
        "features are of the layers after those that the head was trained on",
    ),
    Fault(
        "own_embedding_not_read",
        CONFIG,
        "owns_embedding=EMBEDDING in names",
        "owns_embedding=False",
        "a head with an embedding of its own is refused",
    ),
    Fault(
        "tokens_beyond_the_vocabulary",
        WEIGHTS,
        "tokens < head.config.vocab_size",
        "tokens < 2 * head.config.vocab_size",
        "a head of another model makes drafts that no embedding has",
    ),
    Fault(
        "features_not_planned",
        "recipes/build/sizing.py",
        "sum(each.feature_bytes for each in both if isinstance(each, HeadConfig))",
        "0",
        "features take memory that was promised to pages",
    ),
    Fault(
        "a_key_left_out_on_no_npu",
        "attention/npu/fused_attention.py",
        "if not self.leaves_first_out:",
        "if True:",
        "a place of zeros takes its share of the weights",
    ),
    Fault(
        "a_key_left_out_on_no_cpu",
        "attention/cpu/tiles.py",
        "lows = np.minimum(first_key, lens - 1)",
        "lows = np.zeros_like(lens)",
        "decodes see what lies before the first key",
    ),
)

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
