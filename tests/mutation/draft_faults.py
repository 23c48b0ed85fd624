"""Faults of drafts: from n-grams, from other texts, from a draft model, and how many are worth it."""

from __future__ import annotations

from tests.mutation.fault import Fault

FAULTS = {
    "ngram_finds_itself": Fault(
        "continuous_batching/speculation/proposer.py::NGram._look",
        "self._tables[entries[:-1]] = positions[LENGTH:-1].astype(np.int32)",
        "self._tables[entries] = positions[LENGTH:].astype(np.int32)",
        "the last tokens are found at the end of the row, where nothing follows",
        "tests/continuous_batching/test_ngram.py::test_it_guesses_what_followed_the_most_recent_earlier_place",
    ),
    "ngram_keeps_the_request_before": Fault(
        "continuous_batching/speculation/proposer.py::NGram._forget",
        "self._tables.reshape(len(self._number), -1)[rows] = 0",
        "",
        "a request is given tokens of the one that had its row before, perhaps another tenant's",
        "tests/continuous_batching/test_ngram.py::test_a_row_knows_nothing_of_the_request_before",
    ),
    "a_replay_guesses_itself": Fault(
        "continuous_batching/recording/replay.py::replay",
        "scheduler.speculation is not None",
        "False",
        "a replay knows less than the proposer did, and decides otherwise",
        "tests/continuous_batching/test_draft_schedules.py::test_who_follows_a_recording_proposes_nothing",
    ),
    "one_uniform_for_all_drafts": Fault(
        "models/sampling/sampler.py::Sampler._limits",
        '"uniform": uniforms(slots.seed[rows], targets)',
        '"uniform": uniforms(slots.seed[rows], slots.num_tokens[rows])',
        "every place of a span draws by the noise of the first",
        "tests/models/test_draft_identity.py::test_drafts_change_no_token",
    ),
    "penalties_forget_the_drafts": Fault(
        "models/sampling/known_tokens.py::KnownTokens._count",
        "target == num_known",
        "True",
        "the second token of a run is not penalised for the first",
        "tests/models/test_draft_identity.py::test_drafts_change_no_token",
    ),
    "the_first_of_a_run_ends_the_answer": Fault(
        "serving/answers/jobs.py::JobRun._read_along",
        "request.finish_reason if index == last[row] else None",
        "request.finish_reason",
        "an answer ends with the first token of the run that ended it",
        "tests/serving/test_drafts.py::test_answers_end_where_they_do_without_drafts",
    ),
    "prompt_not_computed_by_the_draft_model": Fault(
        "continuous_batching/speculation/proposer.py::model_spans",
        "has_drafts | ~slots.decoding(rows, starts, known)",
        "has_drafts",
        "drafts follow from a prompt that the draft model has not read",
        "tests/continuous_batching/test_draft_model.py::test_rows_lack_tokens_while_they_have_no_drafts_and_catch_up",
    ),
    "draft_fed_at_the_place_behind": Fault(
        "models/drafting/drafter.py::Drafter.run",
        "known + ahead - 1",
        "known + ahead",
        "a draft is turned by the position of the next, whose keys it leaves out",
        "tests/models/test_draft_model.py::test_a_draft_model_changes_no_token",
    ),
    "drafts_of_rows_that_dropped_out": Fault(
        "models/drafting/drafter.py::Drafter.follow",
        "tokens[to_device(places, self._device)]",
        "tokens[: len(places)]",
        "rows are fed what was drafted for others",
        "tests/models/test_draft_model.py::test_a_draft_model_changes_no_token",
    ),
    "estimate_stays_with_the_row": Fault(
        "continuous_batching/speculation/lengths.py::Acceptance._follow",
        "numbers != self._number[rows]",
        "self._number[rows] < 0",
        "a new request is drafted for as the one before it in its row deserved",
        "tests/continuous_batching/test_lengths.py::test_an_estimate_follows_its_request_to_another_row",
    ),
    "drafts_free_of_charge": Fault(
        "continuous_batching/speculation/lengths.py::Throughput._seconds",
        "plain_s + drafted_s * (counts > 0) + token_s * counts",
        "plain_s + drafted_s * (counts > 0)",
        "every likely draft is checked, however long the step gets for it",
        "tests/continuous_batching/test_lengths.py::test_throughput_never_falls_below_plain",
    ),
    "guess_across_salts": Fault(
        "continuous_batching/speculation/suffix.py::Suffix._is_same",
        "self._salt_of_chunk[places // _CHUNK] == self._salt[rows]",
        "self._salt_of_chunk[places // _CHUNK] >= 0",
        "what one tenant's text held shows in how fast another is answered",
        "tests/continuous_batching/test_suffix.py::test_entries_that_meet_in_a_table_tell_nothing_across_salts",
    ),
}
