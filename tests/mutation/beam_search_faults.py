"""Which faults are seeded in beam search?"""

from __future__ import annotations

from tests.mutation.fault import Fault

ROOM = "continuous_batching/"
ADMISSION, BEAMS, DOOR = (
    ROOM + "scheduling/admission.py",
    ROOM + "sampling/beam_scoring.py",
    ROOM + "scheduling/validation.py",
)
LIFECYCLE, SCHEDULER, SEARCHES = (
    ROOM + "paging/slot_lifecycle.py",
    ROOM + "scheduling/scheduler.py",
    ROOM + "sampling/beam_search.py",
)
TABLES = ROOM + "paging/page_tables.py"

SEARCH_FAULTS = {
    "spare_candidates_end": Fault(
        BEAMS + "::choose",
        "order[:width][over[:width]]",
        "order[over][:width]",
        "a candidate that only stands in for an ended one becomes an answer",
    ),
    "equal_is_better": Fault(
        BEAMS + "::is_over",
        "score(best, num_tokens, params) <= hypotheses[-1].score",
        "score(best, num_tokens, params) < hypotheses[-1].score",
        "a search goes on for what cannot replace an answer",
    ),
    "two_beams_in_a_row": Fault(
        BEAMS + "::place", "taken.discard(row)", "", "two continuations of one beam overwrite each other"
    ),
    "beams_forgotten_at_the_door": Fault(
        DOOR + "::most_pages",
        "longest + max(0, request.params.beam_width - 1) * (longest - shared)",
        "longest",
        "a search is taken that can never fit, and preempts itself for ever",
    ),
    "search_without_rows": Fault(
        ADMISSION + "::Admission.admit",
        "max(1, request.params.beam_width)",
        "1",
        "a search comes in that has no rows for its beams",
    ),
    "beams_not_promised": Fault(
        SEARCHES + "::BeamSearches.extra_pages",
        "max(0, -(-reserved // size) - search.num_shared(size)) * (len(search.beams) - 1)",
        "0",
        "a search comes in on pages for one beam, and is thrown out again",
    ),
    "beams_go_on_alone": Fault(
        SEARCHES + "::BeamSearches.keep_together",
        "not ready.issuperset(search.rows)",
        "False",
        "a beam computes its last token, and nobody chooses what follows",
    ),
    "best_not_first_after_preemption": Fault(
        SEARCHES + "::BeamSearches.suspend",
        "search.beams = [slots.requests[each] for each in search.rows]",
        "pass",
        "beams come back with the scores of others",
    ),
    "one_bad_beam_goes_on": Fault(
        SEARCHES + "::BeamSearches.advance",
        "(sampled.tokens[at] < 0).any()",
        "(sampled.tokens[at] < 0).all()",
        "candidates from logits that are not finite become an answer",
    ),
    "keys_of_former_tokens": Fault(
        LIFECYCLE + "::SlotLifecycle.continue_beam",
        "slots.requests[row].page_keys = slots.requests[source].page_keys",
        "",
        "a beam's pages are published by the keys of what it held before it took over another's",
    ),
    "tokens_of_former_beam": Fault(
        LIFECYCLE + "::SlotLifecycle.continue_beam",
        "slots.token_ids[row, :count] = slots.token_ids[source, :count]",
        "",
        "a beam has the pages of one answer and the tokens of another",
    ),
    "dropped_beam_keeps_pages": Fault(
        TABLES + "::PageTables.fork",
        "self.prefix.release(old[kept:])",
        "",
        "every step leaks the pages of beams that nobody continues",
    ),
    "beams_stay_in_flight": Fault(
        SCHEDULER + "::Scheduler._finish",
        "rows if in_flight else ()",
        "rows[:1] if in_flight else ()",
        "the rows of a search that ended under its batch are never free again",
    ),
}
