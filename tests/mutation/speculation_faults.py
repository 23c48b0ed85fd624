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

SPECULATION_FAULTS = (
    Fault(
        "estimate_stays_with_the_row",
        ACCEPTANCE,
        "changed = np.flatnonzero(numbers != self._number[rows])",
        "changed = np.flatnonzero(self._number[rows] < 0)",
        "a new request is drafted for as the one before it in its row deserved",
    ),
    Fault(
        "first_guess_counted_as_later",
        ACCEPTANCE,
        "trials = np.stack([guessed > 0, np.minimum(right, guessed - 1)])",
        "trials = np.stack([guessed > 0, guessed - 1])",
        "guesses after a wrong one, which nobody judged, count as wrong",
    ),
    Fault(
        "drafts_free_of_charge",
        THROUGHPUT,
        "plain_s + drafted_s * (counts > 0) + token_s * counts",
        "plain_s + drafted_s * (counts > 0)",
        "every likely draft is checked, however long the step gets for it",
    ),
    Fault(
        "never_probed",
        THROUGHPUT,
        "return likeliest if is_due and",
        "return 0 if is_due and",
        "what once did not pay is never tried again",
    ),
    Fault(
        "always_hopeful",
        THROUGHPUT,
        "return self._until_look == 0",
        "return True",
        "no step is scheduled ahead although guesses are wrong",
    ),
    Fault(
        "guesses_made_whatever_they_cost",
        WORTH,
        "pays = times >= _LEAST_TIMES",
        "pays = True",
        "where making guesses takes longer than they save, all answers are slower for it",
    ),
    Fault(
        "every_load_taken_for_the_same",
        WORTH,
        "if not self._num_rows / _SAME_LOAD <= num_rows <= self._num_rows * _SAME_LOAD:",
        "if not self._num_rows:",
        "one row gets no guesses because they did not pay for many",
    ),
    Fault(
        "entries_fade_together",
        DECODE_TIME,
        "faded = _KEPT ** len(rows)",
        "faded = _KEPT",
        "what a step takes now hardly counts beside what steps took first",
    ),
    Fault(
        "suffix_keeps_what_stands_one_place_on",
        SUFFIX,
        "[sources - _LONGEST]",
        "[sources - _LONGEST + 1]",
        "the tokens that are kept are not those after the ones before them",
    ),
    Fault(
        "base_forgotten",
        SOURCE,
        "return self._base",
        "return self._least",
        "the source's speculation never begins with its base length",
    ),
    Fault(
        "guess_across_salts",
        SUFFIX,
        "same &= self._salt_of_chunk[places // _CHUNK] == self._salt[rows]",
        "same &= self._salt_of_chunk[places // _CHUNK] >= 0",
        "what one tenant's text held shows in how fast another is answered",
    ),
    Fault(
        "shortest_end_first",
        SUFFIX,
        "likely = np.flatnonzero((best == 0) & (places > 0))",
        "likely = np.flatnonzero(places > 0)",
        "a long known end is left for a later place of a short one",
    ),
    Fault(
        "chunks_do_not_overlap",
        SUFFIX,
        "self._filled[chunks] = overlap",
        "self._filled[chunks] = 0 * overlap",
        "no guess crosses from one chunk of a text into the next",
    ),
    Fault(
        "drafts_are_chunks",
        STEP_TIME,
        "chunks &= lens > np.bincount(batch.sampled, minlength=len(lens))",
        "pass",
        "the prefill budget's margin is that of decodes",
    ),
)
