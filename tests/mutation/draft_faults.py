"""Faults of guesses that are checked: who makes them, what counts, what is recorded and what is told."""

from __future__ import annotations

from tests.mutation.fault import Fault

ROOM = "continuous_batching/"
NGRAM = ROOM + "speculation/ngram.py"
SPECULATION = ROOM + "speculation/speculation.py"
BATCH, RECORDED = ROOM + "batch.py", ROOM + "recording/recorded_drafts.py"
REPLAY = ROOM + "recording/replay.py"
SAMPLER, PROCESSORS = "models/sampling/sampler.py", "models/sampling/logit_processors.py"
JOBS, MESSAGES = "serving/answers/jobs.py", "serving/engine/messages.py"

DRAFT_FAULTS = {
    "ngram_finds_itself": Fault(
        NGRAM + "::NGram._look",
        "self._tables[entries[:-1]] = positions[LENGTH:-1].astype(np.int32)",
        "self._tables[entries] = positions[LENGTH:].astype(np.int32)",
        "the last tokens are found at the end of the row, where nothing follows",
    ),
    "ngram_keeps_the_request_before": Fault(
        NGRAM + "::NGram._forget",
        "self._tables.reshape(len(self._number), -1)[rows] = 0",
        "",
        "a request is given tokens of the one that had its row before, perhaps another tenant's",
    ),
    "ngram_compares_one_token": Fault(
        NGRAM + "::NGram._is_same",
        "LENGTH + 1",
        "2",
        "what two entries of a table have in common is taken for a quotation",
    ),
    "ngram_goes_on_after_a_wrong_guess": Fault(
        NGRAM + "::NGram._followed",
        "np.where(self._is_same(rows, moved, known), moved, 0)",
        "moved",
        "one quotation is guessed for ever",
    ),
    "a_draft_in_the_last_place": Fault(
        SPECULATION + "::Speculation.propose",
        "slots.limit[rows] - known - 1",
        "slots.limit[rows] - known",
        "a draft stands where no token may follow it",
    ),
    "a_request_cannot_do_without_drafts": Fault(
        SPECULATION + "::Speculation.propose",
        "slots.most_drafts[rows]",
        "self.most",
        "max_draft_tokens of a request is not read",
    ),
    "steps_wait_for_drafts_that_nobody_may_have": Fault(
        SPECULATION + "::Speculation.is_hopeful",
        "self.lengths.is_hopeful and bool(self._slots.most_drafts[self._slots.busy].any())",
        "self.lengths.is_hopeful",
        "steps are not scheduled ahead although no request may have drafts",
    ),
    "a_place_too_many_is_counted": Fault(
        SPECULATION + "::Speculation._count",
        "accepted > position",
        "accepted >= position",
        "more is accepted by place than altogether",
    ),
    "many_rows_ask_in_each_step": Fault(
        SPECULATION + "::Speculation.propose",
        "self._pause > 0 or not self.lengths.asks",
        "not self.lengths.asks",
        "proposing costs the host as much as the whole step",
    ),
    "the_token_after_the_drafts_is_recorded": Fault(
        BATCH + "::Batch.is_draft",
        "self.targets < self.stops[self.sampled]",
        "self.targets <= self.stops[self.sampled]",
        "a replay reads drafts of other places",
    ),
    "a_replay_guesses_itself": Fault(
        REPLAY + "::replay",
        "scheduler.speculation is not None",
        "False",
        "a replay knows less than the proposer did, and decides otherwise",
    ),
    "a_simulation_looks_ahead_of_drafts": Fault(
        RECORDED + "::RecordedDrafts.is_hopeful",
        "isinstance(self._upcoming(), Committed)",
        "False",
        "a simulation makes a batch where the engine waited for tokens to guess from",
    ),
    "one_uniform_for_all_drafts": Fault(
        SAMPLER + "::Sampler._parameters",
        '"uniform": uniforms(slots.seed[rows], targets)',
        '"uniform": uniforms(slots.seed[rows], slots.num_tokens[rows])',
        "every place of a span draws by the noise of the first",
    ),
    "penalties_forget_the_drafts": Fault(
        PROCESSORS + "::_occurrences",
        "targets[asking]",
        "slots.num_tokens[rows[asking]]",
        "the second token of a run is not penalised for the first",
    ),
    "min_tokens_asks_for_the_first_of_a_run": Fault(
        PROCESSORS + "::_biases",
        "targets < slots.min_total[rows]",
        "slots.num_tokens[rows] < slots.min_total[rows]",
        "no end token may come in a run that begins before min_tokens",
    ),
    "log_probabilities_stay_with_dropped_tokens": Fault(
        BATCH + "::Sampled.take",
        "{index_of[old]: each for old, each in self.logprobs.items() if old in index_of}",
        "dict(self.logprobs)",
        "behind a wrong draft, tokens are told with the log-probabilities of others",
    ),
    "the_first_of_a_run_ends_the_answer": Fault(
        JOBS + "::JobRun._read_along",
        "request.finish_reason if index == last[row] else None",
        "request.finish_reason",
        "an answer ends with the first token of the run that ended it",
    ),
    "the_first_sent_of_a_run_ends_the_answer": Fault(
        MESSAGES + "::Stepped.ends_at",
        "{stream: at for at, stream in enumerate(self.streams)}",
        "{stream: self.streams.index(stream) for stream in self.streams}",
        "a served answer ends with the first token of the run that ended it",
    ),
}
_BATCHING = "tests/continuous_batching/"
_OURS = (_BATCHING + "test_drafts.py", _BATCHING + "test_draft_schedules.py")
DRAFT_TESTS_OF = {
    NGRAM: (_BATCHING + "test_ngram.py",),
    **dict.fromkeys((SPECULATION, RECORDED, REPLAY), _OURS),
    BATCH: (*_OURS, "tests/models/test_drafts.py"),
    **dict.fromkeys((SAMPLER, PROCESSORS), ("tests/models/test_drafts.py",)),
    **dict.fromkeys((JOBS, MESSAGES), ("tests/serving/test_drafts.py",)),
}
