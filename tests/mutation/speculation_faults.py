"""Which faults are seeded where drafts are guessed, and where their number is chosen?"""

from __future__ import annotations

from tests.mutation.fault import Fault

BATCHING = "continuous_batching/"
ROOM, TESTS = BATCHING + "speculation/", "tests/continuous_batching/"
ACCEPTANCE, DECODE_TIME, THROUGHPUT, WORTH, SOURCE, SUFFIX, STEP_TIME = (
    ROOM + "acceptance.py",
    ROOM + "decode_time.py",
    ROOM + "throughput.py",
    ROOM + "worth.py",
    ROOM + "source.py",
    ROOM + "suffix.py",
    BATCHING + "step_time.py",
)
SPECULATION_TESTS_OF = {
    **dict.fromkeys((ACCEPTANCE, DECODE_TIME, THROUGHPUT, WORTH, SOURCE), (TESTS + "test_lengths.py",)),
    SUFFIX: (TESTS + "test_suffix.py",),
    STEP_TIME: (TESTS + "test_adaptive_prefill_budget.py",),
}

SPECULATION_FAULTS = {
    "estimate_stays_with_the_row": Fault(
        ACCEPTANCE + "::Acceptance._follow",
        "numbers != self._number[rows]",
        "self._number[rows] < 0",
        "a new request is drafted for as the one before it in its row deserved",
    ),
    "first_guess_counted_as_later": Fault(
        ACCEPTANCE + "::Acceptance.learn",
        "np.minimum(right, guessed - 1)",
        "guessed - 1",
        "guesses after a wrong one, which nobody judged, count as wrong",
    ),
    "drafts_free_of_charge": Fault(
        THROUGHPUT + "::Throughput._seconds",
        "plain_s + drafted_s * (counts > 0) + token_s * counts",
        "plain_s + drafted_s * (counts > 0)",
        "every likely draft is checked, however long the step gets for it",
    ),
    "never_probed": Fault(
        THROUGHPUT + "::Throughput._best",
        "likeliest if is_due and gains[likeliest] >= (_LEAST_GAIN - 1) * num_rows else 0",
        "0 if is_due and gains[likeliest] >= (_LEAST_GAIN - 1) * num_rows else 0",
        "what once did not pay is never tried again",
    ),
    "always_hopeful": Fault(
        THROUGHPUT + "::Throughput.is_hopeful",
        "self._until_look == 0",
        "True",
        "no step is scheduled ahead although guesses are wrong",
    ),
    "guesses_made_whatever_they_cost": Fault(
        WORTH + "::Worth.observe",
        "times >= _LEAST_TIMES",
        "True",
        "where making guesses takes longer than they save, all answers are slower for it",
    ),
    "every_load_taken_for_the_same": Fault(
        WORTH + "::Worth.observe",
        "self._num_rows / _SAME_LOAD <= num_rows <= self._num_rows * _SAME_LOAD",
        "self._num_rows",
        "one row gets no guesses because they did not pay for many",
    ),
    "entries_fade_together": Fault(
        DECODE_TIME + "::DecodeTime._fit",
        "_KEPT ** len(rows)",
        "_KEPT",
        "what a step takes now hardly counts beside what steps took first",
    ),
    "suffix_keeps_what_stands_one_place_on": Fault(
        SUFFIX + "::Suffix._store",
        "sources - _LONGEST",
        "sources - _LONGEST + 1",
        "the tokens that are kept are not those after the ones before them",
    ),
    "base_forgotten": Fault(
        SOURCE + "::Source.best",
        "self._base",
        "self._least",
        "the source's speculation never begins with its base length",
    ),
    "guess_across_salts": Fault(
        SUFFIX + "::Suffix._is_same",
        "self._salt_of_chunk[places // _CHUNK] == self._salt[rows]",
        "self._salt_of_chunk[places // _CHUNK] >= 0",
        "what one tenant's text held shows in how fast another is answered",
    ),
    "shortest_end_first": Fault(
        SUFFIX + "::Suffix._look",
        "(best == 0) & (places > 0)",
        "places > 0",
        "a long known end is left for a later place of a short one",
    ),
    "chunks_do_not_overlap": Fault(
        SUFFIX + "::Suffix._open_chunks",
        "self._filled[chunks] = overlap",
        "self._filled[chunks] = 0 * overlap",
        "no guess crosses from one chunk of a text into the next",
    ),
    "drafts_are_chunks": Fault(
        STEP_TIME + "::StepTime.observe",
        "chunks &= lens > np.bincount(batch.sampled, minlength=len(lens))",
        "pass",
        "the prefill budget's margin is that of decodes",
    ),
}
