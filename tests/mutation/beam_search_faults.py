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

SEARCH_FAULTS = (
    Fault(
        "spare_candidates_end",
        BEAMS,
        "order[:width][over[:width]]",
        "order[over][:width]",
        "a candidate that only stands in for an ended one becomes an answer",
    ),
    Fault(
        "equal_is_better",
        BEAMS,
        "num_tokens, params) <= hypotheses[-1].score",
        "num_tokens, params) < hypotheses[-1].score",
        "a search goes on for what cannot replace an answer",
    ),
    Fault(
        "two_beams_in_a_row",
        BEAMS,
        "        taken.discard(row)\n",
        "",
        "two continuations of one beam overwrite each other",
    ),
    Fault(
        "beams_forgotten_at_the_door",
        DOOR,
        "return longest + max(0, request.params.beam_width - 1) * (longest - shared)",
        "return longest",
        "a search is taken that can never fit, and preempts itself for ever",
    ),
    Fault(
        "search_without_rows",
        ADMISSION,
        "if slots.num_free < max(1, request.params.beam_width):",
        "if slots.num_free < 1:",
        "a search comes in that has no rows for its beams",
    ),
    Fault(
        "beams_not_promised",
        SEARCHES,
        "return max(0, -(-reserved // size) - search.num_shared(size)) * (len(search.beams) - 1)",
        "return 0",
        "a search comes in on pages for one beam, and is thrown out again",
    ),
    Fault(
        "beams_go_on_alone",
        SEARCHES,
        "if not ready.issuperset(search.rows):",
        "if False:",
        "a beam computes its last token, and nobody chooses what follows",
    ),
    Fault(
        "best_not_first_after_preemption",
        SEARCHES,
        "            search.beams = [slots.requests[each] for each in search.rows]\n",
        "            pass\n",
        "beams come back with the scores of others",
    ),
    Fault(
        "one_bad_beam_goes_on",
        SEARCHES,
        "if (sampled.tokens[at] < 0).any():",
        "if (sampled.tokens[at] < 0).all():",
        "candidates from logits that are not finite become an answer",
    ),
    Fault(
        "keys_of_former_tokens",
        LIFECYCLE,
        "        slots.requests[row].page_keys = slots.requests[source].page_keys\n",
        "",
        "a beam's pages are published by the keys of what it held before it took over another's",
    ),
    Fault(
        "tokens_of_former_beam",
        LIFECYCLE,
        "        slots.token_ids[row, :count] = slots.token_ids[source, :count]\n",
        "",
        "a beam has the pages of one answer and the tokens of another",
    ),
    Fault(
        "dropped_beam_keeps_pages",
        TABLES,
        "        self.prefix.release(old[kept:])\n",
        "",
        "every step leaks the pages of beams that nobody continues",
    ),
    Fault(
        "beams_stay_in_flight",
        SCHEDULER,
        "        for each in rows if in_flight else ():\n",
        "        for each in rows[:1] if in_flight else ():\n",
        "the rows of a search that ended under its batch are never free again",
    ),
)
