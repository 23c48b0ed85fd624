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

DRAFT_FAULTS = (
    Fault(
        "ngram_finds_itself",
        NGRAM,
        "self._tables[entries[:-1]] = positions[LENGTH:-1].astype(np.int32)",
        "self._tables[entries] = positions[LENGTH:].astype(np.int32)",
        "the last tokens are found at the end of the row, where nothing follows",
    ),
    Fault(
        "ngram_keeps_the_request_before",
        NGRAM,
        "        self._tables.reshape(len(self._number), -1)[rows] = 0\n",
        "",
        "a request is given tokens of the one that had its row before, perhaps another tenant's",
    ),
    Fault(
        "ngram_compares_one_token",
        NGRAM,
        "for back in range(1, LENGTH + 1):",
        "for back in range(1, 2):",
        "what two entries of a table have in common is taken for a quotation",
    ),
    Fault(
        "ngram_goes_on_after_a_wrong_guess",
        NGRAM,
        "return np.where(self._is_same(rows, moved, known), moved, 0)",
        "return moved",
        "one quotation is guessed for ever",
    ),
    Fault(
        "a_draft_in_the_last_place",
        SPECULATION,
        "np.minimum(slots.limit[rows] - known - 1, self.most)",
        "np.minimum(slots.limit[rows] - known, self.most)",
        "a draft stands where no token may follow it",
    ),
    Fault(
        "a_request_cannot_do_without_drafts",
        SPECULATION,
        ", self.most), slots.most_drafts[rows])",
        ", self.most), self.most)",
        "max_draft_tokens of a request is not read",
    ),
    Fault(
        "steps_wait_for_drafts_that_nobody_may_have",
        SPECULATION,
        " and bool(self._slots.most_drafts[self._slots.busy].any())",
        "",
        "steps are not scheduled ahead although no request may have drafts",
    ),
    Fault(
        "a_place_too_many_is_counted",
        SPECULATION,
        "int((accepted > position).sum())",
        "int((accepted >= position).sum())",
        "more is accepted by place than altogether",
    ),
    Fault(
        "many_rows_ask_in_each_step",
        SPECULATION,
        "if self._pause > 0 or not self.lengths.asks:",
        "if not self.lengths.asks:",
        "proposing costs the host as much as the whole step",
    ),
    Fault(
        "the_token_after_the_drafts_is_recorded",
        BATCH,
        "= self.targets < self.stops[self.sampled]",
        "= self.targets <= self.stops[self.sampled]",
        "a replay reads drafts of other places",
    ),
    Fault(
        "a_replay_guesses_itself",
        REPLAY,
        "if scheduler.speculation is not None:",
        "if False:",
        "a replay knows less than the proposer did, and decides otherwise",
    ),
    Fault(
        "a_simulation_looks_ahead_of_drafts",
        RECORDED,
        "return isinstance(self._upcoming(), Committed)",
        "return False",
        "a simulation makes a batch where the engine waited for tokens to guess from",
    ),
    Fault(
        "one_uniform_for_all_drafts",
        SAMPLER,
        '"uniform": uniforms(slots.seed[rows], targets),',
        '"uniform": uniforms(slots.seed[rows], slots.num_tokens[rows]),',
        "every place of a span draws by the noise of the first",
    ),
    Fault(
        "penalties_forget_the_drafts",
        PROCESSORS,
        "keys = _keys(rows, asking, slots.num_prompt[rows[asking]], targets[asking], slots, vocab_size)",
        "keys = _keys(rows, asking, slots.num_prompt[rows[asking]], slots.num_tokens[rows[asking]], slots,"
        " vocab_size)",
        "the second token of a run is not penalised for the first",
    ),
    Fault(
        "min_tokens_asks_for_the_first_of_a_run",
        PROCESSORS,
        "too_short = targets < slots.min_total[rows]",
        "too_short = slots.num_tokens[rows] < slots.min_total[rows]",
        "no end token may come in a run that begins before min_tokens",
    ),
    Fault(
        "log_probabilities_stay_with_dropped_tokens",
        BATCH,
        "{index_of[old]: each for old, each in self.logprobs.items() if old in index_of}",
        "dict(self.logprobs)",
        "behind a wrong draft, tokens are told with the log-probabilities of others",
    ),
    Fault(
        "the_first_of_a_run_ends_the_answer",
        JOBS,
        "reason = request.finish_reason if index == last[row] else None",
        "reason = request.finish_reason",
        "an answer ends with the first token of the run that ended it",
    ),
    Fault(
        "the_first_sent_of_a_run_ends_the_answer",
        MESSAGES,
        "last = {stream: at for at, stream in enumerate(self.streams)}",
        "last = {stream: self.streams.index(stream) for stream in self.streams}",
        "a served answer ends with the first token of the run that ended it",
    ),
)
_BATCHING = "tests/continuous_batching/"
_OURS = (_BATCHING + "test_drafts.py", _BATCHING + "test_draft_schedules.py")
DRAFT_TESTS_OF = {
    NGRAM: (_BATCHING + "test_ngram.py",),
    **dict.fromkeys((SPECULATION, RECORDED, REPLAY), _OURS),
    BATCH: (*_OURS, "tests/models/test_drafts.py"),
    **dict.fromkeys((SAMPLER, PROCESSORS), ("tests/models/test_drafts.py",)),
    **dict.fromkeys((JOBS, MESSAGES), ("tests/serving/test_drafts.py",)),
}
