"""Faults of attention on the CPU, of samples, of beams, and of what a prompt's tokens score."""

from __future__ import annotations

from tests.mutation.fault import Fault

FAULTS = {
    "prompt_weighs_what_nobody_wrote": Fault(
        "attention/cpu/attention.py::CpuAttention._matrices",
        "values[:, prompt.known :] = 0",
        "",
        "a NaN beyond a prompt's end reaches it, for zero times NaN is NaN",
        "tests/attention/test_attention.py::test_a_span_longer_than_a_query_block",
    ),
    "prompt_looks_past_its_window": Fault(
        "attention/cpu/attention.py::CpuAttention._weigh",
        "(key >= first[:, None]) & (key <= last[:, None])",
        "key <= last[:, None]",
        "a sliding window slides for decodes only",
        "tests/attention/test_attention.py::test_a_span_longer_than_a_query_block",
    ),
    "cut_sample_is_the_best": Fault(
        "serving/answers/answers.py::_rank",
        "not is_whole",
        "False",
        "a sample that ran out of time is chosen before whole ones",
        "tests/serving/test_offline.py::test_whole_samples_go_before_partial_ones_and_empty_ones",
    ),
    "cached_prompt_told_of_its_end": Fault(
        "continuous_batching/request.py::Request.num_findable",
        "self.num_scored if self.is_scoring else len(self.tokens) - 1",
        "len(self.tokens) - 1",
        "what is found in the cache is not computed, and nothing is told of it",
        "tests/models/test_prompt_logprobs.py::test_each_device_tells_what_transformers_finds",
    ),
    "embedding_of_a_neighbour": Fault(
        "models/sampling/prompt_outputs.py::pooled_of",
        "(np.cumsum(lens) - batch.stops)[spans]",
        "-batch.starts[spans]",
        "every prompt gets the states of the first one in its step",
        "tests/models/test_pooling.py::test_each_device_finds_what_transformers_finds",
    ),
    "two_beams_in_a_row": Fault(
        "continuous_batching/samples/beam_search.py::place",
        "taken.discard(row)",
        "",
        "two continuations of one beam overwrite each other",
        "tests/continuous_batching/test_beam_scoring.py::test_beams_move_no_more_than_they_must",
    ),
    "beams_not_promised": Fault(
        "continuous_batching/samples/beam_search.py::BeamSearches.extra_pages",
        "max(0, -(-reserved // size) - search.num_shared(size))",
        "0",
        "a search comes in on pages for one beam, and is thrown out again",
        "tests/continuous_batching/test_beam_search.py::test_a_search_is_promised_pages_for_all_its_beams",
    ),
    "beams_go_on_alone": Fault(
        "continuous_batching/samples/beam_search.py::BeamSearches.keep_together",
        "not ready.issuperset(search.rows)",
        "False",
        "a beam computes its last token, and nobody chooses what follows",
        "tests/continuous_batching/test_beam_search.py::test_a_search_may_be_aborted_while_it_comes_back",
    ),
    "best_not_first_after_preemption": Fault(
        "continuous_batching/samples/beam_search.py::BeamSearches.suspend",
        "search.beams = [slots.requests[each] for each in search.rows]",
        "pass",
        "beams come back with the scores of others",
        "tests/continuous_batching/test_beam_search.py::test_a_search_that_loses_its_rows_again_and_again_finds_the_same",
    ),
    "tokens_of_former_beam": Fault(
        "continuous_batching/paging/slot_lifecycle.py::SlotLifecycle.continue_beam",
        "slots.token_ids[row, :count] = slots.token_ids[source, :count]",
        "",
        "a beam has the pages of one answer and the tokens of another",
        "tests/continuous_batching/test_beam_search.py::test_beams_share_all_that_they_have_in_common",
    ),
    "dropped_beam_keeps_pages": Fault(
        "kv_cache/groups.py::PageGroup.fork",
        "self.clear(row)",
        "",
        "every step leaks the pages of beams that nobody continues",
        "tests/continuous_batching/test_beam_search.py::test_beams_share_all_that_they_have_in_common",
    ),
}
